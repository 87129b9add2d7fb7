"""The wheels of `make dist` install and work without the repository, in a path with spaces.

Downloads packages and creates environments: `make test-recipes` runs these tests.
"""

import os
import shutil
import subprocess
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from support.launches import shell
from support.refusals import shows
from support.sources import DISTRIBUTIONS, ROOT

pytestmark = pytest.mark.recipe

NAMES = ["neox-launcher", "neox-data", "neox-kernels", "neox-model"]
SECONDS = 1200
NOBODY = 65534
CONSTRAINTS = ROOT / "constraints.txt"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with the wheels, per version of Python."""
    output = tmp_path_factory.mktemp("wheels") / "a folder" / "dist"
    run(ROOT, f"tools/dist.sh '{output}'")
    return output


def run(folder, command, commands=Path("/usr/bin"), **variables):
    # Nothing of the test's own environment or of the repository may be found.
    variables = {"PYTHONPATH": "", "VIRTUAL_ENV": "", **variables}
    done = shell(folder, command, seconds=SECONDS, commands=commands, **variables)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def versions(dist):
    return sorted(folder.name for folder in dist.iterdir() if folder.is_dir())


def create(folder, version):
    """Create an environment in a path with spaces; return the folder of its commands."""
    base = ROOT / f".venvs/data-{version}/bin/python"
    subprocess.run([base, "-m", "venv", folder / "an environment"], check=True)
    return folder / "an environment" / "bin"


def wheels(dist, version, *names):
    """Return the arguments for pip."""
    found = [next((dist / version).glob(f"{name.replace('-', '_')}-*.whl")) for name in names]
    return " ".join(f"'{path}'" for path in found)


def install(folder, commands, what, options=""):
    run(folder, f"python -m pip install --quiet --no-input -c '{CONSTRAINTS}' {options} {what}", commands)


def init(folder, commands):
    """Write a configuration from texts, `a run/config.yml`."""
    texts = folder / "my texts"
    texts.mkdir()
    for path in sorted((ROOT / "docs").glob("*.md"))[:8]:
        shutil.copy(path, (texts / path.name).with_suffix(".txt"))
    command = "neox-launch init --data 'my texts' --output 'a run' --model pythia-14m"
    run(folder, f"{command} --vocab-size 512 --devices 1", commands)


def test_every_folder_has_the_four_wheels(dist):
    assert "3.11" in versions(dist)
    for version in versions(dist):
        paths = sorted((dist / version).iterdir())
        assert [path.name.split("-")[0].replace("_", "-") for path in paths] == sorted(NAMES)


def test_wheels_without_the_extension_are_refused(dist, tmp_path):
    """After `dist`, whose environments have the extension."""
    failing = {"PYTHONPATH": "", "VIRTUAL_ENV": "", "CC": "/bin/false", "CXX": "/bin/false"}
    done = shell(
        ROOT,
        f"tools/dist.sh '{tmp_path / 'wheels'}'",
        seconds=SECONDS,
        commands=Path("/usr/bin"),
        PYTHONS="3.11",
        **failing,
    )
    assert done.returncode == 1
    assert "was not compiled" in done.stderr
    assert not (tmp_path / "wheels").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_has_every_file_the_licence_and_a_description_without_links_into_the_repository(dist, name):
    (path,) = (dist / "3.11").glob(f"{name.replace('-', '_')}-*.whl")
    source = ROOT / "packages" / name / "src"
    packages = [package for package, home in DISTRIBUTIONS.items() if home == name]
    expected = {
        str(path.relative_to(source))
        for package in packages
        for kind in ("*.py", "*.yml", "*.txt", "py.typed")
        for path in (source / package).rglob(kind)
    }
    with zipfile.ZipFile(path) as wheel:
        held = set(wheel.namelist())
        (information,) = {each.split("/")[0] for each in held if ".dist-info/" in each}
        licence = wheel.read(f"{information}/licenses/LICENSE")
        metadata = message_from_bytes(wheel.read(f"{information}/METADATA"))
    assert expected <= held
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata.get_payload().startswith(f"# {name}\n")
    assert "](.." not in metadata.get_payload()


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_launcher_and_data_install_and_work(version, dist, tmp_path):
    if version not in versions(dist):
        pytest.skip(f"Python {version} is not installed")
    commands = create(tmp_path, version)
    install(tmp_path, commands, wheels(dist, version, "neox-launcher", "neox-data"))
    models = run(tmp_path, "neox-config models", commands)
    assert "pythia-160m" in models
    native = "from neox_data.native import load_native; print(load_native().__name__)"
    assert run(tmp_path, f'python -c "{native}"', commands) == "neox_data._native\n"

    init(tmp_path, commands)
    assert "valid" in run(tmp_path, "neox-config check --files 'a run/config.yml'", commands)
    # Neither needs torch.
    done = shell(tmp_path, 'python -c "import torch"', seconds=SECONDS, commands=commands, PYTHONPATH="")
    assert "named 'torch'" in done.stderr


def test_all_four_train(dist, tmp_path):
    """In the order of tools/environment.sh: DeepSpeed's installation imports torch."""
    commands = create(tmp_path, "3.11")
    install(tmp_path, commands, "torch setuptools pybind11 ninja py-cpuinfo")
    install(tmp_path, commands, "deepspeed", "--no-build-isolation")
    install(tmp_path, commands, wheels(dist, "3.11", *NAMES))
    imports = "import neox_config, neox_launcher, neox_data, neox_kernels, neox_model; neox_model.Trainer"
    assert run(tmp_path, f'python -c "{imports}"', commands) == ""

    init(tmp_path, commands)
    run(
        tmp_path,
        "neox-launch --config 'a run/config.yml' --set train-iters=2 --set log-interval=1 --set eval-iters=1",
        commands,
    )
    assert (tmp_path / "a run/checkpoints/latest").read_text().strip() == "global_step2"


