"""`preprocess_data --loss-mask`: tokens and labels of prompts with responses, and of conversations."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import tokenizers
from click.testing import CliRunner, Result
from pyarrow import parquet

from neox_data.errors import CorpusError, TokenizerError
from neox_data.indexed import open_indexed
from neox_data.labels import check_labels
from neox_data.manifest import read_manifest
from neox_data.preprocess.chat_template import ChatTemplate, load_chat_template
from neox_data.preprocess.chat_tokens import end_of_answer
from neox_data.preprocess.cli import main
from neox_data.preprocess.conversations import messages_in
from neox_data.preprocess.loss_mask import ChatMask, MaskedEncoder, PromptMask
from neox_data.tokenizers import build_tokenizer
from neox_data.tokenizers.added import add_special_tokens
from neox_data.tokenizers.char_level import CharLevelTokenizer
from neox_data.tokenizers.train import train_byte_level_bpe
from support.refusals import refused, shows

PLAIN = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{%- for message in messages %}\n"
    "<|{{ message.role }}|>{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{{ eos_token }}\n"
    "{%- endfor %}"
)
CHAT = [
    {"role": "user", "content": "one <b>"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, name="chat.jinja", tokens={"eos_token": "</s>"})


def parts(source: str, messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
    return [tuple(part) for part in template(source).segments(messages)]


def test_an_assistant_message_is_what_the_template_adds_after_the_generation_prompt() -> None:
    assert parts(PLAIN, CHAT) == [
        ("<|user|>one <b></s>\n<|assistant|>", False),
        ("two</s>\n", True),
        ("<|user|>three</s>\n<|assistant|>", False),
        ("four</s>\n", True),
    ]


def test_generation_blocks_mark_what_counts() -> None:
    assert parts(MARKED, CHAT) == [
        ("<|user|>one <b></s><|assistant|>", False),
        ("two", True),
        ("</s><|user|>three</s><|assistant|>", False),
        ("four", True),
        ("</s>", False),
    ]


def test_the_marked_text_is_the_one_that_transformers_renders() -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    (text,), _ = utilities.render_jinja_template(
        conversations=[CHAT], chat_template=MARKED, eos_token="</s>", add_generation_prompt=False
    )
    assert "".join(text for text, _ in parts(MARKED, CHAT)) == text


def test_a_conversation_without_assistant_does_not_count() -> None:
    assert parts(PLAIN, CHAT[:1]) == [("<|user|>one <b></s>\n", False)]


def test_a_template_that_changes_earlier_text_is_refused() -> None:
    counting = "{{ messages | length }}" + PLAIN
    with refused(ValueError, "message 2"):
        template(counting).segments(CHAT)


@pytest.mark.parametrize("expression", ["1 / 0", "'%(a)s' % {}", "range(10 ** 9)", "messages.pop.x.y"])
def test_a_template_that_fails_is_reported(expression: str) -> None:
    with refused(ValueError, "chat template rejects"):
        template(f"{{{{ {expression} }}}}").segments(CHAT)


def test_a_message_with_the_marks_themselves_is_refused() -> None:
    with refused(ValueError, "U+FDD0", "U+FDD1"):
        template(MARKED).segments([{"role": "user", "content": "x\ufdd0y"}])
    for arguments in ({"city": ["\ufdd1"]}, {"\ufdd0": 1}):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        with refused(ValueError, "contains the character"):
            template(MARKED).segments([{"role": "assistant", "content": None, "tool_calls": [call]}])


def test_marks_are_found_in_deeply_nested_messages() -> None:
    """JSON may be nested more deeply than Python's functions may call themselves."""
    value: object = "\ufdd0"
    for _ in range(5000):
        value = {"x": [value]}
    with refused(ValueError, "contains the character"):
        template(MARKED).segments([{"role": "user", "content": "", "metadata": value}])


def test_a_template_cannot_reach_python() -> None:
    with refused(ValueError, "chat template rejects"):
        template("{{ messages.__class__.__mro__[1].__subclasses__() }}").segments(CHAT)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no chat template"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json"),
        ({"tokenizer_config.json": "[" * 200_000}, "tokenizer_config.json"),
        ({"chat_template.jinja": "{% if"}, "valid chat template"),
        ({"chat_template.jinja": "{{ " + "[" * 5000}, "valid chat template"),
    ],
)
def test_a_missing_or_damaged_template_is_reported(tmp_path: Path, files, message) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with refused(CorpusError, message):
        load_chat_template(tmp_path)


