"""The configuration file of a run that `neox-launch init` has chosen."""

import json
import math
import shlex
from pathlib import Path

from neox_config.describe.estimate_tables import recomputation_settings
from neox_config.pluralize import pluralize
from neox_config.schema.paths import written_paths
from neox_launcher.init.texts import Prepared
from neox_launcher.init.training import Devices, Training

__all__ = ["configuration_text"]

# Folder of the checkpoints, in that of the configuration.
_CHECKPOINTS = "checkpoints"

_NUM_CHECKPOINTS = 10
_HIGHEST_RATE, _RATE_TIMES_WIDTH = 0.002, 0.5

_TEXT = """\
# Written by neox-launch init. Train, or resume from the latest checkpoint, with the first command:
#
#   neox-launch --config {path}
#   neox-launch generate --config {path} --prompt TEXT
#   neox-report {folder}
#
# {tokens:,} tokens for training; {parameters:,} parameters.
# An iteration is {samples} of {seq_length:,} tokens.
# neox-config explain NAME describes a parameter, and neox-config estimate{of_cpu} FILE memory and operations.

# --- Data: written by neox-data prepare
data-path: {data_path}
split: "{split}"                      # documents for training, validation and test
tokenizer-type: {tokenizer_type}
vocab-file: {vocab_file}

# --- Model: {name}
{architecture}
seq-length: {seq_length}                       # tokens per sample

# --- Training: {passes:.2f} passes over the texts (limit: {limit})
train-iters: {iterations}
{planned}train-micro-batch-size-per-gpu: {micro}     # samples per device and forward pass
gradient-accumulation-steps: {accumulation}        # micro-batches per update
hidden-dropout: 0.0
attention-dropout: 0.0

# --- Optimizer
optimizer:
  type: Adam
  params:
    lr: {rate}                        # the smaller of {highest_rate} and {rate_times_width} / hidden-size
    betas: [0.9, 0.95]
    eps: 1.0e-8
weight-decay: 0.1
gradient-clipping: 1.0
lr-decay-style: cosine
min-lr: {least_rate}                  # a tenth of the peak
warmup: 0.05                          # fraction of the iterations

# --- Devices
num-gpus: {devices}                   # {kind}
precision: {precision}
zero-optimization:
  stage: {zero}
pipe-parallel-size: {stages}
model-parallel-size: {model_parallel}
{recomputation}
# --- Checkpoints, evaluation, logs
save: {save}
load: {save}                          # if empty, training starts from new weights
save-interval: {save_interval}
keep-last-n-checkpoints: 2
eval-interval: {eval_interval}
eval-iters: {evaluated}               # batches per evaluation, each as large as one of training
log-interval: {log_interval}
log-dir: {log_dir}                    # metrics.jsonl, for neox-report

# --- Texts that the model writes
temperature: 0.8                      # 0: always the most probable token, which small models repeat
"""


def configuration_text(path: Path, training: Training, prepared: Prepared, devices: Devices) -> str:
    """Return the text of the configuration.

    Args:
        path: where it will be; checkpoints and logs are written to the folder of it.
        training: what was chosen.
        prepared: the texts.
        devices: the devices.
    """
    setup, folder = training.setup, path.parent
    layout, batch = setup.run.layout, setup.run.batch
    rate = _rounded(min(_HIGHEST_RATE, _RATE_TIMES_WIDTH / training.candidate.width))
    planned = "" if training.planned_seconds is None else f"planned-seconds: {training.planned_seconds:g}\n"
    lines_of_recomputation = recomputation_settings(setup) if setup.recomputes else ()
    text = _TEXT.format(
        path=shlex.quote(str(path)),
        folder=shlex.quote(str(folder)),
        tokens=prepared.training_tokens,
        parameters=training.parameters,
        samples=pluralize(setup.samples, "sample"),
        seq_length=training.seq_length,
        data_path=_quoted(written_paths(prepared.data_path)),
        split=prepared.split,
        tokenizer_type=prepared.tokenizer_type,
        vocab_file=_quoted(written_paths(prepared.vocab_file)),
        name=training.candidate.name,
        architecture=training.candidate.text(training.seq_length),
        passes=training.tokens / prepared.training_tokens,
        limit=training.limit,
        iterations=training.iterations,
        planned=planned,
        micro=batch.micro,
        accumulation=batch.accumulation,
        rate=rate,
        least_rate=_rounded(rate / 10),
        highest_rate=_HIGHEST_RATE,
        rate_times_width=_RATE_TIMES_WIDTH,
        devices=devices.count,
        kind=devices.kind,
        of_cpu="" if devices.are_gpus else " --cpu",
        precision=devices.precision,
        zero=layout.zero,
        stages=layout.stages if layout.stages > 1 else 0,
        model_parallel=layout.tensor,
        recomputation="".join(f"{line}\n" for line in lines_of_recomputation),
        save=_quoted(written_paths(str(folder / _CHECKPOINTS))),
        save_interval=max(1, training.iterations // _NUM_CHECKPOINTS),
        eval_interval=training.evaluation_interval,
        evaluated=training.evaluation_batches,
        log_interval=max(1, min(10, training.iterations // 20)),
        log_dir=_quoted(written_paths(str(folder))),
    )
    return "\n".join(_aligned(line) for line in text.splitlines()) + "\n"


def _aligned(line: str) -> str:
    """Return a line with its comment in the column of the others."""
    setting, mark, comment = line.partition("  # ")
    return f"{setting.rstrip():<37} # {comment}" if mark and setting.strip() else line


def _rounded(number: float) -> float:
    """Return a number with two significant digits."""
    return round(number, 1 - math.floor(math.log10(number)))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False, allow_nan=False)
