"""tools/test_same.py: which cases are drawn, what is read of their files, and which differences are found."""

import ast
import json
import struct
from collections import Counter
from pathlib import Path

import pytest

from same_case import Case, Command, Part, chosen
from same_compare import compare, report
from same_mutants import mutants_of
from same_observe import lines_of, observe
from same_speed import Ratio
from same_training import LAYOUTS, PRECISIONS, resume_cases, training_cases
from support.architectures import ARCHITECTURES

CASE = Case("training", "a / b", (Command(("program",)),), metrics="metrics.jsonl", checkpoints=("step1",))
SHOWN = {
    "command 1: exit codes": "0",
    "iteration 1: loss/train": 2.5,
    "iteration 2: loss/train": 2.25,
    "iteration 2: train/skipped": 0,
    "global_step2 tensor a": "F32 2 sum 1.0 sha256 1",
}


@pytest.mark.parametrize("number", [1, 3, 10, len(ARCHITECTURES)])
def test_parts_are_the_table_and_each_has_every_value(number):
    parts = [list(training_cases(Part(place, number))) for place in range(1, number + 1)]
    names = Counter(case.name for part in parts for case in part)
    assert set(names.values()) == {1}
    assert len(names) == len(ARCHITECTURES) * 8 * 3
    for part in parts:
        architectures, layouts, precisions = map(
            set, zip(*(case.name.split(" / ") for case in part), strict=True)
        )
        assert (architectures, layouts, precisions) == (set(ARCHITECTURES), set(LAYOUTS), set(PRECISIONS))
    assert max(map(len, parts)) - min(map(len, parts)) <= 4 or number == len(ARCHITECTURES)


def test_resumed_checkpoints_are_those_of_cases_of_the_table():
    titles = {case.title for case in training_cases(Part(1, 1))}
    needed = [case.needed for case in resume_cases()]
    assert all(len(each) == 1 and each <= titles for each in needed)


@pytest.mark.parametrize("text", ["0/10", "11/10", "3", "1/0", "a/b"])
def test_invalid_parts_are_refused(text):
    with pytest.raises(ValueError, match="is not k/n"):
        Part.parse(text)


def test_cases_are_chosen_by_text_and_group():
    cases = [CASE, Case("data", "a", ()), Case("data", "b", ())]
    assert chosen(cases, name="DATA: A", groups=[]) == cases[1:2]
    assert chosen(cases, name="b", groups=["data"]) == cases[2:]
    assert chosen(cases, name=None, groups=[]) == cases


def test_keys_depend_on_all_that_decides_a_result():
    others = [
        CASE.key("torch 2"),
        Case("training", "a / b", (Command(("program",), ranks=2),), metrics="metrics.jsonl").key(),
        Case("training", "a / b", (Command(("program",)),), files={"settings.yml": ""}).key(),
    ]
    assert len({CASE.key(), *others}) == 4
    assert CASE.key() == Case(**vars(CASE)).key()


@pytest.mark.parametrize(
    ("change", "kind", "first"),
    [
        ({}, "equal", None),
        ({"iteration 2: loss/train": 2.2500000000000004}, "different", "iteration 2: loss/train"),
        ({"global_step2 tensor a": "F32 2 sum 1.0 sha256 2"}, "different", "global_step2 tensor a"),
        ({"another": None}, "different", "another"),
        ({"iteration 2: train/skipped": False}, "different", "iteration 2: train/skipped"),
    ],
)
def test_every_difference_is_found(change, kind, first):
    outcome = compare(CASE, SHOWN, SHOWN | change)
    assert outcome.kind == kind
    assert [name for name, _, _ in outcome.differences] == ([] if first is None else [first])


def test_nan_equals_nan():
    shown = SHOWN | {"iteration 1: loss/train": float("nan")}
    assert compare(CASE, shown, SHOWN | {"iteration 1: loss/train": float("nan")}).kind == "equal"


def test_a_missing_value_is_a_difference():
    found = dict(list(SHOWN.items())[:-1])
    assert compare(CASE, SHOWN, found).differences == (
        ("global_step2 tensor a", SHOWN["global_step2 tensor a"], "(missing)"),
    )


def test_a_resume_is_compared_with_the_uninterrupted_training():
    resumed = dict(list(SHOWN.items())[2:])
    assert compare(CASE, resumed, resumed, SHOWN).kind == "equal"
    outcome = compare(CASE, resumed, resumed, SHOWN | {"iteration 2: loss/train": 2.0})
    assert outcome.differences == (("iteration 2: loss/train", 2.0, 2.25),)


def test_refusals_are_alike_only_with_the_same_message():
    refused = {"command 1: exit codes": "2", "command 1: line 1": "error: no"}
    assert compare(CASE, refused, refused).kind == "refused alike"
    assert compare(CASE, refused, refused).refusal == "error: no"
    assert compare(CASE, refused, refused | {"command 1: line 1": "error: never"}).kind == "different"
    assert compare(CASE, refused, SHOWN).kind == "different"


