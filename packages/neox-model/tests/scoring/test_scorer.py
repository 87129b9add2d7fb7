"""Log-likelihoods of texts under a model whose next token depends on the last one alone."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn

from neox_config.errors import ConfigError
from neox_config.schema.sections.generation import GenerationSection
from neox_data.errors import DataError
from neox_data.indexed import IndexedDatasetWriter
from neox_data.tokenizers import build_tokenizer
from neox_model.errors import ModelError
from neox_model.generate.batch import Batch, Request
from neox_model.generate.engine import Engine
from neox_model.generate.forward import Forward
from neox_model.generate.modes import Job
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.scoring import documents, perplexity
from neox_model.scoring.endings import NotFiniteError, StoppedError
from neox_model.scoring.perplexity import measure_perplexity, ratio_of
from neox_model.scoring.results import Results, write_results
from neox_model.scoring.scorer import Part, Scorer, rolling_parts
from neox_model.serve.logprobs import ShownToken, TokenNames, completion_logprobs
from support.decoding import scores_of
from support.distributed import run_ranks
from support.refusals import refused, shows

TOKENIZER = build_tokenizer("CharLevelTokenizer")
END, ENTRIES = TOKENIZER.end_of_document, TOKENIZER.vocab_size + 3
TABLE = torch.randn(ENTRIES, ENTRIES, generator=torch.Generator().manual_seed(0))
LOGS = TABLE.double().log_softmax(-1)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        self.sizes.append(tuple(inputs[0].shape))
        return TABLE[inputs[0].t()]


class Head(nn.Module):
    def forward(self, hidden_SBV: Tensor) -> Tensor:
        return hidden_SBV.transpose(0, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList([Body(), Head()])

    def autocast(self) -> torch.no_grad:
        return torch.no_grad()


def forward() -> Forward:
    return Forward(Model(), hidden_size=4, vocab_size=TOKENIZER.vocab_size, model_vocab_size=ENTRIES)


def scorer(*, seq_length: int = 8, batch_tokens: int = 16) -> Scorer:
    return Scorer(forward(), seq_length=seq_length, batch_tokens=batch_tokens)


def expected(tokens: list[int]) -> float:
    """Log-likelihood of all tokens but the first."""
    return sum(float(LOGS[before, after]) for before, after in pairwise(tokens))


PARTS = [
    Part([1], [2, 3]),
    Part([5, 6, 7], [8]),
    Part([9] * 20, [1, 2, 3]),
    Part([4], [0] * 8),
    Part([2], [7]),
]


@pytest.mark.parametrize("batch_tokens", [1, 8, 16, 10_000])
def test_scores_are_sums_over_the_tokens_for_any_batch(batch_tokens):
    scores = scores_of(scorer(batch_tokens=batch_tokens), PARTS)
    for part, score in zip(PARTS, scores, strict=True):
        assert score.log_likelihood == pytest.approx(
            expected([part.context[-1], *part.continuation]), abs=1e-5
        )


def test_batches_have_at_most_the_given_tokens_and_long_texts_come_first():
    made = scorer(batch_tokens=16)
    scores_of(made, PARTS)
    sizes = made.forward._body[0].sizes
    assert sizes[0] == (2, 8)
    assert all(rows * length <= 16 for rows, length in sizes)
    assert sum(rows for rows, _ in sizes) == len(PARTS)


def test_greedy_means_that_every_token_is_the_most_likely_one():
    first = int(TABLE[3].argmax())
    second = int(TABLE[first].argmax())
    parts = [Part([3], [first, second]), Part([3], [first, second - 1]), Part([3], [first])]
    assert [score.is_greedy for score in scores_of(scorer(), parts)] == [True, False, True]


@pytest.fixture
def likely_padding(monkeypatch):
    """The entries that the tokenizer lacks are the most likely ones after every token."""
    table = TABLE.clone()
    table[:, TOKENIZER.vocab_size :] += 9
    monkeypatch.setitem(globals(), "TABLE", table)
    monkeypatch.setitem(globals(), "LOGS", table.double().log_softmax(-1))


def test_scores_generation_server_and_harness_have_one_rule_for_padding(likely_padding):
    """Probabilities are over all entries; the most likely tokens are the tokenizer's."""
    prompt, entries = [5, 9, 2, 7], TOKENIZER.vocab_size
    engine = Engine(Batch(forward(), slots=2, capacity=12, recompute=True), TOKENIZER)
    engine.submit(Request(prompt=prompt, maximum_tokens=1, scores_prompt=True, top_count=2))
    (update,) = engine.step()
    values = [float(LOGS[before, after]) for before, after in pairwise(prompt)]
    assert update.new.prompt.log_probabilities == pytest.approx(values, abs=1e-5)
    (token,), (value,), (top,) = update.new.tokens, update.new.log_probabilities, update.new.top
    best = LOGS[7, :entries].sort(descending=True)
    assert token == int(best.indices[0])
    assert [number for number, _ in top] == best.indices[:2].tolist()
    assert [value, *(each for _, each in top)] == pytest.approx(best.values[[0, 0, 1]].tolist(), abs=1e-5)
    second = top[1][0]
    first_score, second_score = scores_of(scorer(), [Part(prompt, [token]), Part(prompt, [second])])
    assert (first_score.is_greedy, second_score.is_greedy) == (True, False)
    assert first_score.log_likelihood == pytest.approx(value, abs=1e-6)
    shown = completion_logprobs(TokenNames(TOKENIZER), [ShownToken(token, value, top, 0)])
    # The harness's client of servers calls a token greedy if it is the first of these.
    assert max(shown["top_logprobs"][0].values()) == shown["token_logprobs"][0] == value
    pytest.importorskip("lm_eval")
    from neox_model.scoring.harness import HarnessModel

    model = HarnessModel(
        scorer(), Job(GenerationSection(), None, TOKENIZER, SINGLE_PROCESS, seed=0, seq_length=0)
    )
    found = model._loglikelihood_tokens([(None, prompt, [one]) for one in (token, second)])
    assert found == [(first_score.log_likelihood, True), (second_score.log_likelihood, False)]


