from contextlib import closing

import numpy as np
import pytest
import torch

from neox_data.errors import DataError, IndexedDatasetError, TokenizerError
from neox_data.indexed import IndexedDatasetWriter
from neox_data.manifest import describe_tokenizer, write_manifest
from neox_data.tokenizers import build_tokenizer
from neox_model.parallel.groups import SINGLE_RANK, Group, Groups
from neox_model.train.data.datasets import check_tokenizers
from neox_model.train.data.streams import build_datasets, num_samples, open_streams
from support.refusals import refused
from support.settings import resolved_from

END = 0


def write(folder, name, *, documents, token):
    """Documents of 30 equal tokens, each closed by the end-of-document token."""
    with IndexedDatasetWriter(folder / name, dtype=np.uint16) as writer:
        for _ in range(documents):
            writer.append(np.array([token] * 30 + [END], dtype=np.uint16))
    return str(folder / name)


def settings(**changes):
    base = {"train_iters": 10, "eval_interval": 4, "eval_iters": 3, "split": "8,1,1", "num_workers": 0}
    return resolved_from(base | {"tokenizer_type": "CharLevelTokenizer"} | changes, devices=2)


def groups(*, data=SINGLE_RANK, pipe=SINGLE_RANK):
    return Groups(data=data, model=SINGLE_RANK, pipe=pipe, world=SINGLE_RANK, control=SINGLE_RANK)


def windows(resolved, stream, count):
    return [next(stream).tokens_BS for _ in range(count)]


def test_sample_counts_equal_those_of_gpt_neox():
    # Two devices, two samples, two micro-batches: eight samples per update.
    resolved = settings(data_path="x")
    found = num_samples(resolved.config.training, resolved.run.batch.whole)
    assert found == {"train": 80, "valid": 72, "test": 24}


def test_one_prefix_is_split_by_documents(tmp_path):
    prefix = write(tmp_path, "text", documents=20, token=5)
    datasets = build_datasets(settings(data_path=prefix))
    assert {
        part: len(data) >= count for (part, data), count in zip(datasets.items(), (80, 72, 24), strict=True)
    } == {
        "train": True,
        "valid": True,
        "test": True,
    }
    assert list(datasets) == ["train", "valid", "test"]


def test_a_part_without_documents_or_samples_is_left_out(tmp_path):
    prefix = write(tmp_path, "text", documents=20, token=5)
    assert list(build_datasets(settings(data_path=prefix, split="9,1,0"))) == ["train", "valid"]
    assert list(build_datasets(settings(data_path=prefix, eval_iters=0))) == ["train"]


def test_an_evaluation_builds_no_training_order(tmp_path):
    prefix = write(tmp_path, "corpus", documents=20, token=1)
    datasets = build_datasets(settings(data_path=prefix), ("valid", "test"))
    assert list(datasets) == ["valid", "test"]
    assert {path.name.split("_indexmap")[0] for path in tmp_path.glob("*.npy")} == {
        "corpus_valid",
        "corpus_test",
    }


def test_separate_datasets_per_part_are_blended_by_weight(tmp_path):
    few = write(tmp_path, "few", documents=20, token=5)
    many = write(tmp_path, "many", documents=20, token=6)
    paths = {"train_data_paths": [few, many], "valid_data_paths": [few], "test_data_paths": [many]}
    datasets = build_datasets(settings(**paths, train_data_weights=[1, 3]))
    tokens = [5 if 5 in datasets["train"][item] else 6 for item in range(80)]
    assert (tokens.count(5), tokens.count(6)) == (20, 60)
    assert 5 in datasets["valid"][0]
    assert 6 in datasets["test"][0]


def test_weights_can_follow_the_number_of_documents(tmp_path):
    few = write(tmp_path, "few", documents=10, token=5)
    many = write(tmp_path, "many", documents=30, token=6)
    paths = {"train_data_paths": [few, many], "valid_data_paths": [few], "test_data_paths": [many]}
    by_count = {"weight_by_num_documents": True, "weighted_sampler_alpha": 1.0}
    train = build_datasets(settings(**paths, **by_count))["train"]
    assert sum(5 in train[item] for item in range(80)) == 20


