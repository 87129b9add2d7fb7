"""Where prompts come from and where their continuations go: unconditional, input-file, interactive.

Results are JSON lines, one per prompt, with the fields that GPT-NeoX writes; people get to see them as text
on standard output. Prompts are shared out to the data-parallel replicas; rank 0 writes in the prompts' order.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import click
import torch

from neox_data.tokenizers import Tokenizer
from neox_launcher.errors import NeoXError
from neox_model.checkpoint.outcome import collect, gather
from neox_model.generate.decode import Decoder
from neox_model.parallel.groups import Groups
from neox_model.parallel.random import mixed_seed
from neox_model.worker import show

__all__ = ["MODES", "Job", "Sample", "read_prompts"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the results.

    Args:
        context: the prompt.
        text: what the model added; None when it added nothing.
        length: tokens of `text`.
        finished: whether the model ended the document itself.
        message: why there is no text, when there is none.
        duration_seconds: time it took.
    """

    context: str
    text: str | None
    length: int
    finished: bool
    message: str | None
    duration_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to generate, and with what.

    Args:
        decoder: continues token ids.
        tokenizer: text to ids and back.
        groups: this rank's process groups.
        seed: with a sample's number, decides its random choices, whatever the number of processes.
        num_samples: texts without a prompt.
        input_file: prompts, one per line.
        output_file: where JSON lines go; None: beside the input file, or nowhere without one.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    groups: Groups
    seed: int
    num_samples: int = 0
    input_file: Path | None = None
    output_file: Path | None = None

    def sample(self, context: str, number: int) -> Sample:
        """Continue one prompt. Collective over the tensor-parallel group."""
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(mixed_seed("sample", self.seed, number))
        result = self.decoder.continue_prompt(self.tokenizer.encode(context) if context else [], generator)
        return Sample(
            context=context,
            text=self.tokenizer.decode(result.tokens) if result.tokens else None,
            length=len(result.tokens),
            finished=result.finished,
            message=result.message,
            duration_seconds=round(time.perf_counter() - started, 3),
        )


def read_prompts(path: Path) -> list[str]:
    """The lines of a file, stripped, empty ones left out.

    Raises:
        NeoXError: the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise NeoXError(f"sample_input_file {path} cannot be read: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def _unconditional(job: Job) -> None:
    _generate_all(job, [""] * job.num_samples, job.output_file)


def _from_file(job: Job) -> None:
    if job.input_file is None:
        raise NeoXError(
            "text_gen_type: input-file needs sample_input_file; name a file with one prompt per line"
        )
    output = job.output_file or job.input_file.with_name(job.input_file.name + ".output.jsonl")
    _generate_all(job, read_prompts(job.input_file), output)


def _interactive(job: Job) -> None:
    """Continue each line of standard input, until it ends. The first replica works, the others wait."""
    with _results(job.output_file if job.groups.world.rank == 0 else None) as write:
        for number, context in enumerate(_typed_prompts(job.groups)):
            if job.groups.data.rank == 0:
                sample = job.sample(context, number)
                if job.groups.world.rank == 0:
                    write(sample)
                    _show(sample, "")


def _typed_prompts(groups: Groups) -> Iterator[str]:
    """What is typed where rank 0 runs, on every rank."""
    while True:
        line: str | None = None
        if groups.world.rank == 0:
            click.echo("prompt (Ctrl-D ends)> ", nl=False, err=True)
            line = sys.stdin.readline() or None
        line = gather(groups.control, line)[0]
        if line is None:
            return
        if line.strip():
            yield line.strip()


MODES: dict[str, Callable[[Job], None]] = {
    "unconditional": _unconditional,
    "input-file": _from_file,
    "interactive": _interactive,
}


def _generate_all(job: Job, contexts: Sequence[str], output: Path | None) -> None:
    """Each replica takes every n-th prompt; after each round rank 0 writes and shows what was made."""
    replicas, writes = job.groups.data.size, job.groups.world.rank == 0
    with _results(output if writes else None) as write:
        for first in range(0, len(contexts), replicas):
            number = first + job.groups.data.rank
            sample = job.sample(contexts[number], number) if number < len(contexts) else None
            made = collect(job.groups.control, sample if job.groups.model.rank == 0 else None)
            for shown, made_sample in enumerate((one for one in made if one is not None), start=first + 1):
                write(made_sample)
                _show(made_sample, f"sample {shown} of {len(contexts)}")


@contextmanager
def _results(path: Path | None) -> Iterator[Callable[[Sample], None]]:
    """A function that appends one sample as a JSON line; the file gets its name when all are written."""
    if path is None:
        yield lambda sample: None
        return
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("w", encoding="utf-8") as file:
            yield lambda sample: _append(file, sample)
    except OSError as error:
        raise NeoXError(
            f"the results cannot be written to {path}: {error}; let sample_output_file name another file"
        ) from error
    aside.rename(path)
    logger.info("wrote %s", path)


def _append(file: TextIO, sample: Sample) -> None:
    file.write(json.dumps(asdict(sample), ensure_ascii=False) + "\n")
    file.flush()


def _show(sample: Sample, title: str) -> None:
    details = [title] if title else []
    details += [f"{sample.length} tokens", f"{sample.duration_seconds:.1f} s"]
    details += ["document ended"] if sample.finished else []
    details += [sample.message] if sample.message else []
    show(f"--- {', '.join(details)} ---\n{sample.context}{sample.text or ''}\n")
