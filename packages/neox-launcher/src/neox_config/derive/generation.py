"""The mode of text generation."""

from neox_config.schema.config import NeoXConfig

__all__ = ["generation_mode"]


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
