"""Values with shell metacharacters arrive as the same bytes, and are never executed.

`ssh` is replaced by a script that treats a command like ssh and the remote host: the words after the host
name are joined by spaces and passed to a shell. The real pdsh is used if it is installed.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neox_config import decode_resolved
from neox_launcher.backends import BACKENDS, Contact
from neox_launcher.backends.base import remote_command
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.protocol.messages import decode_line, encode_message
from neox_launcher.protocol.orders import AgentOrders
from support.refusals import shows
from support.tiers import slow_except

SSH = """\
#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
HOST=$host exec /bin/sh -c "$*"
"""
# Replaces the interpreter, and prints its arguments.
INTERPRETER = """\
#!{python}
import json, os, sys
report = {{"argv": sys.argv, "stdin": sys.stdin.read(), "host": os.environ.get("HOST")}}
report["value"] = os.environ.get("VALUE")
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
    """Return a plan for two hosts and the folder of a fake ssh."""
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
    """Return the arguments of the interpreter on each host, after running the commands."""
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
    reports = [folder / f"report.{number}" for number in range(2)]
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
        expected = ["-P", "-m", "neox_launcher.agent", "--launcher", "10.0.0.1:7", "--host-number"]
        assert [report["argv"] for report in found] == [
            [str(python), *expected, str(number)] for number in range(2)
        ]
        assert [report["stdin"] for report in found] == ["s3cret\n"] * 2
        assert [report["host"] for report in found] == ["one", "two"]
        made = {path.name for path in place.iterdir()} - {"hosts", "token", "given-up-0", "given-up-1"}
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


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(name=names)
def test_any_path_of_the_interpreter_arrives_as_it_is(plan, launcher, name):
    check_name(*plan, launcher, name)


# Prints its own words, as the command of a container would pass them on.
PREFIX = """\
#!/bin/sh
VALUE="$VALUE, $1"; export VALUE; shift
exec "$@"
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("value", slow_except([text for text in HOSTILE if "\n" not in text], "two words"))
def test_the_setup_and_the_prefix_run_on_each_host_as_they_are(plan, launcher, value):
    planned, folder = plan
    container = folder / "enter it"
    container.write_text(PREFIX)
    container.chmod(0o755)
    python = folder / "interpreter"
    python.write_text(INTERPRETER.format(python=sys.executable))
    python.chmod(0o755)
    # The setup reads its standard input, which is not the token.
    setup = f"cat; VALUE={shlex.quote(value)}; export VALUE # done"
    changed = replace(planned, remote_setup=setup, remote_prefix=(str(container), value))
    found = started(changed, launcher, folder, python)
    assert [report["value"] for report in found] == [f"{value}, {value}"] * 2
    assert [report["stdin"] for report in found] == ["s3cret\n"] * 2


def test_a_setup_that_fails_is_named(plan):
    planned, _ = plan
    changed = replace(planned, launcher="ssh", remote_setup="no-such-module load x")
    contact = Contact(addresses=("10.0.0.1",), port=7, token="s3cret", folder="/run")
    command = remote_command(changed, contact, "--host-number", "0")
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 127
    assert shows(done.stderr, "remote-setup", "127: no-such-module")


variables = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30).filter(lambda text: "\0" not in text))
# What configurations take: line breaks and tabs are slips, refused where they are read.
values = variables.filter(lambda text: text != "None" and not set(text) & set("\n\r\t\f\b\a\v\x1b"))


@settings(max_examples=50, deadline=None)
@given(value=values, variable=variables)
def test_values_and_variables_are_in_the_orders_and_in_no_command(plan, value, variable):
    """They are sent over the control connection, as one line of ASCII."""
    planned, _ = plan
    checkpoint = planned.resolved.config.checkpoint.replaced(load=value)
    resolved = planned.resolved.replaced(checkpoint=checkpoint)
    changed = replace(
        planned, resolved=resolved, environment={"A": variable}, working_directory=f"/{variable}"
    )
    line = encode_message("orders", {"orders": changed.orders().for_agents()})
    assert line.isascii()
    assert b"\n" not in line
    orders = AgentOrders.from_fields(decode_line(line)["orders"])
    assert all(getattr(orders, name) == value for name, value in changed.orders().for_agents().items())
    assert (orders.environment, orders.working_directory) == ({"A": variable}, f"/{variable}")
    assert decode_resolved(orders.resolved).config.checkpoint.load == value
    contact = Contact(addresses=("10.0.0.1",), port=7, token="s3cret", folder="/run")
    for backend in BACKENDS.values():
        assert backend.commands(changed, contact) == backend.commands(planned, contact)


def test_bytes_that_are_no_text_arrive_as_they_are(plan):
    """An environment may contain any byte; Python represents invalid UTF-8 as lone surrogates."""
    raw = bytes(range(1, 256)).decode("utf-8", "surrogateescape")
    sent = replace(plan[0], environment={"A": raw}).orders().for_agents()
    orders = AgentOrders.from_fields(decode_line(encode_message("orders", {"orders": sent}))["orders"])
    assert os.fsencode(orders.environment["A"]) == os.fsencode(raw)