def test_texts_that_cannot_be_scored_are_refused():
    with refused(ModelError, "9 tokens", "seq-length"):
        scores_of(scorer(), [Part([1], [0] * 9)])
    with refused(ModelError, code="no-tokens"):
        scores_of(scorer(), [Part([1], [])])


def test_an_output_that_is_not_finite_is_refused(monkeypatch):
    monkeypatch.setitem(globals(), "TABLE", TABLE * math.nan)
    with refused(NotFiniteError, "not finite"):
        scores_of(scorer(), PARTS)


def test_a_signal_ends_the_scoring_before_the_next_batch():
    answers = iter([False, False, True])
    made = scorer(batch_tokens=8)
    made._is_stopping = lambda: next(answers)
    with pytest.raises(StoppedError):
        scores_of(made, PARTS)
    assert len(made.forward._body[0].sizes) == 2


def work_in_sections(counts: list[int]) -> dict[str, Any]:
    """What each rank receives, with these numbers of turns; then, how many it takes if rank 1 ends."""
    from neox_model.parallel.topology import create_groups
    from neox_model.scoring import endings

    groups = create_groups(1, 1)
    taken = 0

    def turns(count: int, ending: bool) -> Iterator[list[int]]:
        nonlocal taken
        for number in range(count):
            taken += 1
            # Turns that find nothing, and several results of one.
            yield [100 * groups.data.rank + number] * (number % 3)
        if ending:
            raise endings.NotFiniteError("because")

    found = endings.gather_in_sections(groups.control, turns(counts[groups.data.rank], ending=False))
    taken = 0
    is_broken = groups.data.rank == 1
    try:
        endings.gather_in_sections(groups.control, turns(3 if is_broken else 1000, ending=is_broken))
    except endings.EvaluationEndedError as error:
        return {"found": found, "error": repr(error), "taken": taken}
    raise AssertionError("the evaluation went on")


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[0, 40], [16, 32], [5, 5], [17, 0]])
def test_replicas_gather_in_sections_and_end_together(counts):
    first, second = run_ranks(work_in_sections, size=2, counts=counts)
    whole = [
        [100 * rank + number for number in range(count) for _ in range(number % 3)]
        for rank, count in enumerate(counts)
    ]
    assert first["found"] == second["found"] == whole
    assert first["error"] == second["error"] == "NotFiniteError('because')"
    # The replica that can go on stops at the end of the section, not of its share.
    assert (first["taken"], second["taken"]) == (16, 3)


