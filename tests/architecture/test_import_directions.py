"""Imports go one way: three packages that know nothing of each other, one on top with an order inside it."""

import pytest

from support.sources import PACKAGES, Source, sources

LEAVES = ("neox_launcher", "neox_data", "neox_kernels")

# What each part of neox_model may import of neox_model, besides itself. Layers and what they stand on take
# plain arguments; the parts under the line put things together.
PARTS = {
    "errors": set(),
    "optional": {"errors"},
    "parallel": {"errors"},
    "initialization": {"parallel", "errors"},
    "layers": {"parallel", "initialization", "errors"},
    "metrics": {"parallel", "optional", "errors"},
    "optim": {"parallel", "optional", "errors"},
    "report": {"metrics", "optional", "errors"},
    # -- assembly
    "worker": {"errors"},
    "doctor": {"worker", "errors"},
    "processes": {"parallel", "errors"},
    "build": {"layers", "parallel", "initialization", "errors"},
    "checkpoint": {"build", "parallel", "errors"},
    "train": {
        "build",
        "checkpoint",
        "metrics",
        "optim",
        "parallel",
        "processes",
        "worker",
        "optional",
        "errors",
    },
    "generate": {"build", "checkpoint", "layers", "parallel", "processes", "worker", "errors"},
    "evaluate": {"build", "checkpoint", "train", "parallel", "processes", "worker", "errors"},
    "verify": {"checkpoint", "metrics", "worker", "errors"},
}
READS_CONFIGURATION = (
    "worker",
    "doctor",
    "processes",
    "build",
    "checkpoint",
    "train",
    "generate",
    "evaluate",
    "verify",
    "optim.build",
)
READS_DATA = ("worker", "processes", "train", "generate", "evaluate")

# Who may import a third-party package; packages that are not listed are nobody's fence.
FENCES = {
    "deepspeed": (
        "neox_model.build.as_pipeline",
        "neox_model.build.zero_sharding",
        "neox_model.train.engine",
    ),
    "apex": ("neox_kernels",),
    "matplotlib": ("neox_model.report", "neox_data.indexed.chart"),
    "rich": ("neox_model.metrics.writers.console", "neox_data"),
    "safetensors": ("neox_model.checkpoint",),
    "tensorboard": ("neox_model.metrics.writers.tensorboard",),
    "torch.utils.tensorboard": ("neox_model.metrics.writers.tensorboard",),
    "tokenizers": ("neox_data.tokenizers",),
    "torch": ("neox_data.loader", "neox_kernels", "neox_model"),
    "transformers": (),
    "wandb": ("neox_model.metrics.writers.wandb",),
}


def lies_in(module: str, folders: tuple[str, ...]) -> bool:
    return any(module == folder or module.startswith(folder + ".") for folder in folders)


def ours(source: Source) -> list[tuple[str, str]]:
    """Each import of one of our modules, with the place it stands at."""
    return [
        (imported.module, f"{source.path}:{imported.line} imports {imported.module}")
        for imported in source.imports()
        if lies_in(imported.module, PACKAGES)
    ]


@pytest.mark.parametrize("package", LEAVES)
def test_a_leaf_package_imports_only_itself(package):
    wrong = [
        place
        for source in sources(package)
        for module, place in ours(source)
        if not lies_in(module, (package,))
    ]
    assert wrong == []


def test_the_configuration_imports_nothing_else_of_the_launcher():
    allowed = ("neox_launcher.config", "neox_launcher.errors")
    files = [source for source in sources("neox_launcher") if lies_in(source.module, allowed[:1])]
    assert files
    assert [place for source in files for module, place in ours(source) if not lies_in(module, allowed)] == []


def test_the_launcher_never_names_the_model_by_import():
    wrong = [
        place
        for source in sources("neox_launcher")
        for module, place in ours(source)
        if "neox_model" in module
    ]
    assert wrong == []


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_model_imports_only_what_lies_below_it(part):
    allowed = {part, *PARTS[part]}
    wrong = [
        place
        for source in sources("neox_model")
        if part_of(source.module) == part
        for module, place in ours(source)
        if lies_in(module, ("neox_model",)) and part_of(module) not in allowed
    ]
    assert wrong == []


def test_every_part_of_the_model_has_a_place_in_the_order():
    assert {part_of(source.module) for source in sources("neox_model")} - {""} <= set(PARTS)


def test_only_assembly_reads_configuration():
    """`errors` is the exception: the model's errors are the launcher's, so that one handler tells them."""
    readers = tuple(f"neox_model.{part}" for part in READS_CONFIGURATION)
    wrong = [
        place
        for source in sources("neox_model")
        if not lies_in(source.module, readers)
        for module, place in ours(source)
        if lies_in(module, ("neox_launcher",)) and module != "neox_launcher.errors"
    ]
    assert wrong == []


def test_only_assembly_reads_corpora():
    readers = tuple(f"neox_model.{part}" for part in READS_DATA)
    wrong = [
        place
        for source in sources("neox_model")
        if not lies_in(source.module, readers)
        for module, place in ours(source)
        if lies_in(module, ("neox_data",))
    ]
    assert wrong == []


@pytest.mark.parametrize("package", FENCES)
def test_a_third_party_package_stays_behind_its_fence(package):
    wrong = [
        f"{source.path}:{imported.line} imports {imported.module}"
        for source in sources()
        if not lies_in(source.module, FENCES[package])
        for imported in source.imports()
        if lies_in(imported.module, (package,))
    ]
    assert wrong == []
