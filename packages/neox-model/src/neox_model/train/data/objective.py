"""Turn the samples of a dataset into those of the configured objective. Without torch."""

import numpy as np

from neox_config.schema.sections.objective import ObjectiveSection
from neox_config.spec.update import DataSpec
from neox_data.errors import TokenizerError
from neox_data.fill_in_middle import FillInMiddleDataset, MiddleTokens
from neox_data.masking import MaskedDataset, Masking, WordEdges
from neox_data.tokenizers import Tokenizer
from neox_model.train.data.datasets import Datasets

__all__ = ["check_special_tokens", "samples_of_objective"]


_ADD = (
    "add it with neox-data add-tokens (or train-tokenizer --special-token) and tokenize the data again with "
    "the new tokenizer"
)
# Mask tokens of published vocabularies, and ours.
_MASK_TOKENS = ("<|mask|>", "[MASK]", "<mask>")


def check_special_tokens(data: DataSpec, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer has what the objective requires.

    Raises:
        TokenizerError: it lacks a special token, or its words are unknown.
    """
    if data.objective == "masked":
        _masking(data.targets, tokenizer)
    if data.targets.fim_rate:
        _middle_tokens(data.targets, tokenizer)


def samples_of_objective(datasets: Datasets, data: DataSpec, tokenizer: Tokenizer) -> Datasets:
    """Return the datasets with the samples that the model is trained and evaluated on.

    Args:
        datasets: the datasets by part.
        data: the objective.
        tokenizer: the model's tokenizer.

    Raises:
        TokenizerError: as `check_special_tokens`.
    """
    section = data.targets
    if data.objective == "masked":
        masking = _masking(section, tokenizer)
        return {
            part: MaskedDataset(dataset, masking, length=data.length, key=f"{data.seed} {part}")
            for part, dataset in datasets.items()
        }
    found = dict(datasets)
    if section.fim_rate and "train" in found:
        found["train"] = FillInMiddleDataset(
            found["train"],
            _middle_tokens(section, tokenizer),
            seed=data.seed,
            rate=section.fim_rate,
            spm_rate=section.fim_spm_rate,
        )
    return found


def _masking(section: ObjectiveSection, tokenizer: Tokenizer) -> Masking:
    if section.mask_token is not None:
        mask = _needed(tokenizer, "mask-token", section.mask_token)
    else:
        known = [tokenizer.token_id(token) for token in _MASK_TOKENS]
        found = [number for number in known if number is not None]
        if not found:
            raise TokenizerError(
                f"objective: masked: the vocabulary has no mask token ({', '.join(_MASK_TOKENS)}); name the "
                f"one that it has with mask-token, or {_ADD}"
            )
        mask = found[0]
    text_ids = sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids - {mask})
    return Masking(
        mask=mask,
        text_ids=np.array(text_ids, np.int64),
        probability=section.mask_prob,
        short_probability=section.short_seq_prob,
        padding=tokenizer.end_of_document if tokenizer.padding is None else tokenizer.padding,
        words=WordEdges(tokenizer) if section.mask_whole_words else None,
    )


def _middle_tokens(section: ObjectiveSection, tokenizer: Tokenizer) -> MiddleTokens:
    return MiddleTokens(
        prefix=_needed(tokenizer, "fim-prefix-token", section.fim_prefix_token),
        middle=_needed(tokenizer, "fim-middle-token", section.fim_middle_token),
        suffix=_needed(tokenizer, "fim-suffix-token", section.fim_suffix_token),
        end_of_document=tokenizer.end_of_document,
    )


def _needed(tokenizer: Tokenizer, name: str, token: str) -> int:
    """Return the id of a token that the objective adds to texts."""
    number = tokenizer.token_id(token)
    if number == tokenizer.end_of_document:
        raise TokenizerError(
            f"{name}: {token!r} ends documents, so that others of it would divide documents; name another "
            f"token of the vocabulary, or {_ADD}"
        )
    if number is None:
        raise TokenizerError(
            f"{name}: the vocabulary has no token {token!r}; name one that it has, or {_ADD}"
        )
    return number
