import json

from neox_launcher.protocol.failure_record import record_failures
from neox_launcher.protocol.outcome import Failure


def test_failures_of_all_attempts_are_appended_as_whole_lines(tmp_path):
    folder = tmp_path / "logs"
    killed = Failure(rank=1, host="a", time=5.0, message="killed by SIGKILL", exit_code=137, unreported=True)
    broken = Failure(rank=0, host="b", time=6.0, message="x" * 9000, traceback="Traceback")
    record_failures(folder, [killed], launch="abc", restart=2)
    record_failures(folder, [broken])
    first, second = map(json.loads, (folder / "failures.jsonl").read_text().splitlines())
    assert first == {
        "time": 5.0,
        "launch": "abc",
        "restart": 2,
        "host": "a",
        "rank": 1,
        "message": "killed by SIGKILL",
        "traceback": None,
        "output": "",
        "exit_code": 137,
        "unreported": True,
    }
    assert (second["rank"], len(second["message"]), second["traceback"]) == (0, 4000, "Traceback")


def test_the_beginning_of_a_long_message_and_the_end_of_a_long_traceback_are_kept(tmp_path):
    text = "begin" + "x" * 9000 + "end"
    record_failures(tmp_path, [Failure(rank=0, host="b", time=6.0, message=text, traceback=text)])
    found = json.loads((tmp_path / "failures.jsonl").read_text())
    assert found["message"].startswith("beginx")
    assert found["traceback"].endswith("xend")


def test_without_failures_no_file_is_created(tmp_path):
    record_failures(tmp_path / "logs", [])
    assert list(tmp_path.iterdir()) == []
