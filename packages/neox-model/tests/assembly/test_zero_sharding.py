import importlib

import pytest

from neox_config.errors import NeoXError
from neox_model.assembly.zero_sharding import partitioned_as_built
from neox_model.parallel.groups import SINGLE_PROCESS
from support.refusals import refused
from support.settings import resolved_from

OFFLOAD = {"offload_optimizer": {"device": "nvme", "nvme_path": "x"}}


@pytest.mark.parametrize(
    ("settings", "operator", "variable"),
    [
        (OFFLOAD, "async_io", "DS_BUILD_AIO=1"),
        ({"zero_quantized_weights": True}, "quantizer", "DS_BUILD_QUANTIZER=1"),
    ],
)
def test_a_missing_operator_is_refused_with_its_installation(monkeypatch, settings, operator, variable):
    importlib.import_module("neox_model.engine.deepspeed.build")
    for module in ("build", "compat"):
        monkeypatch.setattr(f"neox_model.engine.deepspeed.{module}.installed_ops", {})
    resolved = resolved_from({"engine": "deepspeed", "zero_optimization": {"stage": 3, **settings}})
    with refused(NeoXError, f"operator {operator}", variable):
        partitioned_as_built(resolved.run, SINGLE_PROCESS)


@pytest.mark.parametrize("error", [ImportError("libaio.so.1: no such file"), RuntimeError("built with 2.12")])
def test_an_operator_that_cannot_be_loaded_is_refused_with_the_reason(monkeypatch, error):
    def fail(builder: object) -> None:
        raise error

    importlib.import_module("neox_model.engine.deepspeed.compat")
    monkeypatch.setattr("neox_model.engine.deepspeed.compat.installed_ops", {"async_io": True})
    monkeypatch.setattr("neox_model.engine.deepspeed.compat.AsyncIOBuilder.load", fail)
    resolved = resolved_from({"engine": "deepspeed", "zero_optimization": {"stage": 3, **OFFLOAD}})
    with refused(NeoXError, "async_io", f"({error})", "tools/aio.sh"):
        partitioned_as_built(resolved.run, SINGLE_PROCESS)
