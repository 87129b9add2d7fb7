"""Trainings that upload to an object store, a folder or an S3 server, and trainings that resume from it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from neox_config.facts.checkpoints import LATEST, MANIFEST
from neox_model.checkpoint.adapters import merge_adapters
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.downloads import cache_folder
from support.corpus import write_corpus
from support.cut_connections import proxied
from support.distributed import DistributedFailure, run_ranks
from support.refusals import refused
from support.s3_server import BUCKET, CREDENTIALS, REQUIRES_S3, emptied_bucket, serving
from support.settings import SMALL_TRAINING, resolved_from

pytestmark = pytest.mark.slow

STEPS = 4
ZERO2 = {"zero_optimization": {"stage": 2}, "precision": "bfloat16", "train_batch_size": 8}


def train(trainings: list[dict[str, Any]]) -> None:
    """Train each in the same processes; `lost` is a folder that is deleted before.

    `goes_away` is the folder of a store that nothing can be written to after the start of the run.
    """
    from functools import partial
    from unittest.mock import patch

    from torch import distributed

    from neox_model.checkpoint.store_claim import claim_store
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run, saving

    for settings in trainings:
        lost, goes_away = settings.pop("lost", None), settings.pop("goes_away", None)
        if lost is not None and distributed.get_rank() == 0:
            shutil.rmtree(lost)
        distributed.barrier()
        resolved = resolved_from(SMALL_TRAINING | settings, devices=distributed.get_world_size())
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)

        def claim_and_lose(*arguments: Any, lost: str | None = goes_away, **others: Any) -> str:
            number = claim_store(*arguments, **others, patience=0.0)
            if lost is not None:
                shutil.rmtree(lost)
                Path(lost).write_text("a file: nothing can be written below it")
            return number

        with (
            patch.object(saving, "Uploads", partial(saving.Uploads, patience=0.0)),
            patch.object(saving, "claim_store", claim_and_lose),
        ):
            open_run.train_in(groups, resolved)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def settings_of(corpus: str, folder: Path, url: str) -> dict[str, Any]:
    return {
        "data_path": corpus,
        "train_iters": STEPS,
        "save": str(folder),
        "save_interval": 2,
        "keep_last_n_checkpoints": 1,
        "checkpoint_store": url,
        "store_cache": str(folder.parent / "cache"),
    }


def test_a_training_that_lost_its_folder_resumes_from_the_store_bit_for_bit(tmp_path, corpus):
    """Two ranks, ZeRO 2 and bfloat16."""
    url = f"file://{tmp_path}/store"
    whole = settings_of(corpus, tmp_path / "whole", f"file://{tmp_path}/other store") | ZERO2
    # Empty at first, which is no error, because this run fills it.
    from_store = settings_of(corpus, tmp_path / "save", url) | ZERO2 | {"load": url}
    trainings = [whole, from_store | {"exit_interval": 2}, from_store | {"lost": str(tmp_path / "save")}]
    run_ranks(train, size=2, trainings=trainings)
    [downloaded] = cache_folder(url, str(tmp_path / "cache")).glob("*/global_step2")
    assert Manifest.read(downloaded).iteration == 2
    tensors = [
        Manifest.read(tmp_path / folder / "global_step4").tensors
        for folder in ("whole", "save", "store", "other store")
    ]
    assert tensors == [tensors[0]] * 4
    assert (tmp_path / "store" / LATEST).read_text() == "global_step4\n"
    # Only the folder is limited to one checkpoint.
    assert [path.name for path in (tmp_path / "save").glob("global_*")] == ["global_step4"]
    assert Manifest.read(tmp_path / "store" / "global_step2").iteration == 2


@pytest.mark.sweep
def test_a_store_that_went_away_fails_the_end_and_the_next_start_uploads_what_is_missing(tmp_path, corpus):
    store = tmp_path / "store"
    settings = settings_of(corpus, tmp_path / "save", f"file://{store}")
    with refused(DistributedFailure, "global_step4, is complete"):
        run_ranks(train, size=1, trainings=[settings | {"goes_away": str(store)}])
    assert (tmp_path / "save" / LATEST).read_text() == "global_step4\n"
    store.unlink()
    run_ranks(train, size=1, trainings=[settings | {"load": str(tmp_path / "save")}])
    assert Manifest.read(store / "global_step4") == Manifest.read(tmp_path / "save" / "global_step4")


@pytest.mark.sweep
def test_an_empty_store_is_an_error_on_all_ranks_unless_this_training_fills_it(tmp_path, corpus):
    settings = settings_of(corpus, tmp_path / "save", f"file://{tmp_path}/store") | ZERO2
    with refused(DistributedFailure, "contains no checkpoint"):
        run_ranks(train, size=2, trainings=[settings | {"load": f"file://{tmp_path}/other"}])
    assert not (tmp_path / "save" / LATEST).exists()


def test_another_training_is_refused_where_one_has_uploaded_before_it_trains(tmp_path, corpus):
    url = f"file://{tmp_path}/store"
    first = settings_of(corpus, tmp_path / "first", url) | ZERO2
    run_ranks(train, size=2, trainings=[first])
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    with refused(DistributedFailure, "global_step4"):
        run_ranks(train, size=2, trainings=[settings_of(corpus, tmp_path / "second", url) | ZERO2])
    assert {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()} == before
    assert not list((tmp_path / "second").glob("global_step*"))


def test_fine_tuning_from_a_store_is_that_from_a_folder_bit_for_bit(tmp_path, corpus):
    """Two ranks, ZeRO 2 and bfloat16; asynchronous saves that are uploaded to another store."""
    url = f"file://{tmp_path}/store"
    base = settings_of(corpus, tmp_path / "base", url) | ZERO2
    others = {"checkpoint_store": f"file://{tmp_path}/tuned store", "async_save": True}
    tuned = base | {"finetune": True, "train_iters": 2}
    trainings = [
        base,
        tuned | {"load": url, "save": f"{tmp_path}/from-url"} | others,
        tuned | {"load": f"{tmp_path}/base", "save": f"{tmp_path}/from-folder", "checkpoint_store": None},
    ]
    run_ranks(train, size=2, trainings=trainings)
    tensors = [
        Manifest.read(tmp_path / folder / "global_step2").tensors
        for folder in ("from-url", "from-folder", "tuned store")
    ]
    assert tensors == [tensors[0]] * 3
    assert tensors[0] != Manifest.read(tmp_path / "store" / "global_step2").tensors


def test_adapters_of_a_base_in_a_store_are_those_of_one_in_a_folder_bit_for_bit(tmp_path, corpus):
    """The base is trained on before the adapters resume: its recorded checkpoint is downloaded."""
    url, adapted_url = f"file://{tmp_path}/store", f"file://{tmp_path}/adapters store"
    base = settings_of(corpus, tmp_path / "base", url) | ZERO2 | {"keep_last_n_checkpoints": None}
    adapted = base | {"lora_rank": 2, "checkpoint_store": None}
    stored = {
        "save": f"{tmp_path}/stored",
        "checkpoint_store": adapted_url,
        "async_save": True,
        "load": adapted_url,
    }
    longer = {"train_iters": STEPS + 2, "override_lr_scheduler": True, "load": f"{tmp_path}/base"}
    trainings = [
        base,
        adapted | {"lora_base": f"{tmp_path}/base", "save": f"{tmp_path}/whole"},
        adapted | stored | {"lora_base": url, "exit_interval": 2},
        base | longer,
        adapted | stored | {"lora_base": url, "lost": f"{tmp_path}/stored"},
    ]
    run_ranks(train, size=2, trainings=trainings)
    assert (tmp_path / "store" / LATEST).read_text() == f"global_step{STEPS + 2}\n"
    whole, resumed = (Manifest.read(tmp_path / name / "global_step4") for name in ("whole", "stored"))
    assert whole.tensors == resumed.tensors
    there, here = whole.config["base"], resumed.config["base"]
    assert here == there | {"folder": url}
    [download] = cache_folder(url, base["store_cache"]).iterdir()
    assert download.name.endswith("-weights")
    merged = [
        merge_adapters(tmp_path / "stored" / "global_step4", tmp_path / name, base=folder)
        for name, folder in (("from-download", download), ("from-folder", tmp_path / "base"))
    ]
    tensors = [Manifest.read(folder).tensors for folder in merged]
    assert tensors == [tensors[1]] * 2
    assert here["iteration"] == STEPS


@REQUIRES_S3
def test_a_training_resumes_from_an_s3_server_and_survives_its_absence(tmp_path, corpus, monkeypatch):
    """Two ranks, ZeRO 2 and bfloat16; the server goes away within the upload of a shard."""

    def settings(name: str) -> dict[str, Any]:
        return settings_of(corpus, tmp_path / name, f"s3://{BUCKET}/{name}") | ZERO2

    def is_uploaded(name: str) -> bool:
        there = system.cat_file(f"{BUCKET}/{name}/global_step4/{MANIFEST}")
        return there == (tmp_path / name / "global_step4" / MANIFEST).read_bytes()

    with serving() as server, proxied(server) as proxy:
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        system = emptied_bucket(server)
        parts = settings("parts") | {"load": f"s3://{BUCKET}/parts"}
        whole = settings("whole") | {"checkpoint_store": None}
        trainings = [whole, parts | {"exit_interval": 2}, parts | {"lost": str(tmp_path / "parts")}]
        run_ranks(train, size=2, trainings=trainings)
        found = [Manifest.read(tmp_path / name / "global_step4").tensors for name in ("whole", "parts")]
        assert found == [found[0]] * 2
        assert is_uploaded("parts")
        assert system.cat_file(f"{BUCKET}/parts/{LATEST}") == b"global_step4\n"

        proxy.cut_after(40_000)
        with refused(DistributedFailure, "global_step4, is complete"):
            run_ranks(train, size=2, trainings=[settings("cut")])
        assert proxy.is_cut.is_set()
        assert Manifest.read(tmp_path / "cut/global_step4").tensors == found[0]
        assert not system.exists(f"{BUCKET}/cut/{LATEST}")
        proxy.mend()
        run_ranks(train, size=2, trainings=[settings("cut") | {"load": str(tmp_path / "cut")}])
        assert is_uploaded("cut")