def test_replicas_read_separate_slices_and_resume_continues(tmp_path):
    resolved = settings(data_path=write(tmp_path, "text", documents=40, token=5))
    datasets = build_datasets(resolved)
    seen = []
    for rank in (0, 1):
        here = groups(data=Group(rank, 2, None, (0, 1)))
        open_train = open_streams(
            resolved.data, resolved.run, datasets, here, vocab_size=512, end_of_document=END
        )["train"]
        whole = [batch.tokens_BS for batch, _ in zip(open_train(0), range(6), strict=False)]
        resumed = [batch.tokens_BS for batch, _ in zip(open_train(2 * 8), range(2), strict=False)]
        assert all((a == b).all() for a, b in zip(whole[4:], resumed, strict=True))
        seen.append(whole)
    expected = [datasets["train"][item][:-1].tolist() for item in range(8)]
    both = [first.tolist() + second.tolist() for first, second in zip(*seen, strict=True)]
    assert both[0] + both[1] == expected


def test_the_lazy_order_writes_nothing_and_is_the_same_for_any_ranks_and_after_resuming(tmp_path):
    few = write(tmp_path, "few", documents=20, token=5)
    many = write(tmp_path, "many", documents=20, token=6)
    files = sorted(path.name for path in tmp_path.iterdir())
    paths = {"train_data_paths": [few, many], "valid_data_paths": [few], "test_data_paths": [many]}

    def seen(**sizes):
        resolved = settings(**paths, train_data_weights=[1, 3], sample_order="lazy", **sizes)
        datasets, rows = build_datasets(resolved), {}
        for rank in (0, 1):
            here = groups(data=Group(rank, 2, None, (0, 1)))
            open_train = open_streams(
                resolved.data, resolved.run, datasets, here, vocab_size=512, end_of_document=END
            )["train"]
            for iteration in (0, 1):
                stream = open_train(iteration * 8)
                for step in range(resolved.run.batch.accumulation):
                    rows[iteration, step, rank] = next(stream).tokens_BS.tolist()
        return [row for place in sorted(rows) for row in rows[place]]

    two = seen()
    assert two == seen(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1)
    assert sum(6 in row for row in two) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_index_files_go_to_the_named_folder_where_the_datas_cannot_be_written(tmp_path, monkeypatch):
    prefix = write(tmp_path, "text", documents=20, token=5)
    cache = tmp_path / "cache"
    resolved = settings(data_path=prefix, eval_iters=0, data_cache_dir=str(cache))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    build_datasets(resolved)
    assert sorted(path.name.rsplit("_ac_")[1] for path in cache.iterdir()) == [
        "doc_idx.npy",
        "sample_idx.npy",
        "sha256.json",
        "shuffle_idx.npy",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "text.bin", "text.idx"]


def test_blend_is_built_for_the_samples_it_takes_despite_rounding(tmp_path):
    few = write(tmp_path, "few", documents=1, token=5)
    many = write(tmp_path, "many", documents=20, token=6)
    paths = {"train_data_paths": [few, many], "valid_data_paths": [few], "test_data_paths": [many]}
    # The first of equals is dataset 0, although its weight asks for no sample.
    train = build_datasets(settings(**paths, train_data_weights=[0, 1]))["train"]
    assert [5 in train[item] for item in range(3)] == [False, True, False]


def test_a_documents_end_can_be_left_out_of_the_loss(tmp_path):
    resolved = settings(data_path=write(tmp_path, "text", documents=20, token=5), eod_mask_loss=True)
    stream = open_streams(
        resolved.data, resolved.run, build_datasets(resolved), groups(), vocab_size=512, end_of_document=END
    )["train"](0)
    batches = [next(stream) for _ in range(4)]
    assert all(((batch.tokens_BS == END) == (batch.loss_mask_BS == 0)).all() for batch in batches)
    assert any((batch.loss_mask_BS == 0).any() for batch in batches)


