from neox_data.command import one_option_per_word

SEVERAL = frozenset({"--input", "--keys"})


def spread(line: str) -> str:
    return " ".join(one_option_per_word(line.split(), SEVERAL))


def test_words_after_an_option_of_several_get_the_option_each() -> None:
    assert spread("--input a b --flag --keys x y --other p") == (
        "--input a --input b --flag --keys x --keys y --other p"
    )


def test_other_words_stay_as_they_are() -> None:
    assert spread("a --other b c --input=d -x --input e") == "a --other b c --input=d -x --input e"
