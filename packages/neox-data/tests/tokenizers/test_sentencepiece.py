"""SentencePieceTokenizer against the library sentencepiece, with models that it trains."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from neox_data.errors import TokenizerError
from neox_data.preprocess.chat_tokens import encode_conversation
from neox_data.tokenizers import Tokenizer, build_tokenizer
from support.refusals import refused

library = pytest.importorskip("sentencepiece")

WORDS = [
    *"the quick brown fox jumps over a lazy dog return def print self world hello new old 10 2 345".split(),
    *"がぱ 가나 Àé Ångström naïve 中文 你好 <s> </s> <unk> <pad>".split(),
    *"<0x41> <code> <|im_start|> 👍🏽".split(),
    *("\ufb01", "\u00bd", "\u2167", "\u2581", "\uff21\uff42"),
    *(
        "\u304b\u3099",
        "\u1100\u1161",
        "A\u0300",
        "e\u0301",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\ufeff",
        "\x00",
        "\t",
    ),
    *("\n", "\r\n", "  ", "    ", "aaaa", "<", ">", "s>", "<s", "0x41>", "<0x4", "...", "!!!", "\U00016ea0"),
]
IDENTITY = {"normalization_rule_name": "identity", "byte_fallback": True}
PLAIN = {**IDENTITY, "remove_extra_whitespaces": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**PLAIN, "split_digits": True},
    "llama with more symbols": {**PLAIN, "control_symbols": ["<pad>", "<|im_start|>", "<code>"]},
    "no space in front": {**PLAIN, "add_dummy_prefix": False},
    "spaces removed": IDENTITY,
    "long pieces": {**PLAIN, "split_by_whitespace": False, "allow_whitespace_only_pieces": True},
    "nmt_nfkc": {"byte_fallback": True},
    "nmt_nfkc_cf": {"byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf"},
    "user-defined": {**PLAIN, "user_defined_symbols": ["<code>", "   ", "ox"]},
    "no bytes": {"normalization_rule_name": "identity"},
    "unigram": {"model_type": "unigram"},
    "unigram, spaces behind": {"model_type": "unigram", "treat_whitespace_as_suffix": True, **PLAIN},
    "characters": {"model_type": "char", "normalization_rule_name": "nfkc"},
    "words": {"model_type": "word", "use_all_vocab": True},
}
# These are run by gigatoken, and so without the library.
FAST = ["llama", "llama with more symbols", "no space in front", "spaces removed", "long pieces"]


def text_of(generator: random.Random, *, is_known: bool = False) -> str:
    separators = [" ", " ", " ", "", "  ", "\n"]
    parts = [generator.choice(WORDS) + generator.choice(separators) for _ in range(generator.randrange(12))]
    if not is_known and generator.random() < 0.1:
        parts.append(
            "".join(chr(generator.choice((generator.randrange(0x20, 0x3000), 0x1F600))) for _ in range(9))
        )
    return "".join(parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    generator = random.Random(1)
    lines = [text_of(generator, is_known=True).replace("\n", " ").replace("\x00", "") for _ in range(3000)]
    (folder / "texts").write_text("\n".join(line for line in lines if line.strip()))
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Any:
    """Return a function from the name of a model to the library's tokenizer and ours."""

    @cache
    def build(name: str) -> tuple[Any, Tokenizer]:
        prefix = folder / str(list(MODELS).index(name))
        options = {"model_type": "bpe", "vocab_size": 700, "hard_vocab_limit": False, **MODELS[name]}
        library.SentencePieceTrainer.train(
            input=str(folder / "texts"), model_prefix=str(prefix), minloglevel=2, num_threads=1, **options
        )
        file = prefix.with_suffix(".model")
        processor = library.SentencePieceProcessor(model_file=str(file))
        return processor, build_tokenizer("SentencePieceTokenizer", vocab_file=file)

    return build


@pytest.mark.parametrize("name", MODELS)
def test_texts_have_the_ids_of_the_library(pair: Any, name: str) -> None:
    processor, tokenizer = pair(name)
    assert tokenizer.engine == ("gigatoken" if name in FAST else "sentencepiece")
    generator = random.Random(2)
    texts = ["", " ", "   ", "\u2581", " a", "a ", "  a  b  ", *(text_of(generator) for _ in range(2000))]
    ids, sizes = tokenizer.encode_flat(texts)
    expected = processor.encode(texts)
    rows = [row.tolist() for row in map(lambda end, size: ids[end - size : end], sizes.cumsum(), sizes)]
    for text, ours, right in zip(texts, rows, expected, strict=True):
        assert ours == right, text
    assert {tokenizer.end_of_document, processor.unk_id()} <= tokenizer.special_ids
    assert len(tokenizer.special_ids & set(ids.tolist())) <= 1


@pytest.mark.parametrize("name", MODELS)
def test_ids_have_the_text_of_the_library(pair: Any, name: str) -> None:
    processor, tokenizer = pair(name)
    control = {number for number in range(tokenizer.vocab_size) if processor.is_control(number)}
    numbers = sorted(set(range(tokenizer.vocab_size)) - control)
    generator = random.Random(3)
    for _ in range(2000):
        few = [generator.choice(numbers) for _ in range(4)]
        row = [generator.choice(generator.choice([numbers, few])) for _ in range(generator.randrange(1, 12))]
        assert tokenizer.decode(row) == processor.decode(row), row
    assert tokenizer.decode([tokenizer.end_of_document]) == "</s>"
    assert [tokenizer.entry(number) for number in range(5)] == [
        processor.id_to_piece(number) for number in range(5)
    ]


def test_control_symbols_in_a_conversation_are_their_ids(pair: Any) -> None:
    for name in ("llama with more symbols", "nmt_nfkc"):
        processor, tokenizer = pair(name)
        ids = encode_conversation("<s>hello world</s>new", tokenizer)
        assert ids == [1, *processor.encode("hello world"), 2, *processor.encode("new")]
        assert tokenizer.encode("<s>hello") == processor.encode("<s>hello")
        assert 1 not in tokenizer.encode("<s>hello")


def test_half_of_a_surrogate_pair_is_an_error(pair: Any) -> None:
    for name in ("llama", "unigram"):
        with refused(TokenizerError, "UTF-8", code="not-encodable"):
            pair(name)[1].encode("\ud800")


def test_a_reply_is_the_text_of_all_tokens_less_that_of_the_prompt(pair: Any) -> None:
    generator = random.Random(4)
    for name in MODELS:
        tokenizer = pair(name)[1]
        texts = [text_of(generator) for _ in range(60)]
        for text in texts:
            before = tokenizer.encode(f"the {text}")
            tokens = [generator.randrange(3, tokenizer.vocab_size) for _ in range(20)]
            reply = tokenizer.continued(before)
            found = "".join([*(reply.add(token) for token in tokens), reply.finish()])
            assert tokenizer.decode(before) + found == tokenizer.decode(before + tokens)
