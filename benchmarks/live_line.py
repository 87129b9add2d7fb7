"""CPU time of `neox-launch` while it draws the live line of a run.

A number of agents, with eight workers each, report once a second, as in a job; every report has the status of
rank 0, which the launcher shows four times a second on a pseudo terminal. Prints the CPU time of the main
loop, of the drawing and of both, as a fraction of one core.
"""

import fcntl
import os
import struct
import termios
import threading
import time

import click

from neox_config.finite_json import restored
from neox_launcher.controller.hang import HangWatch
from neox_launcher.controller.live_display import LiveDisplay
from neox_launcher.protocol.messages import decode_line, encode_message

_WORKERS_OF_A_HOST = 8
_METRICS = {
    "loss/train": 2.3456,
    "throughput/tokens_per_second": 123456.7,
    "throughput/tflops_per_device": 123.4,
    "optimizer/learning_rate": 6e-4,
    "loss/validation": 2.5,
    "memory/bytes": 6e10,
}


@click.command()
@click.option("--workers", default=256, show_default=True, help="Number of workers.")
@click.option("--seconds", default=20, show_default=True, help="Duration of the measurement.")
@click.option("--columns", default=120, show_default=True, help="Width of the terminal.")
def main(workers: int, seconds: int, columns: int) -> None:
    """Measure the CPU time of the launcher for the reports of a job."""
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    threading.Thread(target=_drain, args=(reading,), daemon=True).start()
    display = LiveDisplay(os.fdopen(writing, "w", closefd=False))
    watch = HangWatch(600.0)
    in_reports = 0.0
    started, started_cpu = time.monotonic(), time.process_time()
    for iteration in range(1, seconds + 1):
        messages = [_report(first, iteration) for first in range(0, workers, _WORKERS_OF_A_HOST)]
        before = time.process_time()
        for line in messages:
            _receive(line, display, watch)
        in_reports += time.process_time() - before
        time.sleep(max(0.0, started + iteration - time.monotonic()))
    whole, wall = time.process_time() - started_cpu, time.monotonic() - started
    display.close()
    click.echo(f"{workers} workers, {wall:.0f} s, {columns} columns")
    click.echo(f"reports   {in_reports / wall:.2%} of a core")
    click.echo(f"all       {whole / wall:.2%} of a core, with the encoding of the reports by this program")


def _receive(line: bytes, display: LiveDisplay, watch: HangWatch) -> None:
    message = decode_line(line)
    for rank, iteration in message["ranks"].items():
        watch.hear(int(rank), int(iteration))
    if message["status"]:
        display.show_status(restored(message["status"]))


def _report(first: int, iteration: int) -> bytes:
    ranks = {str(rank): iteration for rank in range(first, first + _WORKERS_OF_A_HOST)}
    status = {"phase": "", "iteration": iteration, "last_iteration": 100_000, "metrics": _METRICS}
    return encode_message("progress", {"ranks": ranks, "status": {} if first else status})


def _drain(descriptor: int) -> None:
    while os.read(descriptor, 65536):
        pass


if __name__ == "__main__":
    main()
