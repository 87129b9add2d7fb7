"""tools/size.py: what it counts, in small sources with known counts, and what it says of a larger number."""

import ast
from pathlib import Path
from textwrap import dedent

import pytest

import size
from size_count import LANGUAGES, Counts, count_takers, count_text
from size_holders import Program
from support.sources import ROOT

# A module of the configuration, and one through which it is imported.
CONFIGURATION = {
    "base": """
        class NeoXConfig: ...
        class Resolved:
            config: NeoXConfig
            width: int
            @property
            def settings(self) -> NeoXConfig: ...
        """,
    "facade": "from base import NeoXConfig, Resolved as Resolved",
}


def counted(text: str) -> Counts:
    return count_text(dedent(text), ast.parse(dedent(text)), None)


def takers(text: str, **others: str) -> Counts:
    """Return the functions of a module by what they take; the module may import from `base` and `facade`."""
    texts = CONFIGURATION | others | {"subject": text}
    trees = {name: ast.parse(dedent(each)) for name, each in texts.items()}
    return count_takers(Program(trees), "subject", trees["subject"])


@pytest.mark.parametrize(
    ("text", "tokens", "statements", "functions"),
    [
        ("", 0, 0, 0),
        ("# a comment\n\n\n", 0, 0, 0),
        ('"""A module."""\n', 0, 0, 0),
        ("x = 1  # one\n", 3, 1, 0),
        ('x = 1\n"""What x is."""\n', 3, 1, 0),
        ('x = """not a docstring"""\n', 3, 1, 0),
        ("x = (\n    1,\n)\n", 6, 1, 0),
        ("x = f'{a + b} and {c!r:>{d}}'\n", 3, 1, 0),
        ("if a:\n    pass\nelse:\n    b\n", 7, 3, 0),
        ('def f(a):\n    """Return a."""\n    return a\n', 8, 2, 1),
        ('class A:\n    """A class."""\n\n    async def f(self):\n        def g(): ...\n', 16, 4, 2),
        ("try:\n    a\nexcept E:\n    b\n", 7, 3, 0),
        ("match a:\n    case 1:\n        b\n", 7, 2, 0),
        ("f = lambda a: a\n", 6, 1, 0),
    ],
)
def test_python_is_counted_without_docstrings_comments_and_layout(text, tokens, statements, functions):
    expected = Counts(
        files=1,
        lines=len(text.splitlines()),
        tokens=tokens,
        statements=statements,
        functions=functions,
    )
    assert counted(text) == expected


@pytest.mark.parametrize(
    ("suffix", "text", "tokens"),
    [
        (".cu", '// one\nint a = 1.5f; /* two\nlines */ char* b = "// no comment";\n', 11),
        (".sh", "#!/bin/bash\necho $a#b  # comment\n", 5),
        (".yml", 'a: "# b"  # comment\nc: 1\n', 6),
        (".html", "<p><!-- a\nb -->text</p>\n", 8),
        (".js", "a += `b`; // c\n", 7),
        (".pyi", "def f() -> int: ...  # comment\n", 11),
    ],
)
def test_tokens_of_other_languages_are_words_strings_and_signs(suffix, text, tokens):
    found = count_text(text, None, LANGUAGES[suffix][1])
    assert found == Counts(files=1, lines=len(text.splitlines()), tokens=tokens)


@pytest.mark.parametrize(("lines", "long"), [(600, 0), (601, 1)])
def test_file_over_600_lines_is_long(lines, long):
    assert counted("a\n" * lines).long == long


@pytest.mark.parametrize(
    "parameter",
    [
        "a: Resolved",
        "a: NeoXConfig | None = None",
        "*, a: 'Resolved'",
        "*a: Resolved",
        "a: dict[str, list[NeoXConfig]]",
        "a: Callable[[Resolved], int]",
        "a: Either",
        "a, /, b: int, c: facade.Resolved",
    ],
)
def test_function_with_an_annotation_of_the_configuration_takes_it(parameter):
    text = f"""
        import facade
        from facade import NeoXConfig, Resolved
        Either = Resolved | int
        def f({parameter}): ...
        """
    assert takers(text) == Counts(configuration=1)


@pytest.mark.parametrize(
    "parameter", ["", "a", "a: int", "a: Other", "a: Literal['Resolved', 'in two words']"]
)
def test_function_without_it_takes_nothing(parameter):
    text = f"class Other:\n    width: int\ndef f({parameter}) -> Resolved: ..."
    assert takers(text) == Counts()


@pytest.mark.parametrize("name", ["ModelSpec", "RunSpec", "DataSpec", "UpdateSpec"])
def test_specification_is_counted_apart(name):
    text = f"""
        class {name}: ...
        class Resolved: ...
        class Part:
            spec: {name}
        def f(a: {name}): ...
        def g(a: {name}, b: Resolved): ...
        def h(a: Part, b: {name}): ...
        def i(a: Part): ...
        """
    assert takers(text) == Counts(configuration=1, spec=2, holder=1)


