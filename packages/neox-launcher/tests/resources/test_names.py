"""Unresolvable host names."""

import os
import threading
import time

from neox_launcher.resources import names as names_module
from neox_launcher.resources.names import check_names


def unknown(names):
    checked = check_names(names, lambda count: None)
    assert checked.unchecked == ()
    return list(checked.unknown)


def test_addresses_and_this_machine_resolve():
    assert unknown(["127.0.0.1", "::1", "localhost"]) == []


def test_an_unknown_name_is_reported(monkeypatch):
    monkeypatch.setattr("neox_launcher.resources.names.shutil.which", lambda name: None)
    assert unknown(["no-such-host.invalid", "localhost"]) == ["no-such-host.invalid"]


def test_an_alias_of_the_ssh_configuration_resolves(tmp_path, monkeypatch):
    """`ssh -G` prints the settings for a name without connecting."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        "alias.invalid) echo hostname 127.0.0.1 ;;\n"
        "behind.invalid) echo hostname behind.invalid; echo proxyjump gate ;;\n"
        "worse.invalid) echo hostname elsewhere.invalid; echo proxyjump none ;;\n"
        '*) echo hostname "$2" ;;\n'
        "esac\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    names = ["alias.invalid", "behind.invalid", "worse.invalid", "other.invalid"]
    assert unknown(names) == ["worse.invalid", "other.invalid"]


def test_names_are_resolved_in_parallel(monkeypatch):
    """Every answer waits for 64 questions, so that fewer threads would never finish."""
    together = threading.Barrier(64)

    def answer(name):
        together.wait(timeout=30)
        return name != "n7"

    monkeypatch.setattr(names_module, "_is_known", answer)
    checked = check_names([f"n{number}" for number in range(640)], lambda count: None)
    assert (checked.unknown, checked.unchecked) == (("n7",), ())


def test_a_resolver_without_an_answer_delays_a_launch_until_the_deadline_alone(monkeypatch):
    never, reports = threading.Event(), []

    def answer(name):
        return name != "wrong" if name in ("right", "wrong") else never.wait(60)

    monkeypatch.setattr(names_module, "_is_known", answer)
    start = time.monotonic()
    checked = check_names(["right", "slow-1", "wrong", "slow-2"], reports.append, within=1.0, every=0.3)
    assert time.monotonic() - start < 20
    assert (checked.unknown, checked.unchecked) == (("wrong",), ("slow-1", "slow-2"))
    assert reports
    assert set(reports) == {2}
    never.set()


def test_a_fast_check_reports_nothing():
    reports = []
    check_names(["127.0.0.1"], reports.append)
    assert reports == []
