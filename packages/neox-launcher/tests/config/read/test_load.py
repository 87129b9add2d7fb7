"""Loading of a configuration from several files and the command line."""

import re

import pytest

from neox_config import load_config
from neox_config.errors import ConfigError
from neox_config.extras.data_efficiency.curricula import METRICS
from neox_config.names import answers
from support.refusals import refused, shows

START = """\
num-layers: 2
hidden-size: 64
num-attention-heads: 4
max-position-embeddings: 64
train-iters: 9
optimizer: {params: {lr: 0.001}}
train-micro-batch-size-per-gpu: 1
"""

# text of a second file -> the sentences that the error must hold
WRONG = [
    ("autotuning:\n  arg_mappings: {enabled: true}", ["line 2  autotuning.arg_mappings", "must be text"]),
    ("warmpup: 0.01", ["line 1  warmpup: 0.01", "is not a parameter", "did you mean warmup?"]),
    ("num-layer: 4", ["did you mean num-layers?"]),
    ("max-tokens: 1", ["use maximum-tokens for the tokens to generate, or serve.max_tokens for the most"]),
    ("stage: 1", ["move it into its block: zero_optimization.stage"]),
    ("zero_optimization: {stag: 1}", ["zero_optimization.stag: 1", "did you mean stage?"]),
    ("zero_optimization: {x: 1}", ["is not a parameter", "use one of: stage, allgather_partitions"]),
    ("optimizer: {params: {beta: [0.9, 0.9]}}", ["is not an argument of Adam", "did you mean betas?"]),
    ("hidden-dropout: high", ["hidden-dropout: high", "must be a number"]),
    ("hidden-dropout: 1.5", ["must be less than 1"]),
    ("hidden-dropout: .nan", ["must be a finite number"]),
    ("hidden-dropout: 1e999", ["must be a finite number"]),
    ("seed: 9" + "9" * 400, ["must be a whole number"]),
    ("data-path: 10.000", ["must be text"]),
    ("seed: -1", ["must be at least 0"]),
    ("save-interval: 1e19", ["must be a number between -1e18 and 1e18"]),
    ("save-interval: -1e19", ["must be a number between -1e18 and 1e18"]),
    ("train-data-weights: [1, 1e31]", ["must be a number between -1e30 and 1e30"]),
    ("train-data-weights: [1, .inf]", ["must be a finite number"]),
    (
        "sparsity_config: {global_block_indices: [1%s]}" % ("0" * 200),
        ["must be a number between -1e18 and 1e18"],
    ),
    ("hang-timeout: 1e7", ["must be at most 2,000,000", "Seconds without a finished iteration"]),
    ("save-interval: 0", ["must be greater than 0"]),
    ("save-interval: 1.5", ["must be a whole number"]),
    ("save-interval: 10.000", ["10.000", "must be a whole number", "10.000 is 10; for 10,000 write 10000"]),
    ("log-interval: 1.000.000", ["for 1,000,000 write 1000000"]),
    ("save-interval: true", ["save-interval: true", "must be a whole number"]),
    ("no-weight-tying: 1", ["must be true or false"]),
    ("no-weight-tying: maybe", ["must be true or false"]),
    ("data-path: 5", ["must be text", "put it in quotes to make it text"]),
    ("activation: gelo", ["is not one of the choices", "did you mean gelu?"]),
    (
        "activation: zzz",
        ["use gelu, geglu, geglu_tanh, relu, squared_relu, softsign, ", "swiglu, reglu, glu, bilinear"],
    ),
    ("zero_optimization: {stage: 4}", ["is not one of the choices", "use 0, 1, 2, 3"]),
    (
        "lora-target-modules: [qkv, q_proj]",
        ["is not one of the choices in element 2", "use qkv, dense, up, gate, down"],
    ),
    ("dtype: bf16", ["is not a parameter", "use precision: ... (data type of training; may be set"]),
    ("report_to: mlflow", ["set tensorboard-dir, use-wandb or comet.enabled"]),
    ("report_to: wandb", ["set tensorboard-dir, use-wandb or comet.enabled"]),
    ("optim: other", ["use optimizer: {type: ...} (name of the optimizer"]),
    ("completion_only_loss: true", ["preprocess_data --loss-mask prompt-response writes labels"]),
    ("use_rslora: true", ["multiply lora-alpha by the square root of lora-rank"]),
    ("load_in_4bit: true", ["training on quantized weights (QLoRA) is not supported"]),
    ("group_by_length: true", ["use pack-impl: best_fit"]),
    ("assistant_only_loss: true", ["preprocess_data --loss-mask chat"]),
    ("attn_implementation: sdpa", ["remove it; attention is computed by the fastest"]),
    ("lora-target-modules: [gat]", ["is not one of the choices in element 1", "did you mean gate?"]),
    ("train-data-paths: data/x", ["must be a list", "write [data/x]"]),
    ("attention-config: []", ["describes 0 layers", "change the counts"]),
    ("optimizer: {params: {betas: [0.9]}}", ["has too few elements"]),
    ("optimizer: {params: {betas: [0.9, 0.9, 0.9]}}", ["has too many elements"]),
    ("optimizer: {params: {betas: [0.9, high]}}", ["in element 2"]),
    ("optimizer: Adam", ["must be a block of parameters", "write optimizer: {type: ...}"]),
    ("seed: {a: 1}", ["seed is not a block"]),
    ("split: a,b", ["has an invalid format", "write up to three numbers, as in 969,30,1"]),
    ("pipe-partition-method: best", ["write parameters, uniform or type:REGEX"]),
    (
        "hidden-size: 128",
        ["has a different value in", "minimal.yml line 2, as hidden-size: 64", "keep only one"],
    ),
    ("lr: 0.002", ["lr: 0.002", "as optimizer.params.lr: 0.001"]),
    ("sparsity: some", ["must be one of none, all, interspersed", "write attention_config instead"]),
    ("fp16: {type: fp8}", ["must be fp16 or bfloat16"]),
    ("zero_optimization: {offload_param: true}", ["write offload_param: {device: cpu}"]),
    ("geglu: 5", ["must be true or false", "write activation instead"]),
    ("geglu: true\nactivation: gelu", ["has a different value"]),
    ("attention_config: [[[global, loca], 2]]", ["'loca' is not an attention type", "did you mean local?"]),
]


