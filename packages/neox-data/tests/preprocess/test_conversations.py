"""Conversations in JSONL, in parquet and through Arrow give the same tokens and labels."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from neox_data.indexed import open_indexed
from neox_data.preprocess.chat_template import ChatTemplate
from neox_data.preprocess.cli import main
from neox_data.preprocess.conversations import NULLS, messages_in, objects_in
from neox_data.preprocess.loss_mask import ChatMask
from neox_data.preprocess.read import CorpusReader
from neox_data.tokenizers import build_tokenizer

Row = dict[str, Any]

# Shows every key that a message has, and whether it has it.
SHOWS_ALL = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for one in documents or [] %}{{ one | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.name is defined %}[{{ m.name }}]{% endif %}"
    "{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% if 'reasoning_content' in m %}({{ m.reasoning_content }}){% endif %}"
    "{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.tool_call_id is defined %}#{{ m.tool_call_id }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Of Qwen's and Hermes' form.
CHATML = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "</tools><|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}"
    "{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endgeneration %}<|im_end|>\n{% endfor %}"
)
TEMPLATES = {"shows all": SHOWS_ALL, "ChatML": CHATML}

WORDS = (
    "one",
    "Rome",
    "größe",
    "\u4f60\u597d",
    "\U0001f680",
    "a\nb",
    '"quoted"',
    "\\",
    "{}",
    "null",
    "None",
    "",
)
# One type per name, because a column has one; in the order of a struct, which Arrow keeps.
VALUES: dict[str, Callable[[random.Random, float], Any]] = {
    "city": lambda draw, _: draw.choice(WORDS),
    "count": lambda draw, _: draw.randint(-(2**40), 2**40),
    "exact": lambda draw, _: draw.random() < 0.5,
    "items": lambda draw, _: [draw.choice(WORDS) for _ in range(draw.randint(0, 3))],
    "share": lambda draw, _: draw.randint(1, 9999) / 64,
    "where": lambda draw, share: some(
        draw, {"lat": draw.randint(0, 9) / 4, "name": draw.choice(WORDS)}, share
    ),
    "which": lambda draw, share: [some(draw, {"id": draw.randint(0, 9), "of": "x"}, share) for _ in range(2)],
}


def some(draw: random.Random, whole: Row, share: float) -> Row:
    """Return some keys of an object."""
    return {key: value for key, value in whole.items() if draw.random() < share}


def call(draw: random.Random, share: float) -> Row:
    arguments = some(draw, {name: value(draw, share) for name, value in VALUES.items()}, share)
    identity = some(draw, {"id": f"call_{draw.randint(0, 9)}"}, share)
    return identity | {"type": "function", "function": {"name": draw.choice(WORDS), "arguments": arguments}}


def turn(draw: random.Random, share: float) -> Iterator[Row]:
    yield {"role": "user", "content": draw.choice(WORDS)} | some(
        draw, {"name": draw.choice(WORDS)}, share / 2
    )
    while draw.random() < share:
        calls = [call(draw, share) for _ in range(draw.randint(1, 2))]
        # Both forms are usual: no content, and null.
        content = draw.choice(({}, {"content": None}, {"content": draw.choice(WORDS)}))
        thought = some(draw, {"reasoning_content": draw.choice(WORDS)}, share / 2)
        yield {"role": "assistant"} | content | thought | {"tool_calls": calls}
        for one in calls:
            known = {"tool_call_id": one["id"]} if "id" in one else {}
            yield {"role": "tool", "content": draw.choice(WORDS)} | known
        if share == 1:
            break
    yield {"role": "assistant", "content": draw.choice(WORDS)}


def tool(draw: random.Random, share: float) -> Row:
    described = {name: {"type": "string"} | some(draw, {"enum": ["a", "b"]}, share) for name in VALUES}
    parameters = {"type": "object", "properties": some(draw, described, share)}
    optional = some(draw, {"description": draw.choice(WORDS), "parameters": parameters}, share)
    return {"type": "function", "function": {"name": draw.choice(WORDS), **optional}}


def conversation(draw: random.Random, share: float = 0.5) -> Row:
    messages = [{"role": "system", "content": draw.choice(WORDS)}] if draw.random() < share else []
    for _ in range(draw.randint(1, 3)):
        messages += turn(draw, share)
    found = {
        "tools": [tool(draw, share) for _ in range(draw.randint(1, 3))],
        "documents": [some(draw, {"title": draw.choice(WORDS), "text": draw.choice(WORDS)}, share)],
    }
    return {"messages": messages, **some(draw, found, share)}


def conversations(count: int) -> list[Row]:
    """Return drawn conversations; the first has every key, in the order that Arrow gives them."""
    draw = random.Random(7)
    return [conversation(draw, 1), *(conversation(draw) for _ in range(count - 1))]


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: list[Row]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_tables(folder: Path, rows: list[Row]) -> dict[str, Path]:
    """Write conversations in all forms."""
    paths = {"jsonl": folder / "a.jsonl", "parquet": folder / "b.parquet", "Arrow's JSON": folder / "c.jsonl"}
    write_jsonl(paths["jsonl"], rows)
    write_parquet(paths["parquet"], rows)
    write_jsonl(paths["Arrow's JSON"], pyarrow.Table.from_pylist(rows).to_pylist())
    return paths


def with_datasets(folder: Path, rows: list[Row]) -> dict[str, Path]:
    """Write conversations as datasets does: through its file of Arrow, and with its type for JSON."""
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no type for JSON")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    arrow = datasets.load_from_disk(folder / "saved")
    arrow.to_parquet(folder / "d.parquet")
    arrow.to_json(folder / "e.jsonl")
    messages = datasets.List(datasets.Json())
    of_json = datasets.Features({"messages": messages, "tools": datasets.Json(), "documents": messages})
    datasets.Dataset.from_list(
        [{"tools": None, "documents": None, **row} for row in rows], features=of_json
    ).to_parquet(folder / "f.parquet")
    return {"datasets": folder / "d.parquet", "its to_json": folder / "e.jsonl", "Json": folder / "f.parquet"}


def tokenized(path: Path, tokenizer_json: Path, template: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens and the labels of a file."""
    prefix = path.parent / f"{path.name}-out"
    words = ["--loss-mask", "chat", "--chat-template", template, "--tokenizer-type", "HFTokenizer"]
    words += [
        "--vocab-file",
        tokenizer_json,
        "--input",
        path,
        "--output-prefix",
        prefix,
        "--append-eod",
        "-q",
    ]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    # The conversations in JSONL have no nulls.
    assert (f"note: {NULLS}\n" in result.stderr) == (path.name not in ("a.jsonl", "f.parquet"))
    tokens, labels = (
        [row.tolist() for row in open_indexed(f"{prefix}_messages{end}_document")] for end in ("", "_label")
    )
    return tokens, labels


