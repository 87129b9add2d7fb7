"""The modes of generation: unconditional, input-file and interactive.

Results are JSON lines, one per prompt, with GPT-NeoX's fields, and are shown as text on standard output.
Prompts are distributed over the data-parallel replicas; rank 0 writes results in the order of the prompts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from neox_config.errors import ConfigError
from neox_data.tokenizers import Tokenizer
from neox_launcher.worker.reporting import interruptible
from neox_model.checkpoint.outcome import collect, gather
from neox_model.generate.decode import Decoder
from neox_model.generate.interruption import Interrupts, ending_on_signals
from neox_model.generate.prompts import read_prompt, read_prompts
from neox_model.generate.results import writing_results
from neox_model.parallel.groups import Groups
from neox_model.parallel.random import mixed_seed
from neox_model.worker import show

__all__ = ["MODES", "Job", "Sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the results.

    Args:
        context: the prompt.
        text: the generated text; None if empty.
        length: tokens of `text`.
        finished: True if the model ended the document.
        message: why there is no text, or why it ends; None if there is text.
        duration_seconds: time of the generation.
    """

    context: str
    text: str | None
    length: int
    finished: bool
    message: str | None
    duration_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The inputs of a generation.

    Args:
        decoder: continues token ids.
        tokenizer: converts text to ids and back.
        groups: this rank's process groups.
        seed: random seed; together with a sample's number it determines the sample for any number of
            processes.
        num_samples: number of texts without a prompt.
        input_file: file with one prompt per line.
        output_file: file for the JSON lines; None: next to the input file, or no file without one.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    groups: Groups
    seed: int
    num_samples: int = 0
    input_file: Path | None = None
    output_file: Path | None = None

    def sample(self, context: str, number: int, *, should_end: Callable[[], bool] = lambda: False) -> Sample:
        """Continue one prompt. Collective over the tensor-parallel group.

        Args:
            context: the prompt.
            number: number of the sample, for its random seed.
            should_end: called before each token; True ends the text.
        """
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(mixed_seed("sample", self.seed, number))
        prompt = self.tokenizer.encode(context) if context else []
        result = self.decoder.continue_prompt(prompt, generator, should_end=should_end)
        return Sample(
            context=context,
            text=self.tokenizer.decode(result.tokens) if result.tokens else None,
            length=len(result.tokens),
            finished=result.finished,
            message=result.message,
            duration_seconds=round(time.perf_counter() - started, 3),
        )


def _unconditional(job: Job) -> None:
    if job.num_samples == 0:
        raise ConfigError(
            "text_gen_type: unconditional generates num_samples texts, which is 0; set num_samples"
        )
    _generate_all(job, [""] * job.num_samples, job.output_file)


def _from_file(job: Job) -> None:
    if job.input_file is None:
        raise ConfigError(
            "text_gen_type: input-file requires sample_input_file; set it to a file with one prompt per line"
        )
    output = job.output_file or job.input_file.with_name(job.input_file.name + ".output.jsonl")
    _generate_all(job, read_prompts(job.input_file), output)


def _interactive(job: Job) -> None:
    """Continue each line of standard input, until it ends. Only the first replica generates.

    Ctrl-C ends the reply, which is kept as far as it was generated. With neox-launch, Ctrl-C at the prompt
    and a second one during a reply end the session.
    """
    interrupts = Interrupts(job.groups.model, job.decoder.device)
    output = job.output_file if job.groups.world.rank == 0 else None
    with interrupts.handled(), writing_results(output) as write:
        for number, context in enumerate(_typed_prompts(job.groups, interrupts)):
            if job.groups.data.rank == 0:
                interrupts.begin_reply()
                with interruptible(job.groups.world.rank, number):
                    sample = job.sample(context, number, should_end=interrupts.should_end_reply)
                if job.groups.world.rank == 0:
                    write(asdict(sample))
                    _show(sample, "")


def _typed_prompts(groups: Groups, interrupts: Interrupts) -> Iterator[str]:
    """Yield the lines that rank 0 reads from standard input, on every rank."""
    while True:
        line = _ask(interrupts) if groups.world.rank == 0 else None
        line = gather(groups.control, line)[0]
        if line is None:
            return
        if line:
            yield line


def _ask(interrupts: Interrupts) -> str | None:
    while True:
        try:
            with interrupts.waiting_for_input():
                return read_prompt()
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-C ends a reply; press Ctrl-D to exit)", err=True)


MODES: dict[str, Callable[[Job], None]] = {
    "unconditional": _unconditional,
    "input-file": _from_file,
    "interactive": _interactive,
}


def _generate_all(job: Job, contexts: Sequence[str], output: Path | None) -> None:
    """Generate on every replica, each taking every n-th prompt; rank 0 writes and shows each round."""
    replicas, writes = job.groups.data.size, job.groups.world.rank == 0
    with ending_on_signals(), writing_results(output if writes else None) as write:
        for first in range(0, len(contexts), replicas):
            number = first + job.groups.data.rank
            sample = job.sample(contexts[number], number) if number < len(contexts) else None
            made = collect(job.groups.control, sample if job.groups.model.rank == 0 else None)
            for shown, made_sample in enumerate((one for one in made if one is not None), start=first + 1):
                write(asdict(made_sample))
                _show(made_sample, f"sample {shown} of {len(contexts)}")


def _show(sample: Sample, title: str) -> None:
    details = [title] if title else []
    details += [f"{sample.length} tokens", f"{sample.duration_seconds:.1f} s"]
    details += ["document ended"] if sample.finished else []
    details += [sample.message] if sample.message else []
    show(f"--- {', '.join(details)} ---\n{sample.context}{sample.text or ''}\n")