@pytest.mark.parametrize("templates", [[PLAIN], [{"name": "default"}], [{"template": PLAIN}]])
def test_a_list_of_templates_without_the_default_one_has_none(tmp_path: Path, templates) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with refused(CorpusError, code="no-template"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize("kind", ["config", "list", "jinja", "file"])
def test_a_template_is_found_in_a_folder_or_file(tmp_path: Path, kind: str) -> None:
    config = {"eos_token": {"content": "</s>"}}
    if kind == "config":
        config["chat_template"] = PLAIN
    if kind == "list":
        config["chat_template"] = [{"name": "tools", "template": ""}, {"name": "default", "template": PLAIN}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(PLAIN) if kind == "jinja" else None
    (tmp_path / "own.txt").write_text(PLAIN)
    found = load_chat_template(tmp_path / "own.txt" if kind == "file" else tmp_path)
    assert found.fingerprint == template(PLAIN).fingerprint


ROWS = [
    {"prompt": "What is it? ", "response": "A sum.", "messages": CHAT},
    {"prompt": "Nothing follows", "response": "", "messages": CHAT[:1]},
    {"prompt": "", "response": "Only \u00e9", "messages": CHAT[1:2]},
    {"prompt": "", "response": None, "messages": None},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run(corpus: Path, tokenizer_json: Path, *more: object) -> Result:
    output = corpus.parent / "out"
    arguments = ["--input", corpus, "--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer_json]
    return CliRunner().invoke(main, [*map(str, [*arguments, "--output-prefix", output, *more])])


def read(prefix: Path) -> list[list[int]]:
    return [row.tolist() for row in open_indexed(prefix)]


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_only_responses_count(corpus: Path, tokenizer_json: Path, resume) -> None:
    result = run(corpus, tokenizer_json, "--loss-mask", "prompt-response", "--append-eod", *resume)
    assert result.exit_code == 0, result.output
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)
    tokens, labels = [], []
    for row in ROWS[:3]:
        prompt, response = tokenizer.encode(row["prompt"]), tokenizer.encode(row["response"])
        end = [tokenizer.end_of_document]
        tokens.append(prompt + response + end)
        # The response of the second is empty; the end after it is its end all the same.
        labels.append([-100] * len(prompt) + response + end)
    out = corpus.parent / "out"
    assert read(Path(f"{out}_text_document")) == tokens
    assert read(Path(f"{out}_label_document")) == labels
    check_labels(open_indexed(f"{out}_text_document"), open_indexed(f"{out}_label_document"))
    assert open_indexed(f"{out}_text_document").dtype == np.int32
    total = sum(map(len, tokens))
    counted = sum(label >= 0 for row in labels for label in row)
    assert shows(result.output, "->", total)
    assert shows(result.output, counted, f"{total} tokens")
    assert f"has {max(map(len, tokens))} tokens" in result.output
    manifest = read_manifest(f"{out}_label_document")
    assert manifest["counts"]["masked"] == total - counted
    assert manifest["options"]["loss_mask"] == "prompts 'prompt', responses 'response'"


def test_messages_with_other_keys_are_named(tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "chat.jinja").write_text(PLAIN)
    shared = tmp_path / "shared.jsonl"
    shared.write_text(json.dumps({"messages": [{"speaker": "human", "text": "hi"}]}) + "\n")
    result = run(shared, tokenizer_json, "--loss-mask", "chat", "--chat-template", tmp_path / "chat.jinja")
    assert result.exit_code != 0
    assert "are 'speaker', 'text')" in result.output


def test_only_the_assistant_counts(corpus: Path, tokenizer_json: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(PLAIN)
    result = run(corpus, tokenizer_json, "--loss-mask", "chat", "--chat-template", tmp_path / "chat.jinja")
    assert result.exit_code == 0, result.output
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)
    out = corpus.parent / "out"
    tokens, labels = read(Path(f"{out}_messages_document")), read(Path(f"{out}_messages_label_document"))
    plain = ChatTemplate(PLAIN, name="", tokens={})
    for row, ids, label in zip(ROWS[:3], tokens, labels, strict=True):
        segments = plain.segments(row["messages"])
        assert tokenizer.decode(ids) == "".join(segment.text for segment in segments)
        assert ids == [token for segment in segments for token in tokenizer.encode(segment.text)]
        expected = [
            token if segment.counts else -100
            for segment in segments
            for token in tokenizer.encode(segment.text)
        ]
        assert label == expected
    assert "1 document has" in result.output
    assert "1 document has" in result.output


def test_the_template_next_to_the_vocabulary_is_the_default(corpus: Path, tokenizer_json: Path) -> None:
    vocab_file = corpus.parent / "tokenizer.json"
    vocab_file.write_text(tokenizer_json.read_text())
    (corpus.parent / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN}))
    result = run(corpus, vocab_file, "--loss-mask", "chat")
    assert result.exit_code == 0, result.output
    template = f"chat template {corpus.parent}/tokenizer_config.json)"
    assert f"(messages 'messages', {template}" in result.output
    mask = read_manifest(corpus.parent / "out_messages_document")["options"]["loss_mask"]
    assert mask.startswith("messages 'messages', chat template ")
    assert len(mask.split()[-1]) == 64
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=vocab_file)
    texts = ["".join(part.text for part in ChatTemplate(PLAIN, name="", tokens={}).segments(CHAT))]
    assert [tokenizer.decode(row) for row in read(corpus.parent / "out_messages_document")][:1] == texts


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (CHATML, "<|im_end|>"),
        (
            CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content | trim }}{% endgeneration %}"),
            "<|im_end|>",
        ),
        (CHATML.replace("<|im_end|>", ""), None),
        (CHATML.replace("<|im_end|>", "<|endoftext|><|im_end|>"), "<|endoftext|>"),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_special_token_that_ends_an_answer_is_noted(
    corpus, tokenizer_json, tmp_path, source, end
) -> None:
    added = add_special_tokens(tokenizer_json, ["<|im_start|>", "<|im_end|>"], tmp_path / "tokenizer.json")
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tmp_path / "tokenizer.json")
    found = end_of_answer(template(source), tokenizer)
    assert (None if found is None else found.text) == end
    (tmp_path / "chat.jinja").write_text(source)
    options = ("--loss-mask", "chat", "--chat-template", tmp_path / "chat.jinja")
    result = run(corpus, tmp_path / "tokenizer.json", *options)
    note = f"set stop-tokens: [{added['<|im_end|>']}] in the configuration"
    assert (note in result.output) == (end == "<|im_end|>")


