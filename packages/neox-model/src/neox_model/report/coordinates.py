"""The page of `neox-launch coord-check`: sizes of activations by width."""

from collections.abc import Iterator, Mapping, Sequence

from neox_model.report.figure import Line, figure
from neox_model.report.markup import Html, element
from neox_model.report.page import render_body
from neox_model.report.series import Curve

__all__ = ["CHANGE", "render_coordinates"]

CHANGE = ", change"
"""Behind a kind of layer: the change of its activations since the first weights."""

Measured = Mapping[str, Mapping[int, Sequence[Mapping[str, float]]]]


def render_coordinates(measured: Measured) -> str:
    """Return the page as HTML.

    Args:
        measured: by parametrization and width: mean absolute values by kind of layer, before the first update
            and after each.
    """
    sections = [
        element("section", element("h2", name), element("div", *_figures(of_width), class_="charts"))
        for name, of_width in measured.items()
    ]
    return render_body("Sizes of activations by width", element("main", *sections))


def _figures(of_width: Mapping[int, Sequence[Mapping[str, float]]]) -> Iterator[Html]:
    """Yield a figure for each kind of layer, with a line for each update."""
    first = next(iter(of_width.values()))
    for kind in first[0]:
        lines = []
        for step in range(int(kind.endswith(CHANGE)), len(first)):
            values = [sizes[step][kind] for sizes in of_width.values()]
            curve = Curve([*map(float, of_width)], values, values, values, left_out=0, is_exact=True)
            lines.append(Line(label=f"after {step} updates", curve=curve, has_dots=True))
        yield figure(kind, lines, unit="mean absolute value", is_log=True, at="width")