@pytest.mark.parametrize(("text", "sentences"), WRONG)
def test_a_wrong_value_is_reported_with_name_reason_and_remedy(load, text, sentences):
    with pytest.raises(ConfigError) as found:
        load(text)
    for sentence in sentences:
        assert sentence in str(found.value)
    assert found.value.exit_code == 2


def test_all_problems_are_reported_at_once_by_file_and_line(minimal):
    more = minimal.with_name("more.yml")
    more.write_text("seed: -5\n\nwarmpup: 0.01\n")
    with pytest.raises(ConfigError) as found:
        load_config([minimal, more], overrides=["norm=layernom", "nonsense"])
    assert (
        str(found.value)
        == f"""\
command line: 2 problems

  --set nonsense
    is not name=value
    write --set name=value
  --set norm: layernom
    is not one of the choices
    did you mean layernorm?

{more}: 2 problems

  line 1  seed: -5
          must be at least 0
  line 3  warmpup: 0.01
          is not a parameter
          did you mean warmup?"""
    )


def test_missing_required_parameters_are_reported(tmp_path):
    empty = tmp_path / "empty.yml"
    empty.write_text("seed: 1")
    with pytest.raises(ConfigError) as found:
        load_config([empty])
    missing = {problem.name for problem in found.value.problems}
    assert missing == {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "train_iters",
        "optimizer.params.lr",
        "train_micro_batch_size_per_gpu",
    }


def test_rules_that_need_a_wrong_value_are_silent(load):
    with pytest.raises(ConfigError) as found:
        load("", "num-attention-heads=many", "hidden-size=63", "norm=layernorm")
    assert [problem.name for problem in found.value.problems] == ["num_attention_heads"]


