"""Renders the result of `verify-resume`."""

from neox_config.describe.tables import table
from neox_launcher.protocol.verification import Answer

__all__ = ["render_answer"]

_HEADER = ("", "compared", "result", "largest difference")


def render_answer(answer: Answer, *, is_complete: bool = True) -> str:
    """Render a table of the checks followed by the verdict.

    Args:
        answer: result of the comparison.
        is_complete: whether the resumed run finished.
    """
    rows = [_HEADER]
    for check in answer.checks:
        result = f"DIFFERENT: {check.differing}" if check.differing else "agree"
        skipped = f"not compared: {check.skipped}"
        ended = (skipped, "") if check.skipped else (result, check.worst)
        rows.append((check.name, check.compared, *ended))
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    shown = table(list(zip(*columns, strict=True)), left=range(len(columns)))
    return "\n".join([shown, "", *_verdict(answer, is_complete=is_complete)])


def _verdict(answer: Answer, *, is_complete: bool) -> list[str]:
    if not answer.first and is_complete:
        return ["verdict: the resumed run agrees with the uninterrupted one"]
    if not answer.first:
        return ["verdict: the resumed run failed; until then it agrees with the uninterrupted one"]
    explained = [answer.explanation] if answer.explanation else []
    return ["verdict: the runs differ", f"first difference: {answer.first}", *explained]
