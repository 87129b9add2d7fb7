"""An S3 server on this machine (moto), reached through a proxy whose connections a test can cut."""

import importlib.util
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["BUCKET", "CREDENTIALS", "REQUIRES_S3", "emptied_bucket", "refusing", "serving"]

REQUIRES_S3 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("moto", "flask", "flask_cors", "s3fs")),
    reason="requires an S3 server and its client; run: make sweep NAME=services",
)
BUCKET = "checkpoints"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    # Of botocore itself, whose pauses add to ours.
    "AWS_MAX_ATTEMPTS": "1",
}
_START_SECONDS = 120


@contextmanager
def serving() -> Iterator[int]:
    """Yield the port of a server, without buckets, and end it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None, "the S3 server ended"
                assert time.monotonic() < deadline, "the S3 server did not start"
                time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


def emptied_bucket(port: int) -> Any:
    """Return the file system of a server, without a proxy, whose bucket is empty."""
    import fsspec

    system = fsspec.filesystem(
        "s3",
        key="testing",
        secret="testing",
        endpoint_url=f"http://127.0.0.1:{port}",
        use_listings_cache=False,
    )
    if system.exists(BUCKET):
        system.rm(BUCKET, recursive=True)
    system.mkdir(BUCKET)
    return system


@contextmanager
def refusing(port: int) -> Iterator[None]:
    """Within, the server refuses all credentials."""
    _count_without_check(port, "0")
    try:
        yield
    finally:
        _count_without_check(port, "inf")


def _count_without_check(port: int, count: str) -> None:
    """Set after how many requests the server begins to check credentials."""
    url = f"http://127.0.0.1:{port}/moto-api/reset-auth"
    request = urllib.request.Request(url, data=count.encode(), headers={"Content-Type": "text/plain"})
    urllib.request.urlopen(request).close()
