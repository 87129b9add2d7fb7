"""The modes of generation: a prompt, unconditional, input-file and interactive.

Results are JSON lines, one per text, with GPT-NeoX's fields and more, and are shown as text on standard
output. Prompts are distributed over the data-parallel replicas; rank 0 writes results in the order of the
prompts.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import click

from neox_config.errors import NeoXError
from neox_config.pluralize import pluralize
from neox_data.tokenizers import Tokenizer
from neox_launcher.worker.reporting import interruptible
from neox_model.generate.batch import Request
from neox_model.generate.conversation import Conversation
from neox_model.generate.engine import Engine, Reply, not_finite
from neox_model.generate.interruption import Interrupts, agreed_in_copy, ending_on_signals
from neox_model.generate.progress import Progress
from neox_model.generate.prompts import read_prompt, read_prompts
from neox_model.generate.results import writing_results
from neox_model.generate.sampling import GREEDY, Sampling
from neox_model.parallel.control import all_gather_object, gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.random import mixed_seed
from neox_model.worker import show

__all__ = ["MODES", "Job", "Sample", "check_numbers", "replies"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the results.

    Args:
        context: the prompt as it was given.
        text: the generated text; None if empty.
        length: number of generated tokens.
        finished: True if the model ended the document.
        message: why there is no text, or that it was interrupted; None otherwise.
        duration_seconds: time of the generation.
        prompt: the text that the model continued: the context, in a conversation behind its history.
        tokens: the generated ids, without end-of-document; with those of a stop string.
        log_probabilities: of these tokens, under the model.
        finish_reason: why the text ends (see Engine).
    """

    context: str
    text: str | None
    length: int
    finished: bool
    message: str | None
    duration_seconds: float
    prompt: str
    tokens: list[int]
    log_probabilities: list[float]
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The inputs of a generation.

    Args:
        engine: builds an engine for this number of sequences and for sequences of this many tokens.
        tokenizer: converts text to ids and back.
        groups: this rank's process groups.
        seed: random seed; together with a sample's number it determines the sample for any number of
            processes.
        seq_length: maximum number of tokens of the model, prompt included.
        maximum_tokens: maximum number of tokens of one text.
        batch_size: maximum number of sequences that are decoded together.
        sampling: how tokens are chosen; its seed is replaced by one of each sample.
        stop_strings: a text ends before the first of them.
        num_samples: number of texts without a prompt, or of continuations of `prompt`.
        prompt: the text to continue.
        keeps_history: continue a conversation instead of each line by itself.
        input_file: file with one prompt per line.
        output_file: file for the JSON lines; None: next to the input file, or no file without one.
    """

    engine: Callable[[int, int], Engine]
    tokenizer: Tokenizer
    groups: Groups
    seed: int
    seq_length: int
    maximum_tokens: int = 64
    batch_size: int = 16
    sampling: Sampling = field(default=GREEDY)
    stop_strings: tuple[str, ...] = ()
    num_samples: int = 0
    prompt: str | None = None
    keeps_history: bool = True
    input_file: Path | None = None
    output_file: Path | None = None

    def request(self, prompt: Sequence[int], number: int) -> Request:
        """Return the request for the continuation of token ids, the sample with this number."""
        return Request(
            prompt=prompt,
            maximum_tokens=self.maximum_tokens,
            sampling=replace(self.sampling, seed=mixed_seed("sample", self.seed, number)),
            stop_strings=self.stop_strings,
        )


def _sample(context: str, prompt: str, reply: Reply) -> Sample:
    return Sample(
        context=context,
        text=reply.text or None,
        length=len(reply.tokens),
        finished=reply.finish_reason == "end-of-document",
        message=reply.message,
        duration_seconds=round(reply.duration_seconds, 3),
        prompt=prompt,
        tokens=reply.tokens,
        log_probabilities=[round(value, 6) for value in reply.log_probabilities],
        finish_reason=reply.finish_reason,
    )


def _of_prompt(job: Job) -> None:
    assert job.prompt is not None
    _generate_all(job, [job.prompt] * max(1, job.num_samples), job.output_file)


def _unconditional(job: Job) -> None:
    _generate_all(job, [""] * job.num_samples, job.output_file)


def _from_file(job: Job) -> None:
    assert job.input_file is not None
    output = job.output_file or job.input_file.with_name(job.input_file.name + ".output.jsonl")
    prompts = read_prompts(job.input_file)
    _generate_all(job, [text for _, text in prompts], output, lines=[line for line, _ in prompts])


def _interactive(job: Job) -> None:
    """Answer each line of standard input, until it ends. Only the first replica generates.

    Ctrl-C ends the reply, which is kept as far as it was generated. With neox-launch, Ctrl-C at the prompt
    and a second one during a reply end the session.
    """
    groups = job.groups
    interrupts = Interrupts()
    output = job.output_file if groups.world.rank == 0 else None
    engine = job.engine(1, job.seq_length) if groups.data.rank == 0 else None
    conversation = Conversation(
        job.tokenizer, room=job.seq_length - job.maximum_tokens, keeps_history=job.keeps_history
    )
    with interrupts.handled(), writing_results(output) as write:
        for number, context in enumerate(_typed_prompts(groups, interrupts, conversation)):
            if engine is not None:
                interrupts.is_interrupted = False
                prompt, tokens = conversation.prompt(context)
                with interruptible(groups.world.rank, number):
                    reply = _stream(engine, job.request(tokens, number), interrupts, groups)
                check_numbers(reply, number)
                conversation.add(context, reply)
                if groups.world.rank == 0:
                    sample = _sample(context, prompt, reply)
                    write(asdict(sample))
                    show(f"--- {_details(sample, '')} ---\n")


def _stream(engine: Engine, request: Request, interrupts: Interrupts, groups: Groups) -> Reply:
    """Return the reply to a request, whose text is shown as it arrives."""
    ticket, shows = engine.submit(request), groups.world.rank == 0
    reply = None
    while reply is None:
        # All ranks of a copy of the model end a reply after the same token.
        if agreed_in_copy(groups, interrupts.is_interrupted):
            reply = engine.cancel(ticket)
            break
        for update in engine.step():
            reply = update.reply
            if shows and update.text:
                show(update.text, ends_line=False)
    assert reply is not None, "the request waits or runs until there is a reply"
    if shows:
        show("")
    return reply


def _typed_prompts(groups: Groups, interrupts: Interrupts, conversation: Conversation) -> Iterator[str]:
    """Yield the lines that rank 0 reads from standard input, on every rank; carry out commands."""
    while True:
        line = _ask(interrupts) if groups.world.rank == 0 else None
        line = all_gather_object(groups.control, line)[0]
        if line is None:
            return
        if (answer := conversation.command(line)) is not None:
            if groups.world.rank == 0:
                click.echo(answer, err=True)
        elif line:
            yield line


def _ask(interrupts: Interrupts) -> str | None:
    while True:
        try:
            interrupts.waits_for_input = True
            try:
                return read_prompt()
            finally:
                interrupts.waits_for_input = False
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-C ends a reply; press Ctrl-D to exit)", err=True)


MODES: dict[str, Callable[[Job], None]] = {
    "prompt": _of_prompt,
    "unconditional": _unconditional,
    "input-file": _from_file,
    "interactive": _interactive,
}


def _generate_all(
    job: Job, contexts: Sequence[str], output: Path | None, *, lines: Sequence[int] | None = None
) -> None:
    """Generate on every replica, each taking every n-th prompt; rank 0 writes and shows each round.

    Args:
        job: what to do.
        contexts: the prompts.
        output: the file of the results.
        lines: numbers of the prompts' lines in the input file, for messages.
    """
    replicas, writes = job.groups.data.size, job.groups.world.rank == 0
    mine = range(job.groups.data.rank, len(contexts), replicas)
    progress = Progress(
        len(contexts), lambda number: f"sample {number + 1}" if lines is None else f"line {lines[number]}"
    )
    with ending_on_signals(), writing_results(output if writes else None) as write:
        found = replies(job, contexts, mine, progress.note)
        for first in range(0, len(contexts), replicas):
            number = first + job.groups.data.rank
            sample = None
            if number < len(contexts):
                sample = _sample(contexts[number], contexts[number], next(found))
            is_first_of_copy = job.groups.model.rank == job.groups.pipe.rank == 0
            made = gather_object(job.groups.control, sample if is_first_of_copy else None)
            for one in (one for one in made if one is not None):
                write(asdict(one))
                progress.add(one.length, one.message if one.finish_reason == "prompt-too-long" else None)
                details = _details(one, f"sample {progress.results} of {len(contexts)}")
                show(f"--- {details} ---\n{one.context}{one.text or ''}\n")
        if writes and progress.results != len(contexts):
            raise NeoXError(
                f"{pluralize(len(contexts), 'prompt')} gave {pluralize(progress.results, 'result')}; report "
                "this error, and run again"
            )
    if writes:
        progress.finish()


def replies(
    job: Job,
    contexts: Sequence[str],
    numbers: Sequence[int],
    note: Callable[[int], None] = lambda new_tokens: None,
) -> Iterator[Reply]:
    """Yield the continuations of prompts, in the order of their numbers.

    Args:
        job: how to generate.
        contexts: the prompts of all replicas; an empty one starts a document.
        numbers: the prompts to continue.
        note: called after each step with the number of tokens that it decoded.

    Raises:
        NeoXError: the model's output is not finite.
    """
    requests = [
        job.request(job.tokenizer.encode(contexts[one]) if contexts[one] else [], one) for one in numbers
    ]
    if not requests:
        return
    longest = max(max(1, len(request.prompt)) for request in requests)
    engine = job.engine(min(job.batch_size, len(requests)), min(job.seq_length, longest + job.maximum_tokens))
    for number, reply in zip(numbers, engine.replies(requests, note), strict=True):
        check_numbers(reply, number)
        yield reply


def check_numbers(reply: Reply, number: int) -> None:
    """Raise NeoXError if the model's output for a text was not finite."""
    if not reply.is_finite:
        raise NeoXError(not_finite(f" for text {number + 1}"))


def _details(sample: Sample, title: str) -> str:
    ended = "document ended" if sample.finished else ""
    tokens, seconds = pluralize(sample.length, "token"), f"{sample.duration_seconds:.1f} s"
    return ", ".join(filter(None, (title, tokens, seconds, ended, sample.message)))
