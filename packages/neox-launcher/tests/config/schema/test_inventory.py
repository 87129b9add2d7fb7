"""All 525 documented parameters: accepted names and values, and their outcome.

`data/parameters.json` is the inventory of the reference documents, and `data/every_block.yml` switches every
block of DeepSpeed's on, so that what is required inside one is there while another value of it is tried.
"""

import json
import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from neox_config import engine_json, load_config, resolve
from neox_config.errors import ConfigError
from neox_config.names import answer
from neox_config.read.aliases import shorthand_of
from neox_config.read.older import OLDER_SPELLINGS
from neox_config.schema.config import parameter_named
from neox_config.schema.parameter import why_not_used
from neox_config.schema.refused import REFUSED

DATA = Path(__file__).parents[2] / "data"
MINIMAL = """\
num-layers: 4
hidden-size: 64
num-attention-heads: 4
max-position-embeddings: 32
train-iters: 10
train-micro-batch-size-per-gpu: 2
optimizer: {type: Adam, params: {lr: 0.001}}
"""
ENTRIES = {entry["name"]: entry for entry in json.loads((DATA / "parameters.json").read_text())}
BLOCKS = yaml.safe_load((DATA / "every_block.yml").read_text())

# What becomes of each entry; the first pattern that fits counts. "refused" may only shrink.
STATUS = {
    "computed": """
        world_size rank local_rank is_pipe_parallel iteration do_train do_valid do_test padded_vocab_size
        dynamic_loss_scale git_hash user_script""",
    "retired": """
        deepscale deepscale_config deepspeed_activation_checkpointing DDP_impl""",
    "alias": """
        optimizer_type lr adam_beta1 adam_beta2 adam_eps batch_size gas clip_grad loss_scale loss_scale_window
        hysteresis min_scale zero_stage zero_reduce_scatter zero_contiguous_gradients zero_reduce_bucket_size
        zero_allgather_bucket_size geglu rms_norm sinusoidal_pos_emb rpe sparsity
        sparse_attention sparse_attention.* onebitadam cpu_optimizer cpu_torch_adam fp32_allreduce
        disable_allgather distribute_checkpointed_activations
        activation_checkpointing activation_checkpointing.* optimizer.params.max_grad_norm
        zero_optimization.cpu_offload""",
    "no effect": """
        data_efficiency.data_routing.random_ltd.hidden_state_order faiss_use_gpu
        dump_state fp16.auto_cast zero_optimization.grad_hooks
        optimizer.params.torch_adam optimizer.params.cuda_aware
        optimizer.params.comm_backend_name zero_optimization.elastic_checkpoint
        zero_optimization.allgather_partitions zero_optimization.load_from_fp32_weights
        zero_optimization.stage3_gather_16bit_weights_on_model_save
        checkpoint.tag_validation checkpoint.load_universal checkpoint.parallel_write.pipeline_stage
        elasticity.min_time autotuning.arg_mappings""",
    "refused": """
        zero_optimization.zero_quantized_gradients
        sparse_gradients compression_training.channel_pruning compression_training.channel_pruning.*
        compression_training.weight_quantization.shared_parameters.quantizer_kernel""",
    "live": "*",
}
COUNTS = {
    "computed": 12,
    "retired": 4,
    "alias": 51,
    "no effect": 17,
    "refused": 14,
    "live": 427,
}

# Defaults that are others than the inventory's, and why.
DEFAULTS = {
    "log_interval": (100, "the oldest document's, where the newest says null"),
    "distributed_backend": (None, "nccl with GPUs, else gloo"),
    "steps_per_print": (None, "log_interval, which is 100; the document says 10"),
    "gradient_accumulation_steps": (None, "1 only where the other two sizes do not say it"),
    "optimizer.type": ("Adam", "NeoX's, where DeepSpeed has none"),
    "optimizer.params.lr": (None, "required: no model trains well at 0.001 by chance"),
    "optimizer.params.weight_decay": (None, "weight-decay outside the optimizer block"),
    "compression_training.sparse_pruning.shared_parameters.schedule_offset_end": (None, "schedule_offset"),
}
# "All Linear and CONV2D layers" is a phrase of a document; "*" is how it is written.
EVERY_MODULE = ("*",)

# Entries that are required only together with others; their rules are tested separately.
REQUIRED_TOGETHER = (
    "scheduler.params.total_num_steps",
    "*.schedule_config.total_curriculum_step",
    "*.schedule_config.difficulty_step",
    "*.schedule_config.root_degree",
    "*.schedule_config.difficulty",
    "*.schedule_config.max_step",
    "compression_training.layer_reduction.keep_number_layer",
    "compression_training.layer_reduction.teacher_layer",
    "compression_training.layer_reduction.module_name_prefix",
    "compression_training.layer_reduction.other_module_name",
)
# Required by the model itself, which the inventory does not say.
REQUIRED_HERE = {
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "optimizer.params.lr",
}

