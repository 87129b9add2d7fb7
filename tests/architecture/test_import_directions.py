"""Imports go one way: between the packages, and between the rooms (folders and single files) of each."""

import ast
import re
from graphlib import TopologicalSorter

import pytest

from support.sources import PACKAGES, Source, sources

# What each package may import of the others.
PACKAGES_BELOW = {
    "neox_config": (),
    "neox_data": (),
    "neox_kernels": (),
    "neox_launcher": ("neox_config",),
    "neox_model": ("neox_config", "neox_data", "neox_kernels", "neox_launcher"),
}

# Rooms of the same package that each room may import.
ROOMS = {
    "neox_config": {
        "errors": set(),
        "log": set(),
        "atomic": set(),
        "interrupts": set(),
        "pluralize": set(),
        "finite_json": set(),
        "formats": set(),
        "files": set(),
        "command_line": {"errors", "atomic"},
        "limits": {"errors"},
        "names": set(),
        "facts": {"files"},
        "problems": {"errors"},
        "schema": {"facts", "problems"},
        "derive": {"schema", "facts", "problems", "errors", "pluralize"},
        "spec": {"derive", "schema", "facts", "problems", "errors", "pluralize"},
        # Rare features, which only the modules of USES_EXTRAS import.
        "extras": {"derive", "schema", "facts", "problems", "errors", "pluralize"},
        "estimate": {"spec", "derive", "schema", "facts", "problems", "errors"},
        "rules": {"derive", "schema", "facts", "problems", "pluralize"},
        "read": {"rules", "derive", "schema", "facts", "problems", "errors", "atomic", "files", "names"},
        "catalogue": {"read", "estimate", "spec", "derive", "facts", "problems", "errors"},
        "describe": {
            *("catalogue", "read", "estimate", "spec", "derive", "schema", "facts", "problems", "errors"),
            *("pluralize", "names"),
        },
    },
    "neox_launcher": {
        "resources": set(),
        "protocol": {"resources"},
        # -- on every host
        "worker": {"protocol"},
        "agent": {"worker", "protocol", "resources"},
        # -- on the launch host
        "plan": {"protocol", "resources"},
        "backends": {"plan", "protocol", "resources"},
        "controller": {"backends", "plan", "worker", "protocol", "resources"},
        "autotuning": {"controller", "plan", "protocol", "resources"},
        "verify_resume": {"controller", "plan", "protocol", "resources"},
        "verify_layout": {"controller", "plan", "protocol", "resources"},
        "coord_check": {"verify_layout", "controller", "plan", "protocol", "resources"},
        # -- before there is a configuration
        "init": set(),
        "cli": {
            "init",
            "autotuning",
            "verify_resume",
            "verify_layout",
            "coord_check",
            "controller",
            "agent",
            "plan",
            "protocol",
            "resources",
        },
        "__main__": {"cli"},
    },
    "neox_model": {
        "errors": set(),
        "optional": {"errors"},
        "commands": set(),
        "daemon_threads": set(),
        # -- plain arguments
        "torch_compat": set(),
        "pipelining_compat": set(),
        "bounds": set(),
        "versions": {"bounds", "torch_compat"},
        "parallel": {"torch_compat", "errors"},
        "initialization": {"parallel", "errors"},
        "layers": {"parallel", "initialization", "errors"},
        "metrics": {"parallel", "optional", "errors"},
        "optim": {"parallel", "torch_compat", "optional", "errors"},
        "contracts": {"pipelining_compat", "torch_compat", "bounds", "errors"},
        "report": {"metrics", "optional", "errors"},
        # -- read the configuration
        "worker": {"errors"},
        "doctor": {"assembly", "train", "worker", "processes", "versions", "errors"},
        "processes": {"parallel", "torch_compat", "bounds", "daemon_threads", "errors"},
        "assembly": {
            *("layers", "optim", "parallel", "initialization", "torch_compat"),
            *("versions", "errors"),
        },
        "engine": {
            *("assembly", "layers", "optim", "parallel", "contracts", "pipelining_compat", "errors"),
        },
        "checkpoint": {"engine", "parallel", "versions", "daemon_threads", "errors"},
        "train": {
            *("assembly", "checkpoint", "engine", "metrics", "optim", "parallel", "processes", "worker"),
            *("convert", "generate", "scoring", "torch_compat", "versions", "optional", "errors"),
        },
        "generate": {
            "assembly",
            "checkpoint",
            "layers",
            "metrics",
            "parallel",
            "processes",
            "worker",
            "torch_compat",
            "errors",
        },
        "scoring": {
            *("assembly", "checkpoint", "generate", "metrics", "parallel", "processes", "versions"),
            *("optional", "errors"),
        },
        "serve": {"generate", "parallel", "processes", "worker", "errors"},
        "evaluate": {
            *("assembly", "checkpoint", "engine", "train", "generate", "scoring", "parallel", "processes"),
            *("worker", "errors"),
        },
        # Rare features, which only the modules of USES_EXTRAS import.
        "extras": {
            *(
                "assembly",
                "checkpoint",
                "convert",
                "generate",
                "initialization",
                "layers",
                "optim",
                "parallel",
            ),
            *("engine", "processes", "torch_compat", "train", "worker", "errors"),
        },
        "verify": {"checkpoint", "metrics", "worker", "errors"},
        "verify_layout": {"assembly", "checkpoint", "engine", "parallel", "train", "worker"},
        "coord_check": {"parallel", "report", "train", "verify_layout", "worker"},
        # -- programs and notebooks
        "api": {
            *("assembly", "checkpoint", "convert", "generate", "optim", "parallel", "processes", "train"),
            *("inspection", "metrics", "worker"),
        },
        "inspection": {"commands", "checkpoint", "verify", "errors"},
        "convert": {
            *("assembly", "checkpoint", "layers", "parallel", "processes", "inspection"),
            *("commands", "versions", "optional", "errors"),
        },
    },
}
# Rooms of neox_model that may read configurations; the others take plain arguments.
READS_CONFIGURATION = (
    *("worker", "doctor", "processes", "assembly", "engine", "checkpoint", "train", "generate"),
    *("evaluate", "extras", "scoring", "verify", "commands", "inspection", "convert", "serve", "api"),
    *("verify_layout", "coord_check"),
)
# What the other rooms may import of neox_config: the model's errors are subclasses of the configuration's, so
# that one handler reports them all; the others have nothing to do with a configuration.
NOT_CONFIGURATION = tuple(
    f"neox_config.{room}"
    for room in (
        *("errors", "atomic", "finite_json", "command_line", "interrupts", "pluralize", "formats"),
        # Plain values that layers and optimizers may take as arguments.
        *("facts", "spec.model", "spec.run", "spec.update"),
    )
)
READS_DATA = (
    *("worker", "processes", "train", "generate", "serve", "scoring", "evaluate", "extras", "convert"),
    *("api", "verify_layout"),
)
# Modules that may import a rare feature. neox_config declares, decides and estimates all of a run, and the
# sections of the configuration are typed; the other packages load rare features by name.
USES_EXTRAS = (
    *("neox_config.schema.config", "neox_config.rules", "neox_config.rules.objective"),
    *("neox_config.rules.relations", "neox_config.rules.training", "neox_config.derive.implied"),
    *("neox_config.derive.layer_compilation", "neox_config.derive.recomputation"),
    *("neox_config.spec.schedule_preview", "neox_config.spec.read_run", "neox_config.spec.resolve"),
    *("neox_config.spec.run", "neox_config.spec.update"),
    *("neox_config.estimate.setup", "neox_config.estimate.step", "neox_launcher.plan.preflight"),
)
# What a worker of neox_model may import of the launcher: its own side of it, and the checks before a start,
# which a worker that was started by hand runs itself.
LAUNCHER_FOR_WORKERS = (
    *("neox_launcher.worker", "neox_launcher.protocol"),
    *("neox_launcher.plan.preflight", "neox_launcher.plan.notes", "neox_launcher.plan.in_use"),
    "neox_launcher.plan.epochs",
)

