"""Text of tokens behind others, with decoders of five kinds, against the decoding of all together."""

import random
from collections.abc import Callable
from functools import cache

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from neox_data.tokenizers import build_tokenizer
from neox_data.tokenizers.continued import ContinuedText
from neox_data.tokenizers.huggingface import LibraryBackedTokenizer

END = "<|endoftext|>"
WORDS = ["the", "cat", "s", "at", "on", "a", "mat", ",", ".", "n", "o", "t", "é", "中"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "\u2581"


def _byte_level() -> LibraryTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [END, *letters, "Ġt", "Ġth", "he", "ä½"]
    merges = [("Ġ", "t"), ("Ġt", "h"), ("h", "e"), ("ä", "½")]
    found = LibraryTokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


def _bytes_of_sentencepiece() -> models.BPE:
    entries = [END, "<unk>", *BYTES, SPACE, *sorted(set("".join(WORDS[:11]))), "th", SPACE + "th", SPACE * 2]
    merges = [("t", "h"), (SPACE, "th"), (SPACE, SPACE)]
    vocabulary = {entry: number for number, entry in enumerate(dict.fromkeys(entries))}
    return models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def _prepended() -> LibraryTokenizer:
    """As Llama 2: a space in front of each text, which the decoder strips."""
    found = LibraryTokenizer(_bytes_of_sentencepiece())
    found.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    found.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return found


def _byte_fallback() -> LibraryTokenizer:
    """As Gemma: no space is added or stripped."""
    found = LibraryTokenizer(_bytes_of_sentencepiece())
    found.normalizer = normalizers.Replace(" ", SPACE)
    found.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return found


def _metaspace() -> LibraryTokenizer:
    """As T5: words with a mark in front of each."""
    entries = [END, "<unk>", SPACE, *(SPACE + word for word in WORDS), *WORDS]
    scores = [(entry, -float(number)) for number, entry in enumerate(entries)]
    found = LibraryTokenizer(models.Unigram(scores, 1, byte_fallback=False))
    found.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always")
    found.decoder = decoders.Metaspace(SPACE, "always")
    return found


def _word_piece() -> LibraryTokenizer:
    """As BERT: parts of words are marked, and spaces in front of some punctuation are removed."""
    entries = [END, "[UNK]", *WORDS, *("##" + word for word in WORDS), "'", "##'"]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    found = LibraryTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|[.,']"), "isolated")
    found.decoder = decoders.WordPiece("##", cleanup=True)
    return found


def _suffixes() -> LibraryTokenizer:
    """As the first GPT: the last token of a word has a mark behind it."""
    entries = [END, *WORDS, *(word + "</w>" for word in WORDS)]
    found = LibraryTokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, []))
    found.decoder = decoders.BPEDecoder("</w>")
    return found


LIBRARY: dict[str, Callable[[], LibraryTokenizer]] = {
    "byte-level": _byte_level,
    "prepended space": _prepended,
    "byte fallback": _byte_fallback,
    "metaspace": _metaspace,
    "wordpiece": _word_piece,
    "suffixes": _suffixes,
}


@cache
def tokenizer_of(kind: str) -> LibraryBackedTokenizer:
    library = LIBRARY[kind]()
    library.add_special_tokens([END])
    return LibraryBackedTokenizer(library, source=kind)


def streamed(text: ContinuedText, tokens: list[int]) -> list[str]:
    return [*(text.add(token) for token in tokens), text.finish()]


@pytest.mark.parametrize("kind", LIBRARY)
@pytest.mark.parametrize("seed", range(60))
def test_the_text_is_that_of_all_tokens_less_that_of_those_before(kind: str, seed: int) -> None:
    tokenizer, generator = tokenizer_of(kind), random.Random(seed)
    # Some texts of few tokens, so that characters become complete and runs of bytes are long.
    letters = [generator.randrange(tokenizer.vocab_size) for _ in range(generator.choice([2, 8, 400]))]
    letters += [token for token in tokenizer.encode("the cät 中 mat") if token is not None]
    before = [generator.choice(letters) for _ in range(generator.choice([0, 1, 2, 30]))]
    # A context ends with a whole character, as a text does.
    before += tokenizer.encode("a t") if before else []
    tokens = [generator.choice(letters) for _ in range(60)]
    known, whole = (
        tokenizer.library_tokenizer.decode(ids, skip_special_tokens=False)
        for ids in (before, before + tokens)
    )
    assert whole.startswith(known)
    assert "".join(streamed(tokenizer.continued(before), tokens)) == whole[len(known) :]