def without_nulls_of_content(row: Row) -> list[Row]:
    """Return the messages with null as content where there is none, as ours has them."""
    return [{"content": None, **message} for message in row["messages"]]


def compare(folder: Path, tokenizer_json: Path, rows: list[Row], paths: dict[str, Path]) -> int:
    """Compare the forms with each other, and the first with what transformers renders; return the tokens."""
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)
    count = 0
    for name, source in TEMPLATES.items():
        (folder / "chat.jinja").write_text(source)
        found = {form: tokenized(path, tokenizer_json, folder / "chat.jinja") for form, path in paths.items()}
        tokens, labels = found["jsonl"]
        for form, other in found.items():
            assert other == (tokens, labels), f"{name}: {form}"
        for row, ids in zip(rows, tokens, strict=True):
            (text,), _ = utilities.render_jinja_template(
                conversations=[without_nulls_of_content(row)],
                chat_template=source,
                tools=row.get("tools"),
                documents=row.get("documents"),
            )
            assert tokenizer.decode(ids[:-1]) == text, name
        count += sum(map(len, tokens))
        assert sum(label >= 0 for row in labels for label in row) > count / 9
    return count


def test_all_forms_of_conversations_give_the_same_tokens(tmp_path: Path, tokenizer_json: Path) -> None:
    rows = conversations(40)
    compare(tmp_path, tokenizer_json, rows, write_tables(tmp_path, rows))


def test_what_datasets_writes_gives_the_same_tokens(tmp_path: Path, tokenizer_json: Path) -> None:
    rows = conversations(12)
    paths = write_tables(tmp_path, rows) | with_datasets(tmp_path, rows)
    compare(tmp_path, tokenizer_json, rows, paths)


@pytest.mark.sweep
def test_sweep_of_2000_conversations(tmp_path: Path, tokenizer_json: Path) -> None:
    rows = conversations(2000)
    paths = write_tables(tmp_path, rows) | with_datasets(tmp_path, rows)
    assert compare(tmp_path, tokenizer_json, rows, paths) > 1_000_000