# --set, value found at, value
OVERRIDES = [
    ("seed=7", "seed", 7),
    ("optimizer.params.lr=1e-4", "optimizer.params.lr", 1e-4),
    ("lr=1e-4", "optimizer.params.lr", 1e-4),
    ("train-iters = 5", "train_iters", 5),
    ("fp16={enabled: true, hysteresis: 4}", "fp16.hysteresis", 4),
    ("attention-config=[[[global], 4]]", "attention_config", ((("global",), 4),)),
    ("save=", "save", None),
    ("data-path=a=b", "data_path", "a=b"),
    ('data-path="5"', "data_path", "5"),
]


@pytest.mark.parametrize(("override", "name", "value"), OVERRIDES)
def test_the_command_line_wins(load, override, name, value):
    assert load("", override).value_of(name) == value


@pytest.mark.parametrize("override", ["seed", "=5", "a..b=5", "seed=[", "seed=1\nseed: 2"])
def test_a_broken_override_is_refused(load, override):
    with refused(ConfigError, "--set"):
        load("", override)


def test_the_last_of_two_overrides_is_used_with_a_note(load):
    loaded = load("", "zero-stage=1", "seed=1", "zero_optimization.stage=2", "seed=2", "seed=2")
    assert loaded.training.seed == 2
    assert loaded.zero.zero_optimization.stage == 2
    notes = [(note.name, note.value, note.what) for note in loaded.notices]
    assert ("seed", "2", "is used: it is given after --set seed=1") in notes
    assert ("zero_optimization.stage", "2", "is used: it is given after --set zero-stage=1") in notes


def test_null_for_a_block_without_values_is_its_default(load):
    assert load("fp16:", "bf16=null").precision == load("").precision


def test_two_files_that_disagree_can_be_overridden(load):
    with refused(ConfigError, "--set"):
        load("hidden-size: 128")
    assert load("hidden-size: 128", "hidden-size=256").model.hidden_size == 256


def test_the_same_value_twice_in_two_files_is_fine(load):
    assert load("hidden_size: 64").model.hidden_size == 64


def test_blocks_of_several_files_are_merged(load):
    config = load("optimizer: {params: {betas: [0.8, 0.9]}}")
    assert config.optimizer.optimizer.params.betas == (0.8, 0.9)
    assert config.optimizer.optimizer.params.lr == 0.001