@pytest.mark.parametrize("kind", LIBRARY)
def test_nothing_of_a_text_is_held_once_it_is_certain(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode("the cat s at the mat") * 3
    parts = streamed(tokenizer.continued(tokens[:2]), tokens[2:])
    assert all(parts[:-1])
    assert parts[-1] == ""


def test_the_first_token_of_a_reply_keeps_its_space() -> None:
    for kind in ("prepended space", "metaspace", "wordpiece"):
        tokenizer = tokenizer_of(kind)
        before, token = (
            tokenizer.encode("cat"),
            tokenizer.encode("a th" if kind == "prepended space" else "a mat")[-1],
        )
        assert tokenizer.continued(before).add(token) in (" th", " mat")
        assert tokenizer.continued().add(token) in ("th", "mat")


def test_a_character_that_begins_in_the_context_is_part_of_the_text() -> None:
    tokenizer = build_tokenizer("CharLevelTokenizer")
    letter = list("中".encode())
    assert streamed(tokenizer.continued([97, *letter[:2]]), [*letter[2:], 98]) == ["中", "b", ""]
    assert streamed(tokenizer.continued([97, *letter[:2]]), [98]) == ["b", ""]


def test_a_run_of_spelled_bytes_is_decoded_when_it_ends() -> None:
    """The library writes U+FFFD for each byte of a run that is not valid, also for those before the error."""
    tokenizer = tokenizer_of("byte fallback")
    assert len(tokenizer.joined_ids) == len(tokenizer.byte_ids) == 256
    newline, start = tokenizer.token_id("<0x0A>"), tokenizer.token_id("<0xE4>")
    word = tokenizer.token_id("th")
    assert streamed(tokenizer.continued([word]), [newline, word]) == ["", "\nth", ""]
    assert streamed(tokenizer.continued([word]), [newline, start, word]) == ["", "", "\ufffd\ufffdth", ""]
    assert tokenizer_of("byte-level").joined_ids == frozenset()


def test_a_long_text_of_any_kind_is_decoded_in_short_parts() -> None:
    for kind in LIBRARY:
        tokenizer = tokenizer_of(kind)
        sizes: list[int] = []

        def decode(ids: list[int], tokenizer=tokenizer, sizes=sizes) -> str:
            sizes.append(len(ids))
            return tokenizer.decode(ids)

        text = ContinuedText(decode, tokenizer.encode("the cat") * 500, joined=tokenizer.joined_ids)
        for token in tokenizer.encode("the mat") * 300:
            text.add(token)
        assert max(sizes) <= 10


@pytest.mark.parametrize("beginning", [b"\xff", b"\xe4", b"\xe4\xbd", b"\xf0\x9f\x98"])
def test_incomplete_characters_without_end_are_decoded_in_short_parts(beginning: bytes) -> None:
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return bytes(ids).decode(errors="replace")

    tokens = [*beginning * 500, 98]
    assert "".join(streamed(ContinuedText(decode), tokens)) == bytes(tokens).decode(errors="replace")
    assert max(sizes) <= 24


def test_several_incomplete_characters_before_a_whole_one_stay_as_they_are() -> None:
    tokenizer = build_tokenizer("CharLevelTokenizer")
    for count in range(1, 12):
        tokens = [97, *[0xE4, 0xBD] * count, 0xA0, 98]
        assert "".join(streamed(tokenizer.continued(), tokens)) == bytes(tokens).decode(errors="replace")


def test_tokens_without_text_behind_an_incomplete_character_do_not_end_it() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(one for one in ids if one).decode(errors="replace")

    tokens = [97, 0xE4, 0xE4, 0xE4, *[0] * 6, 0xE4, 98]
    assert "".join(streamed(ContinuedText(decode), tokens)) == "a\ufffd\ufffd\ufffd\ufffdb"
