"""The texts of a vocabulary's tokens, for what depends on words or sentences."""

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer

__all__ = ["token_texts"]

# SentencePiece writes spaces so.
_SPACE = "\u2581".encode()


def token_texts(tokenizer: Tokenizer, *, required_by: str, otherwise: str) -> list[bytes]:
    """Return the bytes of each token, with plain spaces; b"" for tokens without text.

    Args:
        tokenizer: the tokenizer.
        required_by: the setting that requires the texts, for the error.
        otherwise: what is unknown without them, and what to do.

    Raises:
        TokenizerError: the texts are not the bytes of the tokens.
    """
    entries = tokenizer.token_bytes()
    if entries is None:
        raise TokenizerError(
            f"{required_by}: the tokens of this {type(tokenizer).__name__} are not the bytes of the texts, "
            f"so that {otherwise}",
            code="not-bytes",
        )
    texts = [entry.replace(_SPACE, b" ") for entry in entries]
    return texts + [b""] * (tokenizer.vocab_size - len(texts))
