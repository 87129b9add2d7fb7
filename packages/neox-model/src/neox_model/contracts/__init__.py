"""Contracts: what we use of torch and DeepSpeed beyond their documentation exists and does what we expect.

Every public function of the modules in `CONTRACTS` is a contract: it calls one thing as its `*compat` module
does and checks the result, in milliseconds. The docstring names what it checks. Some require a process group
of one process. `python -m neox_model.contracts` checks all with the installed versions; `neox-launch doctor`
does so on every host.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from inspect import isfunction

from neox_model.bounds import installed_version, tested_versions

__all__ = ["CONTRACTS", "Contract", "broken_contracts", "contracts_of"]

Contract = Callable[[], None]

CONTRACTS: Mapping[str, str] = {
    "neox_model.contracts.torch_compat": "torch",
    "neox_model.contracts.pipelining_compat": "torch",
    "neox_model.engine.deepspeed.contracts": "deepspeed",
}
"""Module -> the package whose interfaces it checks."""


def contracts_of(module: str) -> list[Contract]:
    """Return the contracts of a module; its import fails where a name that it imports is missing."""
    found = import_module(module)
    return [
        value
        for name, value in vars(found).items()
        if isfunction(value) and value.__module__ == found.__name__ and not name.startswith("_")
    ]


def broken_contracts(module: str) -> Iterator[str | None]:
    """Check each contract of a module, and yield a line if it is broken, None if it holds."""
    package = CONTRACTS[module]
    about = f"{package} {installed_version(package)}"
    bounds = tested_versions()
    tested = "tested: " + ", ".join(f"{name}{bounds.get(name, '')}" for name in sorted({*CONTRACTS.values()}))
    try:
        contracts = contracts_of(module)
    except Exception as error:
        yield f"{about}: {module} cannot be imported: {_in_words(error)}; {tested}"
        return
    for contract in contracts:
        try:
            contract()
        except Exception as error:
            (what, *_) = (contract.__doc__ or contract.__name__).splitlines()
            yield f"{about}: {what.removeprefix('Check ').rstrip('.')}: {_in_words(error)}; {tested}"
        else:
            yield None


def _in_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
