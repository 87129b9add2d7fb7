"""The environment variables that are passed to the workers, and those whose values are hidden."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from neox_config import NeoXConfig
from neox_config.errors import LaunchError

__all__ = [
    "TRAVELLING_NAMES",
    "TRAVELLING_PREFIXES",
    "is_secret",
    "read_environment_file",
    "secret_variables",
    "shown_value",
    "travelling_variables",
]

# Variables that configure computation and communication, which must be the same on all hosts.
TRAVELLING_PREFIXES = (
    *("NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "UCX_", "GLOO_", "FI_", "OMP_"),
    *("PYTHON", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_"),
    # Services that workers use, with their keys.
    *("HF_", "WANDB_"),
)
TRAVELLING_NAMES = frozenset(
    spelling
    for name in ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
    for spelling in (name, name.upper())
) | {"NEOX_API_KEY"}
# The devices of one host, and a process of this host.
_STAYING = ("CUDA_VISIBLE_DEVICES", "WANDB_SERVICE")
ENVIRONMENT_FILE = ".deepspeed_env"
_FILE_VARIABLE = "DS_ENV_FILE"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_HIDDEN = "(hidden)"
# User and password in an address, as in that of a proxy.
_CREDENTIALS = re.compile(r"//[^/@\s]+@")
# Parameter -> the environment variable from which the package that uses it reads it.
_SECRETS = {"comet.api_key": "COMET_API_KEY"}


def travelling_variables(environment: Mapping[str, str], *, home: Path, folder: Path) -> dict[str, str]:
    """Return the variables that are passed to the workers on every host.

    These are the variables with one of TRAVELLING_PREFIXES, those in TRAVELLING_NAMES, and those in the files
    `.deepspeed_env` in the home directory and in the working directory, or in the one file named by
    DS_ENV_FILE. Later ones take precedence.

    Args:
        environment: environment of the launcher.
        home: home directory of the user.
        folder: working directory of the launcher.

    Raises:
        LaunchError: a file cannot be read, or one of its lines is invalid.
    """
    found = {
        name: value
        for name, value in environment.items()
        if (name.startswith(TRAVELLING_PREFIXES) or name in TRAVELLING_NAMES) and name not in _STAYING
    }
    named = environment.get(_FILE_VARIABLE)
    files = [Path(named)] if named else [home / ENVIRONMENT_FILE, folder / ENVIRONMENT_FILE]
    for path in dict.fromkeys(files):
        if named or os.path.exists(path):
            found |= read_environment_file(path)
    return found


def secret_variables(config: NeoXConfig) -> dict[str, str]:
    """Return the secrets of a configuration as variables; the configuration is sent without them."""
    found = {}
    for name, variable in _SECRETS.items():
        value = config.value_of(name)
        if isinstance(value, SecretStr):
            found[variable] = value.get_secret_value()
    return found


def read_environment_file(path: Path) -> dict[str, str]:
    """Read the variables of a file with one NAME=VALUE per line; values are literal, including quotes.

    Empty lines and lines that begin with # are ignored.

    Raises:
        LaunchError: the file cannot be read, or a line has another form.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"{path} cannot be read: {reason}", code="not-readable") from error
    found = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()) or "\0" in value:
            raise LaunchError(
                f"{path} line {number}: write NAME=VALUE, without export and without spaces",
                code="invalid-line",
            )
        found[name.strip()] = value.rstrip("\r")
    return found


def is_secret(name: str) -> bool:
    """Return whether the name of a variable indicates that its value is secret."""
    return _SECRET.search(name) is not None


def shown_value(name: str, value: str) -> str:
    """Return the value of a variable as shown in plans and logs; secrets are hidden."""
    return _HIDDEN if is_secret(name) else _CREDENTIALS.sub(f"//{_HIDDEN}@", value)
