"""The chat template of a model."""

from pathlib import Path

from neox_data.preprocess.chat_template import ChatTemplate, find_chat_template, load_chat_template

__all__ = ["configured_template"]


def configured_template(path: str | None, vocabulary: str | None) -> ChatTemplate | None:
    """Return the configured template, else the one next to the tokenizer, else None.

    Args:
        path: `serve.chat_template`.
        vocabulary: `vocab_file`.

    Raises:
        CorpusError: it is missing or invalid.
    """
    if path is not None:
        return load_chat_template(Path(path))
    if vocabulary is None:
        return None
    file = Path(vocabulary)
    # The name of a model in a hub has no folder here.
    folder = file if file.is_dir() else file.parent if file.is_file() else None
    return None if folder is None else find_chat_template(folder)
