"""Every parameter has one home, is read somewhere and all its choices are implemented; or it is refused."""

import ast
from functools import cache

import pytest

from neox_config.facts.attention import ATTENTION_FACTS, WITHOUT_HEADS
from neox_config.facts.curves import CURVES
from neox_config.facts.learning_rate import DECAY_STYLES, FINAL_DECAYS
from neox_config.names import answers
from neox_config.read.older import OLDER_SPELLINGS
from neox_config.schema.config import all_parameters, sections
from neox_config.schema.refused import REFUSED
from neox_config.schema.sections.optimizer import KNOWN_OPTIMIZERS
from neox_config.spec.positions import POSITIONS
from neox_data.indexed import IMPLEMENTATIONS
from neox_data.tokenizers import TOKENIZERS
from neox_model.assembly.attention import ADDED_POSITIONS, BIASES, ROTATIONS
from neox_model.assembly.patterns import PATTERNS
from neox_model.convert.families import FAMILIES
from neox_model.initialization import INIT_METHODS
from neox_model.layers.activations import ACTIVATIONS, GATED_ACTIVATIONS
from neox_model.layers.norms import NORMS
from neox_model.optim import OPTIMIZERS
from neox_model.train.data.datasets import ORDERS
from support.readers import HANDED_ON
from support.sources import Source, sources

PARAMETERS = {parameter.name: parameter for parameter in all_parameters()}

# Read only by a rule that refuses or explains them: they have no other effect.
READ_BY_RULES_ALONE = {
    "attention_softmax_in_fp32",  # always so
    "faiss_use_gpu",  # the search is exact
    "dump_state",  # neox-config show prints all settings
    "steps_per_print",  # log_interval follows from it
    "zero_allow_untested_optimizer",
}


def declares_or_describes(source: Source) -> bool:
    """Files that name parameters without using their values."""
    described = (
        "schema",
        "read.aliases",
        "read.older",
        "describe",
        "rules",
        "estimate",
        "derive.implied",
        "spec.resume",
    )
    return source.module.startswith(tuple(f"neox_config.{part}" for part in described))


def is_refusal(function: ast.AST) -> bool:
    return isinstance(function, ast.FunctionDef) and function.name.startswith("refuse_")


@cache
def names_read() -> tuple[frozenset[str], frozenset[str]]:
    """Attributes that the packages read, and endings of names that are put together (`train_data_paths`)."""
    attributes, endings = set(), set()
    for source in sources():
        if declares_or_describes(source):
            continue
        for statement in source.tree.body:
            if is_refusal(statement):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute):
                    attributes.add(node.attr)
                elif isinstance(node, ast.JoinedStr) and isinstance(node.values[-1], ast.Constant):
                    endings.add(node.values[-1].value)
    return frozenset(attributes), frozenset(end for end in endings if end.startswith("_"))


def is_read(name: str) -> bool:
    attributes, endings = names_read()
    return name in attributes or name in HANDED_ON or any(name.endswith(ending) for ending in endings)


def top_level_names() -> set[str]:
    return {name for section in sections().values() for name in section.model_fields}


def test_every_parameter_is_read_or_refused():
    unread = {name for name in top_level_names() if not is_read(name)}
    accounted = READ_BY_RULES_ALONE | {name.partition(".")[0] for name in REFUSED}
    assert unread - accounted == set()


def test_parameters_listed_as_unread_are_unread():
    """So that an entry leaves this table when its parameter is built."""
    assert {name for name in READ_BY_RULES_ALONE if is_read(name)} == set()


def choices(name: str) -> set[str]:
    return set(PARAMETERS[name].choices)


# name -> (what may be written, what is implemented). gelu_tanh is what openai_gelu asks for.
IMPLEMENTED = {
    "activation": (choices("activation"), {*ACTIVATIONS, *GATED_ACTIVATIONS} - {"gelu_tanh"}),
    "attention_config": (set(ATTENTION_FACTS), {"global", "local", *PATTERNS, *WITHOUT_HEADS}),
    "data_impl": (choices("data_impl") - {"infer"}, set(IMPLEMENTATIONS)),
    "hf_family": (choices("hf_family"), set(FAMILIES)),
    "init_method": (choices("init_method"), set(INIT_METHODS)),
    # wsd is a curve of its own.
    "lr_decay_style": (choices("lr_decay_style"), {*DECAY_STYLES, "wsd"}),
    "lr_wsd_decay_style": (choices("lr_wsd_decay_style"), set(FINAL_DECAYS)),
    "scheduler.type": (choices("scheduler.type"), CURVES.keys() & choices("scheduler.type")),
    "norm": (choices("norm"), set(NORMS)),
    "optimizer.type": ({name.lower() for name in KNOWN_OPTIMIZERS}, set(OPTIMIZERS)),
    "output_layer_init_method": (choices("output_layer_init_method"), set(INIT_METHODS)),
    "pos_emb": (
        choices("pos_emb") - {"none"},
        {name for name, kind in POSITIONS.items() if kind in {**ADDED_POSITIONS, **ROTATIONS, **BIASES}},
    ),
    "sample_order": (choices("sample_order"), set(ORDERS)),
    "tokenizer_type": (choices("tokenizer_type"), set(TOKENIZERS)),
}


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_every_choice_has_an_implementation_and_no_implementation_is_hidden(name):
    written, implemented = IMPLEMENTED[name]
    assert written == implemented


def target_exists(name: str) -> bool:
    """Return whether this is the name of a parameter, or of a block of parameters."""
    return name in PARAMETERS or any(known.startswith(f"{name}.") for known in PARAMETERS)


def test_every_alias_points_to_a_parameter():
    found = answers("shorthands", "foreign").values()
    targets = {name for each in found for name in each.parameters}
    targets |= {name for older in OLDER_SPELLINGS.values() for name in older.targets}
    assert [name for name in targets if not target_exists(name)] == []


def test_no_name_has_two_homes():
    """A block may have an older spelling under its name, such as `zero_optimization: true`."""
    blocks = {name for name, parameter in PARAMETERS.items() if parameter.is_block}
    sections = ("shorthands", "computed", "retired", "features", "foreign")
    names = [name for section in sections for name in answers(section)]
    names += [*(OLDER_SPELLINGS.keys() - blocks), *PARAMETERS]
    assert sorted(names) == sorted(set(names))
