import random

import pytest

from neox_data.tokenizers import build_tokenizer
from neox_data.tokenizers.continued import ContinuedText
from neox_model.generate.text import ReplyText

BYTES = build_tokenizer("CharLevelTokenizer")


def pieces(tokens: list[int], *stop: str) -> list[str]:
    text = ReplyText(BYTES.continued(), stop)
    taken = []
    for token in tokens:
        is_stopped = text.add(token)
        taken.append(text.take())
        if is_stopped:
            break
    whole = text.finish()
    taken.append(text.take())
    assert "".join(taken) == whole
    return taken


def test_characters_appear_whole():
    assert pieces(list("aé中b".encode())) == ["a", "", "é", "", "", "中", "b", ""]


def test_a_long_text_is_taken_in_pieces_that_are_not_copied_again():
    text = ReplyText(BYTES.continued(), ("absent",))
    for number in range(3000):
        text.add(ord("b") + number % 7)
        assert len(text.take()) == 1
        assert text._rest == ""
    assert text.finish() == "".join(chr(ord("b") + number % 7) for number in range(3000))


def test_incomplete_characters_become_replacements_at_the_end():
    assert pieces(list("a中".encode())[:-1]) == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize("seed", range(20))
def test_the_text_is_that_of_all_tokens(seed):
    generator = random.Random(seed)
    letters = list("aé中😀\n".encode()) if seed % 2 else list(range(512))
    tokens = [generator.choice(letters) for _ in range(60)]
    if seed % 2:
        tokens = list("".join(generator.choice("aé中😀\n") for _ in range(40)).encode())[:-1]
        assert "".join(pieces(tokens)) == BYTES.decode(tokens)
    assert len("".join(pieces(tokens))) > 10


def test_a_stop_string_ends_the_text_and_is_not_shown_even_in_part():
    assert pieces(list(b"one\nUser: two"), "\nUser:", "absent") == [
        *("o", "n", "e", *[""] * 6),
        "",
    ]
    assert pieces(list(b"one\nUse it"), "\nUser:") == [
        *("o", "n", "e", "", "", "", "", "\nUse ", "i", "t"),
        "",
    ]


def test_the_first_of_several_stop_strings_ends_the_text():
    assert "".join(pieces(list(b"abcdef"), "de", "cd")) == "ab"
    assert "".join(pieces(list(b"aaab"), "aab")) == "a"


def test_the_beginning_of_a_stop_string_is_shown_if_the_text_ends_there():
    assert pieces(list(b"one\nUs"), "\nUser:") == ["o", "n", "e", "", "", "", "\nUs"]


def test_a_stop_string_in_front_of_an_incomplete_character_ends_the_text():
    parts = [b"ab", b"stop\xe4"]
    decoded = ContinuedText(lambda ids: b"".join(parts[one] for one in ids).decode(errors="replace"))
    text = ReplyText(decoded, ("stop",))
    text.add(0)
    text.add(1)
    assert text.finish() == "ab"


def test_the_first_of_several_stop_strings_in_one_token_ends_the_text():
    parts = ["a", "bstop and end"]
    text = ReplyText(ContinuedText(lambda ids: "".join(parts[one] for one in ids)), ("end", "stop"))
    assert [text.add(0), text.add(1)] == [False, True]
    assert text.finish() == "ab"


def test_a_token_has_the_text_that_it_has_behind_others():
    """As in SentencePiece: a space in front of the first word is dropped."""
    words = [" one", " two", " three"]
    text = ReplyText(ContinuedText(lambda ids: "".join(words[one] for one in ids).removeprefix(" ")))
    taken = []
    for token in range(3):
        text.add(token)
        taken.append(text.take())
    assert taken == ["one", " two", " three"]
