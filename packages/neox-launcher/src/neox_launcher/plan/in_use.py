"""Refuse a start that needs what another job holds, before any worker imports torch, which takes long.

The workers, which claim the same, have the last word.
"""

from pathlib import Path

from neox_config import NeoXConfig
from neox_config.derive.problems import refusal
from neox_config.errors import NeoXError
from neox_config.facts.stores import is_url
from neox_config.problems import Problem
from neox_launcher.protocol.claims import SAVES_TO, bound_socket, folder_in_use, is_locked

__all__ = ["refuse_what_is_in_use"]


def refuse_what_is_in_use(config: NeoXConfig, *, program: str, is_local: bool) -> None:
    """Refuse a run whose `save` another one uses, and a server whose address is taken.

    Args:
        config: configuration of the job.
        program: train, serve, or one that holds nothing alone.
        is_local: rank 0 runs on this host, so that its address can be tried here.

    Raises:
        ConfigError: another process holds what the job needs.
    """
    save, settings = config.checkpoint.save, config.serving.serve
    is_shared = (
        save is not None and not is_url(save) and not config.checkpoint.checkpoint.use_node_local_storage
    )
    if program == "train" and save is not None and is_shared and is_locked(Path(save)):
        raise _refusal(config, "save", folder_in_use(save, SAVES_TO))
    if program == "serve" and is_local:
        try:
            bound_socket(settings.host, settings.port).close()
        except NeoXError as error:
            of_host = f"serve.host {settings.host} "
            name = "serve.host" if str(error).startswith(of_host) else "serve.port"
            raise _refusal(config, name, str(error).removeprefix(of_host)) from error


def _refusal(config: NeoXConfig, name: str, message: str) -> NeoXError:
    what, _, remedy = message.rpartition("; ")
    return refusal(config, Problem(name, what, remedy))