@pytest.mark.parametrize(
    "body",
    [
        "a: Resolved",
        "a: 'list[Resolved] | None' = None",
        "def __init__(self, a: Resolved): self.a = a",
        "def __init__(self, a: Resolved, b): self.b, self.a = b, a",
        "def __init__(self, a: Resolved): self.a = a.config",
        "def __init__(self, a: Resolved): self.a = a.settings",
        "def __init__(self, a: Resolved):\n            config = a.config\n            self.a = [config]",
        "def __init__(self, a: Resolved): self.a = partial(print, a, 1)",
        "def __init__(self, a: Resolved): self.a = a if a.width else None",
        "def __init__(self): self.a: Resolved | None = None",
        "def __init__(self): self.a = load()",
        "def __init__(self): self.a = Resolved()",
        "a: Other",
    ],
)
def test_class_with_such_a_field_holds_the_configuration(body):
    text = f"""
    from facade import Resolved
    def load() -> Resolved: ...
    class Other:
        a: Resolved
    class Holder:
        {body}
    class Heir(Holder): ...
    class Outer:
        held: list[Holder]
    def f(a: Holder): ...
    def g(a: Heir): ...
    def h(a: Outer): ...
    """
    found = takers(text)
    methods = found.methods + found.configuration
    assert (found.holder, methods) == (3, body.count("def "))


@pytest.mark.parametrize(
    "body",
    [
        "a: int",
        "a: Callable[[Resolved], int]",
        "a: type[Resolved]",
        "def __init__(self, a: Resolved): self.a = a.width",
        "def __init__(self, a: Resolved): self.a = a.config.width",
        "def __init__(self, a: Resolved): self.a = width_of(a)",
        "def __init__(self, a: Resolved): self.a = a is None",
    ],
)
def test_class_with_a_value_of_it_holds_nothing(body):
    text = f"""
    from facade import Resolved
    def width_of(a: Resolved) -> int: ...
    class Other:
        {body}
    def f(a: Other): ...
    """
    assert takers(text).holder == 0


def test_holder_of_another_module_is_found_through_imports():
    part = "from facade import Resolved\nclass Part:\n    resolved: Resolved\n    def f(self): ..."
    assert takers("from parts import Part as P\ndef f(a: P): ...", parts=part) == Counts(holder=1)


def test_subclass_of_the_configuration_counts_as_a_holder():
    text = "from facade import NeoXConfig\nclass Mine(NeoXConfig): ...\ndef f(a: Mine): ..."
    assert takers(text) == Counts(holder=1)


def test_method_of_a_holder_is_counted_apart():
    text = """
        class Resolved: ...
        class Holder:
            resolved: Resolved
            def f(self): ...
            def g(self, a: Resolved): ...
            def h(self, other: "Holder"): ...
        """
    assert takers(text) == Counts(configuration=1, holder=1, methods=1)


ROWS = "".join(f"| {name} | {{}} |\n" for name in size.NUMBERS)


def checkout(folder: Path, *stated: int) -> Path:
    """Write a small checkout: three statements, eleven tokens, one function that takes the configuration."""
    source = folder / "packages/neox-model/src/neox_model/layers/norms.py"
    source.parent.mkdir(parents=True)
    source.write_text('"""Norms."""\n\nfrom base import Resolved\n\n\ndef f(a: Resolved):\n    pass\n')
    (folder / "packages/neox-model/src/neox_model/notes.txt").write_text("not a source")
    (folder / "tools").mkdir()
    (folder / "tools/run.sh").write_text("echo a\n")
    (folder / "CONTRIBUTING.md").write_text("# Size\n\n" + ROWS.format(*stated))
    return folder


def test_tables_show_rooms_languages_and_the_numbers(tmp_path, capsys):
    assert size.main(["--root", str(checkout(tmp_path, *[0] * 6))]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["neox_model/layers", "1", "7", "13", "3", "1", "1"] in lines
    assert ["all", "sources", "1", "7", "13", "3", "1", "1"] in lines
    assert ["tools,", "shell", "and", "make", "1", "1", "2", "0", "0", "0"] in lines
    assert ["3", "statements"] in lines


def test_check_prints_nothing_if_the_stated_numbers_hold(tmp_path, capsys):
    assert size.main(["--check", "--root", str(checkout(tmp_path, 3, 13, 0, 1, 0, 0))]) == 0
    assert capsys.readouterr() == ("", "")


def test_check_names_the_line_of_each_number_that_is_larger_than_stated(tmp_path, capsys):
    assert size.main(["--check", "--root", str(checkout(tmp_path, 2, 13, 0, 0, 0, 0))]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("CONTRIBUTING.md:3: statements: 3, but 2 are stated;")
    assert second.startswith(
        "CONTRIBUTING.md:6: functions of neox_model that take the configuration: 1, but 0"
    )


def test_number_that_is_not_stated_is_reported():
    assert size.compare({"files": 1200}, "| other | 5 |") == [
        "CONTRIBUTING.md has no row 'files'; add it, with 1,200"
    ]


def test_contributing_states_every_number():
    document = (ROOT / "CONTRIBUTING.md").read_text()
    assert size.compare(dict.fromkeys([*size.NUMBERS, *size.TRACED], 0), document) == []
