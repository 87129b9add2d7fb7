"""Uploads to a real S3 server on this machine (moto), whose connections are cut in the middle."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from neox_config.facts.checkpoints import LATEST, MANIFEST
from neox_config.facts.stores import MULTIPART_BYTES
from neox_model.checkpoint.downloads import local_folder
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.store_claim import claim_store
from neox_model.checkpoint.uploads import Uploads
from neox_model.parallel.groups import SINGLE_PROCESS
from support.checkpoint_runs import Run
from support.cut_connections import Proxy, proxied
from support.refusals import refused
from support.s3_server import BUCKET, CREDENTIALS, REQUIRES_S3, emptied_bucket, refusing, serving

pytestmark = [pytest.mark.slow, REQUIRES_S3]

URL = f"s3://{BUCKET}/runs/first"
WIDTH = 500_000
"""Weights and states of 18 MB: four parts of an upload."""


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with serving() as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The connection to the server of everything in this test but `store`."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with proxied(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture
def store(proxy: Proxy, server: int) -> Any:
    return emptied_bucket(server)


def saved(folder: Path, *, updates: int, width: int = WIDTH) -> tuple[Run, Path]:
    run = Run(width=width)
    for _ in range(updates):
        run.train()
    return run, run.save(folder)


def loaded(cache: Path, *, width: int = WIDTH) -> Run | None:
    folder = local_folder(URL, SINGLE_PROCESS, cache=str(cache), patience=0.0)
    if folder is None:
        return None
    run = Run(width=width)
    run.load(folder)
    return run


def uploading(folder: Path, *, patience: float) -> Uploads:
    uploads = Uploads(folder.parent, URL, chunk_bytes=MULTIPART_BYTES, patience=patience)
    uploads.submit(folder)
    return uploads


def objects(store: Any) -> set[str]:
    return {path.removeprefix("checkpoints/runs/first/") for path in store.find("checkpoints")}


def test_a_server_that_goes_away_and_comes_back_has_the_whole_checkpoint(tmp_path, proxy, store):
    assert loaded(tmp_path / "cache") is None
    first, folder = saved(tmp_path / "save", updates=1)
    uploading(folder, patience=0.0).finish()
    second, folder = saved(tmp_path / "save", updates=2)
    assert folder.name == "global_step2"
    proxy.cut_after(12_000_000)
    uploads = uploading(folder, patience=60.0)
    assert proxy.is_cut.wait(60)
    time.sleep(0.5)
    uploads.poll()
    assert store.cat_file(f"checkpoints/runs/first/{LATEST}") == b"global_step1\n"
    assert not any(name.startswith("global_step2") for name in objects(store))
    proxy.mend()
    run = loaded(tmp_path / "cache")
    assert (run.iteration, run.weights) == (1, first.weights)
    uploads.finish()
    assert objects(store) == {
        LATEST,
        *(f"global_step{step}/{file}" for step in (1, 2) for file in (MANIFEST, "shard-00000.safetensors")),
    }
    run = loaded(tmp_path / "cache")
    assert (run.iteration, run.weights, run.states) == (2, second.weights, second.states)


def test_a_server_that_stays_away_fails_the_upload_and_keeps_the_earlier_checkpoint(tmp_path, proxy, store):
    first, folder = saved(tmp_path / "save", updates=1, width=4)
    uploading(folder, patience=0.0).finish()
    _, folder = saved(tmp_path / "save", updates=2, width=WIDTH)
    proxy.cut_after(8_000_000)
    uploads = uploading(folder, patience=1.0)
    with refused(CheckpointError, URL, f"{URL}/global_step2/"):
        uploads.finish()
    with refused(CheckpointError, f"reading {URL}/{LATEST} failed"):
        loaded(tmp_path / "cache", width=4)
    proxy.mend()
    run = loaded(tmp_path / "cache", width=4)
    assert (run.iteration, run.weights) == (1, first.weights)


def test_a_bucket_that_does_not_exist_is_refused_without_repeating(tmp_path, proxy):
    _, folder = saved(tmp_path / "save", updates=1, width=4)
    uploads = Uploads(folder.parent, "s3://absent/run", chunk_bytes=MULTIPART_BYTES, patience=600.0)
    uploads.submit(folder)
    with refused(CheckpointError, "s3://absent/run"):
        uploads.finish()


def test_wrong_credentials_are_refused_before_the_training_without_repeating(tmp_path, proxy, store, server):
    (tmp_path / "save").mkdir()
    with refusing(server), refused(CheckpointError, URL):
        claim_store(URL, tmp_path / "save", load=None, patience=600.0)
    assert not store.find(BUCKET)
    assert claim_store(URL, tmp_path / "save", load=None)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "absent"])
def test_a_damaged_object_is_not_loaded(tmp_path, proxy, store, damage):
    _, folder = saved(tmp_path / "save", updates=1, width=4)
    uploading(folder, patience=0.0).finish()
    [shard] = store.glob(f"{BUCKET}/runs/first/global_step1/*.safetensors")
    data = bytearray(store.cat_file(shard))
    data[-1] ^= 1
    if damage == "absent":
        store.rm_file(shard)
    else:
        store.pipe_file(shard, bytes(data if damage == "flipped" else data[:-9]))
    reason = ["not exist"] if damage == "absent" else ["2 times", "shard-00000"]
    with refused(CheckpointError, *reason):
        loaded(tmp_path / "cache", width=4)