WORDS = {"bool": "true or false", "int": "whole number", "float": "number", "str": "text", "dict": "block"}
# Choices that stand for many values, and one of them.
OPEN_CHOICES = {"<torch.optim class>": "SGD", "type:<regex>": "type:transformer"}

VALUES = {
    "bool": [True, False],
    "int": [4],
    "float": [0.25],
    "str": ["word"],
    "list": [["a"]],
    "list[int]": [[1, 2, 3]],
    "list[str]": [["a", "b"]],
    "list[float]": [[0.5, 0.25]],
    "list[list[str]]": [[["a"], ["b", "c"]]],
    "dict": [{}, None],
    "any": ["O2"],
}
WRONG = {
    "bool": "maybe",
    "int": "many",
    "float": "many",
    "str": [1],
    "list": 5,
    "list[int]": ["x"],
    "list[str]": 5,
    "list[float]": "x",
    "list[list[str]]": ["a"],
    "dict": 5,
}
# Types with other descriptions, because they accept more than the documents list.
KINDS = {
    "attention_config": "list",
    "comet.api_key": "secret text",
    "elasticity.version": "number",
    "optimizer.type": "text",
    "pipe_partition_method": "text",
}
# Where a wrong value of the type is a right one here.
WRONGS = {"optimizer.type": [1], "optimizer_type": [1], "attention_config": ["nonsense"]}
# Where the value of the type does not do.
_METRIC = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.<metric>"
SAMPLES = {
    "comms_logger.prof_ops": [["all_reduce", "all_gather"]],
    # The third choice needs training in fp16.
    "data_types.grad_accum_dtype": ["fp32", "bf16"],
    "activation_checkpointing.number_checkpoints": [4],
    "amp.<apex_argument>": ["O1"],
    "attention_config": [[[[kind], 4]] for kind in ENTRIES["attention_config"]["choices"]],
    "autotuning.arg_mappings": [{"seed": "--seed"}, None],
    "comet.experiment_key": ["0" * 32],
    "compression_training.layer_reduction.keep_number_layer": [4],
    "compression_training.layer_reduction.module_name_prefix": ["layers"],
    "compression_training.layer_reduction.other_module_name": [["final_norm", "embedding.word_embeddings"]],
    "compression_training.layer_reduction.teacher_layer": [[0, 2, 4, 6]],
    "compression_training.sparse_pruning.shared_parameters.block_pattern": ["4x1"],
    "compression_training.sparse_pruning.shared_parameters.excluded_modules": [["mlp.down"]],
    **{
        f"compression_training.{part}.different_groups.<group>.modules": [[module]]
        for part, module in {
            "weight_quantization": "attention.qkv",
            "activation_quantization": "attention",
            "sparse_pruning": "mlp",
            "row_pruning": "mlp.up",
            "head_pruning": "attention.dense",
        }.items()
    },
    "compression_training.row_pruning.different_groups.<group>.related_modules": [[["mlp.down"]]],
    "compression_training.head_pruning.different_groups.<group>.related_modules": [[["attention.qkv"]]],
    "compression_training.sparse_pruning.shared_parameters.schedule_offset_end": [95],
    "curriculum_learning.max_difficulty": [16],
    "report_topk_accuracies": [[1, 5, 20]],
    "curriculum_learning.schedule_config.max_step": [[1, 2]],
    f"{_METRIC}.schedule_config.max_step": [[1, 2]],
    "data_efficiency.data_routing.random_ltd.random_ltd_layer_num": [3],
    "data_efficiency.data_routing.random_ltd.random_ltd_schedule.max_value": [16],
    "deepspeed": [True],
    "elasticity.ignore_non_elastic_batch_info": [True],
    "elasticity.max_train_batch_size": [100],
    "elasticity.model_parallel_size": [1],
    "zero_optimization.offload_optimizer.ratio": [1.0],
    "loss_scale_window": [500.0],
    "min_lr": [0.0001],
    "min_scale": [2.0],
    "split": ["90,10"],
    "test_data_weights": [[0.5]],
    "train_data_weights": [[0.5]],
    "valid_data_weights": [[0.5]],
}
# What else has to be said for a value to be possible.
_PATHS = {part: f"{part}_data_paths=[a]" for part in ("train", "valid", "test")}
_FP16 = ["precision=fp16"]
_WEIGHTS = "compression_training.weight_quantization.shared_parameters"
COMPANIONS = {
    "data_types.grad_accum_dtype": ["precision=bfloat16"],
    **{
        name: ["zero_optimization.stage=3", ".".join([*name.split(".")[:2], "device=cpu"])]
        for name in ENTRIES
        if name.startswith("zero_optimization.offload_") and not name.endswith(".device")
    },
    **{f"{part}_data_paths": [_PATHS[other] for other in _PATHS if other != part] for part in _PATHS},
    **{f"{part}_data_weights": list(_PATHS.values()) for part in _PATHS},
    "activation_checkpointing.contiguous_memory_optimization": ["partition_activations=true"],
    "contigious_checkpointing": ["partition_activations=true"],
    "contiguous_checkpointing": ["partition_activations=true"],
    "fp16_lm_cross_entropy": _FP16,
    "save": ["save_interval=5"],
    "adlr_autoresume": ["save=x", "load=x", "save_interval=5"],
    "scheduler.type": ["scheduler.params.cycle_min_lr=0.1", "scheduler.params.cycle_max_lr=0.2"],
    "scheduler.params.warmup_min_lr": ["scheduler.params.warmup_max_lr=0.5"],
    "zero_optimization.cpu_offload": ["zero_optimization.stage=1"],
    "zero_optimization.offload_optimizer.device": [
        "zero_optimization={stage: 3, offload_optimizer: {nvme_path: x}}"
    ],
    "zero_optimization.offload_param.device": ["zero_optimization={stage: 3, offload_param: {nvme_path: x}}"],
    "zero_optimization.zero_quantized_weights": ["zero_optimization.stage=3"],
    f"{_WEIGHTS}.quantize_weight_in_forward": _FP16,
    f"{_WEIGHTS}.quantizer_kernel": _FP16,
}


