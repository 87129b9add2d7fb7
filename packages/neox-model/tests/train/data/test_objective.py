"""The samples of an objective, from the configuration to the batches."""

from contextlib import closing

import numpy as np
import pytest

from neox_data.errors import TokenizerError
from neox_data.indexed import IndexedDatasetWriter
from neox_data.tokenizers import build_tokenizer
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.train.data.objective import check_special_tokens, samples_of_objective
from neox_model.train.data.streams import build_datasets, open_streams
from support.settings import resolved_from

END = 0
TOKENIZER = build_tokenizer("CharLevelTokenizer")


@pytest.fixture
def prefix(tmp_path) -> str:
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "text", dtype=np.uint16) as writer:
        for _ in range(60):
            body = generator.integers(97, 123, generator.integers(5, 40))
            writer.append(np.array([*body, END], dtype=np.uint16))
    return str(tmp_path / "text")


def settings(prefix, **changes):
    base = {"train_iters": 10, "eval_interval": 4, "eval_iters": 3, "split": "8,1,1", "num_workers": 0}
    base |= {"tokenizer_type": "CharLevelTokenizer", "data_path": prefix, "seq_length": 24}
    return resolved_from(base | {"max_position_embeddings": 24} | changes)


def batches(resolved, part: str, count: int, first: int = 0):
    datasets = samples_of_objective(build_datasets(resolved), resolved.config, TOKENIZER)
    opened = open_streams(resolved, datasets, SINGLE_PROCESS, vocab_size=512, end_of_document=END)
    with closing(opened[part](first)) as stream:
        return [next(stream) for _ in range(count)]


def test_training_samples_have_rearranged_documents_and_others_do_not(prefix) -> None:
    plain, filled = settings(prefix), settings(prefix, fim_rate=0.5)
    before, after = batches(plain, "train", 6), batches(filled, "train", 6)
    special = {TOKENIZER.token_id(f"<|fim_{part}|>") for part in ("prefix", "middle", "suffix")}
    assert special <= {token for batch in after for token in batch.tokens_BS.unique().tolist()}
    for one, other in zip(before, after, strict=True):
        assert one.tokens_BS.shape == other.tokens_BS.shape
        assert (other.tokens_BS[:, 1:] == other.labels_BS[:, :-1]).all()
        assert other.loss_mask_BS.all()
    for one, other in zip(batches(plain, "valid", 4), batches(filled, "valid", 4), strict=True):
        assert (one.tokens_BS == other.tokens_BS).all()


def test_a_resumed_training_continues_with_the_same_documents(prefix) -> None:
    resolved = settings(prefix, fim_rate=0.7)
    whole = batches(resolved, "train", 6)
    later = batches(resolved, "train", 2, first=8)
    assert [
        (one.tokens_BS == other.tokens_BS).all() for one, other in zip(whole[4:], later, strict=True)
    ] == [
        True,
        True,
    ]


def test_a_tokenizer_without_the_tokens_is_refused(prefix) -> None:
    config = settings(prefix, fim_rate=0.5, fim_middle_token="<|middle|>").config
    with pytest.raises(
        TokenizerError, match=r"fim-middle-token: the vocabulary has no token '<\|middle\|>'; "
    ):
        check_special_tokens(config, TOKENIZER)
    check_special_tokens(settings(prefix, fim_middle_token="<|middle|>").config, TOKENIZER)
