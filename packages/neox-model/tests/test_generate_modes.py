import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from neox_data.tokenizers import build_tokenizer
from neox_launcher.errors import NeoXError
from neox_model.generate.decode import Continuation
from neox_model.generate.modes import MODES, Job, read_prompts
from neox_model.parallel.groups import ALONE, Groups
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks


class Shout:
    """Answers with the prompt in capitals and a random digit; nothing to an empty prompt."""

    def continue_prompt(self, prompt: Sequence[int], generator: torch.Generator) -> Continuation:
        if not prompt:
            return Continuation([], finished=True, message="nothing to say")
        digit = ord("0") + int(torch.randint(10, (), generator=generator))
        return Continuation([*bytes(prompt).upper(), digit], finished=False)


def job(groups: Groups = ALONE, seed: int = 1, **settings: object) -> Job:
    tokenizer = build_tokenizer("CharLevelTokenizer")
    return Job(decoder=Shout(), tokenizer=tokenizer, groups=groups, seed=seed, **settings)


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("  first \n\n   \nsecond\nthird é\n", encoding="utf-8")
    return path


def test_prompts_are_stripped_lines_without_the_empty_ones(prompts):
    assert read_prompts(prompts) == ["first", "second", "third é"]


def test_a_missing_prompt_file_is_named(tmp_path):
    with pytest.raises(NeoXError, match=r"sample_input_file .*absent.txt cannot be read"):
        read_prompts(tmp_path / "absent.txt")
    with pytest.raises(NeoXError, match="needs sample_input_file"):
        MODES["input-file"](job())


def test_results_are_json_lines_beside_the_input_and_text_on_standard_output(prompts, capsys):
    MODES["input-file"](job(input_file=prompts))
    lines = read_lines(prompts.with_name("prompts.txt.output.jsonl"))
    assert [line["context"] for line in lines] == ["first", "second", "third é"]
    assert [list(line) for line in lines] == [
        ["context", "text", "length", "finished", "message", "duration_seconds"]
    ] * 3
    assert lines[0]["text"][:-1] == "FIRST"
    assert (lines[0]["length"], lines[0]["finished"], lines[0]["message"]) == (6, False, None)
    shown = capsys.readouterr().out
    assert "sample 2 of 3, 7 tokens" in shown
    assert f"second{lines[1]['text']}" in shown
    assert sorted(path.name for path in prompts.parent.iterdir()) == [
        "prompts.txt",
        "prompts.txt.output.jsonl",
    ]


def test_unconditional_samples_start_from_nothing_and_no_text_is_null(tmp_path):
    output = tmp_path / "samples.jsonl"
    MODES["unconditional"](job(num_samples=2, output_file=output))
    lines = read_lines(output)
    assert [(line["context"], line["text"], line["length"], line["finished"]) for line in lines] == [
        ("", None, 0, True)
    ] * 2
    assert lines[0]["message"] == "nothing to say"


def test_interactive_answers_each_line_until_the_input_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(" one \n\ntwo"))
    MODES["interactive"](job(output_file=tmp_path / "talk.jsonl"))
    assert [line["context"] for line in read_lines(tmp_path / "talk.jsonl")] == ["one", "two"]
    captured = capsys.readouterr()
    assert "oneONE" in captured.out
    assert "prompt" not in captured.out
    assert "prompt" in captured.err


def test_the_seed_decides_and_each_sample_is_its_own(prompts):
    def texts(seed: int) -> list[object]:
        MODES["input-file"](job(input_file=prompts, seed=seed))
        return [line["text"] for line in read_lines(prompts.with_name("prompts.txt.output.jsonl"))]

    assert texts(1) == texts(1)
    assert len({tuple(texts(seed)) for seed in range(5)}) > 1


def test_results_that_cannot_be_written_say_so(prompts):
    with pytest.raises(NeoXError, match=r"cannot be written .* sample_output_file"):
        MODES["input-file"](job(input_file=prompts, output_file=prompts / "not" / "a folder"))


def answer_as_replicas(prompts: str) -> None:
    MODES["input-file"](job(groups=create_groups(1, 1), input_file=Path(prompts)))


def test_replicas_share_the_prompts_and_the_results_are_those_of_one_process(prompts):
    output = prompts.with_name("prompts.txt.output.jsonl")
    MODES["input-file"](job(input_file=prompts))
    alone = [line | {"duration_seconds": 0} for line in read_lines(output)]
    output.unlink()
    run_ranks(answer_as_replicas, size=2, prompts=str(prompts))
    assert [line | {"duration_seconds": 0} for line in read_lines(output)] == alone