# text -> parameter, value
ALIASES = [
    ("gas: 3", "gradient_accumulation_steps", 3),
    ("clip-grad: 0.5", "gradient_clipping", 0.5),
    ("optimizer: {params: {max_grad_norm: 0.5}}", "gradient_clipping", 0.5),
    ("zero-stage: 2", "zero_optimization.stage", 2),
    ("zero_optimization: true", "zero_optimization.stage", 1),
    ("zero_optimization: false", "zero_optimization.stage", 0),
    ("zero_optimization: {stage: 1, cpu_offload: true}", "zero_optimization.offload_optimizer.device", "cpu"),
    ("zero_optimization: {offload_param: false}", "zero_optimization.offload_param.device", "none"),
    ("loss-scale: null", "fp16.loss_scale", 0.0),
    ("loss-scale: 128", "fp16.loss_scale", 128.0),
    ("loss_scale_window: 500.0", "fp16.loss_scale_window", 500),
    ("min-scale: 2", "fp16.min_loss_scale", 2),
    ("adam-beta2: 0.95", "optimizer.params.betas", (0.9, 0.95)),
    ("adam_beta1: 0.8\nadam_beta2: 0.95", "optimizer.params.betas", (0.8, 0.95)),
    ("adam-eps: 1e-6", "optimizer.params.eps", 1e-6),
    ("rms-norm: true", "norm", "rmsnorm"),
    ("rms-norm: false", "norm", "layernorm"),
    ("geglu: true", "activation", "geglu"),
    ("sinusoidal-pos-emb: true", "pos_emb", "sinusoidal"),
    ("rpe: true", "pos_emb", "rpe"),
    ("cpu-optimizer: true\noptimizer: {type: CPU_Adam}", "optimizer.type", "CPU_Adam"),
    ("sparsity: interspersed", "attention_config", ("global", "sparse_fixed", "global", "sparse_fixed")),
    ("sparsity: none", "attention_config", ("global",) * 4),
    ("contigious-checkpointing: true\npartition-activations: true", "contiguous_checkpointing", True),
    ("activation_checkpointing: {partition_activations: true}", "partition_activations", True),
    ("activation-checkpointing: {profile: true}", "profile_backward", True),
    ("fp32-allreduce: true", "communication_data_type", "fp32"),
    ("disable_allgather: true", "zero_optimization.allgather_partitions", False),
    ("fp16: {fp16: true}", "fp16.enabled", True),
    ("fp16: {enabled: true, type: bfloat16}", "bf16.enabled", True),
    ("fp16: {enabled: true, type: bfloat16}", "fp16.enabled", False),
    ("fp16: {enabled: false, type: bfloat16}", "bf16.enabled", False),
    ("precision: bf16", "precision", "bfloat16"),
    ("bfloat16: {enabled: true}", "bf16.enabled", True),
    ("sparse_attention: {block: 32}", "sparsity_config.block", 32),
    ("tokenizer-type: GPT2Tokenizer", "tokenizer_type", "GPT2BPETokenizer"),
    ("scheduler: {type: 1Cycle, params: {cycle_min_lr: 0, cycle_max_lr: 1}}", "scheduler.type", "OneCycle"),
    (
        "scheduler: {type: 1Cycle, params: {cycle_min_lr: 0, cycle_max_lr: 1}}",
        "scheduler.params.cycle_min_lr",
        0,
    ),
    ("amp: {enabled: true, opt_level: O1}", "amp.opt_level", "O1"),
    ("amp: {enabled: true, loss_scale: dynamic}", "amp.loss_scale", 0.0),
    ("amp: {enabled: true, loss_scale: null}", "amp.loss_scale", 0.0),
    ("amp: {enabled: true, loss_scale: '128'}", "amp.loss_scale", 128.0),
    ("amp: {enabled: true, master_weights: null, patch_torch_functions: true}", "amp.enabled", True),
]


@pytest.mark.parametrize(("text", "name", "value"), ALIASES)
def test_other_names_are_folded_into_the_parameter(load, text, name, value):
    overrides = ["optimizer.type=CPU_Adam"] if "CPU_Adam" in text else []
    assert load(text, *overrides).value_of(name) == value


@pytest.mark.parametrize("name", sorted(answers("computed", "retired")))
def test_settings_without_effect_are_noted(load, name):
    config = load(f"{name}: 0")
    (notice,) = config.notices
    assert notice.name == name
    assert notice.place.line == 1
    assert "is computed" in notice.what or "has no effect" in notice.what


def test_an_iteration_to_load_is_refused_with_the_folder_of_its_checkpoint(load):
    with pytest.raises(ConfigError) as found:
        load("load: checkpoints\niteration: 100")
    (problem,) = found.value.problems
    assert (problem.name, problem.value, problem.place.line) == ("iteration", "100", 2)
    assert problem.remedy == "remove it, and set load: CHECKPOINTS/global_step100"


def test_values_that_follow_from_others_are_filled_in(load):
    config = load("weight-decay: 0.3", "seq-length=null")
    assert config.optimizer.optimizer.params.weight_decay == 0.3
    assert config.model.seq_length == 32
    assert load().optimizer.optimizer.params.weight_decay == 0.01


def test_implied_settings_are_applied(load):
    config = load("apply-query-key-layer-scaling: true\nattention-softmax-in-fp32: false\nfinetune: true")
    assert config.attention.attention_softmax_in_fp32
    assert config.checkpoint.no_load_optim
    assert [notice.name for notice in config.notices] == ["attention_softmax_in_fp32"]
    assert load("lazy-mpu-init: true").model.use_cpu_initialization


