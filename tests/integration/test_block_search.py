"""Indexes of retrieval models against embeddings written out in float64: layouts, continued, searched."""

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neox_config.errors import NeoXError
from neox_data.block_index import open_block_index
from neox_data.inverse_cloze import framed
from neox_data.tokenizers import build_tokenizer
from neox_data.whole_files import written_aside
from support.distributed import run_ranks
from support.refusals import refused, shows
from support.retrieval import ITERATIONS, LENGTH, SETTINGS, SIZE, plain_embeddings, weights_of, write_letters
from support.settings import resolved_from

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one process": ({}, 1),
    "data 3": ({}, 3),
    "tensor 2, sequence": ({"model_parallel_size": 2, "sequence_parallel": True}, 2),
    "tensor 2, data 2": ({"model_parallel_size": 2}, 4),
    "ZeRO 3": ({"zero_optimization": {"stage": 3}, "engine": "torch"}, 2),
}
SEARCH: dict[str, Any] = {"indexer_batch_size": 7, "indexer_log_interval": 2, "train_batch_size": None}


def train(settings: dict[str, Any]) -> None:
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    open_run.train_in(create_groups(1, 1), resolved_from(settings))


def retrieve(program: str, settings: dict[str, Any]) -> Any:
    from neox_model.extras.retrieval.find import Recall, find_in
    from neox_model.extras.retrieval.index import index_in
    from neox_model.parallel.topology import create_groups

    resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
    groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
    found = {"index": index_in, "find": find_in}[program](groups, resolved)
    # Results of ranks are JSON, whose keys are text.
    return {**asdict(found), "text": str(found)} if isinstance(found, Recall) else found


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Any]:
    """Settings of a trained model."""
    folder = tmp_path_factory.mktemp("trained")
    settings = SETTINGS | {"data_path": write_letters(folder / "text"), "save": str(folder / "run")}
    run_ranks(train, size=1, settings=settings)
    rest = {name: value for name, value in settings.items() if name not in ("save", "train_batch_size")}
    return rest | {"ict_load": str(folder / "run"), "load": None, "train_micro_batch_size_per_gpu": 1}


def blocks_of_all(settings: dict[str, Any]) -> Any:
    from neox_model.train.data.datasets import all_blocks

    ((_, blocks),) = all_blocks(resolved_from(settings).data).items()
    return blocks


def plain_index(settings: dict[str, Any]) -> torch.Tensor:
    """Embeddings of all blocks in float64."""
    blocks = blocks_of_all(settings)
    rows = [blocks.framed(blocks.tokens(blocks[k]), blocks[k].sequence) for k in range(len(blocks))]
    weights = weights_of(Path(settings["ict_load"]))
    return plain_embeddings(weights, torch.from_numpy(np.stack(rows)), "block")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_has_the_embeddings_of_a_plain_reading(tmp_path, trained, layout):
    more, size = LAYOUTS[layout]
    settings = trained | SEARCH | {"block_data_path": str(tmp_path / "index")} | more
    found, *others = run_ranks(retrieve, size=size, program="index", settings=settings)
    index, wanted = open_block_index(tmp_path / "index"), plain_index(trained)
    assert shows(found, f"{tmp_path / 'index'}: {len(wanted)}", f"width {SIZE}")
    assert others == [None] * (size - 1)
    torch.testing.assert_close(torch.tensor(index.embeddings).double(), wanted, atol=1e-4, rtol=1e-4)
    blocks = blocks_of_all(trained)
    for row in range(len(blocks)):
        place = (0, blocks[row].sequence, blocks[row].begin)
        assert (*place, blocks[row].length) == tuple(index.places[:, row])
        assert index.row_of(place) == row


def interrupted(settings: dict[str, Any]) -> str:
    """Make an index in a process that ends when it has written three parts."""
    from neox_data import block_index

    written = 0

    def counted(path: Path) -> Any:
        nonlocal written
        written += path.suffix == ".npy"
        if written > 3:
            raise OSError(28, "No space left on device", str(path))
        return written_aside(path)

    block_index.written_aside = counted
    try:
        retrieve("index", settings)
    except NeoXError as error:
        return str(error)
    finally:
        block_index.written_aside = written_aside
    return "not interrupted"


def test_an_interrupted_index_is_continued_by_another_number_of_processes(tmp_path, trained):
    settings = trained | SEARCH | {"block_data_path": str(tmp_path / "index")}
    (error,) = run_ranks(interrupted, size=1, settings=settings)
    assert error.startswith(f"the index {tmp_path / 'index'} cannot be written: ")
    assert "No space left" in error
    assert error.endswith("make room on the disk, and run the same command again")
    parts = tmp_path / "index.partial" / "parts"
    before = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.npy")}
    assert len(before) == 3
    assert not (tmp_path / "index").exists()
    # The first part is marked, so that computing it again would be seen.
    first = np.load(parts / "000000000000.npy")
    np.save(parts / "000000000000.npy", first + 1)
    run_ranks(retrieve, size=2, program="index", settings=settings)
    index, wanted = open_block_index(tmp_path / "index"), plain_index(trained)
    wanted[: len(first)] += 1
    torch.testing.assert_close(torch.tensor(index.embeddings).double(), wanted, atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "index.partial").exists()
    (again,) = run_ranks(retrieve, size=1, program="index", settings=settings)
    assert again.startswith(f"{tmp_path / 'index'} is complete already: ")
    other = settings | {"use_one_sent_docs": True}
    with refused(Exception, "index of another"):
        run_ranks(retrieve, size=1, program="index", settings=other)