def home(name):
    """Where an entry is at home: a parameter, or one of the tables of aliases."""
    try:
        parameter_named(name)
    except KeyError:
        if name in OLDER_SPELLINGS:
            return "older"
        found = answer(name)
        kinds = {"shorthands": "shorthand", "computed": "computed", "retired": "retired"}
        inside = "inside" if name.startswith("amp.") else "nowhere"
        return kinds.get(found.kind, inside) if found is not None else inside
    return "parameter"


def written(name):
    """Return the name as a user writes it; `<group>` becomes the first group of the example."""
    parts, at = [], BLOCKS
    for part in name.split("."):
        if part == "<apex_argument>":
            part = "opt_level"
        elif part.startswith("<"):
            part = next(iter(at))
        at = at.get(part, {}) if isinstance(at, dict) else {}
        parts.append(part)
    return ".".join(parts)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """By the name of a block: the files of a small configuration with that block."""
    folder = tmp_path_factory.mktemp("inventory")
    minimal = folder / "minimal.yml"
    minimal.write_text(MINIMAL)
    found = {None: [minimal]}
    for block, content in BLOCKS.items():
        path = folder / f"{block}.yml"
        path.write_text(json.dumps({block: content}))
        found[block] = [minimal, path]
    return found


def attempt(files, name, value, *, spelling=None, around=()):
    """Return the configuration with one value, or the problems."""
    block = name.partition(".")[0]
    text = f"{spelling or written(name)}={json.dumps(value)}"
    companions = COMPANIONS.get(name, COMPANIONS.get(block, []))
    if value in OPEN_CHOICES.values():
        companions = []
    try:
        return load_config(files.get(block, files[None]), overrides=[*companions, *around, text])
    except ConfigError as error:
        return error.problems


def values_of(entry):
    """Documented values of an entry: all choices, or some of its type."""
    if entry["name"] in SAMPLES:
        return SAMPLES[entry["name"]]
    if "choices" in entry:
        return [OPEN_CHOICES.get(choice, choice) for choice in entry["choices"]]
    return VALUES[entry["type"]]


def as_read(value):
    return tuple(as_read(item) for item in value) if isinstance(value, list) else value


def with_home(*kinds):
    return [name for name in ENTRIES if home(name) in kinds]


def test_all_525_are_at_home():
    assert len(ENTRIES) == 525
    assert with_home("nowhere") == []


@pytest.mark.parametrize("name", with_home("parameter"))
def test_type_default_and_choices_are_the_documented_ones(name):
    entry, parameter = ENTRIES[name], parameter_named(name)
    kind = "choice" if "choices" in entry else WORDS.get(entry["type"], "list")
    assert parameter.type.startswith(KINDS.get(name, kind))
    for choice in entry.get("choices", ()):
        assert choice in OPEN_CHOICES or str(choice) in re.findall(r"[\w.-]+", " ".join(parameter.choices))
    if not parameter.is_block:
        phrase = entry["type"] == "list[str]" and isinstance(entry["default"], str)
        documented = EVERY_MODULE if phrase else as_read(entry["default"])
        default = DEFAULTS[name][0] if name in DEFAULTS else documented
        assert parameter.default == default
        assert type(parameter.default) is type(default)