def test_extra_saves_after_the_last_iteration_are_noted(load):
    config = load("extra-save-iters: [512, 10, 0, 256]\nsave: x\ntrain-iters: 10")
    (notice,) = config.notices
    assert (notice.name, notice.what) == (
        "extra_save_iters",
        "contains 256, 512, after the last iteration (10): not saved",
    )
    assert load("extra-save-iters: [10, 0]\nsave: x\ntrain-iters: 10").notices == ()
    (notice,) = load("async-save: true").notices
    assert (notice.name, notice.what) == (
        "async_save",
        "has no effect: it is used only when save is set, but it is null",
    )
    # Like save-interval, in the file of an imported model, which also generates.
    assert load("save-interval-minutes: 5").notices == ()


def test_the_inner_weight_decay_wins_and_the_outer_is_noted(load):
    config = load("weight-decay: 0.1\noptimizer: {params: {weight_decay: 0.2}}")
    assert config.optimizer.optimizer.params.weight_decay == 0.2
    assert "is not used" in config.notices[0].what


def test_deepspeeds_interval_of_reports_is_that_of_the_log_where_none_is_given(load):
    config = load("steps_per_print: 7")
    assert (config.logging.log_interval, config.notices) == (7, ())
    config = load("steps_per_print: 10\nlog-interval: 10")
    assert (config.logging.log_interval, config.notices) == (10, ())
    config = load("steps_per_print: 10\nlog-interval: 100")
    assert config.logging.log_interval == 100
    (notice,) = config.notices
    assert (notice.name, notice.what) == ("steps_per_print", "has no effect: log-interval is 100")


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("fp16=null", "such as --set fp16.enabled=VALUE"),
        ("fp16={}", "such as --set fp16.enabled=VALUE"),
        ("optimizer=null", "such as --set optimizer.type=VALUE"),
        ("optimizer.params=~", "such as --set optimizer.params."),
        (f"{METRICS}={{}}", f"such as --set {METRICS}.NAME.index_to_sample_path=VALUE"),
    ],
)
def test_a_block_without_contents_on_the_command_line_is_noted(load, setting, remedy):
    config = load("fp16: {enabled: true, loss_scale: 0}", setting)
    assert config.precision.fp16.enabled
    (notice,) = config.notices
    assert notice.name == setting.partition("=")[0]
    assert notice.what.endswith("leaves the block as the files and the defaults set it")
    assert remedy in notice.remedy
    assert load("fp16:\noptimizer: null").notices == ()


def test_the_configuration_has_its_sources_and_is_frozen(load):
    config = load("log-interval: 3", "seed=4")
    assert str(config.sources["seed"]) == "command line"
    assert config.sources["log_interval"].line == 1
    assert "eval_iters" not in config.sources
    with refused(ValueError, "frozen"):
        config.model.hidden_size = 5


def test_the_order_of_files_does_not_matter(minimal):
    more = minimal.with_name("more.yml")
    more.write_text("seed: 5\nlog-interval: 3")
    assert load_config([minimal, more]) == load_config([more, minimal])
    assert load_config([minimal, more]) != load_config([minimal])


def test_sizes_have_limits_so_that_nothing_is_built_for_a_number_without_its_unit(minimal):
    with pytest.raises(ConfigError) as refusal:
        load_config([minimal], overrides=["num-layers=1e18", "attention-config=[[[global], 1e18]]"])
    (problem,) = refusal.value.problems
    assert problem.what == "must be at most 10,000"
    with refused(ConfigError, "describes 1,000,000,000,000,000", "num-layers", "is 4"):
        load_config([minimal], overrides=["attention-config=[[[global], 1000000000000000]]"])


