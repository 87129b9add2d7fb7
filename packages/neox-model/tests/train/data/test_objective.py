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
    datasets = samples_of_objective(build_datasets(resolved), resolved.data, TOKENIZER)
    opened = open_streams(
        resolved.data, resolved.run, datasets, SINGLE_PROCESS, vocab_size=512, end_of_document=END
    )
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
    data = settings(prefix, fim_rate=0.5, fim_middle_token="<|middle|>").data
    with pytest.raises(
        TokenizerError, match=r"fim-middle-token: the vocabulary has no token '<\|middle\|>'; "
    ):
        check_special_tokens(data, TOKENIZER)
    check_special_tokens(settings(prefix, fim_middle_token="<|middle|>").data, TOKENIZER)


@pytest.mark.parametrize(
    "changes",
    [{"objective": "masked", "mask_token": "<end>"}, {"fim_rate": 0.5, "fim_suffix_token": "<end>"}],
)
def test_the_end_of_documents_stands_for_nothing_else(prefix, changes, monkeypatch) -> None:
    """Documents are told apart by it, so that more of these tokens would divide them."""
    monkeypatch.setattr(type(TOKENIZER), "token_id", lambda self, token: END if token == "<end>" else 300)
    with pytest.raises(
        TokenizerError, match=r"(mask|fim-suffix)-token: '<end>' ends documents, .*; name another token"
    ):
        check_special_tokens(settings(prefix, **changes).data, TOKENIZER)


MASK, PADDING = TOKENIZER.token_id("<|mask|>"), TOKENIZER.padding


def masked(prefix, **changes):
    return settings(prefix, objective="masked", **{"short_seq_prob": 0.0} | changes)


def test_masked_batches_have_the_tokens_of_causal_ones_in_their_own_places(prefix) -> None:
    plain, hidden = batches(settings(prefix), "train", 8), batches(masked(prefix), "train", 8)
    replaced = 0
    for one, other in zip(plain, hidden, strict=True):
        is_chosen = other.loss_mask_BS == 1
        assert other.tokens_BS.shape == one.tokens_BS.shape
        assert (other.tokens_BS[~is_chosen] == one.tokens_BS[~is_chosen]).all()
        assert (other.labels_BS[is_chosen] == one.tokens_BS[is_chosen]).all()
        assert (one.tokens_BS[is_chosen] != END).all()
        assert (is_chosen.sum(dim=1) > 0).all()
        assert other.document_ids_BS is None
        replaced += int((other.tokens_BS == MASK).sum())
    assert replaced > 20


def test_a_resumed_training_hides_the_same_tokens(prefix) -> None:
    resolved = masked(prefix, short_seq_prob=0.5)
    whole, later = batches(resolved, "train", 6), batches(resolved, "train", 2, first=8)
    for one, other in zip(whole[4:], later, strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True) if a is not None)
    # Another part and another seed have other masks, also of equal samples.
    other = batches(masked(prefix, short_seq_prob=0.5, seed=8), "train", 6)
    assert any((a.tokens_BS != b.tokens_BS).any() for a, b in zip(whole, other, strict=True))


@pytest.mark.parametrize("separates", [False, True])
def test_padding_is_a_document_that_no_token_is_part_of(prefix, separates) -> None:
    resolved = masked(prefix, short_seq_prob=1.0, reset_attention_mask=separates)
    for batch in batches(resolved, "train", 6):
        for tokens, mask, ids in zip(batch.tokens_BS, batch.loss_mask_BS, batch.document_ids_BS, strict=True):
            size = int((ids >= 0).sum())
            assert 2 <= size <= 24
            assert (ids[size:] == -1).all()
            assert (tokens[size:] == PADDING).all()
            assert (mask[size:] == 0).all()
            ends = (tokens[:size] == END).long()
            expected = ends.cumsum(0) - ends if separates else 0 * ends
            assert (ids[:size] == expected).all()


@pytest.mark.parametrize("pack_impl", ["best_fit", "unpacked", "pack_until_overflow"])
def test_whole_documents_are_masked_up_to_their_end(prefix, pack_impl) -> None:
    seen = 0
    for batch in batches(masked(prefix, pack_impl=pack_impl), "train", 6):
        assert batch.tokens_BS.shape == (2, 24)
        for tokens, mask, ids in zip(batch.tokens_BS, batch.loss_mask_BS, batch.document_ids_BS, strict=True):
            size = int((ids == 0).sum())
            assert mask[size:].sum() == 0
            assert 0 < mask.sum() <= max(1, round(0.15 * size))
            assert (tokens[size:] == PADDING).all()
            seen += int((tokens[:size] == END).sum())
    assert seen > 0


def test_a_curriculum_of_lengths_cuts_masked_samples(prefix) -> None:
    curriculum = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 24,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 8},
    }
    whole = batches(masked(prefix), "train", 8)
    cut = batches(masked(prefix, curriculum_learning=curriculum), "train", 8)
    lengths = [batch.tokens_BS.shape[1] for batch in cut]
    assert lengths == [8, 8, 8, 8, 16, 16, 24, 24] or sorted(set(lengths)) == [8, 16, 24]
    for one, other in zip(whole, cut, strict=True):
        length = other.tokens_BS.shape[1]
        assert (one.tokens_BS[:, :length] == other.tokens_BS).all()
        assert (one.loss_mask_BS[:, :length] == other.loss_mask_BS).all()


def test_the_mask_token_is_that_of_the_vocabulary_or_the_named_one(prefix, monkeypatch) -> None:
    check_special_tokens(masked(prefix).data, TOKENIZER)
    with pytest.raises(TokenizerError, match=r"mask-token: the vocabulary has no token '<x>'; name one that"):
        check_special_tokens(masked(prefix, mask_token="<x>").data, TOKENIZER)
    monkeypatch.setattr(type(TOKENIZER), "token_id", lambda self, token: 300 if token == "[MASK]" else None)
    check_special_tokens(masked(prefix).data, TOKENIZER)
    monkeypatch.setattr(type(TOKENIZER), "token_id", lambda self, token: None)
    with pytest.raises(
        TokenizerError, match=r"objective: masked: the vocabulary has no mask token \(<\|mask\|>, "
    ):
        check_special_tokens(masked(prefix).data, TOKENIZER)
    check_special_tokens(settings(prefix).data, TOKENIZER)
