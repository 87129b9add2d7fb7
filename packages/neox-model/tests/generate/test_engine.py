import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neox_config.derive.generation import generation_mode, without_effect
from neox_config.errors import NeoXError
from neox_config.schema.sections.generation import GenerationSection
from neox_data.tokenizers import build_tokenizer
from neox_data.tokenizers.char_level import CharLevelTokenizer
from neox_model.generate import run
from neox_model.generate.batch import Batch, Request
from neox_model.generate.engine import Engine
from neox_model.generate.forward import Forward
from neox_model.generate.modes import Job
from neox_model.generate.run import explained_shortage
from neox_model.generate.sampling import Sampling
from neox_model.parallel.groups import SINGLE_PROCESS
from support.refusals import refused, shows
from support.settings import resolved_from

TOKENIZER = build_tokenizer("CharLevelTokenizer")
END = TOKENIZER.end_of_document


class NextInScript(nn.Module):
    """Continues each text as the script in which its last token occurs."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        self.following = torch.zeros(TOKENIZER.vocab_size, dtype=torch.int64)
        codes = [*TOKENIZER.encode(script), END]
        self.following[codes[:-1]] = torch.tensor(codes[1:])
        self.calls: list[tuple[int, ...]] = []

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens_BS = inputs[0]
        self.calls.append(tuple(tokens_BS.shape))
        return nn.functional.one_hot(self.following[tokens_BS.t()], TOKENIZER.vocab_size).float() * 9


class Scripted(nn.Module):
    """A model with the parts of a real one."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.stack = nn.ModuleList([NextInScript(script), Head()])

    def autocast(self) -> torch.no_grad:
        return torch.no_grad()


class Head(nn.Module):
    def forward(self, hidden_SBV: Tensor) -> Tensor:
        return hidden_SBV.transpose(0, 1)


def scripted(script: str) -> Forward:
    entries = TOKENIZER.vocab_size
    return Forward(Scripted(script), hidden_size=4, vocab_size=entries, model_vocab_size=entries)


def engine(
    script: str = "abcdefghij", *, slots: int = 2, capacity: int = 12, recompute: bool = True, **options: Any
):
    forward = scripted(script)
    return Engine(Batch(forward, slots=slots, capacity=capacity, recompute=recompute), TOKENIZER, **options)


def ask(prompt: str, maximum_tokens: int = 20, *stop: str) -> Request:
    return Request(prompt=TOKENIZER.encode(prompt), maximum_tokens=maximum_tokens, stop_strings=stop)


@pytest.mark.parametrize("steps_per_read", [1, 8])
def test_a_stop_token_ends_a_reply_as_end_of_document_does(steps_per_read):
    (stop,) = TOKENIZER.encode("f")
    stopped = engine(stop_tokens=[stop], steps_per_read=steps_per_read)
    first, second = stopped.replies([ask("b"), ask("g")])
    assert (first.text, first.tokens, first.finish_reason) == (
        "cde",
        TOKENIZER.encode("cde"),
        "end-of-document",
    )
    assert (second.text, second.finish_reason) == ("hij", "end-of-document")