def test_a_file_of_unknown_names_is_not_compared_with_every_known_name(tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr("neox_config.read.load.closest", lambda name, *_: compared.append(name) or None)
    (tmp_path / "other.yml").write_text("".join(f"name_{number}: 1\n" for number in range(1000)))
    with pytest.raises(ConfigError) as refusal:
        load_config([tmp_path / "other.yml"])
    assert sum(problem.what == "is not a parameter" for problem in refusal.value.problems) == 1000
    assert all(problem.remedy for problem in refusal.value.problems)
    assert len(compared) == 100


@pytest.mark.parametrize(
    "text",
    [
        "n_layer: 2, n_embd: 64, n_head: 4, n_positions: 64, max_steps: 9, max_lr: 1, global_batch_size: 8",
        "num-layer: 2, hidden-sise: 64, num-attention-head: 4, max-position-embedding: 64, train-itters: 9, "
        "optimiser: {params: {lr: 1}}, train-micro-batch-size-per-gpus: 1",
        "n_layer: 2, n_embd: 64, n_head: 4, n_positions: 64, num_train_epochs: 2, lr: 1, batch-sise: 4",
    ],
)
def test_a_parameter_that_an_unknown_name_stands_for_is_not_called_missing(tmp_path, text):
    (tmp_path / "a.yml").write_text(f"{{{text}}}")
    with pytest.raises(ConfigError) as refusal:
        load_config([tmp_path / "a.yml"])
    assert {problem.what for problem in refusal.value.problems} == {"is not a parameter"}


def test_an_unknown_name_beside_the_parameter_that_it_stands_for_hides_no_rule(load):
    with pytest.raises(ConfigError) as refusal:
        load("n_head: 3", "num-attention-heads=5")
    assert [problem.name for problem in refusal.value.problems] == ["n_head", "num_attention_heads"]


@pytest.mark.parametrize("name", ["num_train_epochs", "run_name", "gradient_checkpointing"])
def test_the_advice_on_a_foreign_name_has_the_first_sentence_of_the_documentation(load, name):
    with pytest.raises(ConfigError) as found:
        load(f"{name}: 1")
    (problem,) = (each for each in found.value.problems if each.name == name)
    assert ". " not in problem.remedy.replace("...", "")
    assert problem.remedy.startswith("use ")
    assert len(problem.remedy) < 250


def test_two_lengths_of_a_training_name_both_places(load):
    # The file of the fixture has train-iters.
    with pytest.raises(ConfigError) as found:
        load("", "train-epochs=1")
    (problem,) = found.value.problems
    assert re.search(r"and train-iters cannot both be set \(\S+\.yml line \d+\)$", problem.what)
    assert problem.remedy == "remove one of them, or set it to null"


@pytest.mark.parametrize("name", ["launcher", "precision", "pos-emb"])
def test_a_wrong_auto_is_answered_with_the_choices_of_a_parameter(load, name):
    with pytest.raises(ConfigError) as found:
        load(f"{name}: auto")
    assert found.value.problems[0].remedy.startswith("use ")


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("num_heads=4", "use num-attention-heads: ... ("),
        ("heads=4", "use num-attention-heads: ... ("),
        ("num-iters=4", "use train-iters: ... ("),
        ("dropout=0.1", "use hidden-dropout: ... ("),
        ("resume_from_checkpoint=run/checkpoints", "use load: FOLDER and finetune: false; "),
        ("tp=2", "use model-parallel-size: ... ("),
        ("pp=2", "use pipe-parallel-size: ... ("),
        ("block_size=64", "use seq-length: ... ("),
        ("learning_rate=0.1", "use optimizer: {params: {lr: ...}} ("),
        ("ep=2", "use expert-parallel-size: ... ("),
        ("cp=2", "remove it: context parallelism is not supported"),
        ("dp=2", "remove it: the data-parallel size is the number of devices divided by"),
        ("depth_model_parallel_size=2", "remove it: AxoNN is not supported"),
        ("use_axonn_model_parallelism=true", "remove it: AxoNN is not supported"),
        ("num_experts=8", "use moe-num-experts: ... ("),
        ("moe_expert_parallel_size=2", "use expert-parallel-size: ... ("),
        ("use_cpu=true", "remove it: the CPU is used where no GPU is visible"),
        ("use_cache=true", "remove it: generation caches keys and values"),
        ("eos_token=x", "remove it: the tokenizer's files define the special tokens; stop-tokens: [ID"),
        ("min_p=0.1", "remove it: it is not supported; top-p and top-k"),
        ("tf32=true", "remove it: float32 matrices are multiplied without TF32"),
        ("neftune=5", "remove it: noise on embeddings (NEFTune)"),
        ("beta=0.1", "use optimizer: {params: {betas: ...}} ("),
        ("deepspeed_config.zero_stage=2", "remove it: the settings of DeepSpeed are parameters here"),
        ("r=8", "use lora-rank: ... ("),
        ("task_type=CAUSAL_LM", "remove it: adapters are set by lora-rank"),
        ("peft_config.r=8", "use lora-rank: ... ("),
        ("zzzz=1", "search for one: neox-config explain WORD"),
        ("zz;zz=1", "search for one: neox-config explain WORD"),
    ],
)
def test_a_name_of_another_program_has_the_remedy_that_is_meant(load, setting, remedy):
    with pytest.raises(ConfigError) as refusal:
        load("", setting)
    (problem,) = refusal.value.problems
    assert problem.remedy.startswith(remedy)


