"""Internals of DeepSpeed and torch are used in three files and their contracts, and replaced nowhere else."""

import ast
import re
from functools import cache

import pytest

from support.sources import ROOT, sources

# Module -> its contracts. There are three, because optimizers and layers are used without DeepSpeed and
# torch's pipelines, whose import takes seconds.
COMPAT = {
    "neox_model.engine.deepspeed.compat": "neox_model.engine.deepspeed.contracts",
    "neox_model.engine.deepspeed.zero": "neox_model.engine.deepspeed.contracts",
    "neox_model.engine.deepspeed.engines": "neox_model.engine.deepspeed.contracts",
    "neox_model.pipelining_compat": "neox_model.contracts.pipelining_compat",
    "neox_model.torch_compat": "neox_model.contracts.torch_compat",
}
LIBRARIES = ("deepspeed", "torch")
# Underscored names that are documented.
DOCUMENTED = {"_replace", "_exit", "__version__"}
# Of atexit: a worker ends with it, as multiprocessing ends its processes.
ENDING = {"_run_exitfuncs"}
# DeepSpeed's engine inside ours.
INNER = {"inner", "_inner"}
# Of our PipelineChunk, a subclass of torch's stage.
OF_PIPELINE_CHUNK = {"_after_weights", "_allocate", "_measure", "_on_meta"}
READERS = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and name not in DOCUMENTED | ENDING


def of_libraries(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES


class Findings(ast.NodeVisitor):
    """Collects what a file uses of the libraries that is not documented.

    Args:
        own: private names that neox_model itself defines.
    """

    def __init__(self, own: frozenset[str]) -> None:
        self.own = own
        self.found: list[str] = []
        self._imported: set[str] = set()
        self._deepspeeds: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if of_libraries(alias.name):
                self._bind(alias.asname or alias.name.partition(".")[0], alias.name)
                self._check(node, alias.name.split("."))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if of_libraries(node.module):
            for alias in node.names:
                self._bind(alias.asname or alias.name, str(node.module))
                self._check(node, [*str(node.module).split("."), alias.name])

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._check_target(target)
            names = {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
            # What a function of DeepSpeed returns is one of its objects.
            if isinstance(node.value, ast.Call) and self._is_deepspeeds(node.value):
                self._deepspeeds |= names
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._check_target(node.target)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._check_target(target)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in READERS:
            owner, name = node.args[0], node.args[1]
            if node.func.id in ("setattr", "delattr"):
                self._check_target(ast.Attribute(owner, "", lineno=node.lineno))
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._check_attribute(node, name.value)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr.startswith("__") and root_of(node) in self._imported:
            self._check(node, [node.attr])
        else:
            self._check_attribute(node, node.attr)
        self.generic_visit(node)

    def _bind(self, name: str, module: str) -> None:
        self._imported.add(name)
        if module.partition(".")[0] == "deepspeed":
            self._deepspeeds.add(name)

    def _is_deepspeeds(self, value: ast.Call) -> bool:
        names = {root_of(part) for part in (value.func, *value.args)}
        return bool(names & self._deepspeeds)

    def _check_attribute(self, node: ast.AST, name: str) -> None:
        is_dunder = name.startswith("__")
        if name.startswith("ds_") or (is_private(name) and not is_dunder and name not in self.own):
            self.found.append(f"{node.lineno}: {name}")

    def _check(self, node: ast.AST, names: list[str]) -> None:
        private = [name for name in names if is_private(name)]
        self.found += [f"{node.lineno}: {name}" for name in private]

    def _check_target(self, target: ast.AST) -> None:
        for part in ast.walk(target) if isinstance(target, ast.Tuple | ast.List) else (target,):
            is_inside = isinstance(part, ast.Attribute | ast.Subscript)
            if not is_inside:
                continue
            of_libraries = root_of(part) in self._imported | self._deepspeeds
            if of_libraries or INNER & set(ast.unparse(part.value).split(".")):
                self.found.append(f"{part.lineno}: assigns to {root_of(part)}")


def root_of(node: ast.AST) -> str | None:
    """Return the first name in a chain of attributes, calls and subscripts; for `type(x)`, that of `x`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call):
            is_type = isinstance(node.func, ast.Name) and node.func.id == "type"
            node = node.args[0] if is_type else node.func
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        else:
            return None
    return node.id


@cache
def own_names() -> frozenset[str]:
    """Private names that neox_model defines: functions, classes, variables and attributes of self."""
    names: set[str] = set()
    for source in sources("neox_model"):
        if source.module in COMPAT:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return frozenset(name for name in names if name.startswith("_"))


def findings(tree: ast.Module) -> list[str]:
    visitor = Findings(own_names())
    visitor.visit(tree)
    return visitor.found


def test_internals_of_the_engine_and_of_torch_are_used_in_the_compat_files_alone():
    found = [
        f"{source.path}:{finding}"
        for source in sources("neox_model")
        if source.module not in COMPAT and source.module not in COMPAT.values()
        for finding in findings(source.tree)
    ]
    assert found == []


@pytest.mark.parametrize("module", COMPAT)
def test_the_compat_files_are_seen_to_use_internals(module):
    (source,) = (source for source in sources("neox_model") if source.module == module)
    assert findings(source.tree) != []


@pytest.mark.parametrize("module", COMPAT)
def test_every_internal_name_has_a_contract(module):
    (source,) = (source for source in sources("neox_model") if source.module == module)
    contracts = ROOT / "packages/neox-model/src" / f"{COMPAT[module].replace('.', '/')}.py"
    used = {finding.rpartition(": ")[2] for finding in findings(source.tree)} - OF_PIPELINE_CHUNK
    untested = {name for name in used if not re.search(rf"\b{name}\b", contracts.read_text())}
    assert {name for name in untested if not name.startswith("assigns to")} == set()


PLANTS = [
    "from torch._C import _distributed_c10d",
    "import torch._dynamo",
    "from torch.distributed import _functional_collectives",
    "import torch\ntorch._foreach_mul_([], 2)",
    "from torch import distributed as d\nd._get_default_group()",
    "import deepspeed\ndeepspeed.ops.__compatible_ops__ = {}",
    "from deepspeed.ops.op_builder.builder import OpBuilder\nOpBuilder.jit_load = None",
    "from deepspeed.runtime import compiler\ncompiler.compile = None",
    "from deepspeed.accelerator import get_accelerator\nkind = type(get_accelerator())\nkind.is_fp16 = 1",
    "import deepspeed\ninner, *_ = deepspeed.initialize()\ninner.enable_backward_allreduce = False",
    "import deepspeed\nsetattr(deepspeed, 'zero', None)",
    "from torch.nn import functional\nfunctional.linear = None",
    "import torch\ndel torch.compile",
    "def use(optimizer):\n    return optimizer._get_sub_group_partition_rank(0)",
    "def use(param):\n    return getattr(param, '_hp_mapping', None)",
    "class Engine:\n    def use(self):\n        self._inner.module.loss_fn = None",
    "def use(inner):\n    setattr(inner, 'global_steps', 1)",
    "class Stage(Module):\n    def use(self):\n        return self._local_start",
    "def use(param):\n    return hasattr(param, 'ds_id')",
]


@pytest.mark.parametrize("program", PLANTS)
def test_a_planted_use_of_internals_is_found(program):
    assert findings(ast.parse(program)) != []


def test_own_private_names_and_documented_ones_are_allowed():
    program = "import torch\nself._engine = torch.zeros(1)\nself._engine.grad = None\ntorch.__version__"
    assert findings(ast.parse(program)) == []
