"""Renders the results of `verify-layout`."""

from collections import Counter
from collections.abc import Mapping

from neox_config.describe.tables import table
from neox_config.pluralize import pluralize
from neox_config.spec.read_model import read_model
from neox_launcher.protocol.layout_verification import LayoutAnswer
from neox_launcher.verify_layout.sizes import Sizes
from neox_launcher.verify_layout.small import Small

__all__ = ["render_answer", "render_case", "render_kept"]

_EXACT = 1e-8
_HEADER = ("", "compared", "result", "largest error", "limit")


def render_case(title: str, sizes: Sizes, in_float64: bool, steps: int) -> str:
    """Render the heading of a layout."""
    layout = f"data {sizes.data} x pipe {sizes.stages} x model {sizes.tensor}"
    layout += f", experts over {sizes.experts}" if sizes.experts > 1 else ""
    processes = pluralize(sizes.processes, "process", "processes")
    precision = "float64" if in_float64 else "the configured precision"
    return f"{title}: {layout}, {processes}, {precision}, {pluralize(steps, 'update')}"


def render_kept(small: Small) -> str:
    """Render what the small model keeps of the user's, and what it changes."""
    config, model = small.config, read_model(small.config)
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(model.kinds).items())
    kept = [
        f"layers {kinds}",
        f"norm {model.norm.kind}",
        f"positions {config.attention.pos_emb}",
        f"activation {config.model.activation}",
        *(["tied embeddings"] if model.is_tied else []),
        f"optimizer {config.optimizer.optimizer.type}",
        f"objective {model.objective}",
    ]
    changed = ", ".join(map(str, small.changes)) or "nothing"
    return f"keeps {', '.join(kept)}\nchanges {changed}\n"


def render_answer(answer: LayoutAnswer, without: Mapping[str, bool], sizes: Sizes) -> str:
    """Render a table of what was compared, the differences with their meaning, and the verdict.

    Args:
        answer: the comparison.
        without: whether the layout agrees without one kind of parallelism, by the settings of `--layout`.
        sizes: the processes of the layout.
    """
    rows = [_HEADER]
    for part in answer.parts:
        result = f"DIFFERENT: {part.differing:,}" if part.differing else "agree"
        rows.append((part.name, f"{part.compared:,}", result, f"{part.worst:.1e}", f"{part.limit:.0e}"))
    lines = [table(rows, left=range(len(_HEADER))), ""]
    if answer.agrees:
        rounding = max(part.limit for part in answer.parts)
        verdict = "the layout computes the same as one process"
        if sizes.processes == 1:
            verdict = "the layout is one process, so that no parallelism was compared"
        elif rounding > _EXACT:
            verdict += f", up to the rounding of its precision ({rounding:.0e})"
        return "\n".join([*lines, f"verdict: {verdict}\n"])
    lines.append("verdict: the layout does NOT compute the same as one process")
    for finding in answer.findings:
        lines += [f"  {finding.what}", f"      {finding.meaning}"]
    lines += [f"  with {kind}: {'agrees' if agrees else 'differs, too'}" for kind, agrees in without.items()]
    return "\n".join([*lines, ""])