def test_a_vocabulary_without_a_template_is_no_template(corpus: Path, tokenizer_json: Path) -> None:
    result = run(corpus, tokenizer_json, "--loss-mask", "chat")
    assert result.exit_code == 2
    assert f"{tokenizer_json.parent} contains no" in result.output


def with_special(tokenizer_json: Path, folder: Path, single: str) -> Path:
    """Write the tokenizer with `<|endoftext|>` added to texts as the template `single` describes."""
    description = json.loads(tokenizer_json.read_text())
    token = "<|endoftext|>"
    number = next(one["id"] for one in description["added_tokens"] if one["content"] == token)
    pieces = [
        {"Sequence": {"id": "A", "type_id": 0}}
        if part == "A"
        else {"SpecialToken": {"id": token, "type_id": 0}}
        for part in single.split()
    ]
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pieces,
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(description))
    return path


def test_documents_begin_as_the_tokenizer_begins_their_prompts(corpus, tokenizer_json, tmp_path) -> None:
    vocab_file = with_special(tokenizer_json, tmp_path, "bos bos A")
    result = run(corpus, vocab_file, "--loss-mask", "prompt-response")
    assert result.exit_code == 0, result.output
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=vocab_file)
    out = corpus.parent / "out"
    tokens, labels = read(Path(f"{out}_text_document")), read(Path(f"{out}_label_document"))
    assert len(tokens) == 3
    for row, ids, label in zip(ROWS[:3], tokens, labels, strict=True):
        prompt, response = tokenizer.encode(row["prompt"]), tokenizer.encode(row["response"])[2:]
        assert len(tokenizer.encode("")) == 2
        assert ids == prompt + response
        assert label == [-100] * len(prompt) + response