@pytest.mark.parametrize(
    ("position", "restarts"), [("learned", True), ("rotary", False), ("sinusoidal", False)]
)
def test_learned_positions_alone_restart_after_a_documents_end(tmp_path, position, restarts):
    data = write(tmp_path, "text", documents=20, token=5)
    resolved = settings(data_path=data, reset_position_ids=True, reset_attention_mask=True, pos_emb=position)
    parts = open_streams(
        resolved.data, resolved.run, build_datasets(resolved), groups(), vocab_size=512, end_of_document=END
    )
    batches = [next(parts["train"](0)) for _ in range(2)]
    for batch in batches:
        ends = (batch.tokens_BS == END).cumsum(1) - (batch.tokens_BS == END).long()
        assert torch.equal(batch.document_ids_BS, ends)
        place = torch.arange(batch.tokens_BS.shape[1]).expand(batch.tokens_BS.shape)
        assert torch.equal(batch.positions_BS, place) != restarts


def test_token_outside_the_vocabulary_is_reported(tmp_path):
    resolved = settings(data_path=write(tmp_path, "text", documents=20, token=600))
    datasets = build_datasets(resolved)
    stream = open_streams(
        resolved.data, resolved.run, datasets, groups(), vocab_size=600, end_of_document=END
    )["train"](0)
    with refused(DataError, "token 600", "has 600"):
        next(stream)


@pytest.mark.parametrize(("token", "warnings"), [(259, 0), (260, 1), (511, 1)])
def test_a_token_that_no_text_has_is_a_warning(tmp_path, caplog, token, warnings):
    resolved = settings(data_path=write(tmp_path, "text", documents=20, token=token))
    tokenizer = build_tokenizer("CharLevelTokenizer")
    sizes = {"vocab_size": 512, "largest_id": tokenizer.largest_id}
    streams = open_streams(
        resolved.data, resolved.run, build_datasets(resolved), groups(), end_of_document=END, **sizes
    )
    for part in ("train", "valid"):
        with closing(streams[part](0)) as stream:
            assert {token, END} == {*next(stream).tokens_BS.flatten().tolist()}
            next(stream)
    found = [record.message for record in caplog.records if "no text has" in record.message]
    assert len(found) == warnings
    assert all(f"token {token}, but the tokenizer's largest id is 259:" in message for message in found)


def test_stages_in_the_middle_read_nothing(tmp_path):
    resolved = settings(data_path=write(tmp_path, "text", documents=20, token=5))
    middle = groups(pipe=Group(1, 3, None, (0, 1, 2)))
    stream = open_streams(
        resolved.data, resolved.run, build_datasets(resolved), middle, vocab_size=512, end_of_document=END
    )["train"](0)
    assert list(stream) == []
    stream.close()


def test_a_missing_file_is_named(tmp_path):
    with refused(DataError, "nowhere"):
        build_datasets(settings(data_path=str(tmp_path / "nowhere")))


def test_data_made_with_another_tokenizer_is_refused(tmp_path):
    prefix = write(tmp_path, "text", documents=2, token=5)
    tokenizer = build_tokenizer("CharLevelTokenizer")
    check_tokenizers(settings(data_path=prefix).data, tokenizer, entries=512)
    made = describe_tokenizer(tokenizer)
    write_manifest(prefix, inputs=[], tokenizer=made, options={}, counts={})
    check_tokenizers(settings(data_path=prefix).data, tokenizer, entries=512)
    write_manifest(prefix, inputs=[], tokenizer=made | {"sha256": "0"}, options={}, counts={})
    lists = {f"{part}_data_paths": [prefix] for part in ("train", "valid", "test")}
    for paths in ({"data_path": prefix}, lists):
        with refused(DataError, "with another tokenizer"):
            check_tokenizers(settings(**paths).data, tokenizer, entries=512)


