"""The models of the catalogue as text."""

from collections.abc import Sequence

from neox_config.catalogue import Model
from neox_config.describe.tables import table

__all__ = ["render_model", "render_models"]

_COLUMNS = (
    *("name", "family", "parameters", "active"),
    *("layers", "width", "heads", "positions", "rows", "licence"),
)
_TEXTS = (0, 1, 9)


def render_models(models: Sequence[Model]) -> str:
    """Format models as a table."""
    return table([_COLUMNS, *map(_cells, models)], left=_TEXTS)


def _cells(model: Model) -> tuple[str, ...]:
    shape, published = model.resolved.config.model, model.published
    numbers = (
        *(published.parameters, published.used, shape.num_layers, shape.hidden_size),
        *(shape.num_attention_heads, shape.max_position_embeddings, published.rows),
    )
    return (model.name, published.family, *(f"{number:,}" for number in numbers), published.licence)


def render_model(model: Model) -> str:
    """Return the file of a model, with its numbers of parameters as a comment."""
    parts = model.count()
    counts = ", ".join(f"{part} {number:,}" for part, number in parts.items() if number)
    active = "" if model.published.active is None else f"# Active parameters: {model.published.active:,}\n"
    return (
        f"{model.text}\n# Parameters: {sum(parts.values()):,} ({counts})\n{active}"
        f"# Licence of the published weights: {model.published.licence}\n"
    )
