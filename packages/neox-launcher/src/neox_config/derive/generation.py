"""The mode of text generation, and what has no effect in it."""

from collections.abc import Iterator

from neox_config.schema.config import NeoXConfig

__all__ = ["generation_mode", "without_effect"]

# Modes that do not use a parameter. A prompt may precede the modes of a configuration file.
_NOT_USED_IN = {
    "num_samples": ("input-file", "interactive"),
    "sample_input_file": ("unconditional", "interactive"),
}


def generation_mode(config: NeoXConfig) -> str:
    """Return the configured mode, or the one implied by the other settings."""
    settings = config.generation
    if settings.prompt is not None:
        return "prompt"
    if settings.text_gen_type is not None:
        return settings.text_gen_type
    if settings.sample_input_file is not None:
        return "input-file"
    return "unconditional" if settings.num_samples > 0 else "interactive"


def without_effect(config: NeoXConfig) -> Iterator[str]:
    """Yield the names of given parameters that the mode does not use."""
    mode = generation_mode(config)
    for name, modes in _NOT_USED_IN.items():
        if mode in modes and getattr(config.generation, name):
            yield name
