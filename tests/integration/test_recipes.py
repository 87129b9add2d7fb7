"""Every recipe of CONTRIBUTING.md is complete: with its edits alone, the new choice trains.

A test copies the sources, makes the edits, which may be only in files that the recipe names, and runs the
commands with the copy. `make test-recipes` runs these tests.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.corpus import write_corpus
from support.launches import ENVIRONMENT
from support.settings import SMALL_TRAINING
from support.sources import DISTRIBUTIONS, ROOT

SECONDS = 600.0


@dataclass(frozen=True)
class Edit:
    """One change of a source file: `text` is inserted after the line `after`, or is a new file.

    Args:
        path: file below a `src` folder.
        text: what is inserted, or the content of the new file.
        after: whole text before the place of insertion, which occurs once; None for a new file.
    """

    path: str
    text: str
    after: str | None = None


@dataclass(frozen=True)
class Recipe:
    """The edits of one recipe, and a run that uses the result.

    Args:
        row: first cell of the recipe in CONTRIBUTING.md.
        most_files: source files that the recipe may need.
        edits: the changes.
        settings: settings of the run that uses the new choice.
        explained: parameter that `neox-config explain` must describe.
        words: what its description must contain.
        in_effect: a check of the run's folder, given the losses before the edits; by default, that the
            losses differ.
    """

    row: str
    most_files: int
    edits: tuple[Edit, ...]
    settings: Mapping[str, Any]
    explained: str
    words: str
    in_effect: Callable[[Path, list[float]], None] = lambda folder, before: losses_differ(folder, before)


NORM = '''def _half_norm(inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = inputs.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon) / 2
    return (wide * scale * weight).to(inputs.dtype)


class HalfNorm(Norm):
    """Divides by twice the root mean square."""

    plain = staticmethod(_half_norm)

    def __init__(
        self,
        width: int,
        epsilon: float = 1e-8,
        operator: Callable[..., Tensor] | None = None,
        group: Group = SINGLE_RANK,
        **options: Any,
    ) -> None:
        super().__init__(operator, **options)
        self.epsilon = epsilon
        self.weight = self._new_weight(width, group)

    def _arguments(self) -> tuple[Tensor, float]:
        return self._factor(), self.epsilon


'''

OPTIMIZER = '''"""The sign of the gradient as update."""

import torch
from torch.optim import Optimizer

__all__ = ["SignSGD"]


class SignSGD(Optimizer):
    """Moves every weight by the learning rate against the sign of its averaged gradient."""

    def __init__(self, parameters, *, lr: float, momentum: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                state["average"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.sub_(group["lr"] * state["average"].sign())
'''

PATTERN = '''class EvenPattern(Pattern):
    """A pattern in which a token sees the tokens at even distances."""

    def forward(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key) % 2 == 0


'''

TOKENIZER = '''"""Two ids per byte value."""

from neox_data.tokenizers.char_level import CharLevelTokenizer

__all__ = ["WideTokenizer"]


class WideTokenizer(CharLevelTokenizer):
    """Bytes, in a vocabulary of 700 ids."""

    @property
    def vocab_size(self) -> int:
        return 700
'''

POSITION = '''"""Positions as one ramp over all channels."""

import torch
from torch import Tensor, nn

__all__ = ["RampPosition"]


class RampPosition(nn.Module):
    """Adds position / 100 to every channel."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, positions_SB: Tensor) -> Tensor:
        return (positions_SB.unsqueeze(-1).float() / 100).expand(*positions_SB.shape, self.hidden_size)
'''

MIXER = '''"""A mixer: averages of earlier tokens, in which a token's weight falls with its distance."""

import torch
from torch import Tensor

from neox_model.layers.cache import Cached, Chunk
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["DecayMixer"]


