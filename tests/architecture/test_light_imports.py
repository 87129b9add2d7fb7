"""The ground floor is light: commands that do not train never load what takes seconds to import."""

import json
import subprocess
import sys

import pytest

from support.sources import sources

HEAVY = {"torch", "deepspeed", "transformers", "matplotlib", "tensorboard"}
# neox-launcher runs on login nodes and needs no arrays either.
NOT_IN_THE_LAUNCHER = HEAVY | {"numpy", "neox_data", "neox_kernels", "neox_model"}


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level packages that a fresh interpreter holds after importing these modules."""
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules)], capture_output=True, text=True, check=True
    )
    return set(json.loads(result.stdout))


def test_nothing_in_the_launcher_loads_torch():
    modules = [
        source.module
        for package in ("neox_config", "neox_launcher")
        for source in sources(package)
        if not source.module.endswith("__main__")
    ]
    assert "neox_launcher.cli.launch" in modules
    assert loaded_by(modules) & NOT_IN_THE_LAUNCHER == set()


def test_only_the_loader_of_neox_data_imports_torch():
    modules = [source.module for source in sources("neox_data") if source.module != "neox_data.loader"]
    assert "neox_data.preprocess.cli" in modules
    assert loaded_by(modules) & HEAVY == set()


@pytest.mark.parametrize(
    "module",
    [
        "neox_model",
        "neox_model.api.configuration",
        "neox_model.worker",
        "neox_model.doctor.examine",
        "neox_model.bounds",
        "neox_model.report.cli",
        "neox_model.convert.cli",
        "neox_model.inspection.cli",
        "neox_model.train.data.description",
        "neox_kernels",
        "neox_kernels.cli",
    ],
)
def test_light_modules_import_no_heavy_package(module):
    assert loaded_by([module]) & HEAVY == set()


@pytest.mark.parametrize(
    "program",
    [
        "import neox_config, neox_launcher, neox_data, neox_kernels, neox_model",
        "import neox_model; neox_model.Trainer; neox_model.load_model",
        "import neox_kernels; neox_kernels.rotary",
    ],
)
def test_imports_print_nothing(program):
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")
