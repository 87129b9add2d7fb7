import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from neox_data.errors import TokenizerError
from neox_data.tokenizers import build_tokenizer
from support.refusals import refused

TEXTS = [
    "",
    "plain text",
    "  spaces  and\ttabs\n\n",
    "na\u00efve \u4f60\u597d \U0001f680\u200d",
    "don't you'll WE'VE 123456",
]
KINDS = ["HFTokenizer", "GPT2BPETokenizer", "HFGPT2Tokenizer", "CharLevelTokenizer"]


@pytest.fixture
def build(tokenizer_json: Path, tmp_path: Path):
    """Any kind of tokenizer, from one vocabulary."""

    def make(kind: str):
        if kind == "CharLevelTokenizer":
            return build_tokenizer(kind)
        if kind == "HFTokenizer":
            return build_tokenizer(kind, vocab_file=tokenizer_json)
        if kind == "HFGPT2Tokenizer":
            (tmp_path / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
            return build_tokenizer(kind, vocab_file=tmp_path)
        LibraryTokenizer.from_file(str(tokenizer_json)).model.save(str(tmp_path))
        return build_tokenizer(
            kind, vocab_file=tmp_path / "vocab.json", merge_file=str(tmp_path / "merges.txt")
        )

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_texts_come_back_unchanged(build, kind: str) -> None:
    tokenizer = build(kind)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert all(0 <= token < tokenizer.vocab_size for ids in tokenizer.encode_batch(TEXTS) for token in ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(text=st.text())
def test_any_text_comes_back_unchanged(build, kind: str, text: str) -> None:
    tokenizer = build(kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_three_of_one_vocabulary_agree(build) -> None:
    first, *others = (build(kind).encode_batch(TEXTS) for kind in KINDS[:3])
    assert others == [first, first]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_end_of_document_is_found_in_a_text(build, kind: str) -> None:
    tokenizer = build(kind)
    ids = tokenizer.encode("one<|endoftext|>two")
    assert ids.count(tokenizer.end_of_document) == 1
    assert tokenizer.decode([tokenizer.end_of_document]) == "<|endoftext|>"


@pytest.mark.parametrize(
    ("kind", "vocab_size", "end", "padding"),
    [
        ("HFTokenizer", 300, 0, 1),
        ("GPT2BPETokenizer", 300, 0, 1),
        ("HFGPT2Tokenizer", 300, 0, 1),
        ("CharLevelTokenizer", 512, 0, 1),
    ],
)
def test_special_ids(build, kind: str, vocab_size: int, end: int, padding: int) -> None:
    tokenizer = build(kind)
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.padding) == (vocab_size, end, padding)


def test_hfgpt2_adds_its_padding_and_takes_the_end_that_the_folder_names(
    tokenizer_json: Path, tmp_path: Path
) -> None:
    data = json.loads(tokenizer_json.read_text())
    renamed = json.dumps(data).replace("<|padding|>", "<|other|>")
    (tmp_path / "tokenizer.json").write_text(renamed)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|other|>"}}))
    tokenizer = build_tokenizer("HFGPT2Tokenizer", vocab_file=tmp_path)
    assert (tokenizer.vocab_size, tokenizer.padding, tokenizer.end_of_document) == (301, 300, 1)


def test_a_truncation_stored_in_the_file_is_not_applied(tokenizer_json: Path, tmp_path: Path) -> None:
    library = LibraryTokenizer.from_file(str(tokenizer_json))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "t.json"))
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tmp_path / "t.json")
    assert tokenizer.decode(tokenizer.encode(TEXTS[1])) == TEXTS[1]
    assert len(tokenizer.encode("a")) == 1