def test_a_chat_template_writes_the_first_token_itself(corpus, tokenizer_json, tmp_path) -> None:
    vocab_file = with_special(tokenizer_json, tmp_path, "bos A")
    (tmp_path / "chat.jinja").write_text(PLAIN)
    result = run(corpus, vocab_file, "--loss-mask", "chat", "--chat-template", tmp_path / "chat.jinja")
    assert result.exit_code == 0, result.output
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=vocab_file)
    texts = [tokenizer.decode(row) for row in read(corpus.parent / "out_messages_document")]
    assert texts[0].startswith("<|user|>one")


def test_the_summary_counts_texts_and_not_also_their_labels(tmp_path: Path, tokenizer_json: Path) -> None:
    rows = [{"prompt": "abcd efgh", "response": " ijkl"}, {"prompt": "", "response": ""}]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for resume in ((), ("--resume",)):
        result = run(tmp_path / "corpus.jsonl", tokenizer_json, "--loss-mask", "prompt-response", *resume)
        assert result.exit_code == 0, result.output
        (tokens,) = map(len, read(tmp_path / "out_text_document"))
        assert f"-> {tokens} tokens ({14 / tokens:.2f} characters per token)" in result.output
        assert "1 document without" in result.output


def test_a_tokenizer_that_ends_each_text_is_refused(corpus, tokenizer_json, tmp_path) -> None:
    vocab_file = with_special(tokenizer_json, tmp_path, "A eos")
    result = run(corpus, vocab_file, "--loss-mask", "prompt-response")
    assert result.exit_code == 2
    assert "'<|endoftext|>' to the" in result.output


@pytest.mark.parametrize("resume", [(), ("--resume",)])
@pytest.mark.parametrize("single", ["A eos", "bos A eos", "bos A", "A"])
def test_documents_end_once_if_the_tokenizer_ends_them(
    corpus, tokenizer_json, tmp_path, single, resume
) -> None:
    vocab_file = with_special(tokenizer_json, tmp_path, single)
    result = run(corpus, vocab_file, "--jsonl-keys", "response", "--append-eod", *resume)
    assert result.exit_code == 0, result.output
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=vocab_file)
    ends = [] if single.endswith("eos") else [tokenizer.end_of_document]
    # Documents without tokens are left out; a null is an empty text.
    encoded = [tokenizer.encode(row["response"] or "") for row in ROWS]
    expected = [tokens + ends for tokens in encoded if tokens]
    assert read(corpus.parent / "out_response_document") == expected
    assert (shows(result.output, "'<|endoftext|>'", "--append-eod")) != bool(ends)


def test_the_number_of_workers_changes_nothing(tmp_path: Path, tokenizer_json: Path) -> None:
    rows = ({"prompt": f"{n} " * (n % 9), "response": f"r{n}"} for n in range(4000))
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = []
    for workers in (1, 4):
        result = run(
            tmp_path / "corpus.jsonl", tokenizer_json, "--loss-mask", "prompt-response", "--workers", workers
        )
        assert result.exit_code == 0, result.output
        files.append([Path(f"{tmp_path}/out_{key}_document.bin").read_bytes() for key in ("text", "label")])
    assert files[0] == files[1]