@pytest.mark.parametrize("size", [1, 2])
def test_a_search_finds_the_best_blocks_of_a_plain_reading(tmp_path, trained, size):
    more = {"block_data_path": str(tmp_path / "index"), "block_query": "qq q. qqq", "block_count": 4}
    settings = trained | SEARCH | more | {"model_parallel_size": size}
    run_ranks(retrieve, size=size, program="index", settings=settings)
    found, *_ = run_ranks(retrieve, size=size, program="find", settings=settings)
    tokenizer = build_tokenizer("CharLevelTokenizer")
    row = framed(np.array(tokenizer.encode("qq q. qqq")), LENGTH, tokenizer.end_of_document)
    query = plain_embeddings(weights_of(Path(trained["ict_load"])), torch.from_numpy(row[None]), "query")
    scores = (query @ plain_index(trained).T)[0]
    blocks, order = blocks_of_all(trained), scores.argsort(descending=True)[:4].tolist()
    lines = re.findall(r"(?m)^\d+\. score (\S+), document (\d+) of \S+, tokens (\d+) to (\d+)$", found)
    assert len(lines) == 4
    for row_number, (score, document, begin, last) in zip(order, lines, strict=True):
        block = blocks[row_number]
        assert float(score) == pytest.approx(float(scores[row_number]), rel=2e-3)
        assert (int(document), int(begin), int(last) - int(begin) + 1) == (
            *(block.sequence, block.begin),
            block.length,
        )
        assert "   " + tokenizer.decode(blocks.tokens(block).tolist()).splitlines()[0] in found


def test_recall_is_that_of_a_plain_reading(tmp_path, trained):
    """Each sentence of the validation documents against its block without it, and all other whole blocks."""
    from neox_data.inverse_cloze import InverseClozeDataset
    from neox_model.train.data.datasets import held_out_blocks

    settings = trained | SEARCH | {"block_data_path": str(tmp_path / "index")}
    run_ranks(retrieve, size=1, program="index", settings=settings)
    (found,) = run_ranks(retrieve, size=1, program="find", settings=settings)
    part, held_out = held_out_blocks(resolved_from(trained).data)
    assert part == "valid"
    ((_, held_out),) = held_out.items()
    dataset = InverseClozeDataset(
        held_out, name=part, num_samples=1, seed=settings.get("seed", 1234), query_in_block=0.0
    )
    weights, everything = weights_of(Path(trained["ict_load"])), plain_index(trained)
    all_blocks = blocks_of_all(trained)
    rows = {(all_blocks[k].sequence, all_blocks[k].begin): k for k in range(len(all_blocks))}
    hits = {1: 0, 3: 0}
    for item in range(len(dataset)):
        block = held_out[dataset.block_of(item)]
        pair = torch.from_numpy(dataset[item])
        query = plain_embeddings(weights, pair[:1], "query")
        own = float((query * plain_embeddings(weights, pair[1:], "block")).sum())
        scores = (query @ everything.T)[0]
        scores[rows[block.sequence, block.begin]] = -np.inf
        for k in hits:
            hits[k] += int((scores >= own).sum()) < k
    assert found["queries"] == len(dataset)
    assert found["blocks"] == len(everything)
    assert found["found"] == pytest.approx({str(k): hit / len(dataset) for k, hit in hits.items()})
    assert 0 < found["found"]["3"] < 1
    assert found["text"].startswith(
        f"{len(dataset)} sentences of the validation documents, each among {len(everything)} blocks: top 1 "
    )


def test_an_index_of_other_texts_of_the_same_lengths_is_refused(tmp_path, trained):
    texts = write_letters(tmp_path / "text")
    settings = trained | SEARCH | {"block_data_path": str(tmp_path / "index"), "data_path": texts}
    run_ranks(retrieve, size=2, program="index", settings=settings)
    bin_path = Path(f"{texts}.bin")
    tokens = np.fromfile(bin_path, np.uint16)
    # Two letters of the first document are exchanged, and its sentences stay as long as they are.
    first, second = (
        int(np.flatnonzero(tokens == letter)[0]) for letter in np.unique(tokens[tokens > 0])[-2:]
    )
    tokens[[first, second]] = tokens[[second, first]]
    tokens.tofile(bin_path)
    for program, more in (("find", {"block_query": "q"}), ("index", {})):
        with refused(Exception, "'documents", "'doc"):
            run_ranks(retrieve, size=2, program=program, settings=settings | more)


def test_an_index_of_another_checkpoint_is_refused(tmp_path, trained):
    settings = trained | SEARCH | {"block_data_path": str(tmp_path / "index"), "block_query": "q"}
    run_ranks(retrieve, size=1, program="index", settings=settings)
    other = settings | {"ict_load": str(tmp_path / "other"), "load": None}
    again = SETTINGS | {"train_iters": ITERATIONS - 2, "seed": 7}
    run_ranks(train, size=1, settings=again | {"data_path": trained["data_path"], "save": other["ict_load"]})
    with refused(Exception, "iteration 4, manifest"):
        run_ranks(retrieve, size=1, program="find", settings=other)
    nowhere = settings | {"block_data_path": str(tmp_path / "nothing")}
    with refused(Exception, "nothing contains no"):
        run_ranks(retrieve, size=1, program="find", settings=nowhere)