@pytest.mark.parametrize("name", with_home("parameter"))
def test_every_documented_value_is_read_under_both_spellings(files, name):
    for place, value in enumerate(values_of(ENTRIES[name])):
        spelling = written(name).replace("_", "-") if place == 0 else None
        config = attempt(files, name, value, spelling=spelling)
        if is_refused(name) and value is True:
            assert [problem.name for problem in config] == [name]
        elif not parameter_named(name).is_block:
            assert not isinstance(config, list | tuple), config
            found = config.value_of(written(name))
            found = found.get_secret_value() if hasattr(found, "get_secret_value") else found
            assert found == as_read(value)
        else:
            assert not isinstance(config, list | tuple), config


# Which of apex's arguments are accepted is tested with the rules and spellings.
CHECKED = [name for name in with_home("parameter", "shorthand", "older", "inside") if "apex" not in name]


@pytest.mark.parametrize("name", CHECKED)
def test_a_wrong_value_is_refused(files, name):
    entry = ENTRIES[name]
    wrong = WRONGS.get(name, "nonsense" if "choices" in entry else WRONG[entry["type"]])
    problems = attempt(files, name, wrong)
    assert isinstance(problems, list | tuple), "it was accepted"
    assert target_of(name) in {problem.name for problem in problems}


def target_of(name):
    """Return the parameter reported for a problem with an alias."""
    if name in OLDER_SPELLINGS:
        return "optimizer.params.betas" if name.startswith("adam_beta") else name
    return written(name) if home(name) == "parameter" else shorthand_of(name) or written(name)


@pytest.mark.parametrize("name", with_home("shorthand", "older", "inside"))
def test_aliases_take_the_documented_values(files, name):
    for value in values_of(ENTRIES[name]):
        config = attempt(files, name, value)
        assert not isinstance(config, list | tuple), config


@pytest.mark.parametrize("name", with_home("computed", "retired"))
def test_unused_parameters_are_noted(files, name):
    # Another iteration is refused: in GPT-NeoX it chooses the checkpoint to load.
    value = 0 if name == "iteration" else VALUES[ENTRIES[name]["type"]][0]
    config = attempt(files, name, value)
    assert [notice.name for notice in config.notices] == [name]


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.get("required")])
def test_missing_required_parameters_are_reported(name):
    if any(fnmatchcase(name, pattern) for pattern in REQUIRED_TOGETHER):
        return
    parameter = parameter_named(name)
    assert parameter.required or parameter.needed or parameter.is_block


def test_nothing_else_is_required():
    required = {name for name in with_home("parameter") if parameter_named(name).required}
    assert {name for name in required if not ENTRIES[name].get("required")} == REQUIRED_HERE


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.get("aliases")])
def test_other_names_that_the_documents_give_are_known(name):
    outer = name.rpartition(".")[0]
    for alias in ENTRIES[name]["aliases"]:
        alias = alias.replace("-", "_")
        assert {home(alias), home(f"{outer}.{alias}")} != {"nowhere"}


def is_refused(name):
    return any(fnmatchcase(name, pattern) for pattern in REFUSED)


def scope(switch):
    """Return the block that a switch enables: its own, or the one around its shared parameters."""
    head, _, last = switch.rpartition(".")
    if last not in ("enabled", "device"):
        return switch
    return head.removesuffix(".shared_parameters")


def status_of(name):
    """Return the status of an entry according to the code's tables."""
    kind = home(name)
    if kind != "parameter" and not name.startswith("amp."):
        return {"shorthand": "alias", "older": "alias", "inside": "alias"}.get(kind, kind)
    if kind == "parameter" and why_not_used(parameter_named(name).doc) is not None:
        return "no effect"
    if any((name + ".").startswith(scope(switch) + ".") for switch in REFUSED):
        return "refused"
    return "live"


def in_table(name):
    """Return the status according to the reviewed table."""
    return next(
        status
        for status, patterns in STATUS.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns.split())
    )


def test_the_table_lists_the_outcome_of_each_parameter():
    assert {name: in_table(name) for name in ENTRIES} == {name: status_of(name) for name in ENTRIES}


def test_lists_of_refused_parameters_only_shrink():
    assert Counter(map(in_table, ENTRIES)) == COUNTS
    assert sum(COUNTS.values()) == 525


def test_the_complete_example_of_the_guide_loads_and_plans_unchanged():
    config = load_config([DATA / "guide_example.yml"])
    resolved = resolve(config, devices=8)
    assert resolved.run.batch.whole == 32
    assert resolved.run.precision.weights == "fp16"
    assert resolved.config.optimizer.gradient_clipping == 1.0
    assert engine_json(resolved)["train_batch_size"] == 32
