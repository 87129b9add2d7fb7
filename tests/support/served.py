"""A server of a small model, started by `neox-launch serve`, and requests to it."""

import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.corpus import write_corpus
from support.launches import ENVIRONMENT, LAUNCH, launch, write_job
from support.settings import SMALL_TRAINING

__all__ = ["TEMPLATE", "Server", "serving", "write_trained_model"]

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_START_SECONDS = 180.0
_ADDRESS = re.compile(r"serving \S+ on http://127\.0\.0\.1:(\d+)\s")


def write_trained_model(folder: Path) -> None:
    """Train a small model of letters; write its configuration `job.yml`, and a chat template."""
    changes = {
        "seq_length": 96,
        "max_position_embeddings": 96,
        "hidden_size": 32,
        "init_method_std": 0.2,
        "no_weight_tying": True,
        "hidden_dropout": 0.0,
        "train_iters": 30,
        "save_interval": 30,
        "save": "runs",
        "load": "runs",
        "generation_batch_size": 4,
    }
    write_job(folder, SMALL_TRAINING | {"data_path": write_corpus(folder)} | changes)
    (folder / "chat.jinja").write_text(TEMPLATE)
    done = launch(folder, "job.yml", seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass
class Server:
    """A running server.

    Args:
        process: the launcher.
        port: where it listens.
        log: file of its log.
    """

    process: subprocess.Popen[str]
    port: int
    log: Path

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        host: str | None = None,
    ) -> tuple[int, Any]:
        """Return the status and the content of a response. Bodies that are not bytes are sent as JSON."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.putrequest(method, path, skip_host=True)
            given = {"Host": host or f"127.0.0.1:{self.port}", "Content-Type": "application/json"}
            given |= {"Content-Length": str(len(content))} if content is not None else {}
            for name, value in (given | dict(headers or {})).items():
                connection.putheader(name, value)
            connection.endheaders(content)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        is_json = "json" in (response.getheader("content-type") or "")
        return response.status, json.loads(text) if is_json else text

    def complete(self, **fields: Any) -> tuple[int, Any]:
        """Return the response of /v1/completions, greedy unless stated."""
        return self.request("POST", "/v1/completions", {"temperature": 0, **fields})

    def wait_for_texts(self, count: int) -> None:
        """Wait until this many texts are waiting or being generated."""
        limit = time.monotonic() + 60
        while self.request("GET", "/health")[1]["texts"] != count:
            assert time.monotonic() < limit
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the launcher, and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def serving(
    folder: Path,
    *arguments: str,
    config: Sequence[str] = ("job.yml",),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server, by default in a folder of `write_trained_model`, and end it after the block.

    Args:
        folder: the working folder.
        arguments: of the command.
        config: arguments that name the configuration.
        environment: further variables.
    """
    log = folder / f"serve-{len(list(folder.glob('serve-*')))}.log"
    command = [str(LAUNCH), "serve", *config, "--set", "serve.port=0", *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | ENVIRONMENT | dict(environment or {}),
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        limit = time.monotonic() + _START_SECONDS
        while (found := _ADDRESS.search(log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < limit, log.read_text()
            time.sleep(0.1)
        yield Server(process, int(found[1]), log)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
