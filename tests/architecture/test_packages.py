"""What the four packages have in common: licence, version, dependencies, and wheels that are whole."""

import importlib
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from support.sources import DISTRIBUTIONS, PACKAGES, ROOT, sources

NAMES = [*dict.fromkeys(DISTRIBUTIONS.values())]
LEAVES = [name for name in NAMES if name != "neox-model"]
# Where the name to import is not the name to install.
DISTRIBUTION = {"yaml": "pyyaml", "pydantic_core": "pydantic"}


def project(name: str) -> dict:
    return tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]


def requirements(name: str, *, optional: bool = True) -> list[Requirement]:
    declared = project(name)
    extras = declared.get("optional-dependencies", {}).values() if optional else ()
    return [Requirement(line) for lines in (declared["dependencies"], *extras) for line in lines]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}


@pytest.mark.parametrize("name", NAMES)
def test_every_package_carries_the_licence(name):
    assert (ROOT / "packages" / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_versions_are_one_number():
    (version,) = {project(name)["version"] for name in NAMES}
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    of_ours = {requirement.name: str(requirement.specifier) for requirement in requirements("neox-model")}
    assert {name: of_ours[name] for name in LEAVES} == dict.fromkeys(LEAVES, f"=={version}")


COMMANDS = {command: name for name in NAMES for command in project(name).get("scripts", {})}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reports_the_version_of_its_package(command):
    name = COMMANDS[command]
    module, _, function = project(name)["scripts"][command].partition(":")
    main = getattr(importlib.import_module(module), function)
    result = CliRunner().invoke(main, ["--version"], prog_name=command)
    assert (result.exit_code, result.output) == (0, f"{command}, version {project(name)['version']}\n")


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_needs_no_other_package_of_ours(name):
    assert {requirement.name for requirement in requirements(name)} & set(NAMES) == set()


# Clients of services that no test talks to: `make install` leaves them out.
SERVICES = {"wandb", "comet_ml", "s3fs"}


@pytest.mark.parametrize("name", NAMES)
def test_every_direct_dependency_is_pinned_to_a_version_it_allows(name):
    known = pins()
    for requirement in requirements(name):
        if requirement.name not in {*NAMES, *SERVICES}:
            assert Version(known[canonicalize_name(requirement.name)]) in requirement.specifier


@pytest.mark.parametrize("name", NAMES)
def test_upper_bounds_are_excluded_and_have_a_lower_one(name):
    """`neox_model.bounds` reads no others from what is installed."""
    signs = {tuple(sorted(part.operator for part in one.specifier)) for one in requirements(name)}
    assert signs <= {(">=",), ("<", ">="), ("==",)}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_declared(package):
    """Nothing may be there only because another package happened to bring it."""
    imported = {found.module.split(".")[0] for source in sources(package) for found in source.imports}
    foreign = imported - set(sys.stdlib_module_names) - {package}
    foreign = {DISTRIBUTIONS.get(name, name) for name in foreign} - {DISTRIBUTIONS[package]}
    needed = {canonicalize_name(DISTRIBUTION.get(name, name)) for name in foreign}
    declared = {canonicalize_name(requirement.name) for requirement in requirements(DISTRIBUTIONS[package])}
    # torch.utils.tensorboard is what needs the extra of that name; apex is built by hand, no index has it.
    assert needed - {"apex"} <= declared


# In .venvs/docs only, where `make docs-site` builds the site.
OF_THE_SITE = {"mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python", "pymdown-extensions"}
OF_THE_GATE = {
    "nvidia-cuda-cccl",
    "nvidia-cuda-crt",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-runtime",
    "nvidia-nvvm",
    "triton",
}


def test_the_tests_run_with_the_pinned_versions():
    if Path(sys.prefix).name in ("oldest", "newest"):
        pytest.skip("an environment of tools/versions.py, for other versions")
    elsewhere = OF_THE_SITE | OF_THE_GATE
    of_the_tests = {name: version for name, version in pins().items() if name not in elsewhere}
    # make install TORCH=... has written it.
    another_torch = Path(sys.prefix) / "torch"
    if another_torch.exists():
        of_the_tests["torch"] = another_torch.read_text().strip()
    installed = {name: metadata.version(name).split("+")[0] for name in of_the_tests}
    assert installed == of_the_tests


def test_the_packages_of_the_site_are_pinned():
    text = (ROOT / "tools/environment.sh").read_text()
    (installed,) = re.findall(r"pip_install (mkdocs .*)", text)
    assert set(installed.split()) == OF_THE_SITE <= set(pins())


def test_the_compilers_of_the_gate_are_pinned():
    text = (ROOT / "tools/environment.sh").read_text()
    (cuda,) = re.findall(r"pip_install (nvidia-cuda-nvcc .*)", text)
    assert "pip_install --no-deps triton\n" in text
    assert {*cuda.split(), "triton"} == OF_THE_GATE <= set(pins())


def test_no_file_of_ours_names_an_index_or_this_machine():
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked archive, where git cannot list the files of the project")
    names = re.compile(r"https?://[\w.]*pypi|index-url|find-links")
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    wrong = [
        name
        for name in files.split("\0")
        if name and Path(name) != Path(__file__).relative_to(ROOT) and (ROOT / name).is_file()
        if names.search((ROOT / name).read_text(errors="replace"))
        or str(ROOT) in (ROOT / name).read_text(errors="replace")
    ]
    assert wrong == []
