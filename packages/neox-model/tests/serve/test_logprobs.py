"""Names, bytes and places of tokens, as OpenAI's API shows them."""

import random

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers, processors

from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_data.tokenizers.huggingface import LibraryBackedTokenizer
from neox_model.generate.text import ReplyText
from neox_model.serve.logprobs import (
    ShownToken,
    ShownTokens,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    of_prompt,
)

BEGIN, END, SPACE = "<s>", "<|endoftext|>", "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def llama() -> LibraryBackedTokenizer:
    """A tokenizer as that of Llama 2: a space is a letter, unknown letters are bytes, <s> begins texts."""
    words = ["comp", "class", "Foo", "F", "A", " "]
    entries = ["<unk>", BEGIN, END, *BYTES, SPACE, *words[:-1], *(SPACE + word for word in words[:-1])]
    found = LibraryTokenizer(
        models.Unigram([(entry, -1.0) for entry in entries], unk_id=0, byte_fallback=True)
    )
    found.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    found.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens([BEGIN, END])
    found.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    return LibraryBackedTokenizer(found, source="llama")


LLAMA, LETTERS = llama(), build_tokenizer("CharLevelTokenizer")
NAMES = {tokenizer: TokenNames(tokenizer) for tokenizer in (LLAMA, LETTERS)}


def shown_of(
    tokenizer: Tokenizer, prompt: list[int], tokens: list[int], *stop: str, start: int = 0, step: int = 1
) -> tuple[str, list[ShownToken]]:
    """Return the text and the tokens of a reply that arrives in parts of `step` tokens."""
    reply = ReplyText(tokenizer.continued(prompt), stop)
    shown = ShownTokens(tokenizer, NAMES[tokenizer], prompt, start)
    text, found = "", []
    for first in range(0, len(tokens), step):
        for token in tokens[first : first + step]:
            shown.add(token, -0.5, [(token, -0.5)])
            if reply.add(token):
                break
        text += (part := reply.take())
        found += shown.show(part)
        assert (
            "".join(map(str, found)) or not text.strip() or any(ord(letter) > 127 for letter in text) or stop
        )
        if reply.is_stopped:
            break
    reply.finish()
    text += (part := reply.take())
    return text, found + shown.show(part) + shown.finish(is_cut=reply.is_stopped)


@pytest.mark.parametrize("tokenizer", [LLAMA, LETTERS], ids=["llama", "letters"])
@pytest.mark.parametrize("seed", range(40))
def test_the_bytes_of_the_tokens_are_the_text(tokenizer: Tokenizer, seed: int) -> None:
    generator = random.Random(seed)
    letters = [*tokenizer.encode("class A 中 é Foo")[1:], generator.randrange(256)]
    if tokenizer is LLAMA:
        letters.append(LLAMA.token_id(SPACE))
    prompt = tokenizer.encode("comp") if seed % 4 else []
    tokens = [token for _ in range(20) for token in generator.choice([letters, [generator.choice(letters)]])]
    text, shown = shown_of(tokenizer, prompt, tokens, start=7, step=generator.choice([1, 3]))
    assert [one.id for one in shown] == tokens
    joined = b"".join(one.content for one in shown)
    assert joined.decode(errors="replace") == text
    if "\ufffd" not in text:
        assert joined == text.encode()
        for one, after in zip(shown, [*(one.offset for one in shown[1:]), 7 + len(text)], strict=True):
            # Parts of a character are at its beginning.
            whole = one.content.decode(errors="ignore")
            assert text[one.offset - 7 : after - 7] in (whole, whole + text[after - 8 : after - 7])


def test_bytes_are_of_the_text_and_not_of_the_vocabulary() -> None:
    space, comp, word = (LLAMA.token_id(one) for one in (SPACE, SPACE + "comp", "Foo"))
    prompt = LLAMA.encode("class")
    text, shown = shown_of(LLAMA, prompt, [comp, space, word, *(3 + byte for byte in "é".encode()), word])
    assert text == " comp FooéFoo"
    assert [one.content for one in shown] == [b" comp", b" ", b"Foo", b"\xc3", b"\xa9", b"Foo"]
    assert [one.offset for one in shown] == [0, 5, 6, 9, 9, 10]
    chat = chat_logprobs(NAMES[LLAMA], shown)["content"]
    assert [one["token"] for one in chat] == [" comp", " ", "Foo", "bytes:\\xc3", "bytes:\\xa9", "Foo"]
    assert bytes(byte for one in chat for byte in one["bytes"]).decode() == text
    assert chat[0]["top_logprobs"] == [{"token": " comp", "logprob": -0.5, "bytes": list(b" comp")}]
    # At the beginning of a document its space is not in the text.
    assert [one.content for one in shown_of(LLAMA, [], [comp, space])[1]] == [b"comp", b" "]
    assert [one.content for one in shown_of(LLAMA, [], [space, word])[1]] == [b"", b"Foo"]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("Foo", [b" comp", b" ", None]), ("mp F", [b" co", None, None]), ("co", [b" "])],
)
def test_tokens_of_a_stop_string_are_not_in_a_message(stop: str, expected: list[bytes | None]) -> None:
    tokens = [LLAMA.token_id(one) for one in (SPACE + "comp", SPACE, "Foo")]
    text, shown = shown_of(LLAMA, LLAMA.encode("class"), tokens, stop)
    assert [one.content for one in shown] == expected
    message = chat_logprobs(NAMES[LLAMA], shown)["content"]
    assert bytes(byte for one in message for byte in one["bytes"]).decode() == text
    assert len(completion_logprobs(NAMES[LLAMA], shown)["tokens"]) == len(shown)


def test_names_are_unique() -> None:
    names = NAMES[LLAMA]
    spelled = {
        entry: names.text[LLAMA.token_id(entry)] for entry in ("<0x41>", "A", SPACE, "<0x20>", SPACE + "A")
    }
    assert spelled == {"<0x41>": "<0x41>", "A": "A", SPACE: " ", "<0x20>": "<0x20>", SPACE + "A": " A"}
    for tokenizer in (LLAMA, LETTERS):
        size = tokenizer.vocab_size
        assert len({NAMES[tokenizer].text[token] for token in range(size)}) == size
    assert [NAMES[LETTERS].text[token] for token in (65, 0xC3, 256, 300)] == [
        "A",
        "bytes:\\xc3",
        "<|mask|>",
        "token:300",
    ]
    top = [(token, -1.0 - token) for token in range(LLAMA.vocab_size)]
    field = completion_logprobs(names, [ShownToken(5, -1.0, top, 0)])
    assert len(field["top_logprobs"][0]) == LLAMA.vocab_size


def test_added_tokens_are_not_in_the_text_of_a_prompt() -> None:
    def offsets(tokenizer: Tokenizer, text: str, tokens: list[int] | None = None) -> list[tuple[str, int]]:
        tokens = tokenizer.encode(text) if tokens is None else tokens
        names = TokenNames(tokenizer)
        found = of_prompt(tokenizer, names, text, tokens, [None] * len(tokens), [None] * len(tokens))
        return [(names.text[one.id], one.offset) for one in found]

    assert offsets(LLAMA, "class Foo") == [(BEGIN, 0), (" class", 0), (" Foo", 5)]
    ids = LLAMA.encode("class Foo")
    assert offsets(LLAMA, LLAMA.decode(ids), ids) == [(BEGIN, 0), (" class", 3), (" Foo", 9)]
    assert offsets(LETTERS, "é")[1][1] == 0
