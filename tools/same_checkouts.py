"""Two checkouts with an environment each: our packages come from the checkout, all others from .venv."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "STORE", "Checkout", "base_checkout", "new_checkout", "versions"]

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / ".test-same"
_PACKAGES = {
    "neox-launcher": ("neox_config", "neox_launcher"),
    "neox-data": ("neox_data",),
    "neox-kernels": ("neox_kernels",),
    "neox-model": ("neox_model",),
}


@dataclass(frozen=True)
class Checkout:
    """A checkout and its environment.

    Args:
        label: "base" or "new".
        sources: the root of the checkout.
        environment: the folder of its virtual environment.
        scripts: the folder of its commands.
        store: where its runs and results are.
    """

    label: str
    sources: Path
    environment: Path
    scripts: Path
    store: Path

    @property
    def python(self) -> Path:
        """Return the environment's interpreter."""
        return self.environment / "bin/python"

    def digest(self) -> str:
        """Return a digest of the sources of our packages."""
        found = hashlib.sha256()
        for path in sorted(self.sources.glob("packages/*/src/**/*")):
            if path.is_file() and path.suffix in (".py", ".cpp", ".cu", ".h", ".yml"):
                found.update(f"{path.relative_to(self.sources)}\n".encode() + path.read_bytes())
        return found.hexdigest()


def base_checkout(commit: str) -> Checkout:
    """Return a worktree of a commit, made in STORE unless it is there."""
    return _worktree("base", commit, prefix="")


def _worktree(label: str, commit: str, *, prefix: str) -> Checkout:
    commit = _output("git", "rev-parse", "--verify", f"{commit}^{{commit}}")
    store = STORE / f"{prefix}{commit[:12]}"
    if not (store / "sources/Makefile").exists():
        shutil.rmtree(store / "sources", ignore_errors=True)
        _output("git", "worktree", "prune")
        _output("git", "worktree", "add", "--detach", "--quiet", str(store / "sources"), commit)
    return _with_environment(label, store / "sources", store)


def new_checkout(name: str) -> Checkout:
    """Return the checkout in a folder, or a worktree of a commit."""
    if not (Path(name) / "Makefile").exists():
        return _worktree("new", name, prefix="new-")
    sources = Path(name).resolve()
    digest = hashlib.sha256(str(sources).encode()).hexdigest()[:8]
    return _with_environment("new", sources, STORE / f"new-{sources.name}-{digest}")


def _with_environment(label: str, sources: Path, store: Path) -> Checkout:
    store.mkdir(parents=True, exist_ok=True)
    environment = store / "environment"
    # .venv has the commands and the metadata of this checkout, and its extension is compiled.
    scripts = ROOT / ".venv/bin" if sources == ROOT else environment / "bin"
    checkout = Checkout(label, sources, environment, scripts, store)
    if not _is_current(checkout):
        shutil.rmtree(environment, ignore_errors=True)
        _create(checkout)
        _current_file(checkout).write_text(_installed(sources))
    _check(checkout)
    return checkout


def _current_file(checkout: Checkout) -> Path:
    return checkout.environment / "installed"


def _is_current(checkout: Checkout) -> bool:
    path = _current_file(checkout)
    return path.exists() and path.read_text() == _installed(checkout.sources)


def _installed(sources: Path) -> str:
    """Return what determines an environment: what the installation of our packages reads, and the others."""
    found = hashlib.sha256(versions().encode())
    for pattern in ("packages/*/pyproject.toml", "packages/*/setup.py", "packages/*/src/neox_data/csrc/*"):
        for path in sorted(sources.glob(pattern)):
            found.update(path.read_bytes())
    return f"{sources}\n{found.hexdigest()}\n"


def versions() -> str:
    """Return the names and versions of the other packages."""
    metadata = (path.name for path in _third_party().glob("*.dist-info"))
    return "\n".join(sorted(name for name in metadata if not name.startswith("neox_")))


def _third_party() -> Path:
    (found,) = (ROOT / ".venv/lib").glob("python3*/site-packages")
    return found


def _create(checkout: Checkout) -> None:
    sys.stderr.write(f"installing {checkout.sources}\n")
    _output(ROOT / ".venv/bin/python", "-m", "venv", "--without-pip", checkout.environment)
    (site,) = checkout.environment.glob("lib/python3*/site-packages")
    folders = [checkout.sources / "packages" / name / "src" for name in _PACKAGES]
    # A folder in a .pth file is searched, but its .pth files are not read: those that name ROOT's packages.
    # Files are read in alphabetical order.
    _write_paths(site / "zzz_others.pth", [_third_party()])
    if checkout.sources == ROOT:
        _write_paths(site / "__editable__.pth", folders)
        return
    packages = [word for name in _PACKAGES for word in ("-e", f"packages/{name}")]
    _output(
        *(ROOT / ".venv/bin/python", "-m", "pip", "--python", checkout.python, "install", "--quiet"),
        *("--no-input", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"),
        *packages,
        folder=checkout.sources,
    )


def _write_paths(path: Path, folders: Iterable[Path]) -> None:
    path.write_text("".join(f"{folder}\n" for folder in folders))


def _check(checkout: Checkout) -> None:
    """Exit unless every package is imported from the checkout."""
    names = [name for group in _PACKAGES.values() for name in group]
    command = f"import {', '.join(names)}; print(*(module.__file__ for module in ({', '.join(names)})))"
    found = _output(checkout.python, "-c", command, folder=checkout.store).split()
    wrong = [path for path in found if not Path(path).is_relative_to(checkout.sources)]
    if wrong:
        sys.exit(f"the environment of {checkout.sources} imports {', '.join(wrong)}; remove {checkout.store}")


def _output(*command: str | Path, folder: Path = ROOT) -> str:
    found = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{found.stdout}{found.stderr}")
    return found.stdout.strip()