FAULTS = {
    "no key": (
        [{"prompt": "x"}],
        (),
        "line 1: no key 'response'; its keys are 'prompt'; pass another key with --prompt-key or --response-",
    ),
    "no messages": (
        [{"text": "x"}],
        ("chat",),
        "'text'; pass another key with --messages-key, or --skip-bad",
    ),
    "text": (["just text"], (), "line 1: it is str, not an object with 'prompt' and 'response'"),
    "not messages": (
        [{"messages": "x"}],
        ("chat",),
        "the value of 'messages' is text, but not JSON (Expecting value at column 1)",
    ),
    "no role": (
        [{"messages": [{"content": "x"}]}],
        ("chat",),
        "message 1 of the value of 'messages' is not an",
    ),
    "sharegpt": (
        [{"messages": [{"from": "observation", "value": "3"}]}],
        ("chat",),
        "message 1 of the value of 'messages' is from 'observation', which is none of human, gpt, system, ",
    ),
    "tools": (
        [{"messages": CHAT, "tools": "[{]"}],
        ("chat",),
        "the value of 'tools' is text, but not JSON (",
    ),
    "no tools": (
        [{"messages": CHAT, "tools": [1]}],
        ("chat",),
        "the value of 'tools' is not a list of objects",
    ),
    "messages of a prompt": (
        [{"prompt": CHAT[:1], "response": CHAT[1:2]}],
        (),
        "the value of 'prompt' is a list of objects, not text; preprocess_data --loss-mask chat reads conv",
    ),
    "parts": (
        [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
        ("chat",),
        "the content of message 1 of the value of 'messages' is not text: it has a part of the type 'image'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_documents_of_another_form_are_refused_or_counted(tmp_path, tokenizer_json, fault) -> None:
    rows, kind, message = FAULTS[fault]
    corpus = tmp_path / "corpus.jsonl"
    good = {"prompt": "a", "response": "b", "messages": CHAT}
    corpus.write_text("".join(json.dumps(row) + "\n" for row in [*rows, good]))
    (tmp_path / "chat.jinja").write_text(PLAIN + "{{ tools or '' }}" * ("tools" in fault))
    template_option = ("--chat-template", tmp_path / "chat.jinja") if kind else ()
    options = ("--loss-mask", *(kind or ("prompt-response",)), *template_option)
    result = run(corpus, tokenizer_json, *options)
    assert result.exit_code != 0
    assert message in result.output
    assert not list(tmp_path.glob("out*"))
    result = run(corpus, tokenizer_json, *options, "--skip-bad-lines")
    assert result.exit_code == 0, result.output
    assert "1 unreadable document" in result.output


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("prompt-response", ("--ftfy",), "--ftfy has no effect with --loss-mask prompt-response; remove"),
        ("chat", ("--split-long-documents",), "has no effect with --loss-mask chat; remove --split-long-doc"),
        ("chat", ("--exact",), "--exact has no effect with --loss-mask chat"),
        ("chat", ("--jsonl-keys", "messages"), "--jsonl-keys has no effect with --loss-mask chat"),
        ("prompt-response", ("--json-keys", "prompt"), "--jsonl-keys has no effect with"),
        ("chat", ("--response-key", "x"), "--response-key has no effect with --loss-mask chat"),
        ("prompt-response", ("--messages-key", "x"), "--messages-key has no effect with"),
        ("prompt-response", ("--chat-template", "."), "--chat-template has no effect with"),
        (None, ("--prompt-key", "x"), "--prompt-key has no effect without --loss-mask; remove"),
        (None, ("--chat-template", "."), "--chat-template has no effect without --loss-mask"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    corpus, tokenizer_json, kind, options, message
) -> None:
    given = () if kind is None else ("--loss-mask", kind)
    result = run(corpus, tokenizer_json, *given, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not list(corpus.parent.glob("out*"))


def test_null_as_content_is_what_the_template_makes_of_it() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    guarded = "{% for m in messages %}{{ m.content if m.content is not none else '<call>' }};{% endfor %}"
    assert "".join(part.text for part in template(guarded).segments(messages)) == "a;<call>;"
    with refused(ValueError, "message with null"):
        template("{% for m in messages %}{{ m.content }};{% endfor %}").segments(messages)
    mask = ChatMask("messages", template(guarded))
    assert "<call>" in mask.text_of(messages, "it", {"messages": messages})


TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"b": 1, "a": {}}}}]
SHOWS_TOOLS = (
    "{% if tools is not none %}{{ tools | tojson(indent=2, sort_keys=true) }}{% endif %}"
    "{% for one in documents or [] %}{{ one | tojson(separators=[',', ':']) }}{% endfor %}" + PLAIN
)


@pytest.mark.parametrize(
    "extra", [{}, {"tools": TOOLS}, {"tools": []}, {"tools": TOOLS, "documents": [{"a": "é"}]}]
)
@pytest.mark.parametrize("source", [SHOWS_TOOLS, PLAIN, MARKED])
def test_tools_and_documents_are_shown_as_transformers_shows_them(source, extra) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    (text,), _ = utilities.render_jinja_template(
        conversations=[CHAT], chat_template=source, eos_token="</s>", add_generation_prompt=False, **extra
    )
    mask = ChatMask("messages", template(source))
    segments = mask.segments([mask.text_of(CHAT, "it", {"messages": CHAT, **extra})])
    assert "".join(part.text for part in segments) == text
    assert [part.text for part in segments if part.counts] == [
        text for text, counts in parts(source, CHAT) if counts
    ]
    assert mask._left_out == ({each for each in extra if extra[each]} if source != SHOWS_TOOLS else set())


