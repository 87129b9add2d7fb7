"""Which modules read which parameter, found in the packages' syntax trees.

A module that may read configuration reads a parameter when it names it as an attribute, and also the
section or block that it is in: by attribute (`config.attention.rotary_pct`), as a variable
(`attention.rotary_pct`) or by type (`AttentionSection`).
"""

import ast
from dataclasses import dataclass
from functools import cache

from neox_config.facts.norms import NORM_FACTS
from neox_config.schema.config import section_of, sections
from support.sources import Source, sources

__all__ = ["HANDED_ON", "read_by"]

# Blocks that a module passes on whole, so that nothing reads each of their parameters, and parameters that a
# module reads by a name in a table of facts.
HANDED_ON = {
    "zero_optimization.": "neox_config.spec.engine_json",
    "fp16.": "neox_config.spec.engine_json",
    "aio.": "neox_config.spec.engine_json",
    "optimizer.params.": "neox_model.assembly.optimizer",
    # RunSpec.targets is the section of the objective.
    "z_loss": "neox_model.assembly.model",
    **{facts.epsilon: "neox_config.spec.read_model" for facts in NORM_FACTS.values()},
}
# Modules that name parameters without using their values, or only to refuse them.
_DESCRIBING = (
    "schema",
    "read.aliases",
    "read.older",
    "describe",
    "rules",
    "derive.implied",
    "derive.unused",
    "spec.resume",
)


def _describes(source: Source) -> bool:
    return source.module.startswith(tuple(f"neox_config.{part}" for part in _DESCRIBING))


def _may_read(source: Source) -> bool:
    if source.module.startswith("neox_config."):
        return not _describes(source)
    # A run has its configuration.
    homes = ("neox_config", "neox_model.train.run")
    return any(found.module.startswith(homes) for found in source.imports)


def _is_method_of_text(node: ast.Attribute) -> bool:
    """`line.split` is none of `data.split`."""
    holder = node.value
    own = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
    return hasattr(str, node.attr) and own not in sections()


@dataclass(frozen=True)
class _Words:
    """What a module names: attributes, variables, and endings of names put together (`_data_paths`)."""

    attributes: frozenset[str]
    variables: frozenset[str]
    endings: frozenset[str]


@cache
def _readers() -> dict[str, _Words]:
    """Return the words of each module that may read configuration."""
    return {source.module: _words(source) for source in sources() if _may_read(source)}


def _words(source: Source) -> _Words:
    attributes, variables, endings = set(), set(), set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and not _is_method_of_text(node):
            attributes.add(node.attr)
        elif isinstance(node, ast.Name):
            variables.add(node.id)
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[-1], ast.Constant):
            endings.add(str(node.values[-1].value))
    return _Words(
        frozenset(attributes),
        frozenset(variables),
        frozenset(end for end in endings if end.startswith("_")),
    )


@cache
def _properties() -> dict[str, frozenset[str]]:
    """Attribute of a section -> its properties that are made of it: who reads one reads the attribute."""
    found: dict[str, set[str]] = {}
    for source in sources():
        if not source.module.startswith("neox_config.schema.sections."):
            continue
        for function in ast.walk(source.tree):
            if isinstance(function, ast.FunctionDef) and _is_property(function):
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
                        found.setdefault(node.attr, set()).add(function.name)
    return {name: frozenset(names) for name, names in found.items()}


def _is_property(function: ast.FunctionDef) -> bool:
    return any(getattr(decorator, "id", "") == "property" for decorator in function.decorator_list)


def _is_read(name: str, words: _Words) -> bool:
    *blocks, own = name.split(".")
    if _properties().get(own, frozenset()) & words.attributes:
        return True
    section = section_of(name.partition(".")[0])
    around = words.attributes | words.variables
    is_named = own in words.attributes or any(own.endswith(ending) for ending in words.endings)
    is_of_section = not around.isdisjoint({section, sections()[section].__name__})
    return is_named and is_of_section and all(block in around for block in blocks)


def read_by(name: str) -> list[str]:
    """Return the modules that read a parameter; if no module does by name, those that read its block.

    A block that is known to be handed on whole is left to the table that says to whom.
    """
    modules = [module for module, words in _readers().items() if _is_read(name, words)]
    outer = name.rpartition(".")[0]
    if modules or not outer or name.startswith(tuple(HANDED_ON)):
        return modules
    return read_by(outer)
