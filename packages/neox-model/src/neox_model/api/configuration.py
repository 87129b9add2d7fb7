"""Load a configuration for use from Python: from files, a text or a dictionary. Without torch."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neox_config import NeoXConfig, Text
from neox_config import load_config as load_files
from neox_config.errors import ConfigError

__all__ = ["as_text", "load_config"]


def load_config(
    *sources: str | Path | Mapping[str, Any],
    text: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> NeoXConfig:
    """Load and check a configuration.

    Args:
        sources: YAML files, or dictionaries of parameters as in a file; their values are merged. Names may
            contain dashes or underscores.
        text: YAML that is merged with them.
        overrides: parameters that override all others, as `--set` does.

    Raises:
        ConfigError: the configuration is invalid; the message lists every problem.

    Example:
        >>> config = load_config("configs/quickstart.yml", overrides={"train-iters": 20})
    """
    files: list[str | Path] = []
    texts: list[Text] = []
    for source in sources:
        if isinstance(source, Mapping):
            texts.append(
                as_text(source, "dictionary" if len(sources) == 1 else f"dictionary {len(texts) + 1}")
            )
        elif isinstance(source, str | os.PathLike):
            files.append(source)
        else:
            raise ConfigError(
                f"a configuration cannot be loaded from a value of type {type(source).__name__}; pass the "
                "path of a file, a dictionary, or text=..."
            )
    if text is not None:
        texts.append(Text(text, "text"))
    if overrides:
        texts.append(as_text(overrides, "overrides", precedence=1))
    if not files and not texts:
        raise ConfigError("no configuration was given; pass the path of a file, a dictionary, or text=...")
    return load_files(files, texts=texts)


def as_text(values: Mapping[str, Any], name: str, *, precedence: int = 0) -> Text:
    """Return a dictionary as YAML, of which JSON is a part.

    Args:
        values: the dictionary.
        name: what messages call it.
        precedence: precedence of its values.

    Raises:
        ConfigError: a value is neither plain nor a number of numpy.
    """
    try:
        # Strings of numbers that are not finite are read as such.
        content = json.dumps(_plain(values), allow_nan=False)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the {name} contains a value that is no YAML: {error}; use plain values"
        ) from error
    return Text(content, name, precedence, has_lines=False)


def _plain(value: Any) -> Any:
    """Return a value with the types of JSON; numbers of numpy and paths become plain ones."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    is_number = hasattr(value, "item") and not isinstance(value, bool | int | float | str)
    return value.item() if is_number else value
