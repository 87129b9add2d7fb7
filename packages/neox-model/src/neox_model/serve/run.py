"""Run a server: load the model on every rank, and answer HTTP on rank 0 until a signal requests the stop."""

import logging
import os
from pathlib import Path

from neox_config import Resolved
from neox_config.errors import ConfigError, NeoXError
from neox_config.schema.sections.serving import Serve
from neox_data.errors import CorpusError
from neox_data.preprocess.chat_template import ChatTemplate
from neox_model.generate.chat_template import configured_template
from neox_model.generate.modes import Job
from neox_model.generate.run import explained_shortage, load_forward
from neox_model.parallel.groups import Groups
from neox_model.processes import load_tokenizer
from neox_model.serve.app import build_app
from neox_model.serve.calls import Calls
from neox_model.serve.errors import ApiError
from neox_model.serve.loop import StopSignals, run_calls
from neox_model.serve.model import ServedModel
from neox_model.serve.web import WebServer, listening_socket
from neox_model.worker import show

__all__ = ["KEY_VARIABLE", "serve_in"]

logger = logging.getLogger(__name__)

KEY_VARIABLE = "NEOX_API_KEY"
# The part of stop_timeout in which answers are completed; the rest is for the end of the processes.
_STOP_SHARE, _LONGEST_END_SECONDS = 0.8, 20.0
_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve_in(groups: Groups, resolved: Resolved) -> None:
    """Serve the latest checkpoint of the configuration's `load` folder. Collective.

    Raises:
        NeoXError: there is no checkpoint, it contains a different model, or the server cannot listen.
    """
    config, load = resolved.config, resolved.config.checkpoint.load
    assert load is not None, "preflight requires it"
    if groups.data.size > 1:
        raise ConfigError(
            f"{groups.world.size} processes hold {groups.data.size} copies of the model; a server has one: "
            "start model-parallel-size x pipe-parallel-size processes, and a server for each other copy"
        )
    settings, seq_length = config.serving.serve, config.model.seq_length
    is_first = groups.world.rank == 0
    signals = StopSignals(decides=is_first)
    # Before the weights are read, so that an address in use is reported at once.
    key = _key(settings.api_key_file) if is_first else None
    bound = listening_socket(settings.host, settings.port) if is_first else None
    tokenizer = load_tokenizer(config.tokenizer)
    template = _template(settings.chat_template, config.tokenizer.vocab_file) if is_first else None
    forward, _ = load_forward(resolved, load, groups, tokenizer)
    job = Job(
        config.generation,
        forward,
        tokenizer,
        groups,
        seed=config.training.seed,
        seq_length=seq_length,
        reads_every_token=True,
    )
    slots = config.generation.generation_batch_size
    with explained_shortage():
        engine = job.engine(slots, seq_length)
        if bound is None:
            with signals.handled():
                run_calls(engine, groups.control, signals, None)
            return
    calls = Calls(slots=slots, max_waiting=settings.max_waiting)
    model = ServedModel(
        name=load.rstrip("/").rpartition("/")[2] or load,
        tokenizer=tokenizer,
        seq_length=seq_length,
        default_tokens=config.generation.maximum_tokens,
        max_tokens=settings.max_tokens or seq_length,
        template=template,
    )
    if template is not None and model.end_of_answer is not None:
        logger.info("answers to chats end at %s, as in %s", model.end_of_answer, template.name)
    app = build_app(
        model,
        calls,
        allowed_hosts=(*settings.allowed_hosts, settings.host),
        key=key,
        max_body=settings.max_body_bytes,
    )
    timeout = config.launch.stop_timeout
    seconds = max(_STOP_SHARE * timeout, timeout - _LONGEST_END_SECONDS)
    with signals.handled(), explained_shortage():
        web = WebServer(app, bound)
        _announce(settings, load, *bound.getsockname()[:2], has_key=key is not None)
        try:
            run_calls(engine, groups.control, signals, calls, stop_seconds=seconds, check=web.check)
        finally:
            # Whatever ends it, clients receive an answer or an error.
            calls.fail_all(ApiError(503, "the server has ended"))
            web.stop()


def _key(path: str | None) -> str | None:
    """Return the API key of the file, else of the environment.

    Raises:
        NeoXError: the file cannot be read, or the content of the file or the variable is not a key.
    """
    key, source = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    if path is not None:
        source = f"serve.api-key-file {path}"
        try:
            key = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise NeoXError(f"{source} cannot be read: {reason}; check the path") from error
    elif not key:
        return None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise NeoXError(
            f"{source} must contain one key of printable ASCII, and nothing else; correct it",
            code="invalid-key",
        )
    return key


def _template(path: str | None, vocabulary: str | None) -> ChatTemplate | None:
    """Return the chat template; None if there is none, or the one next to the tokenizer is invalid."""
    try:
        return configured_template(path, vocabulary)
    except CorpusError as error:
        if path is not None:
            raise NeoXError(f"serve.chat-template: {error}", code="invalid-template") from error
        logger.warning("chats are refused: %s, or set serve.chat-template", error)
        return None


def _announce(settings: Serve, load: str, host: str, port: int, *, has_key: bool) -> None:
    if settings.host not in _LOCAL and not has_key:
        logger.warning(
            "every user who can reach %s can use this server: there is no API key; set serve.api-key-file",
            settings.host,
        )
    shown = f"[{host}]" if ":" in host else host
    show(f"serving {load} on http://{shown}:{port}")
