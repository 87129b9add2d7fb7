"""Add special tokens to the vocabulary of a tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken

from neox_data.errors import TokenizerError
from neox_data.tokenizers.huggingface import load_tokenizer_json
from neox_data.whole_files import written_aside

__all__ = ["add_special_tokens"]


def add_special_tokens(source: Path, tokens: Sequence[str], output: Path) -> dict[str, int]:
    """Write a tokenizer.json with more special tokens behind its vocabulary; return the id of each.

    All other ids stay the same, so a model with room in its padded vocabulary can continue to train.

    Args:
        source: a tokenizer.json.
        tokens: texts of the new tokens.
        output: the file, written atomically; it may be `source`.

    Raises:
        TokenizerError: the file is missing or not valid, or the vocabulary contains one of the tokens.
    """
    tokenizer = load_tokenizer_json(source)
    for token in tokens:
        number = tokenizer.token_to_id(token)
        if number is not None:
            raise TokenizerError(f"{source} has {token!r} already, with id {number}; remove it from the list")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    output.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(output) as file:
        file.write(tokenizer.to_str(pretty=True).encode())
    ids = tokenizer.get_vocab()
    return {token: ids[token] for token in tokens}
