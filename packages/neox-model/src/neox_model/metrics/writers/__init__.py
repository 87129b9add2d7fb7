"""Where metrics go."""

from collections.abc import Callable

from neox_model.metrics.writers.base import MetricWriter
from neox_model.metrics.writers.comet import CometWriter
from neox_model.metrics.writers.console import ConsoleWriter
from neox_model.metrics.writers.csv import CsvWriter
from neox_model.metrics.writers.jsonl import JsonlWriter
from neox_model.metrics.writers.tensorboard import TensorBoardWriter
from neox_model.metrics.writers.wandb import WandbWriter

__all__ = ["WRITERS", "MetricWriter"]

WRITERS: dict[str, Callable[..., MetricWriter]] = {
    "console": ConsoleWriter,
    "comet": CometWriter,
    "csv": CsvWriter,
    "jsonl": JsonlWriter,
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
}
