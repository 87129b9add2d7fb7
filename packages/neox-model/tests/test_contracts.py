"""Planted changes of torch and DeepSpeed are named by the contracts, and by the doctor."""

import sys
from types import ModuleType

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from neox_model import bounds
from neox_model.bounds import installed_version
from neox_model.contracts import CONTRACTS, broken_contracts
from neox_model.contracts.expect import ContractError, expect, expect_error
from neox_model.doctor import examine
from neox_model.errors import ModelError
from support.distributed import run_ranks
from support.refusals import refused, shows
from support.settings import resolved_from

TORCH = f"torch {installed_version('torch')}: "
BOUNDS = bounds.tested_versions()
TESTED = f"; tested: deepspeed{BOUNDS['deepspeed']}, torch{BOUNDS['torch']}"


def broken(module: str) -> list[str]:
    return [line for line in broken_contracts(module) if line is not None]


def test_a_renamed_function_is_named(monkeypatch):
    monkeypatch.delattr(torch.cuda.memory, "_dump_snapshot")
    (line,) = broken("neox_model.contracts.torch_compat")
    assert line.startswith(f"{TORCH}torch.cuda.memory._dump_snapshot: AttributeError: ")
    assert line.endswith("has no attribute '_dump_snapshot'" + TESTED)


def test_a_removed_keyword_is_named(monkeypatch):
    def record(enabled="all", context="all", stacks="all", device=None):
        raise AssertionError("torch_compat passes max_entries")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    (line,) = broken("neox_model.contracts.torch_compat")
    assert line.startswith(f"{TORCH}torch.cuda.memory._record_memory_history: TypeError: ")
    assert "keyword argument 'max_entries'" in line


def broken_with_a_changed_signature() -> list[str]:
    def get_fwd_recv_ops(self, fwd_chunk_id: int, group_rank: int) -> list[object]:
        return []

    PipelineStage.get_fwd_recv_ops = get_fwd_recv_ops
    return broken("neox_model.contracts.pipelining_compat")


def test_a_changed_signature_is_named():
    ((line, *_),) = run_ranks(broken_with_a_changed_signature, size=1)
    assert shows(line, "PipelineStage.get_fwd_recv_ops", "['self', 'fwd_chunk_id', 'group_rank']")
    assert line.endswith("instead of ['self', 'fwd_chunk_id']" + TESTED)


def broken_with_other_names_in_deepspeed() -> list[str]:
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    PipelineEngine._INSTRUCTIONS = PipelineEngine._INSTRUCTION_MAP
    del PipelineEngine._INSTRUCTION_MAP
    initialize = DeepSpeedZeroOptimizer_Stage3.__init__

    def initialize_and_rename(self, *arguments, **named):
        initialize(self, *arguments, **named)
        self.bit16_groups = self.__dict__.pop("fp16_groups")

    DeepSpeedZeroOptimizer_Stage3.__init__ = initialize_and_rename
    return broken("neox_model.engine.deepspeed.contracts")


def test_renamed_attributes_of_deepspeed_are_named():
    ((of_pipelines, of_stage_3),) = run_ranks(broken_with_other_names_in_deepspeed, size=1)
    assert "PipelineEngine._INSTRUCTION_MAP: AttributeError: " in of_pipelines
    assert "no attribute 'fp16_groups'" in of_stage_3
    assert of_stage_3.startswith(f"deepspeed {installed_version('deepspeed')}: ")
    assert of_stage_3.endswith(TESTED)


def test_a_name_that_is_missing_at_import_is_one_line(monkeypatch):
    for module in ("neox_model.contracts.pipelining_compat", "neox_model.pipelining_compat"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    private = "torch.distributed.pipelining._backward"
    monkeypatch.setitem(sys.modules, private, ModuleType(private))
    (line,) = broken("neox_model.contracts.pipelining_compat")
    assert line.startswith(
        f"{TORCH}neox_model.contracts.pipelining_compat cannot be imported: ImportError: cannot import"
    )


def test_what_differs_is_described():
    with refused(ContractError, "3 instead", "4"):
        expect(1 + 2, 4, "the sum")
    with refused(ContractError, "ValueError"), expect_error(ValueError):
        pass
    with refused(ContractError, "'full'", "'empty'"), expect_error(ValueError, "full"):
        raise ValueError("empty")


def plant(folder, monkeypatch, program: str) -> None:
    """Let every Python that is started from now on run a program first."""
    (folder / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.slow
def test_the_check_of_the_doctor_finds_what_another_process_finds(tmp_path, monkeypatch):
    found = examine.check_contracts()
    versions = " and ".join(f"{name} {installed_version(name)}" for name in dict.fromkeys(CONTRACTS.values()))
    assert found["hold"], found
    assert found["found"].partition(" ")[2] == f"checks passed with {versions}"
    plant(tmp_path, monkeypatch, "import torch\ndel torch._foreach_mul_\n")
    found = examine.check_contracts()
    assert not found["hold"]
    lines = found["found"].splitlines()
    # DeepSpeed's bf16 optimizer calls it, too.
    assert all(line.endswith("has no attribute '_foreach_mul_'" + TESTED) for line in lines)
    assert lines[0].startswith(
        f"{TORCH}neox_model.contracts.torch_compat cannot be imported: AttributeError: "
    )


def test_a_check_that_dies_or_hangs_does_not_hold(tmp_path, monkeypatch):
    plant(tmp_path, monkeypatch, "import os, sys\nsys.stderr.write('about\\nto die\\n')\nos._exit(7)\n")
    died = "neox_model.contracts ended with exit code 7: to die"
    assert examine.check_contracts() == {"hold": False, "found": died}
    plant(tmp_path, monkeypatch, "import time\ntime.sleep(600)\n")
    monkeypatch.setattr(examine, "_CONTRACT_SECONDS", 0.4)
    assert shows(examine.check_contracts()["found"], "neox_model.contracts", "0 s")


class Host(ModuleType):
    """A module whose examination fails, or finds something."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__("neox_model.doctor.host")
        self.error = error

    def examine(self, spec, run, training, *, rank, local_rank, **sections):
        if self.error is not None:
            raise self.error
        return {"torch": "2.13.0"}


@pytest.mark.parametrize(
    ("error", "hold", "raised", "message"),
    [
        (AttributeError("no _foreach_mul_"), False, ModelError, "the line"),
        (AttributeError("no _foreach_mul_"), True, AttributeError, "no _foreach_mul_"),
        (RuntimeError("timed out"), False, RuntimeError, "timed out"),
    ],
)
def test_an_examination_that_fails_by_a_changed_interface_names_it(error, hold, raised, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "neox_model.doctor.host", Host(error))
    monkeypatch.setattr(examine, "check_contracts", lambda: {"hold": hold, "found": "the line"})
    with refused(raised, message):
        examine.examine(resolved_from({}))


def test_one_worker_of_a_host_reports_the_check_with_its_facts(monkeypatch):
    reported = []
    monkeypatch.setitem(sys.modules, "neox_model.doctor.host", Host(None))
    monkeypatch.setattr(examine, "check_contracts", lambda: {"hold": True, "found": "36"})
    monkeypatch.setattr(examine, "report_facts", lambda rank, facts: reported.append((rank, facts)))
    for rank in (0, 1):
        me = type("Rank", (), {"rank": rank, "local_rank": rank})
        monkeypatch.setattr(examine, "read_rank", lambda me=me: me)
        examine.examine(resolved_from({}))
    assert reported == [(0, {"torch": "2.13.0", "contracts": {"hold": True, "found": "36"}})]