def test_the_report_counts_and_says_how_to_repeat():
    refused = {"command 1: exit codes": "2", "command 1: line 1": "error: no"}
    outcomes = [
        compare(CASE, SHOWN, SHOWN),
        compare(CASE, SHOWN, SHOWN | {"iteration 1: loss/train": 3.0}),
        compare(Case("data", "it's", ()), refused, refused),
    ]
    text = report(outcomes, "make test-same BASE=main")
    assert "training: 2 cases: 1 equal, 1 different, 0 refused alike\n" in text
    assert "data: 1 cases: 0 equal, 0 different, 1 refused alike\n    refused alike, 1: error: no\n" in text
    assert "    iteration 1: loss/train\n        base 2.5\n        new  3.0\n" in text
    assert "    repeat: make test-same BASE=main CASE='training: a / b'\n" in text


def _write_tensors(path: Path, tensors: dict[str, list[float]]) -> None:
    header, data = {}, b""
    for name, values in tensors.items():
        part = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _manifest(*pieces: tuple[str, list[list[int]], int, int]) -> str:
    described = [
        {"file": file, "key": "w", "block": block, "start": start, "stop": stop}
        for file, block, start, stop in pieces
    ]
    contents = {
        name: {} for name in ("config", "engine", "optimizer", "optimizer_scalars", "schedule", "training")
    }
    tensors = {"w": {"dtype": "F32", "shape": [4, 3], "pieces": described}}
    return json.dumps({"contents": {**contents, "iteration": 1, "tensors": tensors}})


def _run_folder(folder: Path, manifest: str, shards: dict[str, list[float]]) -> Path:
    (folder / "step1").mkdir(parents=True)
    (folder / "step1/manifest.json").write_text(manifest)
    for name, values in shards.items():
        _write_tensors(folder / "step1" / name, {"w": values})
    records = [
        {"time": 1.5, "iteration": 1, "loss/train": 0.5, "time/iteration": 0.1, "memory/host_bytes": 9},
        {"time": 1.6, "iteration": 1, "event": "end", "reason": str(folder), "seconds": 3.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_tensor_is_the_same_however_ranks_have_divided_it(tmp_path):
    whole = [float(number) for number in range(12)]
    one = _run_folder(tmp_path / "one", _manifest(("a", [[0, 4], [0, 3]], 0, 12)), {"a": whole})
    columns = {"a": [0, 3, 6, 9], "b": [1, 2, 4], "c": [5, 7, 8, 10, 11]}
    pieces = ("a", [[0, 4], [0, 1]], 0, 4), ("b", [[0, 4], [1, 3]], 0, 3), ("c", [[0, 4], [1, 3]], 3, 8)
    three = _run_folder(tmp_path / "three", _manifest(*pieces), columns)
    shown = [observe(CASE, folder, [[0]], {str(folder): "RUN"}) for folder in (one, three)]
    assert shown[0]["step1 tensor w"].startswith("F32 4x3 sum 66.0 sha256 ")
    assert compare(CASE, *shown).kind == "equal"
    changed = _run_folder(tmp_path / "changed", _manifest(*pieces), columns | {"b": [1, 2, 4.000001]})
    differences = compare(CASE, shown[0], observe(CASE, changed, [[0]], {str(changed): "RUN"})).differences
    assert [name for name, _, _ in differences] == ["step1 tensor w"]


def test_metrics_are_read_without_times_memory_and_paths(tmp_path):
    folder = _run_folder(tmp_path, _manifest(("a", [[0, 4], [0, 3]], 0, 12)), {"a": [0.0] * 12})
    shown = observe(CASE, folder, [[0]], {str(folder): "RUN"})
    assert {name: value for name, value in shown.items() if name.startswith("iteration")} == {
        "iteration 1: loss/train": 0.5,
        "iteration 1: end reason": "RUN",
    }


def test_output_is_read_of_the_first_rank_that_fails(tmp_path):
    for rank, text in enumerate(("killed", "error in RUN\n", "error later")):
        (tmp_path / f"output-1-{rank}").write_text(text)
    shown = observe(CASE, tmp_path, [[-9, 2, 3]], {})
    assert shown == {"command 1: exit codes": "-9 2 3", "command 1: line 1": "error in RUN"}


def test_times_and_ports_are_left_out_of_texts():
    assert lines_of("2026-11-29 01:02:03 saved in 1.25 s\nat 127.0.0.1:2345, 12,000 tokens/s") == [
        "TIME saved in DURATION",
        "at 127.0.0.1:PORT, SPEED",
    ]


def test_mutants_change_one_place_in_functions():
    text = """
SIZE = 3
def f(a, b: int = 4):
    \"\"\"Return 5.\"\"\"
    if not a < b and True:
        return g(a, b) + 1
"""
    makers = mutants_of(Path("a.py"), text)
    before = ast.unparse(ast.parse(text)).splitlines()
    changes = []
    for make in makers:
        mutant = make()
        after = mutant.text.splitlines()
        (place,) = (number for number, line in enumerate(before) if line != after[number])
        changes.append((mutant.line, after[place].strip()))
    assert changes == [
        (5, "if not a < b or True:"),
        (5, "if a < b and True:"),
        (5, "if not a <= b and True:"),
        (5, "if not a < b and False:"),
        (6, "return g(a, b) - 1"),
        (6, "return g(b, a) + 1"),
        (6, "return g(a, b) + 2"),
    ]


def test_a_ratio_above_its_limit_is_marked():
    assert str(Ratio("start", 1.04, 1.05)) == "start: new / base 1.040 (at most 1.050)"
    assert str(Ratio("start", 1.06, 1.05)) == "start: new / base 1.060 (at most 1.050): TOO MUCH"
