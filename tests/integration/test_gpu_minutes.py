"""`make gpu-minutes`: rehearsed on the CPU, and made to fail in every way that its report must survive."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import gpu_minutes
import gpu_parts
from gpu_parts import PARTS, NotHereError, Part, Row, Run
from support.refusals import refused
from support.sources import ROOT

MEASURED = Row("speed", 2.0, "TFLOP/s")
# What parts do here: write one row; leave a process in another session, and print its number.
WRITES = """
import json, sys
row = {"name": "speed", "value": 2.0, "unit": "TFLOP/s", "expected": "", "note": ""}
open(sys.argv[1], "w").write(json.dumps({"rows": [row]}))
"""
LEAVES = """
import subprocess, sys
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
left = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(left, start_new_session=True, **quiet).pid, flush=True)
"""
HANGS = "import time; time.sleep(600)"


def part(*lines, seconds=60.0, is_extra=False):
    def command(run, file):
        return ["-c", "\n".join(lines), str(file)]

    return Part("a part", "nothing", seconds, command, gpu_parts.read_rows, is_extra=is_extra)


@pytest.fixture
def run(tmp_path):
    output, work = tmp_path / "output", tmp_path / "work"
    output.mkdir()
    work.mkdir()
    return Run(rehearses=False, output=output, work=work, environment=dict(os.environ))


def left_in(run):
    """What the report has of each part: how it ended, and its rows."""
    parts = json.loads((run.output / "report.json").read_text())["parts"]
    return {name: (found["outcome"], [Row(**row) for row in found["rows"]]) for name, found in parts.items()}


def has_ended(pid):
    """A zombie has ended: its parent may not have collected it."""
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_a_failure_a_hang_and_a_crash_each_cost_their_own_time_only(run):
    parts = {
        "hangs": part(WRITES, LEAVES, HANGS, seconds=5.0),
        "fails": part(WRITES, "raise RuntimeError('an illegal memory access was encountered')"),
        "crashes": part(WRITES, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        "passes": part(WRITES),
    }
    began = time.monotonic()
    assert gpu_minutes.run_parts(parts, run) == 1
    assert time.monotonic() - began < 60
    found = left_in(run)
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "fails": "ended with exit code 1",
        "hangs": "did not end within 5 s",
        "crashes": "was killed by SIGSEGV",
        "passes": "done",
    }
    # Each kept what it had measured.
    assert all(rows[0] == MEASURED for _, rows in found.values())
    assert [row.has_failed for row in found["passes"][1]] == [False]
    for name in ("fails", "hangs", "crashes"):
        assert [row.has_failed for row in found[name][1]] == [False, True], name
    assert "illegal memory access" in found["fails"][1][1].note
    # What it had started in another session ended with it.
    assert has_ended(int((run.work / "hangs.log").read_text()))
    report = (run.output / "report.md").read_text()
    assert report.count("| speed | 2.00 TFLOP/s |") == 4
    assert "illegal memory access" in (run.output / "log.txt").read_text()


def test_a_part_without_figures_fails_and_one_that_cannot_run_here_does_not(run):
    def missing(run, file):
        raise NotHereError("compute-sanitizer is missing")

    parts = {
        "empty": part("open(__import__('sys').argv[1], 'w').write('{\"rows\": []}')"),
        "no file": part("pass"),
        "missing": Part("a part", "nothing", 9.0, missing, gpu_parts.read_rows),
    }
    assert gpu_minutes.run_parts(parts, run) == 1
    found = left_in(run)
    assert found["empty"][0] == "left no figures"
    assert found["no file"][0].startswith("left no figures (FileNotFoundError")
    assert found["missing"] == (
        "not run",
        [Row("a part", note="not measured: compute-sanitizer is missing")],
    )
    del parts["empty"], parts["no file"]
    assert gpu_minutes.run_parts(parts, run) == 0


def test_an_extra_part_runs_only_if_its_time_is_left(run, monkeypatch):
    parts = {"extra": part(WRITES, seconds=60.0, is_extra=True)}
    monkeypatch.setattr(gpu_minutes, "LIMIT_SECONDS", 59.0)
    assert gpu_minutes.run_parts(parts, run) == 0
    assert left_in(run)["extra"][0] == "not run"
    monkeypatch.setattr(gpu_minutes, "LIMIT_SECONDS", 90.0)
    assert gpu_minutes.run_parts(parts, run) == 0
    assert left_in(run)["extra"] == ("done", [MEASURED])


@pytest.mark.slow
def test_a_part_has_the_time_that_the_parts_before_it_left(run):
    parts = {
        "quick": part(WRITES, seconds=60.0),
        "slow": part(WRITES, "import time; time.sleep(3)", seconds=1.0),
    }
    assert gpu_minutes.run_parts(parts, run) == 0
    assert left_in(run)["slow"] == ("done", [MEASURED])


def test_all_parts_end_within_nine_minutes_whatever_happens():
    assert sum(part.seconds for part in PARTS.values() if not part.is_extra) <= gpu_minutes.LIMIT_SECONDS


# A run of three parts in a process, of which the second does not end: where the report goes is its argument.
STOPPED = f"""
import sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import gpu_minutes
from gpu_parts import Part, read_rows
def part(code):
    return Part("a part", "nothing", 300.0, lambda run, file: ["-c", code, str(file)], read_rows)
