"""Count a source file: lines, tokens, statements, functions, and functions that take the configuration."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, fields

from size_holders import Function, Program, statements

__all__ = ["LANGUAGES", "LONG", "Counts", "count_takers", "count_text"]

LONG = 600
"""A file with more lines is long."""

_STRING = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
_WORD = r"[A-Za-z_]\w*|\d[\w.]*|[^\w\s]"
_C = re.compile(rf"(?P<comment>/\*.*?\*/|//[^\n]*)|{_STRING}|{_WORD}", re.DOTALL)
_SHELL = re.compile(rf"(?P<comment>(?<!\S)#[^\n]*)|{_STRING}|{_WORD}")
_MARKUP = re.compile(rf"(?P<comment><!--.*?-->)|{_STRING}|{_WORD}", re.DOTALL)
# Name and tokens of a language, by the suffix of its files; Python has a tokenizer.
LANGUAGES: dict[str, tuple[str, re.Pattern[str] | None]] = {
    ".py": ("Python", None),
    ".pyi": ("Python stubs", _SHELL),
    **dict.fromkeys((".cpp", ".cu", ".cuh", ".h", ".inc"), ("C++ and CUDA", _C)),
    **dict.fromkeys((".js", ".css"), ("JavaScript and CSS", _C)),
    ".html": ("HTML", _MARKUP),
    **dict.fromkeys((".yml", ".yaml"), ("YAML", _SHELL)),
    **dict.fromkeys((".sh", ".mk"), ("shell and make", _SHELL)),
}
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# Since Python 3.12 an f-string is several tokens. Here it is one, on every Python.
_STARTS = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")}
_ENDS = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")}


@dataclass(frozen=True)
class Counts:
    """What is counted, in one file or in several.

    Attributes:
        files: number of files.
        lines: all lines.
        tokens: without comments, docstrings, and the ends and indentation of Python's lines.
        statements: of Python, without docstrings.
        functions: of Python; methods and functions inside functions too, lambdas not.
        configuration: functions with a parameter whose annotation names a class of the whole configuration.
        spec: of the others, those whose annotations name a class of a whole specification.
        holder: of the others, those whose annotations name a class that holds one of these.
        methods: of the others, methods of a class that holds one.
        long: files of more than `LONG` lines.
    """

    files: int = 0
    lines: int = 0
    tokens: int = 0
    statements: int = 0
    functions: int = 0
    configuration: int = 0
    spec: int = 0
    holder: int = 0
    methods: int = 0
    long: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def count_text(text: str, tree: ast.Module | None, pattern: re.Pattern[str] | None) -> Counts:
    """Count all of a file but the functions that take something, which depends on other files.

    Args:
        text: its content.
        tree: its syntax tree, if it is Python.
        pattern: the tokens of its language, if it is another one.
    """
    lines = len(text.splitlines())
    counts = Counts(files=1, lines=lines, long=int(lines > LONG))
    if pattern is not None:
        return counts + Counts(tokens=sum(found["comment"] is None for found in pattern.finditer(text)))
    nodes = [] if tree is None else list(statements(tree))
    docstrings = {(node.lineno, node.col_offset) for node in nodes if _is_docstring(node)}
    return counts + Counts(
        tokens=_python_tokens(text, docstrings),
        statements=len(nodes) - len(docstrings),
        functions=sum(isinstance(node, Function) for node in nodes),
    )


def count_takers(program: Program, module: str, tree: ast.Module) -> Counts:
    """Count the functions of a module by what they take."""
    kinds: Counter[str] = Counter()
    for node in statements(tree):
        if isinstance(node, Function):
            kinds[program.takes(module, node)] += 1
        elif isinstance(node, ast.ClassDef) and f"{module}.{node.name}" in program.holders:
            methods = (each for each in node.body if isinstance(each, Function))
            kinds["methods"] += sum(program.takes(module, each) == "" for each in methods)
    del kinds[""]
    return Counts(**kinds)


def _is_docstring(node: ast.stmt) -> bool:
    """Return whether it is a only a string: a docstring, also one of a variable."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _python_tokens(text: str, docstrings: Collection[tuple[int, int]]) -> int:
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.start in docstrings
        count += not (depth or token.type in _LAYOUT or is_docstring)
        depth += (token.type in _STARTS) - (token.type in _ENDS)
    return count
