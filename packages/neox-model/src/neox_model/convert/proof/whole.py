"""Compare the logits of whole models, in the ways in which a model is used."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from neox_config.spec.model import ModelSpec
from neox_config.spec.run import RunSpec
from neox_model.convert.checkpoints import build_sequential, load_into
from neox_model.convert.proof.choices import clear_choices
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.proof.layers import lengths_of
from neox_model.convert.proof.sides import Sides, dtype_of
from neox_model.convert.proof.texts import real_text
from neox_model.convert.reference import computed, load_model
from neox_model.convert.weights import WeightFiles
from neox_model.layers.attention.kv_cache import logits_in_parts
from neox_model.layers.positions import lengths_of_requests

__all__ = ["compare_logits", "compare_whole"]

_TEXT, _RANDOM, _CACHED, _PREFILL = 256, 64, 24, 10
_COMPARED_POSITIONS = 256


def compare_whole(sides: Sides, model: ModelSpec, run: RunSpec, files: WeightFiles, figures: Figures) -> None:
    """Compare the logits of both models for several inputs."""
    theirs = load_model(sides.folder, sides.family)
    ours = build_sequential(model, run, sides.weights.vocab_size)
    load_into(ours, sides.weights, dtype_of(sides, files))
    compare_logits(sides, lengths_of(model), ours, theirs, figures)


def compare_logits(
    sides: Sides, lengths: tuple[int, int], ours: nn.Module, theirs: Any, figures: Figures
) -> None:
    """Compare the logits of two models in memory for several inputs.

    Args:
        sides: the tokenizer and the vocabulary.
        lengths: of inputs, as `lengths_of` returns them.
        ours: a model of neox-model.
        theirs: a model of transformers.
        figures: collects the differences.
    """
    rows, (longest, beyond_windows) = sides.rows, lengths
    generator = torch.Generator().manual_seed(0)

    def random(batch: int, length: int) -> Tensor:
        return torch.randint(0, rows, (batch, min(length, longest)), generator=generator)

    def compare(what: str, tokens_BS: Tensor) -> None:
        _compare(what, ours, tokens_BS, _theirs(theirs, tokens_BS, rows), figures)

    text = sides.tokenizer.encode(real_text()[: 8 * _TEXT])
    with torch.no_grad():
        compare("real text", torch.tensor([text[: min(_TEXT, longest)]]))
        compare("random ids", random(2, _RANDOM))
        compare("full length", random(1, longest))
        _compare_padded(ours, theirs, random(3, _RANDOM), rows, figures)
        _compare_cached(ours, theirs, random(2, _CACHED), rows, figures)
        if beyond_windows:
            compare("beyond a sliding window", random(1, beyond_windows))


def _compare(
    what: str,
    ours: nn.Module,
    tokens_BS: Tensor,
    there: Tensor,
    figures: Figures,
    *,
    mine: Tensor | None = None,
    length: int | None = None,
) -> None:
    """Compare logits of transformers with ours for the same tokens, computed at once if not given.

    Transformers chooses factors of frequencies by the longest sequence of a call: `length`, or all tokens.
    """
    lengths_B = torch.full((len(tokens_BS),), length or tokens_BS.shape[1])

    def here() -> Tensor:
        with lengths_of_requests(ours, lengths_B):
            logits: Tensor = ours(tokens_BS)
        return logits[:, -_COMPARED_POSITIONS:, : there.shape[-1]]

    def exact() -> Tensor:
        ours.double()
        try:
            return here()
        finally:
            ours.float()  # Which restores every weight.

    clear = clear_choices(ours, here)
    clear = None if clear is None else clear[:, -_COMPARED_POSITIONS:]
    mine = here() if mine is None else mine
    figures.compare(what, mine, there, where=" logits", exact=exact, where_clear=clear)


def _theirs(model: Any, tokens_BS: Tensor, rows: int) -> Tensor:
    logits: Tensor = computed(model, tokens_BS, use_cache=False).logits
    return logits[:, -_COMPARED_POSITIONS:, :rows]


def _compare_padded(ours: nn.Module, theirs: Any, tokens_BS: Tensor, rows: int, figures: Figures) -> None:
    """Compare a batch of different lengths, padded on the left there and one by one here."""
    batch, length = tokens_BS.shape
    lengths = [max(1, length - row * (length // batch)) for row in range(batch)]
    mask_BS = torch.stack([torch.arange(length) >= length - each for each in lengths]).long()
    positions_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": mask_BS, "position_ids": positions_BS, "use_cache": False}
    padded = computed(theirs, tokens_BS, **inputs).logits[..., :rows]
    for row, each in enumerate(lengths):
        one = slice(row, row + 1), slice(length - each, None)
        _compare("left-padded batch", ours, tokens_BS[one], padded[one], figures, length=length)


def _compare_cached(ours: nn.Module, theirs: Any, tokens_BS: Tensor, rows: int, figures: Figures) -> None:
    """Compare a prompt and then one token at a time, each side with its own cache, with whole sequences."""
    prompt = min(_PREFILL, tokens_BS.shape[1])
    steps: Sequence[Tensor] = [tokens_BS[:, :prompt], *tokens_BS[:, prompt:].split(1, dim=1)]
    # Its name before transformers 5.24.
    name = "cache" if "cache" in signature(theirs.forward).parameters else "past_key_values"
    past, found = None, []
    for step in steps if tokens_BS.shape[1] > prompt else steps[:1]:
        output = computed(theirs, step, use_cache=True, **{name: past})
        past = output[name]
        found.append(output.logits[..., :rows])
    cached = torch.cat(found, dim=1)
    length = tokens_BS.shape[1]
    mine = logits_in_parts(ours, tokens_BS, (0, *range(prompt, length), length))[..., :rows]
    _compare("cached", ours, tokens_BS, cached, figures, mine=mine)
    _compare("cached and whole", ours, tokens_BS, _theirs(theirs, tokens_BS, rows), figures, mine=mine)
