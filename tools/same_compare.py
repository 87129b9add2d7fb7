"""Compare what two checkouts show of a case, and state what differs."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from same_case import Case
from same_observe import Value

__all__ = ["KINDS", "Outcome", "compare", "report"]

KINDS = ("equal", "different", "refused alike")
_SHOWN_CASES, _SHOWN_VALUES, _SHOWN_CHARACTERS = 10, 3, 200
_MISSING = "(missing)"


@dataclass(frozen=True)
class Outcome:
    """The comparison of a case.

    Args:
        case: what ran.
        kind: one of KINDS.
        differences: names with both values, in the order of the base.
        refusal: the line with which both refuse.
    """

    case: Case
    kind: str
    differences: tuple[tuple[str, Value, Value], ...] = ()
    refusal: str = ""


def compare(
    case: Case,
    expected: Mapping[str, Value],
    found: Mapping[str, Value],
    uninterrupted: Mapping[str, Value] | None = None,
) -> Outcome:
    """Compare two results.

    Args:
        case: what ran.
        expected: result of the base.
        found: result of the new checkout.
        uninterrupted: result of the base for the case that this one must repeat from its middle.
    """
    if uninterrupted is not None:
        repeated = ("iteration ", "global_step")
        wanted = {
            name: uninterrupted[name]
            for name in expected
            if name in uninterrupted and name.startswith(repeated) and _is_repeated(name)
        }
        expected = {**expected, **wanted}
    names = [*expected, *(name for name in found if name not in expected)]
    differences = tuple(
        (name, expected.get(name, _MISSING), found.get(name, _MISSING))
        for name in names
        # Types, so that 1 and True differ; repr, so that NaN equals NaN.
        if repr(expected.get(name, _MISSING)) != repr(found.get(name, _MISSING))
    )
    if differences:
        return Outcome(case, "different", differences)
    failed = [
        name for name, value in found.items() if name.endswith("exit codes") and set(str(value)) - set("0 ")
    ]
    if failed or "copies" in found:
        return Outcome(case, "refused alike", refusal=_refusal(found))
    return Outcome(case, "equal")


def _is_repeated(name: str) -> bool:
    """Return whether a resumed run must show the same: losses, norms, weights and states."""
    return "loss/" in name or "grad_norm" in name or " tensor " in name


def _refusal(found: Mapping[str, Value]) -> str:
    lines = [str(value) for name, value in found.items() if ": line " in name and str(value).strip()]
    return next(
        (line for line in lines if "rror" in line), lines[-1] if lines else str(found.get("copies", ""))
    )


def report(outcomes: Sequence[Outcome], command: str) -> str:
    """Return the report: a line for each group, refusals, and the first differences.

    Args:
        outcomes: of all cases.
        command: the start of the command that repeats a case.
    """
    lines = []
    for group in dict.fromkeys(outcome.case.group for outcome in outcomes):
        of_group = [outcome for outcome in outcomes if outcome.case.group == group]
        counts = Counter(outcome.kind for outcome in of_group)
        lines.append(
            f"{group}: {len(of_group)} cases: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
        )
        refusals = Counter(outcome.refusal[:_SHOWN_CHARACTERS] for outcome in of_group if outcome.refusal)
        lines += [
            f"    refused alike, {count}: {text}" for text, count in refusals.most_common(_SHOWN_VALUES)
        ]
    different = [outcome for outcome in outcomes if outcome.kind == "different"]
    for outcome in different[:_SHOWN_CASES]:
        lines += ["", f"different: {outcome.case.title}"]
        for name, expected, found in outcome.differences[:_SHOWN_VALUES]:
            lines += [f"    {name}", f"        base {_shown(expected)}", f"        new  {_shown(found)}"]
        lines.append(f"    {len(outcome.differences)} values differ")
        lines.append(f"    repeat: {command} CASE={shlex.quote(outcome.case.title)}")
    if len(different) > _SHOWN_CASES:
        lines += [
            "",
            "also different:",
            *(f"    {outcome.case.title}" for outcome in different[_SHOWN_CASES:]),
        ]
    return "\n".join(lines) + "\n"


def _shown(value: Value) -> str:
    return repr(value)[:_SHOWN_CHARACTERS]