@pytest.mark.parametrize("changed", [{}, {"sample_order": "lazy"}, {"data_impl": "cached"}])
def test_a_changed_offset_in_the_index_is_refused_before_training(tmp_path, changed):
    prefix = write(tmp_path, "text", documents=20, token=5)
    write_manifest(prefix, inputs=[], tokenizer={}, options={}, counts={})
    resolved = settings(data_path=prefix, **changed)
    assert list(build_datasets(resolved)) == ["train", "valid", "test"]
    path = tmp_path / "text.idx"
    data = bytearray(path.read_bytes())
    # The offset of sequence 1, in bytes, behind the header and 20 lengths: the next token, so still valid.
    data[34 + 20 * 4 + 8] += 2
    path.write_bytes(data)
    with refused(IndexedDatasetError, "text.idx", "text.manifest.json"):
        build_datasets(resolved)


def test_a_token_outside_the_vocabulary_in_the_manifest_is_refused_before_training(tmp_path):
    prefix = write(tmp_path, "text", documents=20, token=5)
    tokenizer = build_tokenizer("CharLevelTokenizer")
    arguments = {"inputs": [], "tokenizer": describe_tokenizer(tokenizer), "options": {}, "counts": {}}
    for largest in (-1, 511):
        write_manifest(prefix, **arguments, largest_token=largest)
        check_tokenizers(settings(data_path=prefix).data, tokenizer, entries=512)
    write_manifest(prefix, **arguments, largest_token=512)
    with refused(TokenizerError, "token 512", "has 512"):
        check_tokenizers(settings(data_path=prefix).data, tokenizer, entries=512)


def test_a_negative_token_is_reported(tmp_path):
    with IndexedDatasetWriter(tmp_path / "text", dtype=np.int32) as writer:
        for _ in range(20):
            writer.append([5] * 30 + [-1])
    resolved = settings(data_path=str(tmp_path / "text"))
    stream = open_streams(
        resolved.data, resolved.run, build_datasets(resolved), groups(), vocab_size=600, end_of_document=END
    )["train"](0)
    with refused(DataError, "token -1", "neox-data verify"):
        next(stream)


def write_labelled(folder, labels):
    """One document of seven tokens with labels; returns the settings that name both."""
    for name, row, dtype in (("tokens", [5, 6, 7, 8, 9, 5, END], "uint16"), ("labels", labels, "int32")):
        with IndexedDatasetWriter(folder / name, dtype=dtype) as writer:
            writer.append(np.array(row, dtype=dtype))
    names = {f"{part}_data_paths": [str(folder / "tokens")] for part in ("train", "valid", "test")}
    return names | {"train_label_data_paths": [str(folder / "labels")], "eval_iters": 0}


@pytest.mark.parametrize("pack_impl", ["unpacked", "best_fit", "pack_until_overflow"])
def test_a_stream_of_whole_documents_has_labels_and_padding(tmp_path, pack_impl):
    given = write_labelled(tmp_path, [-100, -100, -100, 8, 9, 5, END])
    resolved = settings(**given, pack_impl=pack_impl)
    streams = open_streams(
        resolved.data, resolved.run, build_datasets(resolved), groups(), vocab_size=10, end_of_document=END
    )
    with closing(streams["train"](0)) as stream:
        batch = next(stream)
    # Twelve are predicted, and the document has seven.
    assert batch.tokens_BS[0].tolist() == [5, 6, 7, 8, 9, 5, END] + [0] * 5
    assert batch.labels_BS[0].tolist() == [0, 0, 8, 9, 5, END] + [0] * 6
    assert batch.loss_mask_BS[0].tolist() == [0, 0, 1, 1, 1, 1] + [0] * 6


def test_a_label_outside_the_vocabulary_is_refused(tmp_path):
    resolved = settings(**write_labelled(tmp_path, [-100, -100, -100, 11, 9, 5, END]), pack_impl="unpacked")
    streams = open_streams(
        resolved.data, resolved.run, build_datasets(resolved), groups(), vocab_size=10, end_of_document=END
    )
    with closing(streams["train"](0)) as stream, refused(DataError, "label 11"):
        next(stream)


def test_labels_of_another_dataset_are_refused(tmp_path):
    resolved = settings(**write_labelled(tmp_path, [-100, 6]))
    with refused(DataError, "1 document", "2 labels"):
        build_datasets(resolved)