class DropsFirstSpace(CharLevelTokenizer):
    """As SentencePiece: the space in front of a text is not decoded."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).removeprefix(" ")


def test_a_reply_keeps_the_space_between_it_and_its_prompt():
    asked = Engine(Batch(scripted("ab cde"), slots=2, capacity=12), DropsFirstSpace())
    plain, stopped = asked.replies([ask("b"), ask("ab", 20, " c")])
    assert (plain.text, plain.finish_reason) == (" cde", "end-of-document")
    assert (stopped.text, stopped.finish_reason) == ("", "stop-string")
    asked.submit(ask("b"))
    texts = []
    while asked.is_busy:
        texts += [update.text for update in asked.step()]
    assert texts[0] == " "
    assert "".join(texts) == " cde"


def test_a_stop_token_that_the_tokenizer_lacks_is_refused():
    with refused(NeoXError, "stop-tokens", END + 1000, "0"):
        engine(stop_tokens=[END + 1000])


@pytest.mark.parametrize("steps_per_read", [1, 3, 8])
def test_replies_end_for_their_own_reason_and_come_in_order(steps_per_read):
    requests = [
        ask("abc"),
        ask("a", 4),
        ask("xxxxxxxxa"),
        ask("j"),
        ask("b", 20, "fg", "hi"),
        ask("x" * 12),
        ask("h", 1),
    ]
    replies = list(engine(steps_per_read=steps_per_read).replies(requests))
    assert [(reply.text, reply.finish_reason, reply.message) for reply in replies] == [
        ("defghij", "end-of-document", None),
        ("bcde", "maximum-tokens", None),
        ("bcd", "seq-length", None),
        ("", "end-of-document", "the model ended the document immediately"),
        ("cde", "stop-string", None),
        ("", "prompt-too-long", "the prompt's 12 tokens already fill seq_length (12)"),
        ("i", "maximum-tokens", None),
    ]
    assert [TOKENIZER.decode(reply.tokens) for reply in replies][4:] == ["cdefg", "", "i"]
    assert all(len(reply.tokens) == len(reply.log_probabilities) for reply in replies)


def test_an_empty_prompt_is_the_beginning_of_a_document():
    made = engine("a")
    made.submit(Request(prompt=[], maximum_tokens=3))
    batch = made._batch
    made.step()
    assert batch._tokens_BT[0, 0] == END


def test_updates_are_the_parts_of_the_reply_and_other_requests_enter_meanwhile():
    made = engine(slots=1)
    first, second = made.submit(ask("a", 3)), made.submit(ask("e", 2))
    seen: dict[int, list[str]] = {first: [], second: []}
    replies = {}
    while made.is_busy:
        for update in made.step():
            seen[update.ticket].append(update.text)
            if update.reply is not None:
                replies[update.ticket] = update.reply.text
    assert seen == {first: ["b", "c", "d"], second: ["f", "g"]}
    assert replies == {first: "bcd", second: "fg"}


def test_a_cancelled_request_leaves_its_slot_and_the_others_continue():
    made = engine(slots=3)
    tickets = [made.submit(ask(prompt, 6)) for prompt in ("a", "b", "c", "d")]
    made.step()
    made.step()
    reply = made.cancel(tickets[0])
    assert (reply.text, reply.finish_reason, reply.message) == ("bc", "interrupted", "interrupted")
    assert made.cancel(tickets[0]) is None
    found = {}
    while made.is_busy:
        found |= {update.ticket: update.reply.text for update in made.step() if update.reply is not None}
    assert found == {tickets[1]: "cdefgh", tickets[2]: "defghi", tickets[3]: "efghij"}
    waiting = made.submit(ask("a"))
    assert shows(made.cancel(waiting).message, "interrupted before it")
    assert not made.is_busy


def test_a_stream_of_short_requests_does_not_stop_a_long_one():
    made = engine(slots=2)
    long, texts = made.submit(ask("a", 6)), []
    for _ in range(12):
        made.submit(ask("h", 1))
        texts += [update.text for update in made.step() if update.ticket == long]
    assert "".join(texts) == "bcdefg"


def test_recomputation_processes_the_whole_text_for_every_token():
    made = engine(slots=2)
    list(made.replies([ask("ab", 3), ask("abc", 3)]))
    assert made._batch._forward.model.stack[0].calls == [(2, 3), (2, 4), (2, 5)]


def test_cached_decoding_processes_one_token_of_each_text():
    made = engine(slots=2, recompute=False)
    list(made.replies([ask("ab", 3), ask("abc", 3)]))
    assert made._batch._forward.model.stack[0].calls == [(2, 3), (2, 1), (2, 1)]


def test_sampled_replies_depend_on_the_seed_of_the_request():
    def text(seed: int) -> str:
        sampling = Sampling(temperature=30.0, seed=seed)
        request = Request(prompt=[5], maximum_tokens=8, sampling=sampling)
        return next(engine().replies([request])).text

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "interactive"),
        ({"num_samples": 2}, "unconditional"),
        ({"num_samples": 2, "sample_input_file": "prompts.txt"}, "input-file"),
        ({"num_samples": 2, "text_gen_type": "interactive"}, "interactive"),
        ({"prompt": "", "text_gen_type": "input-file", "sample_input_file": "prompts.txt"}, "prompt"),
    ],
)
def test_the_mode_follows_from_the_settings(settings, expected):
    assert generation_mode(resolved_from(settings).config) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_samples": 2}, []),
        ({"num_samples": 2, "prompt": "a", "sample_input_file": "prompts.txt"}, []),
        ({"num_samples": 2, "sample_input_file": "prompts.txt"}, ["num_samples"]),
        (
            {"num_samples": 2, "sample_input_file": "prompts.txt", "text_gen_type": "interactive"},
            ["num_samples", "sample_input_file"],
        ),
    ],
)
def test_parameters_that_the_mode_does_not_use_are_named(settings, expected):
    assert list(without_effect(resolved_from(settings).config)) == expected


def test_each_parameter_reaches_the_job():
    settings = {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.8,
        "repetition_penalty": 1.2,
        "stop_strings": ("x",),
        "stop_tokens": (),
        "sampling_seed": 0,
        "generation_batch_size": 3,
        "interactive_history": False,
        "maximum_tokens": 9,
        "sample_input_file": "prompts.txt",
        "sample_output_file": "texts.jsonl",
        "num_samples": 4,
        "prompt": "once",
        "seed": 77,
    }
    forward = scripted("abc")

    def job(**changes: object) -> Job:
        config = resolved_from(settings | changes).config
        return Job(
            config.generation,
            forward,
            TOKENIZER,
            SINGLE_PROCESS,
            seed=config.training.seed,
            seq_length=config.model.seq_length,
        )

    found = job()
    assert (found.sampling_seed, job(sampling_seed=None).sampling_seed) == (0, 77)
    assert str(found.output_file) == "texts.jsonl"
    assert str(job(sample_output_file=None).output_file) == "prompts.txt.output.jsonl"
    assert found.seq_length == resolved_from({}).config.model.seq_length
    request = found.request([1], 2)
    assert (request.maximum_tokens, request.stop_strings) == (9, ("x",))
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.8, repetition_penalty=1.2)
    assert replace(request.sampling, seed=0) == sampling
    others = [job(sampling_seed=1).request([1], 2), found.request([1], 3)]
    assert len({one.sampling.seed for one in (request, *others)}) == 3
    for recompute in (False, True):
        shapes = forward.model.stack[0].calls
        shapes.clear()
        list(job(recompute=recompute).engine(1, 9).replies([ask("a", 2)]))
        assert shapes == [(1, 1), (1, 2 if recompute else 1)]
    (stop,) = TOKENIZER.encode("b")
    (stopped,) = job(stop_tokens=(stop,)).engine(1, 9).replies([ask("a")])
    assert (stopped.text, stopped.finish_reason) == ("", "end-of-document")


@pytest.mark.parametrize(
    ("device", "reads_every_token", "steps"), [("cpu", False, 1), ("meta", False, 8), ("meta", True, 1)]
)
def test_tokens_are_read_one_by_one_on_a_cpu_and_in_interactive_sessions(device, reads_every_token, steps):
    forward = scripted("abc")
    forward.device = torch.device(device)
    job = Job(
        GenerationSection(),
        forward,
        TOKENIZER,
        SINGLE_PROCESS,
        seed=1,
        seq_length=4,
        reads_every_token=reads_every_token,
    )
    assert job.engine(1, 4)._steps_per_read == steps


def test_a_request_for_no_tokens_is_scored_alone_and_may_fill_the_capacity():
    made = engine("abcdef", slots=2, capacity=3)
    prompts = {
        made.submit(
            Request(prompt=TOKENIZER.encode(text), maximum_tokens=0, scores_prompt=True, top_count=1)
        ): text
        for text in ("abc", "a", "acd")
    }
    seen = {}
    while made.is_busy:
        for update in made.step():
            assert (update.text, update.new.tokens) == ("", [])
            assert (update.reply.finish_reason, update.reply.tokens) == ("maximum-tokens", [])
            seen[prompts[update.ticket]] = update.new.prompt
    assert [len(seen[text].log_probabilities) for text in ("abc", "a", "acd")] == [2, 0, 2]
    likeliest = -math.log1p((TOKENIZER.vocab_size - 1) * math.exp(-9))
    assert seen["acd"].log_probabilities == pytest.approx([likeliest - 9, likeliest], abs=1e-5)
    assert [row[0][0] for row in seen["abc"].top] == TOKENIZER.encode("bc")


def test_an_update_contains_the_end_of_the_document_and_the_reply_does_not():
    made = engine("ab")
    made.submit(Request(prompt=TOKENIZER.encode("a"), maximum_tokens=5, top_count=1))
    updates = []
    while made.is_busy:
        updates += made.step()
    assert [token for update in updates for token in update.new.tokens] == [*TOKENIZER.encode("b"), END]
    assert [row[0][0] for update in updates for row in update.new.top] == [*TOKENIZER.encode("b"), END]
    assert updates[-1].reply.tokens == TOKENIZER.encode("b")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_output_that_is_not_finite_is_known_also_if_it_ends_the_document(value):
    """The first of several NaN is the largest: often it is the entry of end-of-document."""

    class Broken(NextInScript):
        def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
            logits_SBV = super().forward(inputs)
            logits_SBV[:, :, END] = torch.where(inputs[0].t() == ord("c"), value, logits_SBV[:, :, END])
            return logits_SBV

    made = engine("abcdef")
    made._batch._forward._body = [Broken("abcdef")]
    broken, fine = made.replies([ask("b", 4), ask("d", 2)])
    assert (broken.text, broken.finish_reason) == ("c", "end-of-document")
    assert (broken.is_finite, fine.is_finite) == (False, True)


def test_too_little_memory_for_the_weights_has_a_remedy(monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(run, "find_storage", lambda *_: None)
    monkeypatch.setattr(run, "folder_with_weights", lambda *_, **__: None)
    monkeypatch.setattr(run, "build_forward_pass", fail)
    with refused(NeoXError, "CUDA", code="out-of-memory"):
        run.load_forward(resolved_from({}), "checkpoints", SINGLE_PROCESS, TOKENIZER)


def test_too_little_memory_on_the_host_names_the_settings_and_other_errors_stay_theirs():
    with refused(NeoXError, "generation-batch-size", code="out-of-memory"), explained_shortage():
        torch.empty(2**60)
    with refused(RuntimeError, "size of tensor"), explained_shortage():
        torch.ones(2) + torch.ones(3)


@pytest.mark.parametrize("steps_per_read", [1, 3])
def test_updates_have_the_tokens_of_the_reply_with_as_many_likely_ones_as_requested(steps_per_read):
    """Also when a request moves to the slot of one that has ended."""
    counts = {"a": 1, "h": 3, "d": 2}
    made = engine(slots=3, steps_per_read=steps_per_read)
    tickets = {made.submit(replace(ask(prompt), top_count=count)): count for prompt, count in counts.items()}
    tokens: dict[int, list[int]] = {ticket: [] for ticket in tickets}
    replies = {}
    while made.is_busy:
        for update in made.step():
            tokens[update.ticket] += update.new.tokens
            assert len(update.new.tokens) == len(update.new.log_probabilities) == len(update.new.top)
            assert {len(row) for row in update.new.top} <= {tickets[update.ticket]}
            assert [row[0][0] for row in update.new.top] == update.new.tokens
            if update.reply is not None:
                replies[update.ticket] = update.reply.tokens
    assert {ticket: [*own, END] for ticket, own in replies.items()} == tokens


def test_a_limit_that_is_reached_with_the_model_is_that_of_the_request():
    (reply,) = engine(capacity=4).replies([ask("ab", 2)])
    assert (reply.text, reply.finish_reason) == ("cd", "maximum-tokens")


def test_the_model_has_the_precision_of_the_configuration_and_no_dropout():
    resolved = resolved_from({"precision": "bfloat16", "hidden_dropout": 0.5, "attention_dropout": 0.5})
    forward = run.build_forward_pass(resolved.model, resolved.run, SINGLE_PROCESS, TOKENIZER)
    assert {parameter.dtype for parameter in forward.model.parameters()} == {torch.bfloat16}
    assert not any(module.training for module in forward.model.modules())
