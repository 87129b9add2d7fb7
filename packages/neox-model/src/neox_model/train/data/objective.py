"""Turn the samples of a dataset into those of the configured objective. Without torch."""

from neox_config import NeoXConfig
from neox_data.blend import SampleDataset
from neox_data.errors import TokenizerError
from neox_data.fill_in_middle import FillInMiddleDataset, MiddleTokens
from neox_data.tokenizers import Tokenizer
from neox_model.train.data.datasets import Datasets

__all__ = ["check_special_tokens", "samples_of_objective"]


def check_special_tokens(config: NeoXConfig, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer has the special tokens of the objective.

    Raises:
        TokenizerError: it lacks one.
    """
    if config.objective.fim_rate:
        _middle_tokens(config, tokenizer)


def samples_of_objective(datasets: Datasets, config: NeoXConfig, tokenizer: Tokenizer) -> Datasets:
    """Return the datasets with the samples that the model is trained and evaluated on.

    Args:
        datasets: the datasets by part.
        config: the configuration.
        tokenizer: the model's tokenizer.

    Raises:
        TokenizerError: the tokenizer lacks a special token of the objective.
    """
    found = dict(datasets)
    if config.objective.fim_rate and "train" in found:
        found["train"] = _with_middles(found["train"], config, tokenizer)
    return found


def _with_middles(dataset: SampleDataset, config: NeoXConfig, tokenizer: Tokenizer) -> SampleDataset:
    return FillInMiddleDataset(
        dataset,
        _middle_tokens(config, tokenizer),
        seed=config.training.seed,
        rate=config.objective.fim_rate,
        spm_rate=config.objective.fim_spm_rate,
    )


def _middle_tokens(config: NeoXConfig, tokenizer: Tokenizer) -> MiddleTokens:
    section = config.objective
    return MiddleTokens(
        prefix=_needed(tokenizer, "fim-prefix-token", section.fim_prefix_token),
        middle=_needed(tokenizer, "fim-middle-token", section.fim_middle_token),
        suffix=_needed(tokenizer, "fim-suffix-token", section.fim_suffix_token),
        end_of_document=tokenizer.end_of_document,
    )


def _needed(tokenizer: Tokenizer, name: str, token: str) -> int:
    number = tokenizer.token_id(token)
    if number is None:
        raise TokenizerError(
            f"{name}: the vocabulary has no token {token!r}; name one that it has, or add it with neox-data "
            "add-tokens (or train-tokenizer --special-token) and tokenize the data again"
        )
    return number
