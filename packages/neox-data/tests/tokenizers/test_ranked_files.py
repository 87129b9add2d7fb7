import base64
import struct
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_data.errors import TokenizerError
from neox_data.indexed import IndexedDatasetWriter, open_indexed
from neox_data.preprocess.chat_tokens import encode_conversation
from neox_data.preprocess.cli import main
from neox_data.search import documents_with, token_matcher
from neox_data.tokenizers import build_tokenizer
from support.refusals import refused

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BPE, UNIGRAM = 2, 1


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number: int, value: bytes | int) -> bytes:
    """Encode one field of a protocol buffer."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece(text: str, score: float, kind: int) -> bytes:
    return field(1, field(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + field(3, kind))


def model(
    kind: int = BPE, end: str = "</s>", more: bytes = b"", rules: bytes = b"", trainer: bytes = b""
) -> bytes:
    """Return a SentencePiece model: the bytes, the letters of "hello world", and three merges."""
    pieces = [piece("<unk>", 0, UNKNOWN), piece("<s>", 0, CONTROL), piece(end, 0, CONTROL)]
    pieces += [piece(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)]
    merges = ["he", "ll", "\u2581w"]
    letters = [*sorted(set("hello world") - {" "}), "\u2581"]
    pieces += [piece(text, -rank, NORMAL) for rank, text in enumerate([*merges, *letters])]
    trainer = field(3, kind) + field(35, 1) + trainer
    normalizer = field(1, b"identity") + field(3, 1) + field(4, 1) + field(5, 1) + rules
    return b"".join(pieces) + more + field(2, trainer) + field(3, normalizer)


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model())
    return path


@pytest.fixture
def tiktoken(tmp_path: Path) -> Path:
    ranks = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b" w"]
    path = tmp_path / "r50k_base.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(text), rank) for rank, text in enumerate(ranks)))
    return path


def test_a_sentencepiece_model_is_read(sentencepiece: Path) -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", vocab_file=sentencepiece)
    ids = tokenizer.encode("hello world \u4f60")
    assert tokenizer.decode(ids) == "hello world \u4f60"
    pieces = ["\u2581", "he", "ll", "o", "\u2581w", "o", "r", "l", "d", "\u2581"]
    numbers = {text: 259 + rank for rank, text in enumerate(["he", "ll", "\u2581w", *"dehlorw", "\u2581"])}
    assert ids == [*(numbers[text] for text in pieces), *(3 + byte for byte in "\u4f60".encode())]
    assert (tokenizer.end_of_document, tokenizer.padding, tokenizer.vocab_size) == (2, None, 270)


def test_a_tiktoken_file_is_read(tiktoken: Path) -> None:
    tokenizer = build_tokenizer("TiktokenTokenizer", vocab_file=tiktoken)
    assert tokenizer.encode("hello world<|endoftext|>") == [258, 111, 259, 111, 114, 108, 100, 50256]
    assert tokenizer.decode([258, 111, 259, 60_000, -1]) == "hello w"
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (50256, 50257)


@pytest.mark.parametrize(
    ("kind", "is_spelt"), [("TiktokenTokenizer", True), ("SentencePieceTokenizer", False)]
)
def test_a_passage_is_found_in_the_tokens(
    kind: str, is_spelt: bool, tiktoken: Path, sentencepiece: Path, tmp_path: Path
) -> None:
    file = {"TiktokenTokenizer": tiktoken, "SentencePieceTokenizer": sentencepiece}[kind]
    tokenizer = build_tokenizer(kind, vocab_file=file)
    with IndexedDatasetWriter(tmp_path / "a", dtype="u2") as writer:
        for text in ("hello world", "world", "hell", "o, he", "\u4f60 hello"):
            writer.append(tokenizer.encode(text))
    found = {
        text: list(documents_with(open_indexed(tmp_path / "a"), text, tokenizer)) for text in ("ello", "o w")
    }
    assert found == {"ello": [0, 4], "o w": [0]}
    assert (token_matcher("ello", tokenizer) is not None) == is_spelt


def test_batch_encoding_equals_single_encoding(sentencepiece: Path) -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", vocab_file=sentencepiece)
    texts = ["hello", "", "wor ld"]
    ids, sizes = tokenizer.encode_flat(texts)
    assert ids.tolist() == [number for text in texts for number in tokenizer.encode(text)]
    assert sizes.tolist() == [len(tokenizer.encode(text)) for text in texts]
    assert [len(part) for part in tokenizer.encode_flat([])] == [0, 0]


def test_different_files_have_different_fingerprints(tmp_path: Path, sentencepiece: Path) -> None:
    other = tmp_path / "other.model"
    other.write_bytes(model() + field(1, field(1, b"xyz") + field(3, NORMAL)))
    prints = {
        build_tokenizer("SentencePieceTokenizer", vocab_file=path).fingerprint
        for path in (sentencepiece, other)
    }
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("SentencePieceTokenizer", "a.model", b"nonsense", "a sentencepiece model"),
        (
            "SentencePieceTokenizer",
            "a.model",
            model(end="<end>"),
            "end-of-document token '</s>'",
        ),
        ("TiktokenTokenizer", "own.tiktoken", b"aGU= 0\n", "pretokenizer 'own' needs"),
        ("TiktokenTokenizer", "r50k_base.tiktoken", b"zzz\n", "r50k_base.tiktoken"),
    ],
)
def test_unusable_file_is_reported(
    tmp_path: Path, kind: str, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(TokenizerError, message):
        build_tokenizer(kind, vocab_file=tmp_path / name)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (model(kind=UNIGRAM), "unigram"),
        (model(rules=field(2, b"rules")), "normalizes"),
        (model(more=piece("<code>", 0, USER_DEFINED)), "user-defined"),
        (model(more=piece("old", 0, UNUSED)), "unused"),
        (model(trainer=field(35, 0)), "byte fallback"),
        (model(trainer=field(24, 1)), "behind words"),
        (model(rules=field(5, 0)), "escape spaces"),
    ],
)
def test_a_model_for_the_library_is_refused_without_it(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "a.model").write_bytes(content)
    with refused(TokenizerError, "a.model", reason, "sentencepiece", code="requires-library"):
        build_tokenizer("SentencePieceTokenizer", vocab_file=tmp_path / "a.model")


def test_control_symbols_in_a_text_are_text(sentencepiece: Path) -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", vocab_file=sentencepiece)
    assert tokenizer.encode("<s>he") == [269, *(3 + byte for byte in b"<s>"), 259]
    assert tokenizer.decode([1, 269, 259]) == "<s> he"
    assert encode_conversation("<s>he</s>ll", tokenizer) == [1, 269, 259, 2, 269, 260]
    assert [tokenizer.token_id(text) for text in ("</s>", "<0x41>", "he")] == [2, 3 + 0x41, 259]
    assert tokenizer.special_ids == {0, 1, 2}


def test_no_merge_makes_a_control_symbol_the_unknown_one_or_a_byte_of_a_text(tmp_path: Path) -> None:
    texts = ["<", "s", ">", "u", "n", "k", "s>", "k>", "un", "<un", "<0x", "41>"]
    more = b"".join(piece(text, -99 - rank, NORMAL) for rank, text in enumerate(texts))
    (tmp_path / "a.model").write_bytes(model(more=more))
    tokenizer = build_tokenizer("SentencePieceTokenizer", vocab_file=tmp_path / "a.model")
    ids = tokenizer.encode("<s> <unk>")
    assert [tokenizer.entry(number) for number in ids] == ["\u2581", "<", "s>", "\u2581", "<un", "k>"]
    assert 3 + 0x41 not in tokenizer.encode("<0x41>")


def test_spaces_that_a_model_removes_are_plain_ones(sentencepiece: Path) -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", vocab_file=sentencepiece)
    assert tokenizer.encode("  he   he \u2581 ") == tokenizer.encode("he he")
    assert tokenizer.encode("\nhe\n") == [269, 13, 259, 13]
    assert tokenizer.encode("  ") == tokenizer.encode("") == []


@pytest.mark.parametrize("kind", ["TiktokenTokenizer", "SentencePieceTokenizer"])
def test_half_of_a_surrogate_pair_is_an_error(kind: str, tiktoken: Path, sentencepiece: Path) -> None:
    file = {"TiktokenTokenizer": tiktoken, "SentencePieceTokenizer": sentencepiece}[kind]
    with refused(TokenizerError, "UTF-8", code="not-encodable"):
        build_tokenizer(kind, vocab_file=file).encode_flat(["a", "\ud800"])


# Letters, a digit and marks of Unicode 17, which tiktoken does not classify as such.
NEW = (
    "\U00016ea0",
    "\U00010940",
    "\U00011db0",
    "\U0001e6c0",
    "\ua7ce",
    "\u088f",
    "\U00011de0",
    "\u1acf",
    "\U00010efa",
)


@pytest.mark.parametrize("encoding", ["r50k_base", "cl100k_base", "o200k_base"])
def test_letters_of_unicode_17_divide_words_as_in_tiktoken(encoding: str, tmp_path: Path) -> None:
    last = sorted({letter.encode()[-1] for letter in NEW})
    pairs = [bytes([byte]) + other for byte in last for other in (b"<", b"a", b"1")] + [b"<d", b" \xf0"]
    ranks = [bytes([byte]) for byte in range(256)] + pairs
    path = tmp_path / f"{encoding}.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(text), rank) for rank, text in enumerate(ranks)))
    tokenizer = build_tokenizer("TiktokenTokenizer", vocab_file=path)
    joined = {text: rank for rank, text in enumerate(ranks)}
    for letter in NEW:
        content = letter.encode()
        # Punctuation joins it, and so do letters behind it where one other character may begin a word.
        assert tokenizer.encode(f"{letter}<div") == [*content[:-1], joined[content[-1:] + b"<"], *b"div"]
        first = content[-1] if encoding == "r50k_base" else joined[content[-1:] + b"a"]
        assert tokenizer.encode(f"{letter}abc")[: len(content)] == [*content[:-1], first]
        ids = tokenizer.encode(f"a{letter}<|endoftext|>{letter}<")
        assert ids == [97, *content, tokenizer.end_of_document, *content[:-1], joined[content[-1:] + b"<"]]
    texts = ["plain <div", f"{NEW[0]}<div", "\u4f60\U0001f600", f"a{NEW[1]}"]
    ids, sizes = tokenizer.encode_flat(texts)
    assert ids.tolist() == [number for text in texts for number in tokenizer.encode(text)]
    assert sizes.tolist() == [len(tokenizer.encode(text)) for text in texts]


def test_missing_and_additional_files_are_reported(tmp_path: Path, sentencepiece: Path) -> None:
    with refused(TokenizerError, "vocab_file", "tokenizer.model", code="missing-file"):
        build_tokenizer("SentencePieceTokenizer")
    with refused(TokenizerError, "none.tiktoken", code="missing-file"):
        build_tokenizer("TiktokenTokenizer", vocab_file=tmp_path / "none.tiktoken")
    with refused(TokenizerError, "merge_file"):
        build_tokenizer("SentencePieceTokenizer", vocab_file=sentencepiece, merge_file=sentencepiece)


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "SPMTokenizer"])
def test_a_corpus_is_preprocessed_with_it(tmp_path: Path, sentencepiece: Path, kind: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "hello world"}\n{"text": ""}\n')
    words = ["--input", tmp_path / "a.jsonl", "--tokenizer-type", kind, "--append-eod"]
    words += ["--vocab-file", sentencepiece, "--output-prefix", tmp_path / "out"]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert "SentencePieceTokenizer, run by" in result.stdout
    dataset = open_indexed(tmp_path / "out_text_document")
    tokenizer = build_tokenizer("SentencePieceTokenizer", vocab_file=sentencepiece)
    assert [row.tolist() for row in dataset] == [[*tokenizer.encode("hello world"), 2]]