@pytest.mark.parametrize("kind", ["objects", "JSON", "parquet"])
def test_the_tools_of_a_corpus_are_written(tmp_path, tokenizer_json, kind) -> None:
    rows = [
        {"messages": CHAT, "tools": json.dumps(TOOLS) if kind != "objects" else TOOLS},
        {"messages": CHAT, "tools": "" if kind != "objects" else None},
    ]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "parquet":
        corpus = tmp_path / "corpus.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), corpus)
    (tmp_path / "chat.jinja").write_text(SHOWS_TOOLS)
    options = ("--loss-mask", "chat", "--chat-template", tmp_path / "chat.jinja")
    result = run(corpus, tokenizer_json, *options)
    assert result.exit_code == 0, result.output
    assert "does not show" not in result.output
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)
    with_tools, without = [tokenizer.decode(row) for row in read(tmp_path / "out_messages_document")]
    assert with_tools == json.dumps(TOOLS, indent=2, sort_keys=True, ensure_ascii=False) + without
    (tmp_path / "chat.jinja").write_text(PLAIN)
    result = run(corpus, tokenizer_json, *options)
    assert shows(result.output, "'tools'", f"{tmp_path}/chat.jinja")


def test_a_template_may_show_the_date() -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (
        "{{ strftime_now('%d %B %Y') }};{{ dict(a=1) }};{% for m in messages %}{% continue %}{% endfor %}"
    )
    (text,), _ = utilities.render_jinja_template(conversations=[CHAT[:1]], chat_template=source)
    assert parts(source, CHAT[:1]) == [(text, False)]


def test_messages_of_sharegpt_and_content_in_parts_are_read() -> None:
    theirs = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
    ]
    roles = ("system", "user", "assistant")
    ours = [{"role": role, "content": text} for role, text in zip(roles, "sab", strict=True)]
    in_parts = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in zip(roles, "sab", strict=True)
    ]
    assert messages_in(theirs, "it") == messages_in(in_parts, "it") == ours
    in_parts[2]["content"].append({"type": "text", "text": "c"})
    assert messages_in(in_parts, "it")[2]["content"] == "bc"


@pytest.mark.parametrize("resume", [(), ("--resume",)])
@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"messages": [{"role": 1}]},
            ("--loss-mask", "chat"),
            "has text under 'messages'; documents were skipped, such as {}, line 1: message 1 of the value "
            "of 'messages' is not an object with role and content, or with from and value (its keys are "
            "'role'); pass the right key with --messages-key, or another corpus",
        ),
        (
            {"prompt": "", "response": ""},
            ("--loss-mask", "prompt-response"),
            "has text under 'prompt' and 'response'; pass the right key with --prompt-key or --response-key",
        ),
    ],
)
def test_a_corpus_without_a_document_names_the_keys_and_the_cause(
    tmp_path, tokenizer_json, resume, row, options, message
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps(row) + "\n")
    (tokenizer_json.parent / "chat_template.jinja").write_text(PLAIN)
    try:
        result = run(corpus, tokenizer_json, *options, "--skip-bad-lines", *resume)
    finally:
        (tokenizer_json.parent / "chat_template.jinja").unlink()
    assert result.exit_code == 2
    assert message.format(corpus) in result.output


def test_conversations_without_a_loss_mask_name_the_option(tmp_path, tokenizer_json) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"messages": CHAT}) + "\n")
    result = run(corpus, tokenizer_json, "--jsonl-keys", "messages")
    assert "preprocess_data --loss-mask chat" in result.output


@pytest.mark.parametrize("token", [{"lstrip": False}, {"content": None}, 7])
def test_a_special_token_without_a_text_is_reported(tmp_path: Path, token) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": token, "chat_template": PLAIN}))
    with refused(CorpusError, "bos_token"):
        load_chat_template(tmp_path)