@pytest.mark.parametrize("seq_length", [1, 2, 7, 16])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 14, 33])
def test_rolling_parts_have_each_token_once_and_the_tokens_before_it(count, seq_length):
    tokens = list(range(100, 100 + count))
    parts = rolling_parts(tokens, prefix=END, seq_length=seq_length)
    assert [token for part in parts for token in part.continuation] == tokens
    whole = [END, *tokens]
    for part in parts:
        row = [*part.context, *part.continuation]
        start = whole.index(row[0])
        assert whole[start : start + len(row)] == row
        assert len(row) - 1 <= seq_length
    if count > seq_length:
        assert len(parts[-1].context) + len(parts[-1].continuation) == seq_length + 1


def test_rolling_parts_are_those_of_the_harness():
    utils = pytest.importorskip("lm_eval.utils")
    for count, length in [(1, 1), (5, 7), (7, 7), (8, 7), (40, 7)]:
        tokens = list(range(count))
        windows = utils.get_rolling_token_windows(
            token_list=tokens, prefix_token=END, max_seq_len=length, context_len=1
        )
        theirs = [tuple(map(list, utils.make_disjoint_window(window))) for window in windows]
        parts = rolling_parts(tokens, prefix=END, seq_length=length)
        assert [(list(part.context), list(part.continuation)) for part in parts] == theirs


TEXTS = ["été 你好", "", "a", *(f"text number {number} " * (1 + number % 5) for number in range(35))]


def measure(source, **options):
    return measure_perplexity(str(source), scorer(), TOKENIZER, SINGLE_PROCESS, **options)


@pytest.fixture
def corpus(tmp_path):

    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def test_perplexity_is_that_of_all_tokens_and_counts_what_was_read(corpus):
    found = measure(corpus)
    codes = [TOKENIZER.encode(text) for text in TEXTS]
    loss = -sum(expected([END, *tokens]) for tokens in codes)
    tokens = sum(map(len, codes))
    num_bytes, characters = sum(len(text.encode()) for text in TEXTS), sum(map(len, TEXTS))
    assert (found.documents, found.empty_documents, found.tokens) == (len(TEXTS) - 1, 1, tokens)
    assert (found.num_bytes, found.characters) == (num_bytes, characters)
    assert found.loss.value == pytest.approx(loss / tokens, rel=1e-6)
    assert found.bits_per_byte.value == pytest.approx(loss / num_bytes / math.log(2), rel=1e-6)
    rows = found.rows(per_character=True)
    assert rows["perplexity"].value == pytest.approx(math.exp(loss / tokens), rel=1e-6)
    assert rows["perplexity_per_character"].value == pytest.approx(math.exp(loss / characters), rel=1e-6)
    assert "perplexity_per_character" not in found.rows(per_character=False)
    assert found.units == "documents"
    assert found.loss.low < found.loss.value < found.loss.high


def test_an_indexed_dataset_has_the_perplexity_of_its_texts(corpus, tmp_path):

    with IndexedDatasetWriter(tmp_path / "tokens", dtype=np.uint16) as writer:
        for text in TEXTS:
            writer.append(np.array([*TOKENIZER.encode(text), END], dtype=np.uint16))
    texts, tokens = measure(corpus), measure(tmp_path / "tokens")
    assert texts.loss == tokens.loss
    assert texts.bits_per_byte == tokens.bits_per_byte
    assert {**texts.counts(), "source": ""} == {**tokens.counts(), "source": ""}


