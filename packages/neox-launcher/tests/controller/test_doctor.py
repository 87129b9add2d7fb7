"""The diagnosis of the results of several hosts."""

import pytest

from neox_launcher.controller.doctor import diagnose
from neox_launcher.protocol.messages import own_version
from neox_launcher.protocol.outcome import Failure, Outcome
from support.refusals import shows

FACTS = {
    "host": "one",
    "clock": 0.1,
    "python": "3.11.9",
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "neox-model": "0.1.0",
    "numpy": "2.4.0",
    "driver": "570.1",
    "cudnn": "9.19.0",
    "attention": {"global": "cuDNN", "local": "flash"},
    "attention_notes": [],
    "gpus": ["H100", "H100"],
    "gpu_error": None,
    "files": {"/data/a.bin": "10 bytes of Monday"},
    "folders": {"save": ""},
    "contracts": {"hold": True, "found": "36 checks passed"},
    "all_reduce": {"bytes": 2**20, "seconds": 0.002, "bytes_per_second": 3e9},
}


def findings(second, *, failure=None):
    """Return the diagnosis of two hosts, where the second one has these differences."""
    facts = {0: FACTS, 1: {**FACTS, "host": "two", **second}}
    outcome = Outcome(exit_code=0 if failure is None else 1, first_failure=failure, facts=facts)
    diagnosis = diagnose(outcome, hosts=2)
    return diagnosis, {finding.name: finding for finding in diagnosis.findings}


def test_equal_hosts_are_good():
    diagnosis, found = findings({})
    assert diagnosis.is_good
    assert str(diagnosis).rpartition("\n")[0].endswith("\n\nverdict: these hosts can run the job")
    assert shows(found["reach and join"].found, "2 hosts", "2 workers")
    assert found["neox-launcher"].found == own_version()
    assert found["GPUs"].found == "2 x H100"
    assert found["cudnn"].found == "9.19.0"
    assert found["contracts"].found == "36 checks passed"
    assert "untested versions" not in found
    assert shows(found["attention backend"].found, "cuDNN (global layers)")
    assert shows(found["all-reduce"].found, "1 MiB", "2.0 ms", "3.00 GB/s")


@pytest.mark.parametrize(
    ("second", "name", "words"),
    [
        ({"clock": -2.0}, "clocks", "at most 2.1 s apart: one is ahead of two"),
        ({"torch": "2.11.0"}, "torch", "2.13.0 on one\n2.11.0 on two"),
        ({"driver": "560.2"}, "driver", "570.1 on one\n560.2 on two"),
        ({"cudnn": "9.10.2"}, "cudnn", "9.19.0 on one\n9.10.2 on two"),
        (
            {"attention": {"global": "flash"}},
            "attention backend",
            "cuDNN (global layers), flash (local layers) on one\nflash (global layers) on two",
        ),
        (
            {"contracts": {"hold": False, "found": "torch 2.16.0: a\ntorch 2.16.0: b"}},
            "contracts",
            "on two, torch 2.16.0: a\non two, torch 2.16.0: b",
        ),
        ({"gpus": ["H100"]}, "GPUs", "2 x H100 on one\n1 x H100 on two"),
        ({"gpu_error": "3 uncorrected memory errors"}, "GPUs", "the GPU of rank 1 on two: 3 uncorrected"),
        ({"files": {"/data/a.bin": "9 bytes of Monday"}}, "/data/a.bin", "9 bytes of Monday on two"),
        ({"files": {}}, "/data/a.bin", "None on two"),
        ({"folders": {"save": "/s: Permission denied"}}, "save", "on two, /s: Permission denied"),
        ({"local_folders": {"own": "/s is the same"}}, "own", "on two, /s is the same"),
    ],
)
def test_a_difference_is_reported_with_a_remedy(second, name, words):
    diagnosis, found = findings(second)
    assert [finding.name for finding in diagnosis.findings if not finding.is_good] == [name]
    assert words in found[name].found
    assert str(diagnosis).endswith(f"verdict: 1 problem to fix first\n  {name}: {found[name].remedy}")


def test_a_contract_that_is_broken_on_several_hosts_is_one_line():
    facts = {rank: {**FACTS, "host": f"host-{rank}"} for rank in range(4)}
    for rank in (0, 2):
        facts[rank]["contracts"] = {"hold": False, "found": "torch 2.16.0: a"}
    # Not the first worker of its host.
    del facts[3]["contracts"]
    diagnosis = diagnose(Outcome(exit_code=0, facts=facts), hosts=4)
    (finding,) = (finding for finding in diagnosis.findings if finding.name == "contracts")
    assert not finding.is_good
    assert shows(finding.found, "host-0, host-2", "torch 2.16.0", "a")


def test_untested_versions_are_a_line_and_no_problem():
    diagnosis, found = findings({"untested": "torch 2.16.0 (tested: >=2.13,<2.16)"})
    assert diagnosis.is_good
    assert shows(found["untested versions"].found, "torch 2.16.0", ">=2.13,<2.16")
    facts = {rank: {**FACTS, "untested": "torch 2.16.0"} for rank in (0, 1)}
    diagnosis = diagnose(Outcome(exit_code=0, facts=facts), hosts=1)
    lines = [line for line in str(diagnosis).splitlines() if line.startswith("untested")]
    assert shows(lines, "torch 2.16.0")


def test_hosts_that_reach_the_launcher_but_not_each_other():
    failure = Failure(rank=1, host="two", time=0.0, message="timed out")
    diagnosis, found = findings({}, failure=failure)
    assert not diagnosis.is_good
    assert shows(found["reach and join"].found, "worker 1 on")
    assert "firewalls" in found["reach and join"].remedy


def test_notes_about_attention_are_shown_once_and_are_no_problem():
    notes = {"attention": {"global": "flash"}, "attention_notes": ["attention-dropout 0.1 is not a multiple"]}
    facts = {rank: {**FACTS, **notes} for rank in (0, 1)}
    diagnosis = diagnose(Outcome(exit_code=0, facts=facts), hosts=1)
    assert diagnosis.is_good
    (finding,) = (finding for finding in diagnosis.findings if finding.name == "attention backend")
    assert shows(finding.found, "attention-dropout 0.1 is")


def test_a_model_without_pytorchs_attention_has_no_backend_to_compare():
    facts = {0: {**FACTS, "attention": {}}}
    diagnosis = diagnose(Outcome(exit_code=0, facts=facts), hosts=1)
    assert "attention backend" not in [finding.name for finding in diagnosis.findings]


def test_an_unreachable_host_is_the_only_finding():
    failure = Failure(rank=None, host="", time=0.0, message="two: could not be started")
    diagnosis = diagnose(Outcome(exit_code=1, first_failure=failure), hosts=2)
    assert shows([finding.found for finding in diagnosis.findings], "two: could not")


def test_hosts_with_another_version_are_listed():
    failure = Failure(rank=None, host="two", time=0.0, message="its agent runs neox-launcher 0.0.1")
    outcome = Outcome(
        exit_code=2, first_failure=failure, other_versions={"two": "0.0.1", "four": "0.0.1", "five": "0.0.2"}
    )
    diagnosis = diagnose(outcome, hosts=5)
    assert [finding.name for finding in diagnosis.findings] == ["reach and join", "neox-launcher"]
    found = diagnosis.findings[1]
    assert not found.is_good
    assert shows(found.found, own_version(), "0.0.1", "0.0.2")
    assert shows(found.remedy, "neox-launcher on all")
