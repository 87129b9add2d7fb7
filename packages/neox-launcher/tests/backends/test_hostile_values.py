"""What a shell would take for its own arrives as the same bytes, and is never run.

`ssh` here is a script that does what ssh and the host at its other end do with a command: the words after the
host's name are joined by spaces, and a shell reads the result. pdsh is the real one where it is installed.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neox_launcher.backends import BACKENDS, Contact
from neox_launcher.config import decode_resolved
from neox_launcher.launch import Request, plan_launch
from neox_launcher.orders import Orders
from neox_launcher.plan import LaunchPlan

SSH = """\
#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
HOST=$host exec /bin/sh -c "$*"
"""
# Stands at the place of the interpreter, and tells what it was given.
INTERPRETER = """\
#!{python}
import json, os, sys
report = {{"argv": sys.argv, "stdin": sys.stdin.read(), "host": os.environ.get("HOST")}}
with open(os.environ["REPORT"] + "." + sys.argv[-1], "w") as file:
    json.dump(report, file)
"""
HOSTILE = [
    "plain",
    "two words",
    "it's",
    'say "hi"',
    "a;touch ran",
    "$(touch ran)",
    "`touch ran`",
    "a\ntouch ran\n",
    "%n %h %u %%",
    "*?[a]{b,c}~",
    "\\",
    "-o ProxyCommand=x",
    "&& touch ran #",
    "über straße \u65e5\u672c",
    "!history",
    "$HOME ${IFS}",
]
# A path may hold anything but a slash, a NUL and lone surrogates.
names = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=20
).filter(lambda name: name not in (".", ".."))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan for two hosts, and the folder of a fake ssh."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hosts").write_text("one slots=1\ntwo slots=1\n")
    (folder / "small.yml").write_text(
        "{num-layers: 2, hidden-size: 8, num-attention-heads: 2, seq-length: 4, max-position-embeddings: 4,"
        "train-iters: 1, train-micro-batch-size-per-gpu: 1, optimizer: {type: Adam, params: {lr: 0.1}}}"
    )
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    overrides = (f"hostfile={folder / 'hosts'}",)
    request = Request(program="train", paths=(str(folder / "small.yml"),), overrides=overrides)
    return plan_launch(request, environment={}), folder


def started(plan: LaunchPlan, launcher: str, folder: Path, python: Path) -> list[dict]:
    """What the interpreter of each host was told, after the commands ran."""
    contact = Contact(addresses=("10.0.0.1",), port=7, token="s3cret", folder=str(python.parent))
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "REPORT": str(folder / "report"),
    }
    planned = replace(plan, launcher=launcher, python=str(python))
    for command in BACKENDS[launcher].commands(planned, contact):
        for path, content in command.files.items():
            Path(path).write_text(content)
        subprocess.run(
            command.argv,
            env=environment | dict(command.environment),
            input=command.stdin,
            text=True,
            check=True,
            cwd=python.parent,
            timeout=30,
        )
    reports = [folder / f"report.{node}" for node in range(2)]
    found = [json.loads(report.read_text()) for report in reports]
    for report in reports:
        report.unlink()
    return found


def check_name(plan, folder, launcher, name):
    place = folder / f"d{name}"
    try:
        place.mkdir()
    except OSError:
        # The file system takes no name that long, or not in this encoding.
        return
    python = place / f"py{name}"
    try:
        python.write_text(INTERPRETER.format(python=sys.executable))
        python.chmod(0o755)
        found = started(plan, launcher, folder, python)
        expected = ["-P", "-m", "neox_launcher.node", "--launcher", "10.0.0.1:7", "--node"]
        assert [report["argv"] for report in found] == [
            [str(python), *expected, str(node)] for node in range(2)
        ]
        assert [report["stdin"] for report in found] == ["s3cret\n"] * 2
        assert [report["host"] for report in found] == ["one", "two"]
        made = {path.name for path in place.iterdir()} - {"token", "given-up-0", "given-up-1"}
        assert made == {python.name}
    finally:
        with suppress(OSError):
            shutil.rmtree(place)


needs_pdsh = pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed")
LAUNCHERS = ["ssh", pytest.param("pdsh", marks=needs_pdsh)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_path_of_the_interpreter_arrives_as_it_is(plan, launcher, name):
    check_name(*plan, launcher, name)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=names)
def test_any_path_of_the_interpreter_arrives_as_it_is(plan, launcher, name):
    check_name(*plan, launcher, name)


variables = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30).filter(lambda text: "\0" not in text))
# What configurations take: line breaks and tabs are slips, refused where they are read.
values = variables.filter(lambda text: text != "None" and not set(text) & set("\n\r\t\f\b\a\v\x1b"))


@settings(max_examples=50, deadline=None)
@given(value=values, variable=variables)
def test_values_and_variables_are_in_the_orders_and_in_no_command(plan, value, variable):
    """They travel over the control connection, as one line of ASCII."""
    planned, _ = plan
    config = planned.resolved.config
    checkpoint = config.checkpoint.replaced(load=value)
    resolved = replace(planned.resolved, config=config.model_copy(update={"checkpoint": checkpoint}))
    changed = replace(
        planned, resolved=resolved, environment={"A": variable}, working_directory=f"/{variable}"
    )
    text = changed.orders().to_json()
    assert text.isascii()
    assert "\n" not in text
    orders = Orders.from_json(text)
    assert orders == changed.orders()
    assert (orders.environment, orders.working_directory) == ({"A": variable}, f"/{variable}")
    assert decode_resolved(orders.resolved).config.checkpoint.load == value
    contact = Contact(addresses=("10.0.0.1",), port=7, token="s3cret", folder="/run")
    for backend in BACKENDS.values():
        assert backend.commands(changed, contact) == backend.commands(planned, contact)


def test_bytes_that_are_no_text_arrive_as_they_are(plan):
    """An environment may hold any byte; Python shows those that are no text as lone surrogates."""
    raw = bytes(range(1, 256)).decode("utf-8", "surrogateescape")
    orders = Orders.from_json(replace(plan[0], environment={"A": raw}).orders().to_json())
    assert os.fsencode(orders.environment["A"]) == os.fsencode(raw)
