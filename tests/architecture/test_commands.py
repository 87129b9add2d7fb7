"""Every command: its help, its examples, its exit codes, and what shells complete in it."""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from support.documents import DOCUMENTS
from support.sources import ROOT

PROGRAMS: dict[str, click.Command] = {}
for path in sorted((ROOT / "packages").glob("*/pyproject.toml")):
    for program, entry in tomllib.loads(path.read_text())["project"]["scripts"].items():
        module, _, function = entry.partition(":")
        PROGRAMS[program] = getattr(importlib.import_module(module), function)


def commands() -> Iterator[tuple[str, ...]]:
    for name, program in PROGRAMS.items():
        yield (name,)
        if isinstance(program, click.Group):
            yield from ((name, each) for each in program.commands)


COMMANDS = list(commands())
named = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


def command_of(words: tuple[str, ...]) -> click.Command:
    command = PROGRAMS[words[0]]
    for word in words[1:]:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


def invoke(words, **options):
    return CliRunner().invoke(PROGRAMS[words[0]], words[1:], prog_name=words[0], **options)


def examples_of(words: tuple[str, ...]) -> list[str]:
    """Return the examples in the help of a command."""
    shown = invoke((*words, "--help")).stdout.partition("Examples:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in shown.splitlines()]


def own_words(example: str) -> list[str]:
    """Return the words of the command in a shell command: what is in $(), before > or |."""
    inner = re.search(r"\$\((.*)\)", example)
    return shlex.split(re.split(r" [>|] ", inner[1] if inner else example)[0])


@pytest.fixture
def any_path(monkeypatch):
    """Every path exists."""
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: Path(value))


def parse(words: list[str]) -> tuple[str, ...]:
    """Parse a command line as its program does; return the program and the command.

    Raises:
        ClickException: it is wrong.
    """
    program = PROGRAMS[words[0]]
    with program.make_context(words[0], words[1:]) as context:
        rest = [*context._protected_args, *context.args]
        if not isinstance(program, click.Group) or not rest:
            return (words[0],)
        name, command, rest = program.resolve_command(context, rest)
        assert command is not None
        with command.make_context(name, rest, parent=context) as inner:
            assert inner.args == []
        return (words[0], str(name))


@named
def test_help_shows_two_examples_that_parse(words, any_path):
    examples = examples_of(words)
    assert len(examples) == 2
    for example in examples:
        assert parse(own_words(example))[: len(words)] == words


@pytest.mark.parametrize("program", [name for name in PROGRAMS if isinstance(PROGRAMS[name], click.Group)])
def test_the_list_of_commands_has_whole_sentences(program):
    assert not re.search(r"\w\.\.\.$", invoke((program, "--help")).stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "line",
    [
        "neox-config check",
        "neox-config check a.yml --device 8",
        "neox-config estimate a.yml --tflops fast",
        "neox-config chek a.yml",
        "neox-data split a --output b",
        "neox-launch a.yml --outputs all",
        "neox-report",
    ],
)
def test_an_example_that_is_wrong_is_found(line, any_path):
    with pytest.raises(click.UsageError):
        parse(shlex.split(line))


@named
def test_help_is_in_sentences(words):
    command = command_of(words)
    texts = [command.help, *(param.help for param in command.params if isinstance(param, click.Option))]
    for text in texts:
        sentence = re.sub(r"\s*\[default: .*\]$", "", (text or "").strip())
        assert re.match(r"[A-Z\"'`].*[.]$", sentence, re.DOTALL), text


@named
def test_many_options_are_under_headings(words):
    command = command_of(words)
    groups = [getattr(param, "group", None) for param in command.params if param.name != "version"]
    headings = [group.title if group else "Options" for group in groups]
    shown = [param for param in command.params if isinstance(param, click.Option)]
    if len(shown) > 8:
        assert headings.count("Options") <= 4
        assert len(set(headings)) >= 3


