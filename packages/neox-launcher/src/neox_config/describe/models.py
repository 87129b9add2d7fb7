"""The models of the catalogue as text."""

from collections.abc import Sequence

from neox_config.catalogue import Model

__all__ = ["render_model", "render_models"]

_COLUMNS = ("name", "family", "parameters", "layers", "width", "heads", "positions", "rows", "licence")
_NUMBERS = slice(2, 8)


def render_models(models: Sequence[Model]) -> str:
    """Format models as a table."""
    lines = [_COLUMNS, *(_cells(model) for model in models)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    numbers = range(*_NUMBERS.indices(len(_COLUMNS)))
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(model: Model) -> tuple[str, ...]:
    shape, published = model.resolved.config.model, model.published
    numbers = (
        *(published.parameters, shape.num_layers, shape.hidden_size),
        *(shape.num_attention_heads, shape.max_position_embeddings, published.rows),
    )
    return (model.name, published.family, *(f"{number:,}" for number in numbers), published.licence)


def render_model(model: Model) -> str:
    """Return the file of a model, with its number of parameters by part as a comment."""
    parts = model.count()
    counts = ", ".join(f"{part} {number:,}" for part, number in parts.items() if number)
    return (
        f"{model.text}\n# Parameters: {sum(parts.values()):,} ({counts})\n"
        f"# Licence of the published weights: {model.published.licence}\n"
    )
