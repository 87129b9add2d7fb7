"""The server of `neox-launch serve`."""

from neox_config.schema.parameter import Section, block, param
from neox_config.schema.paths import PathText

__all__ = ["Serve", "ServingSection"]


class Serve(Section):
    """Server for programs that use OpenAI's API. Requires the packages starlette and uvicorn."""

    host: str = param(
        "127.0.0.1",
        origin="ours",
        min_length=1,
        doc="Address on which the host of rank 0 listens. The default can be reached from that host alone; "
        "0.0.0.0 from all networks, which requires an API key in most places.",
    )
    port: int = param(
        8000, origin="ours", ge=0, le=65535, doc="TCP port; 0 for a free one, which is printed."
    )
    api_key_file: PathText | None = param(
        None,
        origin="ours",
        none_means="the variable NEOX_API_KEY, or no key if it is not set",
        doc="File with the API key that clients must send.",
    )
    allowed_hosts: tuple[str, ...] = param(
        (),
        origin="ours",
        doc="Names of this server in addresses that clients use, without port. localhost, host and addresses "
        "in numbers are always allowed; requests to another name are refused, because any web page can have "
        "its name resolved to this machine.",
    )
    max_waiting: int = param(
        256,
        origin="ours",
        ge=0,
        doc="Maximum number of texts that wait for a place among the generation_batch_size texts that are "
        "generated together; requests for more are refused with status 429.",
    )
    max_body_bytes: int = param(
        4 * 1024 * 1024,
        origin="ours",
        gt=0,
        doc="Maximum size of a request in bytes; larger ones are refused with status 413.",
    )
    max_tokens: int | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="seq_length",
        doc="Largest max_tokens that a request may state. Requests without it get maximum_tokens.",
    )
    chat_template: PathText | None = param(
        None,
        origin="ours",
        none_means="the one in the folder of vocab_file; without one, chats are refused",
        doc="Chat template: a file of Jinja, or a folder with chat_template.jinja or tokenizer_config.json.",
    )


class ServingSection(Section, resume="free"):
    """Answers over HTTP (neox-launch serve)."""

    serve: Serve = block(Serve, origin="ours", doc="Server for programs that use OpenAI's API.")