def test_the_settings_of_deepspeed_in_a_file_of_json_are_parameters(minimal, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    config = load_config([minimal, tmp_path / "ds.json"])
    assert config.value_of("zero_optimization.stage") == 2


def test_a_start_of_the_scheduler_is_read_from_the_checkpoint(load):
    config = load("scheduler: {type: WarmupLR, params: {last_batch_iteration: -1}}")
    assert [notice.name for notice in config.notices] == ["scheduler.params.last_batch_iteration"]


@pytest.mark.parametrize("name", ["keep_batchnorm_fp32", "master_weights", "cast_model_type"])
def test_arguments_of_apex_that_cast_weights_are_refused(load, name):
    with refused(ConfigError, "O2", "O3"):
        load(f"amp: {{enabled: true, {name}: true}}")


def test_precision_and_amp_contradict_each_other(load):
    with refused(ConfigError, "precision: bfloat16"):
        load("amp: {enabled: true}\nprecision: bfloat16")


@pytest.mark.parametrize(
    ("text", "has_note"),
    [
        ("zero_optimization: {stage: 3, reduce_scatter: false}", True),
        ("zero_optimization: {stage: 1}", True),
        ("zero_optimization: {stage: 1}\nprecision: bfloat16", True),
        ("zero_optimization: {stage: 1}\nprecision: bfloat16\nengine: deepspeed", False),
        ("zero_optimization: {stage: 0}", False),
    ],
)
def test_gradients_that_are_divided_first_anyway_are_noted(load, text, has_note):
    config = load(f"{text}\nprescale_gradients: true")
    assert ("prescale_gradients" in [notice.name for notice in config.notices]) is has_note


@pytest.mark.parametrize(
    ("freeze_step", "noted"),
    [
        (9, ["prescale_gradients", "communication_data_type"]),
        (10, ["optimizer.params.freeze_step"]),
        (None, ["optimizer.params.freeze_step"]),
    ],
)
def test_a_freeze_that_never_comes_and_keys_without_effect_after_it_are_noted(load, freeze_step, noted):
    overrides = ["optimizer.type=OneBitAdam"]
    if freeze_step is not None:
        overrides.append(f"optimizer.params.freeze_step={freeze_step}")
    # The run has 10 iterations.
    config = load("prescale_gradients: true\ncommunication_data_type: fp32", *overrides)
    names = {"optimizer.params.freeze_step", "prescale_gradients", "communication_data_type"}
    assert [notice.name for notice in config.notices if notice.name in names] == noted


def test_errors_and_notes_do_not_show_secrets(tmp_path):
    paths = [tmp_path / name for name in ("a.yml", "b.yml")]
    for path, key in zip(paths, ("first-key", "other-key"), strict=True):
        path.write_text(f"comet: {{api_key: {key}}}\n")
    with pytest.raises(ConfigError) as refusal:
        load_config(paths)
    assert shows(str(refusal.value), "different value in")
    assert "as comet.api_key: (hidden)" in str(refusal.value)
    assert "-key" not in str(refusal.value)
    with pytest.raises(ConfigError) as refusal:
        load_config(paths[:1], overrides=["comet.api_key=[third-key]"])
    assert "comet.api_key: (hidden)" in str(refusal.value)
    assert "-key" not in str(refusal.value)
