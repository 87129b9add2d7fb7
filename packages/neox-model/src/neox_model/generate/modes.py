"""The modes of generation: a prompt, unconditional, input-file and interactive.

Results are JSON lines, one per text, with GPT-NeoX's fields and more, and are shown as text on standard
output. Prompts are distributed over the data-parallel replicas; rank 0 writes results in the order of the
prompts.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from neox_config.errors import NeoXError
from neox_config.pluralize import first_few, pluralize
from neox_config.schema.sections.generation import GenerationSection
from neox_data.tokenizers import Tokenizer
from neox_launcher.worker.reporting import interruptible
from neox_model.generate.batch import Batch, Request
from neox_model.generate.conversation import Conversation
from neox_model.generate.engine import Engine, Reply, not_finite
from neox_model.generate.forward import Forward
from neox_model.generate.interruption import Interrupts, agreed_in_copy, ending_on_signals
from neox_model.generate.prompts import Prompts, read_prompts
from neox_model.generate.results import writing_results
from neox_model.generate.sampling import Sampling
from neox_model.metrics.progress_lines import ProgressLines
from neox_model.parallel.control import all_gather_object, gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.random import mixed_seed
from neox_model.worker import show

__all__ = ["MODES", "Job", "check_numbers", "replies"]

logger = logging.getLogger(__name__)


# Of prompts that are too long; the number of all is logged.
_MOST_NAMED = 10


# Tokens are read back from a GPU several at a time; from a CPU one by one, which costs nothing.
_STEPS_PER_READ = 8


@dataclass(frozen=True, slots=True)
class Job:
    """The inputs of a generation.

    Args:
        settings: the parameters of generation.
        forward: the model's forward pass.
        tokenizer: converts text to ids and back.
        groups: this rank's process groups.
        seed: random seed, unless the settings have another; together with a sample's number it determines
            the sample for any number of processes.
        seq_length: maximum number of tokens of the model, prompt included.
        reads_every_token: deliver tokens one by one, also from a GPU.
    """

    settings: GenerationSection
    forward: Forward
    tokenizer: Tokenizer
    groups: Groups
    seed: int = field(kw_only=True)
    seq_length: int = field(kw_only=True)
    reads_every_token: bool = field(default=False, kw_only=True)

    @property
    def sampling_seed(self) -> int:
        """Return the random seed of sampled tokens."""
        return self.seed if self.settings.sampling_seed is None else self.settings.sampling_seed

    def engine(self, slots: int, capacity: int) -> Engine:
        """Return an engine for this number of sequences, and for sequences of this many tokens."""
        one_by_one = self.reads_every_token or self.forward.device.type == "cpu"
        return Engine(
            Batch(self.forward, slots=slots, capacity=capacity, recompute=self.settings.recompute),
            self.tokenizer,
            stop_tokens=self.settings.stop_tokens,
            steps_per_read=1 if one_by_one else _STEPS_PER_READ,
        )

    def request(self, prompt: Sequence[int], number: int) -> Request:
        """Return the request for the continuation of token ids, the sample with this number."""
        return Request(
            prompt=prompt,
            maximum_tokens=self.settings.maximum_tokens,
            sampling=Sampling(
                temperature=self.settings.temperature,
                top_k=self.settings.top_k,
                top_p=self.settings.top_p,
                repetition_penalty=self.settings.repetition_penalty,
                seed=mixed_seed("sample", self.sampling_seed, number),
            ),
            stop_strings=self.settings.stop_strings,
            has_logits=self.settings.return_logits,
        )

    @property
    def output_file(self) -> Path | None:
        """Return the configured file of the results, else one next to the input file, else None."""
        settings = self.settings
        default = settings.sample_input_file and f"{settings.sample_input_file}.output.jsonl"
        output = settings.sample_output_file or default
        return None if output is None else Path(output)


def _result(job: Job, context: str, prompt: str, reply: Reply) -> dict[str, Any]:
    """Return a line of the results: GPT-NeoX's fields, then ours.

    Args:
        job: whether there are logits.
        context: the prompt as it was given.
        prompt: the text that the model continued: the context, in a conversation behind its history.
        reply: the continuation.
    """
    logits = [[round(value, 6) for value in row] for row in reply.logits]
    return {
        "context": context,
        "text": reply.text or None,
        "length": len(reply.tokens),
        "finished": reply.finish_reason == "end-of-document",
        "message": reply.message,
        "duration_seconds": round(reply.duration_seconds, 3),
        "prompt": prompt,
        "tokens": reply.tokens,
        "log_probabilities": [round(value, 6) for value in reply.log_probabilities],
        "finish_reason": reply.finish_reason,
        **({"logits": logits} if job.settings.return_logits else {}),
    }


def _of_prompt(job: Job) -> None:
    assert job.settings.prompt is not None
    _generate_all(job, [job.settings.prompt] * max(1, job.settings.num_samples))


def _unconditional(job: Job) -> None:
    _generate_all(job, [""] * job.settings.num_samples)


def _from_file(job: Job) -> None:
    assert job.settings.sample_input_file is not None
    prompts = read_prompts(Path(job.settings.sample_input_file), job.settings.prompt_end)
    _generate_all(job, [text for _, text in prompts], lines=[line for line, _ in prompts])


def _interactive(job: Job) -> None:
    """Answer each prompt of standard input, until it ends. Only the first replica generates.

    Ctrl-C ends the reply, which is kept as far as it was generated. With neox-launch, Ctrl-C at the prompt
    and a second one during a reply end the session.
    """
    groups = job.groups
    interrupts = Interrupts()
    output = job.output_file if groups.world.rank == 0 else None
    engine = job.engine(1, job.seq_length) if groups.data.rank == 0 else None
    conversation = Conversation(
        job.tokenizer,
        room=job.seq_length - job.settings.maximum_tokens,
        keeps_history=job.settings.interactive_history,
    )
    with interrupts.handled(), writing_results(output) as write:
        typed = Prompts(job.settings.prompt_end)
        for number, context in enumerate(_typed_prompts(typed, groups, interrupts, conversation)):
            if engine is not None:
                interrupts.is_interrupted = False
                prompt, tokens = conversation.prompt(context)
                with interruptible(groups.world.rank, number):
                    reply = _stream(engine, job.request(tokens, number), interrupts, groups)
                check_numbers(reply, number)
                conversation.add(context, reply)
                if groups.world.rank == 0:
                    write(_result(job, context, prompt, reply))
                    show(f"--- {_details(reply)} ---\n")


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


def _typed_prompts(
    typed: Prompts, groups: Groups, interrupts: Interrupts, conversation: Conversation
) -> Iterator[str]:
    """Yield the prompts that rank 0 reads from standard input, on every rank; carry out commands."""
    while True:
        line = _ask(typed, interrupts) if groups.world.rank == 0 else None
        line = all_gather_object(groups.control, line)[0]
        if line is None:
            return
        if (answer := conversation.command(line)) is not None:
            if groups.world.rank == 0:
                click.echo(answer, err=True)
        elif line:
            yield line


def _ask(typed: Prompts, interrupts: Interrupts) -> str | None:
    while True:
        try:
            interrupts.waits_for_input = True
            try:
                return typed.read()
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


def _generate_all(job: Job, contexts: Sequence[str], *, lines: Sequence[int] = ()) -> None:
    """Generate on every replica, each taking every n-th prompt; rank 0 writes and shows each round.

    Args:
        job: what to do.
        contexts: the prompts.
        lines: numbers of the prompts' lines in the input file, if there is one.
    """
    groups, started = job.groups, time.monotonic()
    replicas, writes = groups.data.size, groups.world.rank == 0
    is_first_of_copy = groups.model.rank == groups.pipe.rank == 0
    progress = ProgressLines("generation", "tokens of this replica", None)
    tokens, too_long = 0, []
    with ending_on_signals(), writing_results(job.output_file if writes else None) as write:
        found = replies(job, contexts, range(groups.data.rank, len(contexts), replicas), progress.add)
        for first in range(0, len(contexts), replicas):
            reply = next(found, None)
            made = gather_object(groups.control, reply if is_first_of_copy else None)
            for number, one in enumerate((one for one in made if one is not None), start=first):
                write(_result(job, contexts[number], contexts[number], one))
                tokens += len(one.tokens)
                if one.finish_reason == "prompt-too-long":
                    too_long.append(f"line {lines[number]}" if lines else f"sample {number + 1}")
                title = f"sample {number + 1} of {len(contexts)}, {_details(one)}"
                show(f"--- {title} ---\n{contexts[number]}{one.text}\n")
    if writes:
        results, seconds = pluralize(len(contexts), "result"), time.monotonic() - started
        speed = tokens / max(seconds, 1e-9)
        logger.info("%s: %s in %.1f s (%.1f tokens/s)", results, pluralize(tokens, "token"), seconds, speed)
    if too_long:
        refused = pluralize(len(too_long), "prompt was", "prompts were")
        logger.warning("%s too long: %s", refused, first_few(too_long, _MOST_NAMED))


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
    engine = job.engine(
        min(job.settings.generation_batch_size, len(requests)),
        min(job.seq_length, longest + job.settings.maximum_tokens),
    )
    for number, reply in zip(numbers, engine.replies(requests, note), strict=True):
        check_numbers(reply, number)
        yield reply


def check_numbers(reply: Reply, number: int) -> None:
    """Raise NeoXError if the model's output for a text was not finite."""
    if not reply.is_finite:
        raise NeoXError(not_finite(f" for text {number + 1}"))


def _details(reply: Reply) -> str:
    ended = "document ended" if reply.finish_reason == "end-of-document" else ""
    tokens, seconds = pluralize(len(reply.tokens), "token"), f"{reply.duration_seconds:.1f} s"
    return ", ".join(filter(None, (tokens, seconds, ended, reply.message)))
