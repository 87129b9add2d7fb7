"""`neox-config` reports any configuration quickly: it is valid, or each problem has its place and a remedy.

The mutations start from configs/*.yml, and every name is tried with seven wrong values. A few
hundred run in `make test`; `make sweep NAME=config` runs all, and prints the figures.
"""

import json
import random
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from neox_config import load_config
from neox_config.errors import ConfigError
from neox_config.schema.config import all_parameters
from neox_launcher.cli.config import main

ROOT = Path(__file__).parents[4]
SHIPPED = sorted((ROOT / "configs").glob("*.yml"))
DOCUMENTED = [
    entry["name"] for entry in json.loads((Path(__file__).parents[1] / "data/parameters.json").read_text())
]
BLOCKS = Path(__file__).parents[1] / "data/every_block.yml"
PARAMETERS = [parameter for parameter in all_parameters() if "<" not in parameter.name]
# With parameters that only this project has.
NAMES = sorted({*DOCUMENTED, *(parameter.name for parameter in PARAMETERS)})
MUTATIONS = 10_000
A_FEW = 120
# Processor time, which a busy machine does not change.
LIMIT_SECONDS = 10.0

WRONG_VALUES = ["word", "-7", "1e18", "0.5", "[[1, a], {b: c}]", "{a: {b: 1}}", "''"]
ODD_VALUES = [
    *(
        "true",
        "false",
        "null",
        "~",
        "0",
        "-1",
        "1",
        "3",
        "0.1",
        "1e-300",
        "1e300",
        "1e18",
        "9" * 400,
        ".inf",
        ".nan",
    ),
    *(
        "word",
        "'5'",
        "'1_000'",
        "yes",
        "None",
        "auto",
        "all",
        "cpu",
        "'\\0'",
        '"a\\tb"',
        "\u2028",
        "\U0001f600",
    ),
    *(
        "[]",
        "[1, 2]",
        "[[[global], 4]]",
        "[0.9, 0.95]",
        "[[]]",
        "{}",
        "{a: 1}",
        "{enabled: true}",
        "[.nan, 1]",
    ),
    *("{type: SGD}", "{type: OneBitAdam, params: {lr: 0.1, freeze_step: x}}", "{stage: 3}", "{stage: {}}"),
    *("!!python/name:os.system x", "*a", "&a 1", "1,000", "5 %", "16k", "2e", "-", "|", "> text"),
]


@contextmanager
def no_hang(what):
    """Fail if the block takes more processor time than any configuration may."""

    def stop(*_):
        raise AssertionError(f"more than {LIMIT_SECONDS} s of processor time for {what}")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Figures:
    """Number of accepted and refused cases, and the slowest one."""

    def __init__(self):
        self.outcomes = Counter()
        self.slowest = (0.0, "")

    def __str__(self):
        counts = ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(self.outcomes.items()))
        return (
            f"{self.outcomes.total():,} cases: {counts}; slowest {self.slowest[0]:.2f} s ({self.slowest[1]})"
        )


def check(files, overrides, what, figures):
    """Load a configuration and run commands with it; every refusal names place and remedy."""
    started = time.process_time()
    arguments = [*map(str, files), *(f"--set={text}" for text in overrides)]
    with no_hang(what):
        try:
            config = load_config(files, overrides=overrides)
        except ConfigError as refusal:
            outcome = "refused"
            assert_explained(refusal, what)
        else:
            outcome = "accepted"
            for command in (["check"], ["show"], ["show", "--engine"], ["estimate"]):
                assert_ends_well(CliRunner().invoke(main, [*command, *arguments]), what)
            assert config.files
    taken = time.process_time() - started
    figures.outcomes[outcome] += 1
    figures.slowest = max(figures.slowest, (taken, what))


def assert_ends_well(result, what):
    assert result.exit_code in (0, 2), f"{what}: {result.exception!r}"
    if result.exit_code:
        assert result.stderr.strip(), what


def assert_explained(refusal, what):
    assert refusal.problems, what
    for problem in refusal.problems:
        is_absent = problem.what.startswith(("is missing", "is required", "was not given"))
        assert is_absent or problem.place is not None, (what, problem)
        assert problem.remedy or "must" in problem.what, (what, problem)
    assert "Traceback" not in str(refusal)