# Modules that may import a third-party package; packages that are not listed are unrestricted.
FENCES = {
    "deepspeed": ("neox_model.engine.deepspeed",),
    "fsspec": ("neox_model.checkpoint.object_store",),
    "apex": ("neox_kernels",),
    "lm_eval": ("neox_model.scoring.harness",),
    "matplotlib": ("neox_launcher.cli.schedule_chart", "neox_model.report"),
    "rich": (
        *("neox_launcher.controller.live_display", "neox_launcher.controller.live_line"),
        *("neox_launcher.controller.screens", "neox_data"),
    ),
    "compressed_tensors": ("neox_model.convert.reference",),
    "peft": ("neox_model.convert.reference",),
    "safetensors": (),
    "sentencepiece": ("neox_data.tokenizers.ranked_files",),
    "starlette": ("neox_model.serve",),
    "tensorboard": ("neox_model.metrics.writers.tensorboard",),
    "torch.utils.tensorboard": ("neox_model.metrics.writers.tensorboard",),
    "tokenizers": ("neox_data.tokenizers",),
    "torch": ("neox_data.loader", "neox_kernels", "neox_model"),
    "transformers": ("neox_model.convert.reference",),
    "uvicorn": ("neox_model.serve.web",),
    "wandb": ("neox_model.metrics.writers.wandb",),
}