def llama_tokenizer(folder: Path, kind: str) -> Path:
    """Train a tokenizer that adds a space to the beginning of each text, as Llama 2's and Mistral's."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    decoders = tokenizers.decoders
    if kind == "Prepend":
        normalizers = tokenizers.normalizers
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("▁", "merged_with_next")
    else:
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    texts = ["one two three four five", "the answer is two", "[INST] one [/INST] two"]
    inner.train_from_iterator(texts * 9, trainer)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    description = json.loads(inner.to_str())
    # Words were split only while training, so that no entry is longer than one.
    whole = description["pre_tokenizer"] | {"split": False}
    description["pre_tokenizer"] = None if kind == "Prepend" else whole
    (folder / "tokenizer.json").write_text(json.dumps(description))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
ANSWERS = ["two three", "the answer: é ☃ is  four.", "five"]
TURNS = [
    {"role": role, "content": text}
    for number, answer in enumerate(ANSWERS)
    for role, text in (("user", f"one {number} ☃"), ("assistant", answer))
]


@pytest.mark.parametrize("kind", ["Prepend", "Metaspace"])
def test_a_tokenizer_that_adds_a_space_encodes_whole_conversations(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    vocab_file = llama_tokenizer(tmp_path, kind)
    (tmp_path / "chat_template.jinja").write_text(INSTRUCTIONS)
    corpus = tmp_path / "corpus.jsonl"
    rows = [TURNS, TURNS[:3], TURNS[2:4]]
    corpus.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    result = run(corpus, vocab_file, "--loss-mask", "chat")
    assert result.exit_code == 0, result.output
    assert "HFTokenizer, as whole" in result.output
    tokens, labels = (read(tmp_path / f"out_messages{end}_document") for end in ("", "_label"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = [
        theirs.apply_chat_template(row, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        for row in rows
    ]
    assert tokens == [each["input_ids"] for each in expected]
    masks = [[int(label >= 0) for label in row] for row in labels]
    assert masks == [each["assistant_masks"] for each in expected]
    counted = [label for label in labels[0] if label >= 0]
    assert counted == [token for token, counts in zip(tokens[0], masks[0], strict=True) if counts]
    text = build_tokenizer("HFTokenizer", vocab_file=vocab_file).decode(counted)
    # A token begins with the space before its word.
    assert text.replace("</s> ", "</s>") == "".join(f"{answer}</s>" for answer in ANSWERS)


@pytest.mark.parametrize("kind", ["Prepend", "Metaspace"])
def test_a_tokenizer_that_adds_a_space_encodes_whole_prompts_and_responses(tmp_path: Path, kind) -> None:
    vocab_file = llama_tokenizer(tmp_path, kind)
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"prompt": "the answer is ", "response": "two ☃"}, {"prompt": "one", "response": ""}]
    empty = {"prompt": "", "response": ""}
    corpus.write_text("".join(json.dumps(row) + "\n" for row in [empty, *rows, empty]))
    result = run(corpus, vocab_file, "--loss-mask", "prompt-response", "--append-eod")
    assert result.exit_code == 0, result.output
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=vocab_file)
    tokens, labels = (read(tmp_path / f"out_{key}_document") for key in ("text", "label"))
    assert tokens == [[*tokenizer.encode(row["prompt"] + row["response"]), 2] for row in rows]
    counted = [[label for label in row if label >= 0] for row in labels]
    # All bytes of the snowman count.
    assert [tokenizer.decode(row).lstrip(" ") for row in counted] == ["two ☃</s>", "</s>"]


def test_a_space_before_each_text_is_added_once(corpus, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    train_byte_level_bpe(["a b c"], vocab_size=270, output=path)
    description = json.loads(path.read_text())
    description["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
    description["pre_tokenizer"]["trim_offsets"] = True
    path.write_text(json.dumps(description))
    result = run(corpus, path, "--loss-mask", "prompt-response")
    assert result.exit_code == 0, result.output
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=path)
    texts = [tokenizer.decode(row) for row in read(tmp_path / "out_text_document")]
    assert texts == [f" {row['prompt']}{row['response']}" for row in ROWS[:3]]
    labels = [[label for label in row if label >= 0] for row in read(tmp_path / "out_label_document")]
    assert [tokenizer.decode(row).strip(" ") for row in labels] == [row["response"] for row in ROWS[:3]]


def test_a_tokenizer_that_adds_a_space_and_names_no_places_is_refused() -> None:
    class Spaced(CharLevelTokenizer):
        def encode_flat(self, texts):
            return super().encode_flat([f" {text}" for text in texts])

    with refused(TokenizerError, "cd'", "tokenizer.json"):
        MaskedEncoder(Spaced(), PromptMask("a", "b"))