def mutated(text, draw):
    """Return a text after one to three accidents."""
    for _ in range(draw.randint(1, 3)):
        text = draw.choice(ACCIDENTS)(text, draw)
    return text


def change_a_value(text, draw):
    lines = text.splitlines() or [""]
    place = draw.randrange(len(lines))
    lines[place] = f"{lines[place].partition(':')[0]}: {draw.choice(ODD_VALUES)}"
    return "\n".join(lines)


def add_a_parameter(text, draw):
    parameter = draw.choice(PARAMETERS)
    values = [*ODD_VALUES, *map(str, parameter.choices), *LIMITS.get(parameter.name, ())]
    *blocks, name = parameter.name.split(".")
    written = f"{name}: {draw.choice(values)}"
    for block in reversed(blocks):
        written = f"{block}: {{{written}}}"
    return f"{text}\n{written}\n"


def cut(text, draw):
    start = draw.randrange(len(text) + 1)
    return text[:start] + text[start + draw.randint(1, 30) :]


def insert(text, draw):
    start = draw.randrange(len(text) + 1)
    return text[:start] + draw.choice([*"{}[]:,&*!#\"'-?|>%@\t\n\\\0", *ODD_VALUES]) + text[start:]


def move_a_line(text, draw):
    lines = text.splitlines(keepends=True) or [""]
    line = lines.pop(draw.randrange(len(lines)))
    lines.insert(draw.randrange(len(lines) + 1), draw.choice(["", " ", "  ", "\t"]) + line)
    return "".join(lines)


def repeat_a_line(text, draw):
    lines = text.splitlines(keepends=True) or [""]
    lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))
    return "".join(lines)


def misspell(text, draw):
    start = draw.randrange(max(1, len(text)))
    return text[:start] + draw.choice("abcdefghijklmnopqrstuvwxyz-_.: ") + text[start + 1 :]


ACCIDENTS = [
    *(
        change_a_value,
        change_a_value,
        add_a_parameter,
        add_a_parameter,
        cut,
        insert,
        move_a_line,
        repeat_a_line,
    ),
    misspell,
]
# The smallest and the largest value of every number.
LIMITS = {
    parameter.name: [word for part in parameter.limits.split(", ") for word in part.split()[1:]]
    for parameter in PARAMETERS
    if parameter.limits
}


def check_mutations(folder, numbers):
    figures = Figures()
    local = ROOT / "configs/local-data.yml"
    for number in numbers:
        draw = random.Random(number)
        source = draw.choice(SHIPPED)
        path = folder / f"{source.stem}.yml"
        path.write_bytes(mutated(source.read_text(encoding="utf-8"), draw).encode("utf-8", "surrogatepass"))
        files = [path, local] if draw.random() < 0.5 and source != local else [path]
        check(files, (), f"mutation {number} of {source.name}", figures)
    return figures


def check_wrong_values(folder, names):
    figures = Figures()
    path = folder / "complete.yml"
    path.write_text(yaml.safe_dump(yaml.safe_load(BLOCKS.read_text()) | MINIMAL))
    for name in names:
        for value in WRONG_VALUES:
            check([path], (f"{name}={value}",), f"{name}={value}", figures)
    return figures


MINIMAL = {
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "max-position-embeddings": 32,
    "train-iters": 10,
    "train-micro-batch-size-per-gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}


def test_mutations_of_shipped_files_are_reported(tmp_path):
    figures = check_mutations(tmp_path, range(A_FEW))
    assert min(figures.outcomes["accepted"], figures.outcomes["refused"]) > 5


@pytest.mark.slow
def test_wrong_values_of_some_names_are_reported(tmp_path):
    names = random.Random(0).sample(NAMES, 20)
    assert check_wrong_values(tmp_path, names).outcomes["refused"] > 50


@pytest.mark.sweep
def test_sweep_of_mutations(tmp_path, capsys):
    figures = check_mutations(tmp_path, range(MUTATIONS))
    with capsys.disabled():
        sys.stdout.write(f"\nmutations: {figures}\n")


@pytest.mark.sweep
def test_sweep_of_wrong_values(tmp_path, capsys):
    assert len(DOCUMENTED) == 525
    figures = check_wrong_values(tmp_path, NAMES)
    with capsys.disabled():
        sys.stdout.write(f"\nwrong values: {figures}\n")