# Where code may name an engine's library: the tables of engines, of contracts and of versions, and tables of
# names that other programs write.
NAMES_AN_ENGINE = (
    *("neox_model.assembly.engines", "neox_model.contracts", "neox_model.versions"),
    *("neox_model.convert.neox.records", "neox_model.metrics.collective_times"),
)


def lies_in(module: str, folders: tuple[str, ...]) -> bool:
    return any(module == folder or module.startswith(folder + ".") for folder in folders)


def ours(source: Source) -> list[tuple[str, str]]:
    """Each import of one of our modules, with the file and line of it."""
    return [
        (imported.module, f"{source.path}:{imported.line} imports {imported.module}")
        for imported in source.imports
        if lies_in(imported.module, PACKAGES)
    ]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_the_packages_below_it(package):
    allowed = (package, *PACKAGES_BELOW[package])
    wrong = [
        place for source in sources(package) for module, place in ours(source) if not lies_in(module, allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("package", "room"), [(package, room) for package in ROOMS for room in ROOMS[package]]
)
def test_a_room_imports_only_the_rooms_below_it(package, room):
    allowed = {room, *ROOMS[package][room]}
    wrong = [
        place
        for source in sources(package)
        if room_of(source.module) == room
        for module, place in ours(source)
        if lies_in(module, (package,)) and room_of(module) not in allowed
        if not (room_of(module) == "extras" and source.module in USES_EXTRAS)
    ]
    assert wrong == []


def test_the_modules_that_may_import_a_rare_feature_do():
    using = {
        source.module
        for source in sources()
        for module, _ in ours(source)
        if room_of(module) == "extras" and room_of(source.module) != "extras"
        if source.module.partition(".")[0] == module.partition(".")[0] or "neox_model" not in source.module
    }
    assert using == set(USES_EXTRAS)


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_a_place_in_the_order(package):
    assert {room_of(source.module) for source in sources(package)} - {""} == set(ROOMS[package])


@pytest.mark.parametrize("package", ROOMS)
def test_the_order_of_rooms_has_no_cycle(package):
    assert set(TopologicalSorter(ROOMS[package]).static_order()) == set(ROOMS[package])


def test_the_model_imports_only_the_workers_side_of_the_launcher():
    wrong = [
        place
        for source in sources("neox_model")
        for module, place in ours(source)
        if lies_in(module, ("neox_launcher",)) and not lies_in(module, LAUNCHER_FOR_WORKERS)
    ]
    assert wrong == []


def test_only_assembly_reads_configuration():
    readers = tuple(f"neox_model.{room}" for room in READS_CONFIGURATION)
    wrong = [
        place
        for source in sources("neox_model")
        if not lies_in(source.module, readers)
        for module, place in ours(source)
        if lies_in(module, ("neox_config", "neox_launcher")) and not lies_in(module, NOT_CONFIGURATION)
    ]
    assert wrong == []


def test_only_assembly_reads_corpora():
    readers = tuple(f"neox_model.{room}" for room in READS_DATA)
    wrong = [
        place
        for source in sources("neox_model")
        if not lies_in(source.module, readers)
        for module, place in ours(source)
        if lies_in(module, ("neox_data",))
    ]
    assert wrong == []


@pytest.mark.parametrize("package", FENCES)
def test_third_party_packages_are_imported_only_in_listed_modules(package):
    wrong = [
        f"{source.path}:{imported.line} imports {imported.module}"
        for source in sources()
        if not lies_in(source.module, FENCES[package])
        for imported in source.imports
        if lies_in(imported.module, (package,))
    ]
    assert wrong == []


def names_deepspeed(tree: ast.Module) -> list[int]:
    """Return the lines with an identifier or a string that has the name; not those of docstrings."""
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return [
        node.lineno
        for node in ast.walk(tree)
        if node not in statements
        for name in ("value", "id", "attr", "name", "module")
        if re.search(r"(\b|_)deepspeed(\b|_)", str(getattr(node, name, "")))
        and isinstance(node, ast.Constant | ast.Name | ast.Attribute | ast.alias | ast.ImportFrom)
    ]


def test_only_the_table_of_engines_names_deepspeed():
    wrong = [
        f"{source.path}:{line}"
        for source in sources("neox_model")
        if not lies_in(source.module, ("neox_model.engine.deepspeed", *NAMES_AN_ENGINE))
        for line in names_deepspeed(source.tree)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "import deepspeed",
        "from neox_model.engine.deepspeed import build",
        "name = 'neox_model.engine.deepspeed.build'",
        "is_other = engine.name == 'deepspeed'",
        "build = deepspeed_engine()",
    ],
)
def test_a_name_of_deepspeed_is_found(text):
    assert names_deepspeed(ast.parse(text)) == [1]