def test_a_vocabulary_without_padding_has_none(tokenizer_json: Path, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(tokenizer_json.read_text().replace("<|padding|>", "<|other|>"))
    assert build_tokenizer("HFTokenizer", vocab_file=tmp_path / "t.json").padding is None


def test_cut_characters_decode_to_the_replacement_character(build) -> None:
    tokenizer = build("CharLevelTokenizer")
    assert tokenizer.decode([0xE4, 0xBD]) == "\ufffd"
    assert tokenizer.decode([65, 300, 66]) == "A\ufffdB"


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_is_refused(build, kind: str) -> None:
    with refused(TokenizerError, code="not-encodable"):
        build(kind).encode_batch(["fine", "\ud800"])


NOTHING = Path("/nowhere/file")


@pytest.mark.parametrize(
    ("kind", "vocab_file", "merge_file", "sentence"),
    [
        ("GPT2BPE", None, None, "unknown tokenizer_type 'GPT2BPE'; use one of GPT2BPETokenizer,"),
        ("HFTokenizer", None, None, "HFTokenizer: vocab_file is not given; give the path of tokenizer.json"),
        ("HFTokenizer", NOTHING, None, "vocab_file /nowhere/file is not a file"),
        ("HFTokenizer", Path("/"), None, "vocab_file / is not a file; give the path of tokenizer.json"),
        ("HFTokenizer", NOTHING, NOTHING, "merge_file /nowhere/file was given; remove merge_file"),
        ("HFGPT2Tokenizer", None, NOTHING, "/nowhere/file was given; remove merge_file"),
        ("HFGPT2Tokenizer", Path(__file__), None, ".py/tokenizer.json is not a file; give the path"),
        ("GPT2BPETokenizer", NOTHING, None,
            "vocab_file /nowhere/file is not a file; give the path of vocab.json, and merge_file is not "
            "given; give the path of merges.txt"),
        ("TiktokenTokenizer", Path("/"), None,
            "vocab_file / is not a file; give the path of cl100k_base.tik"),
        ("CharLevelTokenizer", NOTHING, None, "uses no files, but /nowhere/file was given"),
    ],
)  # fmt: skip
def test_wrong_files_have_their_sentence(kind: str, vocab_file, merge_file, sentence: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        build_tokenizer(kind, vocab_file=vocab_file, merge_file=merge_file)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("content", ["", "{}", "[1, 2", '{"model": "BPE"}'])
def test_a_damaged_tokenizer_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with refused(TokenizerError, "t.json", "tokenizer.json", code="invalid-tokenizer"):
        build_tokenizer("HFTokenizer", vocab_file=tmp_path / "t.json")


def test_a_vocabulary_without_end_of_document_is_refused(tokenizer_json: Path, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(tokenizer_json.read_text().replace("<|endoftext|>", "</s>"))
    with refused(TokenizerError, "end-of-document", "'<|endoftext|>'"):
        build_tokenizer("HFTokenizer", vocab_file=tmp_path / "t.json")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with refused(TokenizerError, "vocab.json", "end-of-document"):
        build_tokenizer(
            "GPT2BPETokenizer", vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt"
        )


def test_damaged_bpe_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("[]")
    (tmp_path / "merges.txt").write_text("a b\n")
    with refused(TokenizerError, "vocab.json", "merges.txt", "GPT-2's"):
        build_tokenizer(
            "GPT2BPETokenizer", vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt"
        )


def test_fingerprint_is_the_hash_of_the_library_s_description(tokenizer_json: Path) -> None:
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)
    description = json.loads(tokenizer.library_tokenizer.to_str())
    del description["truncation"], description["padding"]
    expected = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    assert tokenizer.fingerprint == expected
    assert tokenizer.added_texts == ["<|endoftext|>", "<|padding|>"]


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_are_those_that_no_text_has(build, kind: str) -> None:
    tokenizer = build(kind)
    special = tokenizer.special_ids
    assert tokenizer.end_of_document in special
    assert tokenizer.padding is None or tokenizer.padding in special
    assert special <= set(range(tokenizer.vocab_size))
    texts = [text.replace("\0", "").replace("\1", "") for text in TEXTS]
    assert not special & {token for ids in tokenizer.encode_batch(texts) for token in ids}


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_found_by_its_text(build, kind: str) -> None:
    tokenizer = build(kind)
    (number,) = tokenizer.encode("a")
    assert tokenizer.token_id("a") == number
    assert tokenizer.token_id("<|no such token|>") is None


def test_bytes_have_special_tokens_among_their_unused_ids() -> None:
    tokenizer = build_tokenizer("CharLevelTokenizer")
    names = ("<|mask|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    assert [tokenizer.token_id(name) for name in names] == [256, 257, 258, 259]
    assert len(tokenizer.special_ids) == 258


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_json_that_is_nested_too_deeply_is_refused_by_its_name(
    tokenizer_json: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
    (folder / name).write_text("[" * 5000 + "]" * 5000)
    with refused(TokenizerError, name):
        build_tokenizer("HFGPT2Tokenizer", vocab_file=folder)