writes, hangs = {WRITES!r}, {LEAVES + HANGS!r}
parts = {{"first": part(writes), "second": part(hangs), "third": part(writes), "fourth": part(writes)}}
sys.exit(gpu_minutes.main(["--rehearse", "--output", sys.argv[1]], parts))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_request_to_stop_ends_the_part_and_leaves_the_report_of_those_before(tmp_path, number):
    process = subprocess.Popen(
        ["env", "--default-signal=INT,HUP", sys.executable, "-c", STOPPED, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (line := process.stdout.readline()).startswith("1 of 4, a part: done"):
        assert line, "it ended"
    # Two parts run at a time; the second has started its process by now or will find that it must not.
    time.sleep(1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted" in out
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [row["value"] for row in parts["first"]["rows"]] == [2.0]
    assert "second" not in parts


def test_a_preparation_from_other_sources_is_refused_and_one_for_another_python_is_not_used(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(gpu_minutes, "PREPARED", tmp_path)
    assert gpu_minutes.unpack_prepared(tmp_path) is None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    record = {"python": "3.99", "digest": "of others", "architectures": "sm_90", "wheels": []}
    (tmp_path / "prepared.json").write_text(json.dumps(record))
    assert gpu_minutes.unpack_prepared(tmp_path) is None
    assert "Python 3.99 and" in capsys.readouterr().out
    (tmp_path / "prepared.json").write_text(json.dumps(record | {"python": version}))
    with refused(SystemExit, "2"):
        gpu_minutes.unpack_prepared(tmp_path)
    assert "make gpu-minutes-prepare again" in capsys.readouterr().err
    (tmp_path / "prepared.json").write_text(
        json.dumps(record | {"python": version, "digest": gpu_minutes.sources_digest()})
    )
    assert gpu_minutes.unpack_prepared(tmp_path) == tmp_path / "site"


@pytest.mark.parametrize(
    ("content", "wheel"), [("{", None), ("[]", None), ("{}", None), (None, b"cut"), (None, None)]
)
def test_a_damaged_preparation_is_refused(tmp_path, monkeypatch, capsys, content, wheel):
    monkeypatch.setattr(gpu_minutes, "PREPARED", tmp_path)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    record = {"python": version, "digest": gpu_minutes.sources_digest(), "wheels": ["one.whl"]}
    (tmp_path / "prepared.json").write_text(json.dumps(record) if content is None else content)
    if wheel is not None:
        (tmp_path / "wheels").mkdir()
        (tmp_path / "wheels/one.whl").write_bytes(wheel)
    with refused(SystemExit, "2"):
        gpu_minutes.unpack_prepared(tmp_path)
    assert ".gpu-minutes is damaged" in capsys.readouterr().err


def test_figures_are_printed_if_the_report_cannot_be_written(run, capsys):
    removes = f"import shutil; shutil.rmtree({str(run.output)!r})"
    assert gpu_minutes.run_parts({"removes": part(WRITES, removes), "passes": part(WRITES)}, run) == 1
    out = capsys.readouterr().out
    assert out.count("the report cannot be written ([Errno 2]") == 2
    assert out.count("| speed | 2.00 TFLOP/s |") == 2
    assert "no whole report" in out


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert gpu_minutes.main(["--rehearse", "--output", str(tmp_path / "file")], {}) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_steps_are_read_with_both_conventions_and_their_budget(tmp_path):
    found = {
        "case": "neox-1.3b/compiled",
        "accumulation": 1,
        "micro_batch_ms": 291.7,
        "tokens_per_second": 56_200.0,
        "mfu_full": 0.515,
        "mfu_causal": 0.481,
        "peak_gib": 45.1,
        "waits": 1,
        "classes": {"products": 194.0, "idle": 3.0},
    }
    (tmp_path / "steps.json").write_text(json.dumps({"rows": [found]}))
    rows = {row.name: row for row in gpu_parts.read_steps(tmp_path / "steps.json", "")}
    name = "neox-1.3b/compiled, accumulation 1"
    assert rows[name].value == 291.7
    assert rows[name].expected.startswith("288.7")
    assert rows[f"{name}, MFU (full attention)"].value == pytest.approx(51.5)
    assert rows[f"{name}, MFU (causal attention)"].value == pytest.approx(48.1)
    assert (rows[f"{name}, products"].value, rows[f"{name}, products"].expected) == (194.0, "194.4")
    assert rows[f"{name}, idle"].value == 3.0


@pytest.mark.recipe
def test_the_rehearsal_runs_every_part(tmp_path):
    done = subprocess.run(
        ["make", "--no-print-directory", "gpu-minutes", "REHEARSE=1", f"OUTPUT={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log.txt").read_text()
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert list(parts) == list(PARTS)
    assert {name for name, found in parts.items() if found["outcome"] != "done"} == {"memcheck"}
    assert all(
        any(row["value"] is not None for row in parts[name]["rows"]) for name in set(parts) - {"memcheck"}
    )
    traced = {path.parent.name for path in (tmp_path / "traces").glob("*/*.json.gz")}
    assert traced == {"neox-1.3b", "llama-1b", "bias-gelu", "tuned"}