class DecayMixer(Cached):
    """Computes out(sum over s of decay ** (t - s) * value(s)), without tokens of other documents."""

    def __init__(self, width, *, decay, init, output_init, group, skip_bias) -> None:
        super().__init__()
        self.decay = decay
        self.value = ColumnParallelLinear(width, width, init=init, group=group)
        self.out = RowParallelLinear(width, width, init=output_init, group=group, skip_bias=skip_bias)

    def forward(self, hidden_SBD, document_ids_BS=None, position_ids_SB=None, entry=None):
        value_SB1F = self.value(hidden_SBD, entry)[0].unsqueeze(2)
        cache, length = self.cache, len(value_SB1F)
        if cache is not None and not isinstance(cache.window, Chunk):
            mixed_SBF = cache.of_next_tokens(value_SB1F, (value_SB1F,), self._next)
        else:
            rows = value_SB1F if cache is None else cache.rows_of_chunk(value_SB1F)[0]
            keys = torch.arange(len(rows), device=rows.device)
            weight = self._weights(keys[-length:].unsqueeze(1) - keys)
            if document_ids_BS is not None:
                same = document_ids_BS[:, -length:].unsqueeze(2) == document_ids_BS.unsqueeze(1)
                weight = weight * same
            mixed_SBF = (weight.to(rows.dtype) @ rows.squeeze(2).transpose(0, 1)).transpose(0, 1)
        return self.out(mixed_SBF, reduces=entry is None or entry.reduces)

    def _next(self, value_B1F, rows_B1TF, span):
        distance_BT = span.positions.unsqueeze(1) - torch.arange(span.num_keys, device=rows_B1TF.device)
        weight_B1T = self._weights(distance_BT).to(rows_B1TF.dtype).unsqueeze(1)
        return (weight_B1T @ rows_B1TF.squeeze(1)).squeeze(1)

    def _weights(self, distance: Tensor) -> Tensor:
        return torch.where(distance < 0, 0.0, self.decay ** distance.clamp(min=0).float())
'''

DECAY = """

@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    kind: str = of("attention_config", compare=False)
    decay: float = of("mixer_decay")
    both_ways: bool = of("objective", default=False)

    @classmethod
    def read(cls, config: NeoXConfig, kind: str, layer_index: int) -> Self:
        return cls(kind=kind, decay=config.attention.mixer_decay)

    def settings(self) -> Settings:
        return {"mixer-decay": self.decay}
"""

COST = """    Decay: Cost(
        tensors=lambda mixer, layer, model: (
            each
            for is_column in (True, False)
            for each in _linear("attention", model.width, model.width, is_column=is_column, bias=True)
        ),
        kept=lambda mixer, layer, setup, is_compiled, device: 2 * setup.element_bytes * setup.model.width,
        bias=lambda mixer: True,
        operations=lambda mixer, model, length, convention: round(
            2 * _counted(model, length, length, convention) * model.width
        ),
    ),
"""

BUILT = """    Decay: lambda mixer, index, run, *, width, init, output_init, group, operators, **_: partial(
        DecayMixer,
        width,
        decay=mixer.decay,
        init=init,
        output_init=output_init,
        group=group,
        skip_bias=operators.bias_dropout_add is not None and operators.norm_of_sum is None,
    ),
"""

RAMP = """

@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    @classmethod
    def read(cls, config: NeoXConfig, layer_index: int) -> Self:
        return cls()

    def settings(self) -> Settings:
        return {}
"""

PENALTY = """    def _penalty(self, hidden_SBD: Tensor, weights_SB: Tensor) -> Tensor:
        term = self.penalty * (hidden_SBD.float().square().mean(dim=-1) * weights_SB).sum()
        # Every rank has these hidden states and this term; the gradients of ranks are summed.
        return term.detach() + (term - term.detach()) / self.group.size

"""

WRITER = '''"""Write metrics as plain lines."""

__all__ = ["LinesWriter"]