def test_without_a_compiler_neox_data_installs_and_counts_with_numpy(tmp_path):
    """From a folder, because a wheel has the extension."""
    copy = tmp_path / "the sources"
    shutil.copytree(
        ROOT / "packages/neox-data",
        copy,
        ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "tests", "*.so"),
    )
    commands = create(tmp_path, "3.11")
    run(
        tmp_path,
        f"python -m pip install --quiet --no-input -c '{CONSTRAINTS}' './the sources'",
        commands,
        CC="/bin/false",
        CXX="/bin/false",
    )
    shown = run(
        tmp_path, 'python -c "from neox_data.native import load_native; print(load_native())"', commands
    )
    assert shown == "None\n"
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    run(
        tmp_path,
        "preprocess_data --input a.jsonl --tokenizer-type CharLevelTokenizer --output-prefix a",
        commands,
    )
    assert shows(run(tmp_path, "neox-data verify a_text_document", commands), "2 sequences", "12 tokens")


@pytest.fixture
def as_nobody():
    """Run a command as a user without rights, in a folder of theirs in which `sources` belongs to root."""
    folder = Path(tempfile.mkdtemp())
    os.chown(folder, NOBODY, NOBODY)
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "tests")
    shutil.copytree(ROOT / "packages/neox-launcher", folder / "sources", ignore=ignored)
    subprocess.run(["chmod", "-R", "a+rX,go-w", folder / "sources"], check=True)

    def call(command):
        user = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups env HOME='{folder}'"
        return folder, shell(
            folder, f"{user} {command}", seconds=SECONDS, commands=Path("/usr/bin"), PYTHONPATH=""
        )

    yield call
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to become another user")
def test_a_user_who_may_not_write_the_sources_installs_the_wheels(dist, as_nobody):
    folder, found = as_nobody(
        "/usr/bin/python3 -c \"import sys, ensurepip; print('%d.%d' % sys.version_info[:2])\""
    )
    version = found.stdout.strip()
    if version not in versions(dist):
        pytest.skip("/usr/bin/python3 is not one of the Pythons of the wheels, or has no ensurepip")
    assert as_nobody("/usr/bin/python3 -m venv env")[1].returncode == 0
    _, refused = as_nobody("env/bin/python -m pip install --quiet ./sources")
    assert (refused.returncode, "Permission denied" in refused.stderr) == (1, True), refused.stderr
    (wheel,) = (dist / version).glob("neox_launcher-*.whl")
    shutil.copy(wheel, folder)
    _, installed = as_nobody(f"env/bin/python -m pip install --quiet ./{wheel.name}")
    assert installed.returncode == 0, installed.stderr
    assert "pythia-160m" in as_nobody("env/bin/neox-config models")[1].stdout
