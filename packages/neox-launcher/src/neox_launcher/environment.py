"""Which environment variables travel to the workers, and which of them are never shown."""

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from neox_launcher.config import NeoXConfig
from neox_launcher.errors import LaunchError

__all__ = [
    "TRAVELLING_PREFIXES",
    "is_secret",
    "read_environment_file",
    "secret_variables",
    "shown_value",
    "travelling_variables",
]

# What decides how libraries compute and communicate, so that it is the same on all hosts.
TRAVELLING_PREFIXES = ("NCCL_", "CUDA_", "UCX_", "PYTHON", "TORCH_", "TORCHINDUCTOR_", "GLOO_", "OMP_", "FI_")
# Names one host's own devices.
_STAYING = "CUDA_VISIBLE_DEVICES"
ENVIRONMENT_FILE = ".deepspeed_env"
_FILE_VARIABLE = "DS_ENV_FILE"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_HIDDEN = "(hidden)"
# Parameter -> the variable in which the package that needs it looks for it.
_SECRETS = {"comet.api_key": "COMET_API_KEY"}


def travelling_variables(environment: Mapping[str, str], *, home: Path, folder: Path) -> dict[str, str]:
    """What the workers get of this machine's environment, on whatever host they run.

    Variables with certain beginnings, and what stands in the files `.deepspeed_env` of the home and of the
    working folder (or in the one that DS_ENV_FILE names): the later wins.

    Args:
        environment: of the launcher.
        home: the user's folder.
        folder: where the launcher was started.

    Raises:
        LaunchError: a file cannot be read, or a line of it is wrong.
    """
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(TRAVELLING_PREFIXES) and name != _STAYING
    }
    named = environment.get(_FILE_VARIABLE)
    files = [Path(named)] if named else [home / ENVIRONMENT_FILE, folder / ENVIRONMENT_FILE]
    for path in dict.fromkeys(files):
        if named or path.exists():
            found |= read_environment_file(path)
    return found


def secret_variables(config: NeoXConfig) -> dict[str, str]:
    """The secrets of a configuration, which travel as variables: what else of it is sent holds none."""
    found = {}
    for name, variable in _SECRETS.items():
        value = config.value_of(name)
        if isinstance(value, SecretStr):
            found[variable] = value.get_secret_value()
    return found


def read_environment_file(path: Path) -> dict[str, str]:
    """The variables of a file with one NAME=VALUE per line; values are taken as they stand, quotes included.

    Empty lines and lines that begin with # do not count.

    Raises:
        LaunchError: it cannot be read, or a line is something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"{path} cannot be read: {reason}") from error
    found = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()) or "\0" in value:
            raise LaunchError(f"{path} line {number}: write NAME=VALUE, without export and without spaces")
        found[name.strip()] = value.rstrip("\r")
    return found


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is nobody else's business."""
    return _SECRET.search(name) is not None


def shown_value(name: str, value: str) -> str:
    """A variable's value as plans and logs show it."""
    return _HIDDEN if is_secret(name) else value
