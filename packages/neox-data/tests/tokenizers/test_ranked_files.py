import base64
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_data.errors import TokenizerError
from neox_data.indexed import IndexedDatasetWriter, open_indexed
from neox_data.preprocess.cli import main
from neox_data.search import documents_with, token_matcher
from neox_data.tokenizers import build_tokenizer

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
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


def model(kind: int = BPE, end: str = "</s>") -> bytes:
    """Return a SentencePiece model: the bytes, the letters of "hello world", and two merges."""
    pieces = [piece("<unk>", 0, UNKNOWN), piece("<s>", 0, CONTROL), piece(end, 0, CONTROL)]
    pieces += [piece(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)]
    merges = ["he", "ll", "\u2581w"]
    letters = [*sorted(set("hello world") - {" "}), "\u2581"]
    pieces += [piece(text, -rank, NORMAL) for rank, text in enumerate([*merges, *letters])]
    trainer = field(3, kind) + field(35, 1)
    normalizer = field(1, b"identity") + field(3, 1) + field(4, 1) + field(5, 1)
    return b"".join(pieces) + field(2, trainer) + field(3, normalizer)


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
        ("SentencePieceTokenizer", "a.model", model(kind=UNIGRAM), "cannot read .*a.model: only BPE"),
        ("SentencePieceTokenizer", "a.model", b"nonsense", "not a sentencepiece model"),
        (
            "SentencePieceTokenizer",
            "a.model",
            model(end="<end>"),
            "has no end-of-document token '</s>'",
        ),
        ("TiktokenTokenizer", "own.tiktoken", b"aGU= 0\n", "cannot tell which pretokenizer 'own' needs"),
        ("TiktokenTokenizer", "r50k_base.tiktoken", b"zzz\n", "cannot read .*r50k_base.tiktoken"),
    ],
)
def test_unusable_file_is_reported(
    tmp_path: Path, kind: str, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(kind, vocab_file=tmp_path / name)


def test_missing_and_additional_files_are_reported(tmp_path: Path, sentencepiece: Path) -> None:
    with pytest.raises(TokenizerError, match=r"requires vocab_file; give the path of tokenizer\.model, or"):
        build_tokenizer("SentencePieceTokenizer")
    with pytest.raises(TokenizerError, match=r"none\.tiktoken does not exist"):
        build_tokenizer("TiktokenTokenizer", vocab_file=tmp_path / "none.tiktoken")
    with pytest.raises(TokenizerError, match=r"remove merge_file"):
        build_tokenizer("SentencePieceTokenizer", vocab_file=sentencepiece, merge_file=sentencepiece)


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "SPMTokenizer"])
def test_a_corpus_is_preprocessed_with_it(tmp_path: Path, sentencepiece: Path, kind: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "hello world"}\n{"text": ""}\n')
    words = ["--input", tmp_path / "a.jsonl", "--tokenizer-type", kind, "--append-eod"]
    words += ["--vocab-file", sentencepiece, "--output-prefix", tmp_path / "out"]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert "encoded by SentencePieceTokenizer, run by gigatoken" in result.stdout
    dataset = open_indexed(tmp_path / "out_text_document")
    tokenizer = build_tokenizer("SentencePieceTokenizer", vocab_file=sentencepiece)
    assert [row.tolist() for row in dataset] == [[*tokenizer.encode("hello world"), 2]]