@named
def test_ctrl_c_ends_with_130(words, any_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    command = command_of(words)
    monkeypatch.setattr(command, "callback", interrupted)
    example = next(each for each in examples_of(words) if len(parse(own_words(each))) >= len(words))
    result = invoke(tuple(own_words(example)))
    assert (result.exit_code, result.stderr) == (130, "\ninterrupted\n")


@named
def test_a_wrong_option_is_an_invalid_request_and_the_nearest_is_named(words):
    result = invoke((*words, "--hepl"))
    assert result.exit_code == 2
    assert "--help" in result.stderr
    assert "--hepl" in result.stderr


@pytest.mark.parametrize("name", [name for name, each in PROGRAMS.items() if isinstance(each, click.Group)])
def test_the_nearest_command_is_named(name):
    known = next(iter(PROGRAMS[name].commands))
    result = invoke((name, known[:-1]))
    assert result.exit_code == 2
    assert known in result.stderr


@named
def test_help_lists_the_exit_codes(words):
    shown = invoke((*words, "--help")).stdout.partition("Exit codes:\n")[2]
    assert [line.split()[0] for line in shown.splitlines() if re.match(r" +\d", line)][:4] == [
        "0",
        "1",
        "2",
        "130",
    ]


def completed(line: str) -> list[str]:
    """Return what bash is told about the last word of a command line."""
    words = line.split(" ")
    variable = f"_{words[0].replace('-', '_').upper()}_COMPLETE"
    environment = {variable: "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return invoke((words[0],), env=environment).stdout.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("neox-config expl", ["plain,explain"]),
        ("neox-config explain num-la", ["plain,num-layers"]),
        ("neox-config explain num_la", ["plain,num_layers"]),
        ("neox-config check a.yml --set rotary-p", ["plain,rotary-pct="]),
        ("neox-config check a", ["file,a"]),
        ("neox-config models pythia-1.", ["plain,pythia-1.4b"]),
        ("neox-launch --config a", ["file,a"]),
        ("neox-launch a.yml --max-r", ["plain,--max-restarts"]),
        ("neox-launch a.yml --set train-it", ["plain,train-iters="]),
        ("neox-launch gen", ["file,gen", "plain,generate"]),
        ("neox-launch init --model pythia-1.", ["plain,pythia-1.4b"]),
        ("neox-data inspect --vocab-file tok", ["file,tok"]),
        ("neox-checkpoint ver", ["plain,verify"]),
        ("neox-convert to-hf --dtype bf", ["plain,bf16", "plain,bfloat16"]),
        ("neox-kernels stat", ["plain,status"]),
        ("neox-kernels status --dtype bf", ["plain,bfloat16", "plain,bf16"]),
        ("neox-report runs", ["file,runs"]),
        ("preprocess_data --tokenizer-type HFT", ["plain,HFTokenizer"]),
    ],
)
def test_shells_complete(line, found):
    assert completed(line) == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_one_line_completes_all_programs(shell):
    shown = invoke(("neox-config", "completion", shell)).stdout
    for name in PROGRAMS:
        assert f"_{name.replace('-', '_').upper()}_COMPLETE={shell}_complete" in shown


@pytest.mark.parametrize(("shell", "line"), [("bash", "compopt -o nospace"), ("zsh", "ending=(-S '')")])
def test_no_space_follows_an_equals_sign(shell, line):
    shown = invoke(("neox-config", "completion", shell)).stdout
    assert shown.count(f"== *= ]] && {line}") == len(PROGRAMS)


def test_the_page_about_commands_names_each_program():
    text = (ROOT / "docs/commands.md").read_text()
    assert [words for words in COMMANDS if " ".join(words) not in text] == []


# Words of a program in a text, such as `neox-config show FILE`.
NAMED = re.compile(r"`(" + "|".join(map(re.escape, PROGRAMS)) + r") ([a-z][a-z-]*)(?![\w./-])")


# The changelog names commands that were removed.
@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if path.name != "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_command_that_a_sentence_names_exists(path):
    groups = {name: program for name, program in PROGRAMS.items() if isinstance(program, click.Group)}
    unknown = {
        f"{program} {word}"
        for program, word in NAMED.findall(path.read_text())
        if program in groups and word not in groups[program].commands
    }
    assert unknown == set()
