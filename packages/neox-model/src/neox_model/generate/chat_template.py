"""The chat template of a model."""

from pathlib import Path

from neox_config import NeoXConfig
from neox_data.preprocess.chat_template import ChatTemplate, find_chat_template, load_chat_template

__all__ = ["configured_template"]


def configured_template(config: NeoXConfig) -> ChatTemplate | None:
    """Return the template that `serve.chat_template` names, else the one next to the tokenizer, else None.

    Raises:
        CorpusError: it is missing or invalid.
    """
    path, vocabulary = config.serving.serve.chat_template, config.tokenizer.vocab_file
    if path is not None:
        return load_chat_template(Path(path))
    if vocabulary is None:
        return None
    file = Path(vocabulary)
    # The name of a model in a hub has no folder here.
    folder = file if file.is_dir() else file.parent if file.is_file() else None
    return None if folder is None else find_chat_template(folder)
