"""Blocks of documents: commands that a test runs, and those that are marked as not run.

A console block is run, unless the line before it is `<!-- not run: REASON -->`. A block of another language
whose first line is a comment with a file name (`# model.yml`) is that file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from support.sources import ROOT

__all__ = [
    "DOCUMENTS",
    "REASONS",
    "REPORTS",
    "RUN",
    "Block",
    "blocks_of",
    "is_run",
    "problems_of",
    "read",
    "shows",
]

# Measurements and generated tables, which the navigation of the site leaves out.
REPORTS = sorted((ROOT / "docs/reports").glob("*.md"))
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *REPORTS,
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("[!.]*/README.md"),
    ]
)
# Documents whose unmarked blocks tests/integration/test_documents_run.py runs.
RUN = (
    "docs/add-an-architecture.md",
    "docs/experts.md",
    "docs/finetuning.md",
    "docs/from-gpt-neox.md",
    "docs/huggingface.md",
    "docs/llama-style.md",
    "docs/performance.md",
    "docs/tutorial.md",
)
# Why a console block is not run, and what is done instead.
REASONS = {
    "cluster": "requires several hosts, a scheduler or containers; as make sweep NAME=cluster has them",
    "gpu": "requires a GPU; make gpu-check runs such commands",
    "install": "changes the environment or runs other tests",
    "network": "downloads from the internet",
    "quickstart": "is run by make quickstart, or uses its result",
    "your files": "names files that only the reader has",
}
_MARK = re.compile(r"^<!-- not run: (.*?) -->$", re.MULTILINE)
_FENCE = re.compile(
    r"^(?:(?P<before>[^\n]*)\n)?(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)
_FILE_NAME = re.compile(r"^# ([\w.-]+\.\w+|Dockerfile)$")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        line: number of its first line, from 1.
        language: what follows the fence: console, yaml, ...
        text: its lines.
        reason: why it is not run; None if it is not marked.
    """

    line: int
    language: str
    text: str
    reason: str | None

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each command, with continued lines, and the output that is shown below it."""
        return re.findall(r"^\$ ((?:.*\\\n)*.*)\n?((?:(?!\$ ).*\n)*)", self.text, re.MULTILINE)

    @property
    def file_name(self) -> str | None:
        """Name of the file that this block is, if it has one."""
        found = _FILE_NAME.match(self.text.partition("\n")[0])
        return found[1] if found and self.language != "console" else None


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a document."""
    found = []
    for block in _FENCE.finditer(text):
        mark = _MARK.fullmatch(block["before"] or "")
        line = text.count("\n", 0, block.start("fence")) + 1
        found.append(Block(line, block["language"].strip(), block["text"], mark[1] if mark else None))
    return found


def is_run(block: Block) -> bool:
    """Return whether a test must run the block."""
    return block.language == "console" and block.reason is None


def problems_of(text: str, *, has_runner: bool) -> list[str]:
    """Return what is wrong with the marks of a document.

    Args:
        text: the document.
        has_runner: whether a test runs the document's blocks.
    """
    blocks = blocks_of(text)
    found = [
        f"line {block.line}: no test runs this block; add the document to RUN, or mark the block"
        for block in blocks
        if is_run(block) and not has_runner
    ]
    found += [
        f"line {block.line}: unknown reason {block.reason!r}"
        for block in blocks
        if block.reason is not None and block.reason not in REASONS
    ]
    marked = sum(block.reason is not None and block.language == "console" for block in blocks)
    if len(_MARK.findall(text)) != marked:
        found.append("a mark is not directly before a console block")
    if re.search(r"^[ \t]+```", text, re.MULTILINE):
        found.append("an indented block is not found by tests; write it without indentation")
    if has_runner and not any(map(is_run, blocks)):
        found.append("no block is run; remove the document from RUN")
    return found


def shows(shown: str, output: str) -> bool:
    """Return whether the output contains the lines that a document shows.

    Args:
        shown: lines of a document; `...` in a line stands for any text, and as a line for any lines.
        output: what the command has printed.
    """
    pattern = "".join(
        r"(?:.*\n)*?"
        if line.strip() == "..."
        else ".*?".join(map(re.escape, line.rstrip().split("..."))) + r"\n"
        for line in shown.strip("\n").split("\n")
    )
    text = "".join(f"{line.rstrip()}\n" for line in output.split("\n"))
    return re.search(f"^{pattern}", text, re.MULTILINE) is not None


def read(document: str) -> str:
    """Return the text of a document, by its path from the root of the repository."""
    return Path(ROOT / document).read_text(encoding="utf-8")