class LinesWriter:
    """Appends `iteration name value` lines to a file."""

    def __init__(self, path) -> None:
        self._file = open(path, "a", encoding="utf-8")

    def write(self, metrics, iteration) -> None:
        for name, value in metrics.items():
            self._file.write(f"{iteration} {name} {value}\\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
'''


def losses_differ(folder: Path, before: list[float]) -> None:
    assert losses(folder) != before


def writer_wrote(folder: Path, before: list[float]) -> None:
    lines = (folder / "lines.txt").read_text().splitlines()
    assert [float(line.split()[2]) for line in lines if " loss/train " in line] == losses(folder)


def vocabulary_is_larger(folder: Path, before: list[float]) -> None:
    manifest = json.loads((folder / "saved" / "global_step3" / "manifest.json").read_text())
    assert manifest["contents"]["tensors"]["embedding.word_embeddings.weight"]["shape"] == [768, 16]


RECIPES = {
    "norm": Recipe(
        row="a norm",
        most_files=2,
        edits=(
            Edit(
                "neox_model/layers/norms.py",
                NORM,
                after="        self.weight = self._new_weight(1, group)\n\n"
                "    def _arguments(self) -> tuple[Tensor, float]:\n"
                "        return self._factor(), self.epsilon\n\n\n",
            ),
            Edit(
                "neox_model/layers/norms.py",
                '    "halfnorm": HalfNorm,\n',
                after='    "scalenorm": ScaleNorm,\n',
            ),
            Edit("neox_config/facts/norms.py", '"halfnorm", ', after="NormName = Literal["),
            Edit(
                "neox_config/facts/norms.py",
                '    "halfnorm": NormFacts(epsilon="rms_norm_epsilon", vectors=1),\n',
                after="NORM_FACTS: Mapping[str, NormFacts] = {\n",
            ),
        ),
        settings={"norm": "halfnorm", "rms_norm_epsilon": 1e-6},
        explained="norm",
        words="halfnorm",
    ),
    "activation": Recipe(
        row="an activation",
        most_files=2,
        edits=(
            Edit(
                "neox_model/layers/activations.py",
                '    "tanh": torch_tanh,\n',
                after='    "mish": functional.mish,\n',
            ),
            Edit(
                "neox_model/layers/activations.py",
                "from torch import tanh as torch_tanh\n",
                after="from torch import Tensor\n",
            ),
            Edit("neox_config/facts/activations.py", '"tanh", ', after="ActivationName = Literal["),
            Edit(
                "neox_config/facts/activations.py",
                '    "tanh": ActivationFacts(kept_tensors=0),\n',
                after="ACTIVATION_FACTS: Mapping[str, ActivationFacts] = {\n",
            ),
        ),
        settings={"activation": "tanh"},
        explained="activation",
        words="tanh",
    ),
    "decay style": Recipe(
        row="a decay style",
        most_files=1,
        edits=(
            Edit("neox_config/facts/learning_rate.py", '"square", ', after="\nDecayStyle = Literal["),
            Edit(
                "neox_config/facts/learning_rate.py",
                '    "square": Decay(\n'
                '        lambda progress, *, peak, floor: peak * (1 - progress**2), "lr * (1 - (t / T)^2)"\n'
                "    ),\n",
                after="DECAY_STYLES: Mapping[str, Decay] = {\n",
            ),
        ),
        settings={"lr_decay_style": "square", "lr_decay_iters": 5},
        explained="lr-decay-style",
        words=r"square: lr \* \(1 - \(t / T\)\^2\)",
    ),
    "optimizer": Recipe(
        row="an optimizer",
        most_files=3,
        edits=(
            Edit("neox_model/optim/sign_sgd.py", OPTIMIZER),
            Edit(
                "neox_model/optim/__init__.py",
                '    "signsgd": "neox_model.optim.sign_sgd:SignSGD",\n',
                after='    "madgrad_wd": "neox_model.optim.madgrad:MadgradWD",\n',
            ),
            Edit(
                "neox_config/facts/optimizers.py",
                '        OptimizerFacts(name="SignSGD", states=("average",), numbers=(), declared=("lr",),\n'
                '            arguments={"momentum": 0.5}),\n',
                after="    for facts in (\n",
            ),
        ),
        settings={"optimizer": {"type": "SignSGD", "params": {"lr": 0.01, "momentum": 0.8}}},
        explained="optimizer.type",
        words="SignSGD",
    ),
    "attention type": Recipe(
        row="an attention type",
        most_files=3,
        edits=(
            Edit(
                "neox_model/layers/attention/patterns.py",
                PATTERN,
                after=" if self.both_ways else distance) <= self.blocks_before\n\n\n",
            ),
            Edit(
                "neox_model/assembly/patterns.py",
                '    "even": lambda *arguments: EvenPattern,\n',
                after="PATTERNS: dict[str, Callable[[Attention, Blocks, int, int, Group], Factory]] = {\n",
            ),
            Edit(
                "neox_model/assembly/patterns.py",
                "from neox_model.layers.attention.patterns import EvenPattern\n",
                after="from neox_model.layers.attention.block_layouts import Draw\n",
            ),
            Edit(
                "neox_config/facts/attention.py",
                '    "even": AttentionFacts(),\n',
                after="ATTENTION_FACTS: Mapping[str, AttentionFacts] = {\n",
            ),
        ),
        settings={"attention_config": [[["global", "even"], 1]]},
        explained="attention-config",
        words="even",
    ),
    "tokenizer": Recipe(
        row="a tokenizer",
        most_files=3,
        edits=(
            Edit("neox_data/tokenizers/wide.py", TOKENIZER),
            Edit(
                "neox_data/tokenizers/__init__.py",
                '    "WideTokenizer": WideTokenizer,\n',
                after='    "HFTokenizer": HFTokenizer,\n',
            ),
            Edit(
                "neox_data/tokenizers/__init__.py",
                "from neox_data.tokenizers.wide import WideTokenizer\n",
                after=" import SentencePieceTokenizer, TiktokenTokenizer\n",
            ),
            Edit(
                "neox_config/facts/tokenizers.py",
                '    "WideTokenizer",\n',
                after="TokenizerName = Literal[\n",
            ),
            Edit(
                "neox_config/facts/tokenizers.py",
                '    "WideTokenizer": TokenizerFacts(usual_entries=700, doc="no file", is_fixed=True),\n',
                after="TOKENIZER_FACTS: Mapping[str, TokenizerFacts] = {\n",
            ),
        ),
        settings={"tokenizer_type": "WideTokenizer", "save": "saved", "save_interval": 3},
        explained="tokenizer-type",
        words="WideTokenizer: no file",
        in_effect=vocabulary_is_larger,
    ),
    "position embedding": Recipe(
        row="a position embedding",
        most_files=4,
        edits=(
            Edit("neox_model/layers/positions/ramp.py", POSITION),
            Edit("neox_config/spec/positions.py", RAMP, after="\nSettings = dict[str, Any]\n"),
            Edit("neox_config/spec/positions.py", "Ramp | ", after="\nAddedPosition = "),
            Edit(
                "neox_config/spec/positions.py",
                '    "ramp": Ramp,\n',
                after="POSITIONS: Mapping[str, type[AddedPosition | AttentionPosition]] = {\n",
            ),
            Edit(
                "neox_model/assembly/attention.py",
                "    Ramp: lambda position, width, init, group: partial(RampPosition, width),\n",
                after="    # (position, width, initialization, tensor-parallel ranks)\n",
            ),
            Edit(
                "neox_model/assembly/attention.py",
                "from neox_config.spec.positions import Ramp\n"
                "from neox_model.layers.positions.ramp import RampPosition\n",
                after="from neox_model.initialization import INIT_METHODS\n",
            ),
            Edit(
                "neox_config/schema/sections/attention.py",
                '"ramp", ',
                after='    pos_emb: Literal["learned", ',
            ),
        ),
        settings={"pos_emb": "ramp"},
        explained="pos-emb",
        words="ramp",
    ),
    "metric writer": Recipe(
        row="a metric writer",
        # Two, and the file that declares the parameter by which it is opened.
        most_files=3,
        edits=(
            Edit("neox_model/metrics/writers/lines.py", WRITER),
            Edit(
                "neox_model/train/writers.py",
                "    if section.lines_file is not None:\n        yield LinesWriter(section.lines_file)\n",
                after='    """Yield the writers that count iterations."""\n',
            ),
            Edit(
                "neox_model/train/writers.py",
                "from neox_model.metrics.writers.lines import LinesWriter\n",
                after="from neox_model.metrics.writers.jsonl import JsonlWriter\n",
            ),
            Edit(
                "neox_config/schema/sections/logging.py",
                "    lines_file: str | None = param(\n"
                '        None, origin="ours", none_means="no lines", doc="File for lines."\n    )\n',
                after='param(100, origin="Meg", gt=0, doc="Iterations between progress reports.")\n',
            ),
        ),
        settings={"lines_file": "lines.txt"},
        explained="lines-file",
        words="File for lines",
        in_effect=writer_wrote,
    ),
    "mixer": Recipe(
        row="a mixer",
        most_files=6,
        edits=(
            Edit("neox_model/layers/decay_mixer.py", MIXER),
            Edit(
                "neox_model/assembly/transformer.py",
                BUILT,
                after="MIXERS: Mapping[type[Any], Callable[..., Factory]] = {\n",
            ),
            Edit(
                "neox_model/assembly/transformer.py",
                "from neox_config.spec.mixers import Decay\n"
                "from neox_model.layers.decay_mixer import DecayMixer\n",
                after="from neox_model.initialization import build_init_method, multiplied\n",
            ),
            Edit("neox_config/spec/mixers.py", DECAY, after="\nSettings = dict[str, Any]\n"),
            Edit("neox_config/spec/mixers.py", "Decay | ", after="\nMixer = "),
            Edit(
                "neox_config/spec/mixers.py",
                '"decay": Decay, ',
                after="_MIXERS: Mapping[str, type[Mixer]] = {",
            ),
            Edit("neox_config/estimate/mixers.py", COST, after="_COSTS: Mapping[type[Any], Cost] = {\n"),
            Edit(
                "neox_config/estimate/mixers.py",
                "from neox_config.spec.mixers import Decay\n",
                after="from neox_config.facts.norms import NORM_FACTS\n",
            ),
            Edit(
                "neox_config/facts/attention.py",
                '    "decay": AttentionFacts(has_heads=False),\n',
                after="ATTENTION_FACTS: Mapping[str, AttentionFacts] = {\n",
            ),
            Edit(
                "neox_config/schema/sections/attention.py",
                "    mixer_decay: float = param(\n"
                '        0.5, origin="ours", ge=0, le=1, doc="Weight of a token relative to the next one."\n'
                "    )\n",
                after='    """Attention types and position embeddings."""\n\n',
            ),
        ),
        settings={
            "attention_config": [[["global", "decay"], 1]],
            "mixer_decay": 0.8,
        },
        explained="mixer-decay",
        words="relative to the next one",
    ),
    "loss term": Recipe(
        row="a loss term",
        most_files=3,
        edits=(
            Edit(
                "neox_config/schema/sections/objective.py",
                "    hidden_penalty: float = param(\n"
                '        0.0, origin="ours", ge=0, doc="Weight of the mean square of hidden states."\n'
                "    )\n",
                after=' to predict the next token or masked tokens, or to find blocks of text."""\n\n',
            ),
            Edit(
                "neox_model/assembly/model.py",
                "        penalty=run.targets.hidden_penalty,\n",
                after="        keeps_gradients=run.layout.splits_backward,\n",
            ),
            Edit(
                "neox_model/layers/lm_head.py",
                "        penalty: float = 0.0,\n",
                after="        operator: LossOperator | None = None,\n",
            ),
            Edit(
                "neox_model/layers/lm_head.py",
                "        self.penalty = penalty\n",
                after="        self.operator = operator\n",
            ),
            Edit(
                "neox_model/layers/lm_head.py",
                " + self._penalty(hidden_SBD, weights_SB)",
                after="            z_terms=self.z_terms,\n        )",
            ),
            Edit(
                "neox_model/layers/lm_head.py",
                PENALTY,
                after="        return loss + (term - term.detach())\n\n",
            ),
        ),
        settings={"hidden_penalty": 0.5},
        explained="hidden-penalty",
        words="mean square of hidden states",
    ),
    "parameter": Recipe(
        row="a parameter",
        most_files=4,
        edits=(
            Edit(
                "neox_config/schema/sections/attention.py",
                "    query_scale: float = param(\n"
                '        1.0, origin="ours", gt=0, doc="Factor of the queries."\n    )\n',
                after='class AttentionSection(Section, resume="model"):\n'
                '    """Attention types and position embeddings."""\n\n',
            ),
            Edit(
                "neox_config/spec/mixers.py",
                '    query_scale: float = of("query_scale", default=1.0)\n',
                after='    qkv_bias: bool = of("use_bias_in_qkv", "use_bias_in_attn_linear")\n',
            ),
            Edit(
                "neox_config/spec/mixers.py",
                "            query_scale=config.attention.query_scale,\n",
                after="            qkv_bias=has_qkv_bias(config),\n",
            ),
            Edit(
                "neox_config/spec/mixers.py",
                '        settings["query-scale"] = self.query_scale\n',
                after='            settings["num-kv-heads"] = self.kv_heads\n',
            ),
            Edit(
                "neox_model/assembly/attention.py",
                "        query_scale=mixer.query_scale,\n",
                after="        qkv_bias=mixer.qkv_bias,\n",
            ),
            Edit(
                "neox_model/layers/attention/parallel_attention.py",
                "        query_scale: float = 1.0,\n",
                after="        recomputes_core: bool = False,\n",
            ),
            Edit(
                "neox_model/layers/attention/parallel_attention.py",
                "        self.query_scale = query_scale\n",
                after="        self.recomputes_core = recomputes_core\n",
            ),
            Edit(
                "neox_model/layers/attention/parallel_attention.py",
                "        query_SBNK = query_SBNK * self.query_scale\n",
                after="        query_SBNK, key, value = self.heads(projected, position_ids_SB)\n",
            ),
        ),
        settings={"query_scale": 3.0},
        explained="query-scale",
        words="Factor of the queries",
    ),
}


def row_of(recipe: Recipe) -> str:
    """Return the table cell of a recipe that names its files."""
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        cells = line.split(" | ", 1)
        if len(cells) == 2 and recipe.row in [
            name.strip() for name in cells[0].removeprefix("| ").split(",")
        ]:
            return cells[1]
    raise AssertionError(f"CONTRIBUTING.md has no recipe for {recipe.row}")


def is_named(path: str, row: str) -> bool:
    """Return whether the recipe names the file, by its path or its folder."""
    names = re.findall(r"`([\w/]+(?:\.py|/))`", row)
    return any(path.endswith(f"/{name}") or path == name or path.startswith(name) for name in names)


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that copies the sources into a new folder and returns the folder."""

    def copy(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        for package, distribution in DISTRIBUTIONS.items():
            source = ROOT / "packages" / distribution / "src" / package
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / package, ignore=ignored)
        return folder

    return copy


@pytest.fixture(scope="module")
def before(copied, tmp_path_factory) -> list[float]:
    """Return the losses of a run with unchanged sources and settings."""
    folder = tmp_path_factory.mktemp("trained") / "before"
    train(folder, {}, copied("before"))
    return losses(folder)


def apply(edit: Edit, folder: Path) -> None:
    path = folder / edit.path
    if edit.after is None:
        assert not path.exists()
        path.write_text(edit.text)
        return
    content = path.read_text()
    assert content.count(edit.after) == 1, f"{edit.path}: {edit.after!r}"
    path.write_text(content.replace(edit.after, edit.after + edit.text))


def run(command: str, *arguments: str, folder: Path, sources: Path) -> str:
    """Run a command of the copy, and return what it printed."""
    result = subprocess.run(
        [Path(sys.executable).with_name(command), *arguments],
        cwd=folder,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 0, f"{command} {' '.join(arguments)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def train(folder: Path, settings: Mapping[str, Any], sources: Path) -> None:
    """Train three iterations in a folder."""
    folder.mkdir()
    job = {**SMALL_TRAINING, "data_path": write_corpus(folder), "train_iters": 3, "seed": 5}
    job |= {"log_dir": "log", "log_interval": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0, **settings}
    (folder / "job.yml").write_text(json.dumps(job))
    run("neox-launch", "--config", "job.yml", folder=folder, sources=sources)


def losses(folder: Path) -> list[float]:
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()
    return [row["loss/train"] for row in map(json.loads, lines) if "loss/train" in row]


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_names_every_file_and_no_more_are_needed(name):
    recipe = RECIPES[name]
    files = {edit.path for edit in recipe.edits}
    assert [path for path in files if not is_named(path, row_of(recipe))] == []
    assert len(files) <= recipe.most_files


@pytest.mark.parametrize("name", RECIPES)
def test_the_places_of_the_edits_exist(name, copied):
    sources = copied(name)
    for edit in RECIPES[name].edits:
        apply(edit, sources)


@pytest.mark.recipe
@pytest.mark.parametrize("name", RECIPES)
def test_the_edits_of_the_recipe_are_enough(name, copied, before, tmp_path):
    recipe, sources = RECIPES[name], copied(name)
    for edit in recipe.edits:
        apply(edit, sources)
    folder = tmp_path / "after"
    train(folder, recipe.settings, sources)
    assert len(losses(folder)) == 3
    assert all(map(math.isfinite, losses(folder)))
    recipe.in_effect(folder, before)
    for command in ("check", "schedule", "estimate"):
        assert run("neox-config", command, "job.yml", folder=folder, sources=sources)
    explained = run("neox-config", "explain", recipe.explained, folder=folder, sources=sources)
    assert re.search(recipe.words, " ".join(explained.split()))


# Kinds of additions that every layout, a resume and generation must know.
EVERYWHERE = ("mixer", "loss term", "parameter")
LAYOUTS = {"tensor": {"model_parallel_size": 2}, "pipeline": {"pipe_parallel_size": 2}}
GENERATED = {
    "text_gen_type": "unconditional",
    "temperature": 0.0,
    "maximum_tokens": 12,
    "num_samples": 1,
}


@pytest.mark.recipe
@pytest.mark.parametrize("name", EVERYWHERE)
def test_what_the_recipe_adds_works_on_layouts_resumes_and_generates(name, copied, tmp_path):
    recipe, sources = RECIPES[name], copied(name)
    for edit in recipe.edits:
        apply(edit, sources)
    saved = {**recipe.settings, "save": "saved", "save_interval": 2}
    alone = tmp_path / "alone"
    train(alone, saved, sources)
    for layout, sizes in LAYOUTS.items():
        folder = tmp_path / layout
        train(folder, {**recipe.settings, **sizes, "num_gpus": 2}, sources)
        assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)

    resumed = tmp_path / "resumed"
    train(resumed, {**recipe.settings, "load": str(alone / "saved" / "global_step2")}, sources)
    assert losses(resumed) == losses(alone)[2:]

    texts = []
    for recompute in (False, True):
        output = alone / f"texts-{recompute}.jsonl"
        settings = GENERATED | {"recompute": recompute, "sample_output_file": output.name, "load": "saved"}
        sets = [word for pair in settings.items() for word in ("--set", f"{pair[0]}={json.dumps(pair[1])}")]
        run("neox-launch", "generate", "--config", "job.yml", *sets, folder=alone, sources=sources)
        texts.append([json.loads(line)["text"] for line in output.read_text().splitlines()])
    assert texts[0] == texts[1] != []


# Without attention there are notes on widths in 16 bits, and the MLP's operator is chosen.
ALONE = {
    "attention_config": [[["decay"], "all"]],
    "pos_emb": "none",
    "activation": "swiglu",
    "glu_fusion": "auto",
    "precision": "bfloat16",
}


@pytest.mark.recipe
def test_a_mixer_may_be_the_only_one_of_a_model(copied, tmp_path):
    recipe, sources, folder = RECIPES["mixer"], copied("mixer alone"), tmp_path / "alone"
    for edit in recipe.edits:
        apply(edit, sources)
    train(folder, {**recipe.settings, **ALONE}, sources)
    assert len(losses(folder)) == 3
    assert all(map(math.isfinite, losses(folder)))
    log = (folder / "log" / "output" / "rank-00000.log").read_text()
    assert "bias_swiglu: " in log
    for command in ("check", "estimate"):
        assert run("neox-config", command, "job.yml", folder=folder, sources=sources)
