"""Common mistakes in configuration files, and the complete error message for each.

Each message must be enough to fix the mistake. Review these messages whenever you change one.
"""

import pytest
from click.testing import CliRunner

from neox_launcher.cli.config import main

MODEL = """\
num-layers: 12
hidden-size: 768
num-attention-heads: 12
max-position-embeddings: 2048
train-iters: 1000
"""
START = (
    MODEL
    + """\
optimizer: {type: Adam, params: {lr: 0.0006}}
train-micro-batch-size-per-gpu: 4
"""
)

# mistake -> (content of run.yml, output of `neox-config check run.yml --devices 8`)
MISTAKES = {
    "a_block_indented_with_tabs": (
        MODEL
        + """\
optimizer:
\ttype: Adam
\tparams: {lr: 0.0006}
""",
        """\
run.yml: 1 problem

  line 7  type: Adam
          is not valid YAML: a tab is used for indentation
          replace the tab with spaces
""",
    ),
    "commas_left_from_json": (
        START
        + """\
warmup: 0.01,
seed: 1,
""",
        """\
run.yml: 2 problems

  line 8  warmup: 0.01,
          must be a number
  line 9  seed: 1,
          must be a whole number
""",
    ),
    "a_windows_path_whose_backslashes_are_escapes": (
        START
        + """\
vocab-file: "C:\\neox\\tokens.json"
""",
        """\
run.yml: 1 problem

  line 8  vocab-file: "C:\\neox\\tokens.json"
          contains a line break or a tab, written as a backslash escape in double quotes
          use single quotes, or / instead of \\
""",
    ),
    "half_of_a_character_in_a_path": (
        START
        + """\
save: "runs\\ud83d/one"
save-interval: 5
""",
        """\
run.yml: 1 problem

  line 8  save: "runs\\ud83d/one"
          contains '\\ud83d', half of a character
          write the whole character
""",
    ),
    "a_misspelt_name": (
        MODEL
        + """\
train-micro-batch-size-per-gpu: 4
optimizer: {type: Adam, params: {lr: 0.0006}}
num-attn-heads: 12
""",
        """\
run.yml: 1 problem

  line 8  num-attn-heads: 12
          is not a parameter
          did you mean num-attention-heads?
""",
    ),
    "a_misspelt_name_in_a_block": (
        START
        + """\
zero_optimization: {stage: 1, overlap_com: true}
""",
        """\
run.yml: 1 problem

  line 8  zero_optimization.overlap_com: true
          is not a parameter
          did you mean overlap_comm?
""",
    ),
    "names_of_other_programs": (
        START
        + """\
learning_rate: 0.001
global_batch_size: 32
""",
        """\
run.yml: 2 problems

  line 8  learning_rate: 0.001
          is not a parameter
          use optimizer: {params: {lr: ...}} (learning rate after warmup)
  line 9  global_batch_size: 32
          is not a parameter
          use train-batch-size: ... (global batch size, in samples per update over all devices)
""",
    ),
    "a_parameter_outside_its_block": (
        START
        + """\
stage: 1
""",
        """\
run.yml: 1 problem

  line 8  stage: 1
          is not a parameter
          move it into its block: zero_optimization.stage
""",
    ),
    "a_parameter_in_the_wrong_block": (
        MODEL
        + """\
train-micro-batch-size-per-gpu: 4
optimizer: {type: Adam, lr: 0.0006}
""",
        """\
run.yml: 1 problem

  line 7  optimizer.lr: 0.0006
          is not a parameter
          move it into its block: optimizer.params.lr
""",
    ),
    "a_dotted_name_in_a_file": (
        MODEL
        + """\
train-micro-batch-size-per-gpu: 4
optimizer.params.lr: 0.0006
""",
        """\
run.yml: 1 problem

  line 7  optimizer.params.lr: 0.0006
          is not a parameter
          write it as a block: optimizer: {params: {lr: ...}}
""",
    ),
    "a_switch_for_a_block": (
        START
        + """\
fp16: true
""",
        """\
run.yml: 1 problem

  line 8  fp16: true
          must be a block of parameters
          write fp16: {enabled: ...}
""",
    ),
    "a_list_for_a_block": (
        START
        + """\
zero_optimization:
  - stage: 1
""",
        """\
run.yml: 1 problem

  line 8  zero_optimization: [{"stage": 1}]
          must be true or false
          write zero_optimization: {stage: ...} instead
""",
    ),
    "something_required_is_missing": (
        """\
num-layers: 12
num-attention-heads: 12
max-position-embeddings: 2048
train-iters: 1000
optimizer: {type: Adam, params: {lr: 0.0006}}
train-micro-batch-size-per-gpu: 4
seq-length: 2048
""",
        """\
run.yml: 1 problem

  hidden_size
    is missing: hidden size, the width of the activations between layers.
    add hidden-size: ...
""",
    ),
    "no_batch_size": (
        MODEL
        + """\
optimizer: {type: Adam, params: {lr: 0.0006}}
""",
        """\
run.yml: 1 problem

  train_micro_batch_size_per_gpu
    is missing, and so is train_batch_size
    add train_micro_batch_size_per_gpu: 4 (samples per device and forward pass)
""",
    ),
    "a_number_with_thousands_commas": (
        START
        + """\
save-interval: 10,000
""",
        """\
run.yml: 1 problem

  line 8  save-interval: 10,000
          must be a whole number
""",
    ),
    "a_number_with_a_unit": (
        START
        + """\
log-interval: 10 steps
""",
        """\
run.yml: 1 problem

  line 8  log-interval: 10 steps
          must be a whole number
""",
    ),
    "a_number_in_words": (
        MODEL
        + """\
train-micro-batch-size-per-gpu: 4
optimizer: {type: Adam, params: {lr: 6e-4, eps: 1e-8f}}
""",
        """\
run.yml: 1 problem

  line 7  optimizer.params.eps: 1e-8f
          must be a number
""",
    ),
    "yes_in_quotes": (
        START
        + """\
checkpoint-activations: "yes"
""",
        """\
run.yml: 1 problem

  line 8  checkpoint-activations: yes
          must be true or false
""",
    ),
    "none_of_python": (
        START
        + """\
load: None
""",
        """\
run.yml: 1 problem

  line 8  load: None
          must not be None, which is Python's null
          write null, or remove it
""",
    ),
    "several_datasets_in_data_path": (
        START
        + """\
data-path: [data/a, data/b]
""",
        """\
run.yml: 1 problem

  line 8  data-path: ["data/a", "data/b"]
          must be text
          write a single value, without brackets
""",
    ),
    "a_split_as_a_list": (
        START
        + """\
split: [969, 30, 1]
""",
        """\
run.yml: 1 problem

  line 8  split: [969, 30, 1]
          must be text
          write up to three numbers, as in 969,30,1
""",
    ),
    "one_beta": (
        MODEL
        + """\
train-micro-batch-size-per-gpu: 4
optimizer: {type: Adam, params: {lr: 0.0006, betas: 0.9}}
""",
        """\
run.yml: 1 problem

  line 7  optimizer.params.betas: 0.9
          must be a list
          write it like [0.9, 0.999]
""",
    ),
    "twice_the_same_name": (
        START
        + """\
train_iters: 2000
""",
        """\
run.yml: 1 problem

  line 8  train_iters
          is given twice in this file, in lines 5 and 8
          keep one of them
""",
    ),
    "two_learning_rates": (
        START
        + """\
lr: 0.001
""",
        """\
run.yml: 1 problem

  line 8  lr: 0.001
          has a different value in run.yml line 6, as optimizer.params.lr: 0.0006
          keep only one of them, or replace both with --set
""",
    ),
    "a_negative_dropout": (
        START
        + """\
hidden-dropout: -0.1
""",
        """\
run.yml: 1 problem

  line 8  hidden-dropout: -0.1
          must be at least 0
""",
    ),
    "a_dropout_in_per_cent": (
        START
        + """\
attention-dropout: 10
""",
        """\
run.yml: 1 problem

  line 8  attention-dropout: 10
          must be less than 1
          Dropout probability on attention probabilities.
""",
    ),
    "a_warmup_in_iterations": (
        START
        + """\
warmup: 2000
""",
        """\
run.yml: 1 problem

  line 8  warmup: 2000
          must be at most 1
          Fraction of lr-decay-iters for linear warmup; 0.01 is 1%.
""",
    ),
    "a_floor_above_the_peak": (
        START
        + """\
min-lr: 0.006
""",
        """\
run.yml: 1 problem

  line 8  min-lr: 0.006
          is more than optimizer.params.lr: 0.0006
          set a smaller min-lr
""",
    ),
    "a_misspelt_optimizer": (
        MODEL
        + """\
train-micro-batch-size-per-gpu: 4
optimizer: {type: AdmaW, params: {lr: 0.0006}}
""",
        """\
run.yml: 1 problem

  line 7  optimizer.type: AdmaW
          is not a known optimizer
          did you mean AdamW?
""",
    ),
    "an_unknown_activation": (
        START
        + """\
activation: gelu_new
""",
        """\
run.yml: 1 problem

  line 8  activation: gelu_new
          is not one of the choices
          use gelu, geglu, geglu_tanh, relu, squared_relu, softsign, swish, mish, silu, swiglu, \
reglu, glu, bilinear
""",
    ),
    "a_stage_that_does_not_exist": (
        START
        + """\
zero_optimization: {stage: 4}
""",
        """\
run.yml: 1 problem

  line 8  zero_optimization.stage: 4
          is not one of the choices
          use 0, 1, 2, 3
""",
    ),
    "heads_that_do_not_divide_the_width": (
        """\
num-layers: 12
hidden-size: 768
num-attention-heads: 10
max-position-embeddings: 2048
train-iters: 1000
optimizer: {type: Adam, params: {lr: 0.0006}}
train-micro-batch-size-per-gpu: 4
""",
        """\
run.yml: 1 problem

  line 3  num-attention-heads: 10
          does not divide hidden-size: 768
          use 4, 6, 8, 12
""",
    ),
    "a_sequence_longer_than_the_positions": (
        START
        + """\
seq-length: 4096
""",
        """\
run.yml: 1 problem

  line 8  seq-length: 4096
          is more than max-position-embeddings: 2048
          set max-position-embeddings: 4096, or reduce seq-length
""",
    ),
    "rotary_positions_in_per_cent": (
        START
        + """\
pos-emb: rotary
rotary-pct: 25
""",
        """\
run.yml: 1 problem

  line 9  rotary-pct: 25
          must be at most 1
          Fraction of each head's dimensions that is rotated; the rest is unchanged.
""",
    ),
    "an_attention_config_for_twice_the_layers": (
        START
        + """\
attention-config: [[["local", "global"], 12]]
""",
        """\
run.yml: 1 problem

  line 8  attention-config: [[["local", "global"], 12]]
          describes 24 layers, but num-layers is 12
          change the counts, or write "all" as the count to repeat the types up to the last layer
""",
    ),
    "fewer_weights_than_datasets": (
        START
        + """\
train-data-paths: [data/a, data/b]
train-data-weights: [1]
valid-data-paths: [data/v]
test-data-paths: [data/t]
""",
        """\
run.yml: 1 problem

  line 9  train-data-weights: [1.0]
          has 1 weight for 2 datasets
          give one entry per dataset, in the same order
""",
    ),
    "fp16_and_bf16": (
        START
        + """\
fp16: {enabled: true}
bf16: {enabled: true}
""",
        """\
run.yml: 1 problem

  line 9  bf16.enabled: true
          cannot be combined with fp16.enabled: true
          keep one of the two
""",
    ),
    "zero_2_with_a_pipeline": (
        START
        + """\
pipe-parallel-size: 2
zero_optimization: {stage: 2}
engine: deepspeed
""",
        """\
run.yml: 1 problem

  line 9  zero_optimization.stage: 2
          must be at most 1 with a pipeline on the deepspeed engine
          set stage: 1, engine: torch, or pipe-parallel-size: 0
""",
    ),
    "parameters_offloaded_in_stage_1": (
        START
        + """\
zero_optimization: {stage: 1, offload_param: {device: cpu}}
""",
        """\
run.yml: 1 problem

  line 8  zero_optimization.offload_param.device: cpu
          requires stage 3, not 1
          set stage: 3
""",
    ),
    "a_batch_that_is_not_the_product": (
        START
        + """\
gradient_accumulation_steps: 2
train_batch_size: 30
""",
        """\
run.yml: 1 problem

  line 9  train_batch_size: 30
          must equal micro-batch x accumulation x data-parallel size: 4 x 2 x 8 = 64
          set train-batch-size: 64
""",
    ),
    "a_batch_that_does_not_divide": (
        START
        + """\
train_batch_size: 100
""",
        """\
run.yml: 1 problem

  line 8  train_batch_size: 100
          is not divisible by micro-batch 4 x data-parallel size 8
          use 96 or 128
""",
    ),
    "more_model_parallelism_than_divides_the_devices": (
        START
        + """\
model-parallel-size: 3
""",
        """\
run.yml: 1 problem

  line 8  model-parallel-size: 3
          does not divide the 8 devices of this job
          use 1, 2, 4, 8
""",
    ),
    "a_folder_for_checkpoints_without_an_interval": (
        START
        + """\
save: checkpoints
""",
        """\
run.yml: 1 problem

  line 8  save: checkpoints
          requires save-interval
          add save-interval: 1000 (iterations between checkpoints)
""",
    ),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_common_mistake_is_reported_with_place_reason_and_remedy(tmp_path, monkeypatch, text, message):
    (tmp_path / "run.yml").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["check", "run.yml", "--devices", "8"])
    assert done.exit_code == 2
    assert done.stderr == message
    assert done.stdout == ""


def test_the_files_are_right_without_their_mistakes(tmp_path, monkeypatch):
    (tmp_path / "run.yml").write_text(START)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["check", "run.yml", "--devices", "8"])
    assert (done.exit_code, done.stderr) == (0, "")
