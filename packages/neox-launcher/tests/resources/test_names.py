"""Names that lead nowhere."""

import os

from neox_launcher.resources.names import unresolved_names


def test_addresses_and_this_machine_are_known():
    assert unresolved_names(["127.0.0.1", "::1", "localhost"]) == []


def test_a_name_that_nobody_knows_is_told(monkeypatch):
    monkeypatch.setattr("neox_launcher.resources.names.shutil.which", lambda name: None)
    assert unresolved_names(["no-such-host.invalid", "localhost"]) == ["no-such-host.invalid"]


def test_an_alias_of_sshs_configuration_is_known(tmp_path, monkeypatch):
    """`ssh -G` prints what ssh would do with a name, and does none of it."""
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
    assert unresolved_names(names) == ["worse.invalid", "other.invalid"]