def shown(paths: dict[str, Path], source: str = SHOWS_ALL) -> dict[str, list[str]]:
    """Return the rendered conversations of files."""
    texts = {}
    for form, path in paths.items():
        mask = ChatMask("messages", ChatTemplate(source, name="", tokens={}))
        reader = CorpusReader([path], ("messages",), text_from=mask.text_of, optional_keys=mask.optional_keys)
        texts[form] = ["".join(part.text for part in mask.segments(each.texts)) for each in reader]
    return texts


def calling(arguments: Any) -> Row:
    return {"messages": [{"role": "assistant", "tool_calls": [{"arguments": arguments}]}]}


# What Arrow does not keep, with what it makes of it; JSON text keeps all of it.
LOST = {
    "the order of keys": ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], '{"a": 1, "b": 2}'),
    "whole numbers among others": ([{"a": 0.5}, {"a": 1}], '{"a": 1.0}'),
    "explicit nulls": ([{"a": 1, "b": 2}, {"a": 1, "b": None}], '{"a": 1}'),
}


@pytest.mark.parametrize("kind", LOST)
def test_what_arrow_loses_is_kept_by_json_text(tmp_path: Path, kind: str) -> None:
    arguments, arrows = LOST[kind]
    written = [json.dumps(each) for each in arguments]
    expected = {"jsonl": written[1], "parquet": arrows, "Arrow's JSON": arrows}
    if kind == "explicit nulls":
        # A null key is no key in any format, because files of JSON may come from Arrow, too.
        expected = dict.fromkeys(expected, arrows)
    texts = shown(write_tables(tmp_path, [calling(each) for each in arguments]))
    as_text = shown(write_tables(tmp_path, [calling(text) for text in written]))
    for form, found in expected.items():
        assert texts[form][1] == f'<assistant>[{{"arguments": {found}}}];', form
        assert as_text[form][1] == f'<assistant>[{{"arguments": {written[1]}}}];', form


def test_large_whole_numbers_are_exact(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [calling({"number": 10**22 + 1})])
    (texts,) = shown({"jsonl": tmp_path / "a.jsonl"}).values()
    assert texts == ['<assistant>[{"arguments": {"number": 10000000000000000000001}}];']


def test_nulls_of_tools_are_kept_by_json_text_alone() -> None:
    tools = [{"name": "a", "default": None, "enum": [None, "x"], "parameters": {"properties": {"b": None}}}]
    cleaned = [{"name": "a", "enum": [None, "x"], "parameters": {"properties": {}}}]
    notes: set[str] = set()
    assert (
        objects_in(json.dumps(tools), "it", notes) == objects_in([json.dumps(tools[0])], "it", notes) == tools
    )
    assert notes == set()
    assert objects_in(tools, "it", notes) == cleaned
    assert notes == {NULLS}
    assert tools[0]["default"] is None
    assert tools[0]["parameters"] == {"properties": {"b": None}}


def test_null_keys_of_a_message_are_no_keys_except_content() -> None:
    notes: set[str] = set()
    given = {"role": "assistant", "refusal": None, "content": None, "tool_calls": None, "name": "x"}
    assert messages_in([given, {"role": "tool"}], "it", notes) == [
        {"role": "assistant", "content": None, "name": "x"},
        {"role": "tool", "content": None},
    ]
    assert [*messages_in([given], "it")[0]] == ["role", "content", "name"]
    assert notes == set()


def test_both_forms_of_messages_may_be_in_one_column() -> None:
    nothing = dict.fromkeys(("role", "content", "from", "value", "name"))
    rows = [nothing | {"from": "human", "value": "a"}, nothing | {"role": "assistant", "content": "b"}]
    expected = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert messages_in(rows, "it") == expected


@pytest.mark.parametrize("as_text", [json.dumps, lambda rows: [*map(json.dumps, rows)], lambda rows: rows])
def test_messages_may_be_json(as_text: Callable[[Any], Any]) -> None:
    rows = [{"role": "user", "content": "é", "name": None}, {"role": "assistant", "content": "b"}]
    assert messages_in(as_text(rows), "it") == [{"role": "user", "content": "é"}, rows[1]]


def test_deeply_nested_objects_lose_their_nulls() -> None:
    """JSON may be nested more deeply than Python's functions may call themselves."""
    value: Any = {"a": None, "b": 1}
    for _ in range(5000):
        value = {"x": [value], "a": None}
    (found,) = messages_in([{"role": "user", "content": "", "metadata": value}], "it")
    inner = found["metadata"]
    for _ in range(5000):
        assert [*inner] == ["x"]
        (inner,) = inner["x"]
    assert inner == {"b": 1}