@pytest.mark.parametrize("token", [TOKENIZER.vocab_size, -1])
def test_a_token_that_the_tokenizer_does_not_have_is_refused(tmp_path, token):
    with IndexedDatasetWriter(tmp_path / "tokens", dtype=np.int32) as writer:
        writer.append(np.array([1, 2, token, END], dtype=np.int32))
    with refused(DataError, "document 0", f"token {token}"):
        measure(tmp_path / "tokens")


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, caplog):
    for name in ("texts.jsonl", "notes.rst"):
        (tmp_path / name).write_text('{"text": "abc"}\n')
    assert measure(tmp_path).documents == 1
    assert "1 file, folder" in caplog.text
    assert "notes.rst" in caplog.text


@pytest.mark.parametrize("place", [0, 1])
def test_a_document_that_would_be_skipped_is_refused(tmp_path, monkeypatch, place):
    monkeypatch.setattr(documents, "_MOST_BYTES", 40)
    texts = ["abc", "defg"]
    texts.insert(2 * place, "x" * 40)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with refused(DataError, "40 bytes"):
        measure(tmp_path / "texts.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.jsonl", b'{"text": 5}\n', "line 1"),
        ("a.jsonl", b'{"body": "a"}\n', "'text'"),
        ("a.jsonl", b"", "a.jsonl"),
        ("a.txt", b"", "a.txt"),
    ],
)
def test_texts_that_cannot_be_scored_have_a_remedy_that_an_evaluation_has(tmp_path, name, content, found):
    (tmp_path / name).write_bytes(content)
    with refused((DataError, ConfigError), found):
        measure(tmp_path / name)


BEGIN = 257


