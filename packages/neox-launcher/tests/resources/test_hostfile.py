"""Hostfiles: their syntax, and errors with line numbers."""

import pytest

from neox_config.errors import HostfileError
from neox_launcher.resources.host import Host
from neox_launcher.resources.hostfile import host_key, parse_hostfile, read_hostfile
from support.refusals import refused


def test_hosts_keep_the_order_of_the_file():
    text = """
        # the pool of this job
        worker-2 slots=4
        worker-0   slots=2   # an older machine

        worker-1.example.org\tslots = 1 max_slots=8
    """
    assert parse_hostfile(text, "hosts") == (
        Host("worker-2", (0, 1, 2, 3)),
        Host("worker-0", (0, 1)),
        Host("worker-1.example.org", (0,)),
    )


def test_addresses_of_both_kinds_are_hosts():
    text = "10.0.0.1 slots=1\n[2001:db8::7] slots=1\nfe80::1%eth0 slots=1"
    names = [host.name for host in parse_hostfile(text, "hosts")]
    assert names == ["10.0.0.1", "2001:db8::7", "fe80::1%eth0"]


@pytest.mark.parametrize(
    ("one", "other"),
    [("a", "a"), ("Worker-1", "worker-1"), ("a.b", "a.b."), ("::1", "[0:0:0:0:0:0:0:1]")],
)
def test_a_duplicate_host_is_reported_with_both_lines(one, other):
    text = f"# pool\n{one} slots=2\nb slots=2\n\n{other} slots=4\n"
    with pytest.raises(HostfileError) as found:
        parse_hostfile(text, "hosts")
    assert str(found.value).startswith("hosts: 1 problem\n\n  lines 2 and 5  ")
    assert "is listed twice" in str(found.value)


# Names that ssh, pdsh or a shell would take for something else never get as far as a command.
WRONG = {
    "worker-1": "write NAME slots=NUMBER",
    "worker-1 slots=": "write NAME slots=NUMBER",
    "worker-1 slots=four": "write NAME slots=NUMBER",
    "worker-1 slots=4 gpus=4": "write NAME slots=NUMBER",
    "worker-1:4": "write NAME slots=NUMBER",
    "worker-1 slots=0": "slots must be 1 to 1024",
    "worker-1 slots=99999999": "slots must be 1 to 1024",
    "worker-1 slots=\u00b2": "write NAME slots=NUMBER",
    "10.0.0.256 slots=4": "is neither a host name nor an address",
    "10.0.7 slots=4": "is neither a host name nor an address",
    "user@worker-1 slots=4": "user names are not supported",
    "-oProxyCommand=x slots=4": "is neither a host name nor an address",
    "worker[1-3] slots=4": "is neither a host name nor an address",
    "a,b slots=4": "is neither a host name nor an address",
    "$(reboot) slots=4": "is neither a host name nor an address",
    "fe80::1%$(reboot) slots=4": "is neither a host name nor an address",
    "ssh:worker-1 slots=4": "is neither a host name nor an address",
}


@pytest.mark.parametrize("line", WRONG)
def test_an_invalid_line_is_reported_with_its_number(line):
    with pytest.raises(HostfileError) as found:
        parse_hostfile(f"a slots=1\n{line}\n", "hosts")
    assert f"line 2  {line}\n" in str(found.value)
    assert WRONG[line] in str(found.value)


def test_numbers_of_thousands_of_digits_are_refused():
    with refused(HostfileError, "1", "1024", code="invalid-lines") as found:
        parse_hostfile(f"a slots={'9' * 5000}\n", "hosts")
    assert len(str(found.value)) < 300
    assert parse_hostfile(f"a slots={'0' * 5000}2\n", "hosts") == (Host("a", (0, 1)),)


def test_of_thousands_of_invalid_lines_some_are_shown():
    with refused(HostfileError, "10,000 problems", code="invalid-lines") as found:
        parse_hostfile("\n".join(f"worker-{number}" for number in range(10_000)), "hosts")
    assert "line 20  worker-19" in str(found.value)
    assert str(found.value).endswith("... and 9,980 more")


def test_all_invalid_lines_are_reported_at_once():
    with refused(HostfileError, "2 problems", "line 1", "line 3", code="invalid-lines"):
        parse_hostfile("a\nb slots=1\nc\n", "hosts")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_a_file_without_hosts_is_refused(text):
    with refused(HostfileError, code="no-hosts"):
        parse_hostfile(text, "hosts")


def test_an_unreadable_file_is_refused(tmp_path):
    with refused(HostfileError, code="not-readable"):
        read_hostfile(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with refused(HostfileError, code="not-readable"):
        read_hostfile(tmp_path / "binary")


def test_a_file_is_read(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2")
    assert read_hostfile(tmp_path / "hosts") == (Host("a", (0, 1)),)


def test_a_file_of_windows_is_read(tmp_path):
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa slots=2\r\nb slots=1\r\n")
    assert read_hostfile(tmp_path / "hosts") == (Host("a", (0, 1)), Host("b", (0,)))


def test_spellings_of_one_address_have_one_key():
    assert host_key("2001:DB8:0::7") == host_key("2001:db8::7")
    assert host_key("A.example") != host_key("a")
