"""Old idioms do not come back into what a person reads; CONTRIBUTING.md ("Words") has the terms to use."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sources import ROOT, sources

# Pattern of whole words, to (a sentence that contained it, what to write instead).
OLD_IDIOMS = {
    r"so (often|many|much)\b(?! (that|as)\b)": ("each contender so often", "a number, 'maximum', 'limit'"),
    r"strangers?": ("A stranger may knock", "an unauthenticated connection, another process"),
    r"knock(s|ed)?": ("A stranger may knock as often as it likes", "connect"),
    r"tells?|told": ("which it has told", "report, show, print, state"),
    r"(is|are) to be": ("what is to be saved", "must"),
    r"twins?\b(?!-flow)": ("a plain twin", "reference implementation"),
    r"seats?": ("a seat of the launch", "bootstrap, host, slot"),
    r"stands? (in|at|beside)": ("the value stands beside it", "is in, is next to"),
    r"(go|goes|went) on": ("the training goes on", "continue"),
    r"hangs? up": ("Hang up.", "close the connection"),
    r"Reception": ("Reception of the agents", "listener"),
    r"nobody|somebody|whoever|anybody|everybody": (
        "When nobody gets on",
        "no process, no user, a process that",
    ),
    r"(is|are) no \w+ (of|that)": ("8 is no divisor of 12", "is not a, does not"),
    r"(process|processes|room|place) of (its|their) own": ("a process of its own", "a new process, separate"),
    r"beside": ("the index lies beside the data", "next to, in the folder of, besides"),
    r"without a word": ("cut without a word", "silently"),
    r"of no meaning": ("what it gives is of no meaning", "undefined"),
    r"forgets?": ("Adam's running means forget", "the literal effect"),
    r"newest checkpoint": ("the name of the newest checkpoint", "latest checkpoint"),
    r"begins? again": ("Begin again from it", "restart, resume"),
    r"mend(s|ed|ing)?": ("how to mend it", "fix, correct"),
    r"hindrances?": ("hindrances of a launch", "problem"),
    r"says? so|said so": ("and the log says so", "reports it, states it"),
    r"in the place of": ("in the place of the first", "instead of, replaces"),
    r"held against": ("shapes are held against the data", "compare with"),
    r"asked for": ("the number of samples asked for", "request, require"),
    r"shall": ("that a layer shall call", "must, or the plain present"),
    r"leads? nowhere": ("names that lead nowhere", "unresolvable, does not exist"),
    r"(laid|lie|lies|lying) (end to end|one after another)": ("laid end to end", "concatenated, contiguous"),
    r"paths count from": ("Paths count from the folder", "are relative to"),
    r"turned in": ("with their positions turned in", "apply rotary position embeddings"),
    r"left alone": ("leaves it left alone", "unchanged, ignored"),
    r"as it (likes|stands)": ("as often as it likes", "(leave it out)"),
    r"given up": ("was given up after 1 s", "timed out, failed"),
}

PATTERNS = {idiom: re.compile(rf"\b(?:{idiom})\b", re.IGNORECASE) for idiom in OLD_IDIOMS}
ANY_IDIOM = re.compile(rf"\b(?:{'|'.join(OLD_IDIOMS)})\b", re.IGNORECASE)


def python_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string: help, messages, log lines, documentation and docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def old_idioms(where: Path, texts: Iterator[tuple[int, str]]) -> list[str]:
    return [
        f"{where}:{line}: {found[0]!r}: write {OLD_IDIOMS[idiom][1]}"
        for line, text in texts
        if ANY_IDIOM.search(text)
        for idiom, pattern in PATTERNS.items()
        for found in pattern.finditer(text)
    ]


def documents() -> list[Path]:
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted(ROOT.glob("packages/*/*.md")),
        *sorted(ROOT.glob("benchmarks/*.md")),
        *sorted(ROOT.glob("configs/*.md")),
    ]


@pytest.mark.parametrize("idiom", OLD_IDIOMS)
def test_each_pattern_matches_its_example(idiom):
    assert PATTERNS[idiom].search(OLD_IDIOMS[idiom][0])


def test_strings_of_the_packages_contain_no_old_idiom():
    found = [line for source in sources() for line in old_idioms(source.path, python_texts(source.tree))]
    assert found == []


def test_strings_of_the_benchmarks_contain_no_old_idiom():
    paths = sorted((ROOT / "benchmarks").glob("*.py"))
    found = [
        line
        for path in paths
        for line in old_idioms(path.relative_to(ROOT), python_texts(ast.parse(path.read_text())))
    ]
    assert found == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_contain_no_old_idiom(path):
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    assert old_idioms(path.relative_to(ROOT), lines) == []