@pytest.fixture
def begins_texts(tmp_path):
    """A tokenizer of bytes that adds BEGIN to the beginning of each text."""
    library = Tokenizer(
        models.BPE(
            vocab={one: number for number, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    library.save(str(tmp_path / "tokenizer.json"))
    return build_tokenizer("HFTokenizer", vocab_file=tmp_path / "tokenizer.json")


def test_what_a_tokenizer_adds_to_a_text_is_before_it_and_not_scored(begins_texts, tmp_path):
    texts = ["abc", "", "d" * 20]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with IndexedDatasetWriter(tmp_path / "tokens", dtype=np.uint16) as writer:
        for text in texts:
            ids = [*begins_texts.encode(text), begins_texts.end_of_document]
            assert ids[0] == BEGIN
            writer.append(np.array(ids, dtype=np.uint16))
    of_texts, of_tokens = (
        measure_perplexity(str(tmp_path / name), scorer(), begins_texts, SINGLE_PROCESS)
        for name in ("texts.jsonl", "tokens")
    )
    loss = -sum(expected(begins_texts.encode(text)) for text in texts)
    assert (of_texts.tokens, of_texts.num_bytes, of_texts.empty_documents) == (23, 23, 1)
    assert of_texts.loss.value == pytest.approx(loss / 23, rel=1e-6)
    assert of_texts.loss == of_tokens.loss
    assert {**of_texts.counts(), "source": ""} == {**of_tokens.counts(), "source": ""}


def test_the_harness_gets_the_ids_that_its_own_backend_uses(begins_texts):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from neox_model.scoring.harness import HarnessModel

    model = HarnessModel(
        scorer(), Job(GenerationSection(), None, begins_texts, SINGLE_PROCESS, seed=0, seq_length=0)
    )
    assert model.prefix_token_id == BEGIN
    begin, *ids = begins_texts.encode("ab")
    assert begin == BEGIN
    assert model.tok_encode("ab") == model.tok_encode("<s>ab") == [BEGIN, *ids]
    assert model.tok_encode("ab", add_special_tokens=False) == ids
    pairs = [("", "ab"), ("x", "ab")]
    requests = [Instance("loglikelihood", {}, arguments=pair, idx=0) for pair in pairs]
    (empty, _), (after_x, _) = model.loglikelihood(requests)
    assert empty == pytest.approx(expected([BEGIN, *ids]), abs=1e-5)
    assert after_x == pytest.approx(expected(begins_texts.encode("xab")[1:]), abs=1e-5)
    # Rolling tasks also score what the tokenizer adds.
    rolling = Instance("loglikelihood_rolling", {}, arguments=("ab",), idx=0)
    [found] = model.loglikelihood_rolling([rolling])
    assert found == pytest.approx(expected([BEGIN, BEGIN, *ids]), abs=1e-5)


def test_few_documents_have_intervals_over_parts(corpus):
    found = measure(corpus, limit=6)
    assert (found.documents, found.empty_documents, found.units) == (5, 1, "parts")
    one = measure(corpus, limit=1)
    assert one.units == "parts"


def test_the_number_of_documents_in_one_call_changes_nothing(corpus, monkeypatch):
    whole = measure(corpus)
    monkeypatch.setattr(perplexity, "_AT_ONCE", 3)
    assert measure(corpus).loss.value == pytest.approx(whole.loss.value, rel=1e-9)


def test_intervals_contain_the_ratio_nearly_as_often_as_they_claim():

    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        sizes = draw.integers(1, 50, size=200)
        losses = sizes * 2.0 + draw.normal(size=200) * np.sqrt(sizes)
        found = ratio_of(losses, sizes.astype(float))
        hits += found.low < 2.0 < found.high
    assert 930 <= hits <= 970


def test_results_files_are_not_replaced_and_have_the_name_of_gpt_neox(corpus, tmp_path, monkeypatch, caplog):
    results = Results(
        iteration=7, perplexity=measure(corpus), per_character=False, tasks=None, tables="", seconds=1.5
    )
    monkeypatch.setattr("time.strftime", lambda form: "26-01-02-03-04")
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(
            lambda _: write_results(str(tmp_path / "new" / "run"), results, {"checkpoint": "runs"}), range(20)
        )
    paths = sorted(made)
    assert len({*paths}) == 20
    assert {*paths} == {*(tmp_path / "new").iterdir()}
    assert "run_eval_results_26-01-02-03-04.json" in [path.name for path in paths]
    found = json.loads(paths[1].read_text())
    assert (found["iteration"], found["checkpoint"]) == (7, "runs")
    assert found["perplexity"]["loss"]["value"] == results.perplexity.loss.value
    assert found["perplexity"]["documents"] == len(TEXTS) - 1
    metrics = results.metrics()
    assert metrics["eval_data/loss"] == results.perplexity.loss.value
    assert set(metrics) == {"eval_data/loss", "eval_data/perplexity", "eval_data/bits_per_byte"}
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "neox_model")
    made = write_results("", results, {"data": "l\udce4uf"})
    assert shows(caplog.messages, f"results to {tmp_path}/eval_results_26-01-02-03-04.json")
    assert json.loads(made.read_text())["data"] == "l\udce4uf"


class Expected:
    """In place of the lines of progress: the amounts that they would name."""

    amounts: list[tuple[int, bool]]

    def __init__(self, *_: Any) -> None:
        Expected.amounts = []

    def expect(self, total: int, *, is_estimate: bool) -> None:
        self.amounts.append((total, is_estimate))

    def add(self, amount: int) -> None:
        pass


@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize(
    ("limit", "amounts"),
    [(None, [(60, True), (60, True), (60, False)]), (4, [(24, True), (24, False)]), (2, [(12, False)])],
)
def test_the_number_of_tokens_is_estimated_until_all_documents_are_read(
    tmp_path, monkeypatch, limit, amounts, is_indexed
):
    texts = ["abcdef"] * 10
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    if is_indexed:
        source = tmp_path / "data"
        with IndexedDatasetWriter(source, dtype=np.uint16) as writer:
            for text in texts:
                writer.append(np.array([*TOKENIZER.encode(text), END], dtype=np.uint16))
    monkeypatch.setattr(perplexity, "ProgressLines", Expected)
    monkeypatch.setattr(perplexity, "_AT_ONCE", 4 if limit is None else 3)
    measure_perplexity(str(source), scorer(), TOKENIZER, SINGLE_PROCESS, limit=limit)
    assert Expected.amounts == amounts
