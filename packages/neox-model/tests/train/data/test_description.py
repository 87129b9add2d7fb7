import json

import numpy as np
import pytest

from neox_data.errors import DataError
from neox_data.indexed import IndexedDatasetWriter
from neox_data.tokenizers import build_tokenizer
from neox_data.trace import readings_at
from neox_data.training_data import load_training_data
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK, Group, Groups
from neox_model.parallel.topology import topology_of_world
from neox_model.train.data.description import describe_training_data, training_data_of
from neox_model.train.data.objective import samples_of_objective
from neox_model.train.data.streams import build_datasets, open_streams
from support.refusals import refused
from support.settings import TINY, resolved_from


def write(folder, name, documents, seed):
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(folder / name, dtype=np.uint16) as writer:
        for _ in range(documents):
            writer.append(random.integers(1, 500, random.integers(1, 40)).astype(np.uint16))
    return str(folder / name)


@pytest.fixture
def settings(tmp_path):
    one, two = write(tmp_path, "one", 40, 1), write(tmp_path, "two", 20, 2)
    paths = {"train_data_paths": [one, two], "valid_data_paths": [one], "test_data_paths": [two]}
    return {
        "train_iters": 6, "eval_interval": 4, "eval_iters": 1, "tokenizer_type": "CharLevelTokenizer",
        "num_workers": 1, "train_data_weights": [0.3, 0.7], **paths,
    }  # fmt: skip


SHORT_FIRST = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 3,
    "max_difficulty": 12,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [3, 8, 12], "max_step": [2, 5]},
}


@pytest.mark.parametrize(
    "changes",
    [{"sample_order": "gpt_neox"}, {"sample_order": "lazy"}, {"curriculum_learning": SHORT_FIRST}],
    ids=["gpt_neox", "lazy", "short first"],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_trace_equals_the_samples_of_a_new_and_a_resumed_training(settings, changes, devices):
    resolved = resolved_from(settings | changes, devices=devices)
    datasets, data = build_datasets(resolved), training_data_of(resolved)
    for rank in range(devices):
        here = Group(rank, devices, None, tuple(range(devices)))
        groups = Groups(
            data=here, model=SINGLE_RANK, pipe=SINGLE_RANK, world=SINGLE_RANK, control=SINGLE_RANK
        )
        open_train = open_streams(
            resolved.data, resolved.run, datasets, groups, vocab_size=512, end_of_document=0
        )["train"]
        for first in (0, 4):
            stream = open_train(first * resolved.run.batch.whole, first)
            for iteration in range(first, 6):
                traced = list(readings_at(data, iteration, rank))
                for step in range(2):
                    batch = next(stream)
                    rows = [reading for reading in traced if reading.place.micro_step == step]
                    tokens = [np.concatenate([one.tokens for one in row.passages]) for row in rows]
                    assert [row[:-1].tolist() for row in tokens] == batch.tokens_BS.tolist()
                    assert [row[1:].tolist() for row in tokens] == batch.labels_BS.tolist()
                    assert batch.tokens_BS.shape[1] == data.length_at(iteration) - 1
            stream.close()


@pytest.mark.parametrize("changes", [{}, {"curriculum_learning": SHORT_FIRST}, {"pack_impl": "best_fit"}])
def test_trace_of_a_masked_model_has_the_tokens_of_its_input_alone(settings, changes):
    resolved = resolved_from(settings | {"objective": "masked", "short_seq_prob": 0.0} | changes)
    datasets = samples_of_objective(
        build_datasets(resolved), resolved.data, build_tokenizer("CharLevelTokenizer")
    )
    data = training_data_of(resolved)
    opened = open_streams(
        resolved.data, resolved.run, datasets, SINGLE_PROCESS, vocab_size=512, end_of_document=0
    )
    stream = opened["train"](0)
    for iteration in range(6):
        traced = iter(readings_at(data, iteration, 0))
        for batch in (next(stream) for _ in range(resolved.run.batch.accumulation)):
            for tokens, mask in zip(batch.tokens_BS, batch.loss_mask_BS, strict=True):
                read = np.concatenate([one.tokens for one in next(traced).passages])
                assert len(read) <= len(tokens)
                assert len(read) == len(tokens) or "pack_impl" in changes
                kept = (mask == 0)[: len(read)]
                assert (tokens[: len(read)][kept].numpy() == read[kept.numpy()]).all()
                assert (mask[len(read) :] == 0).all()
        assert next(traced, None) is None
    stream.close()


@pytest.mark.parametrize(("model", "pipe", "devices"), [(1, 1, 4), (2, 1, 4), (2, 2, 8), (1, 2, 4)])
def test_each_process_belongs_to_its_copy(settings, model, pipe, devices):
    parallel = {"model_parallel_size": model, "pipe_parallel_size": pipe}
    data = training_data_of(resolved_from(settings | parallel, devices=devices))
    topology = topology_of_world(devices, model_parallel_size=model, pipe_parallel_size=pipe)
    for ranks in topology.ranks_along("data"):
        assert [data.data_parallel_ranks[rank] for rank in ranks] == list(range(len(ranks)))


def test_configuration_files_are_read(settings, tmp_path):
    path = tmp_path / "x.yml"
    path.write_text(json.dumps({**TINY, **settings}))
    data = describe_training_data([path], overrides=["train-iters=9"], devices=2)
    assert (data.train_iters, data.data_parallel_size, data.micro_batch, data.accumulation) == (9, 2, 2, 2)
    assert data.build_tokenizer().vocab_size == 512
    assert describe_training_data([path]).data_parallel_size == 1


def write_checkpoint(folder, training):
    folder.mkdir(parents=True)
    layout = {"data": 1, "model": 1, "pipe": 1}
    contents = {"iteration": 3, "config": {}, "layout": layout, "training": training}
    (folder / "manifest.json").write_text(json.dumps({"contents": contents}))


def test_batch_sizes_are_read_from_a_checkpoint(settings, tmp_path):
    path = tmp_path / "x.yml"
    path.write_text(json.dumps({**TINY, **settings, "save": str(tmp_path / "kept"), "save_interval": 1}))
    training = {
        "iteration": 3, "samples": 16, "validation_samples": 0, "batch_sizes": [[0, 4], [1, 6]],
    }  # fmt: skip
    write_checkpoint(tmp_path / "kept/global_step3", training)
    data = describe_training_data([path], checkpoint="3")
    batch = data.micro_batch * data.accumulation
    assert data.batch_sizes.changes == ((0, 4), (1, 6), (3, batch))
    assert data.num_samples["train"] == 16 + 3 * batch
    write_checkpoint(tmp_path / "kept/global_step2", {"iteration": 2, "samples": 8, "validation_samples": 0})
    with refused(DataError, "global_step2"):
        describe_training_data([path], checkpoint="2")
    unknown = training | {"batch_sizes": [[1, 6]]}
    write_checkpoint(tmp_path / "kept/global_step1", unknown)
    with refused(DataError, "batch sizes", "without"):
        describe_training_data([path], checkpoint="1")
    with refused(DataError, "--checkpoint 5"):
        describe_training_data([path], checkpoint="5")


def test_invalid_configuration_is_reported_as_a_data_error(settings, tmp_path):
    path = tmp_path / "x.yml"
    path.write_text(json.dumps({**TINY, **settings, "split": "nonsense"}))
    with refused(DataError, "split"):
        describe_training_data([path])


def test_neox_data_finds_this_package_by_its_entry_point(settings, tmp_path):
    path = tmp_path / "x.yml"
    path.write_text(json.dumps({**TINY, **settings}))
    assert load_training_data([path], devices=2).data_parallel_size == 2
