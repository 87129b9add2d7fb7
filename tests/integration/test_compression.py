"""Compression in training: one model on every layout, in every precision, and after a resume."""

from collections.abc import Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from neox_config.facts.checkpoints import checkpoint_name
from neox_model.inspection.soundness import examine
from support.compressions import COMPRESSIONS, block, pruned_rows, quantized_weights, sparse_weights
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.hf_models import write_tokenizer
from support.layouts import LAYOUTS, SETTINGS, SMALL, WIDE
from support.refusals import shows
from support.settings import SMALL_TRAINING, resolved_from
from support.trainings import tensors_of, train_all

ITERATIONS = 7
# Largest difference of a loss and of a weight. Sums in another order differ in the last bit: this selects no
# other weights, but moves a few values to the next level. The difference is that of levels: of inputs with 6,
# 10, 14 and 20 bits it was 2e-3, 2e-4, 8e-6 and 2e-7.
TOLERANCES = {"pruned": (2e-6, 1e-6), "weights": (5e-4, 1e-4), "inputs": (5e-3, 1e-3)}
ON = ["tensor 2", "torch, pipeline 2", "pipeline 2", "data 2", "torch, ZeRO 3"]
SLOW = [
    "sequence 2",
    "torch, ZeRO 1 x tensor 2",
    "torch, pipeline 2 x tensor 2, interleaved",
    "torch, pipeline 2 x data 2, ZeRO 3, interleaved",
]


def sizes_of(layout: str | None) -> dict[str, Any]:
    is_wide = layout is not None and LAYOUTS[layout].is_wide
    return SETTINGS | (WIDE | {"num_attention_heads": 6} if is_wide else SMALL) | {"num_layers": 2}


def settings_of(name: str, layout: str | None, **more: Any) -> dict[str, Any]:
    settings = sizes_of(layout) | block(name) | ({} if layout is None else LAYOUTS[layout].settings) | more
    if "pipe_parallel_size" in settings:
        settings["train_micro_batch_size_per_gpu"] = 2
    if settings.get("pipeline_schedule") == "interleaved":
        settings["num_layers"] = 4
    return settings


def trained(
    settings: dict[str, Any], *, ranks: int, breaks: str = ""
) -> tuple[list[float], Any, Any, dict[str, float]]:
    """Train in the present world as the training program does.

    Returns:
        Losses, the engine, the groups, and the figures that are logged.
    """
    from neox_model.extras.compression.training import CompressionCallback
    from neox_model.train.state import StepReport, TrainState
    from support import layouts
    from support.runs import a_run, train

    resolved = resolved_from(settings, devices=ranks)
    engine, step, groups, _ = layouts.start(resolved)
    losses: list[float] = []

    def noted(batches: Any) -> StepReport:
        report = step(batches)
        losses.append(float(report.loss))
        return report

    state = TrainState(last_iteration=ITERATIONS, samples_per_iteration=layouts.SAMPLES)
    run = a_run(state=state, resolved=resolved, engine=engine, step=noted, groups=groups)
    callback = CompressionCallback.from_run(run)
    assert callback is not None
    run.add(callback)
    if breaks == "masks":
        for matrix in callback._compression.matrices:
            for _, pruning in matrix.compression.masks():
                times = (2, 1) if pruning.logical.split_dim == 0 else (1, 2)
                # The fault: every rank takes its own part for the whole.
                pruning.whole = lambda part, times=times: part.repeat(times)
    train(run, layouts.batches_of(resolved, groups))
    return losses, engine, groups, dict(callback.measure())


def model_of(name: str, layout: str) -> dict[str, Any]:
    """Return what one rank trains for a layout: its sizes, without its parallelism."""
    return (
        settings_of(name, None) | sizes_of(layout) | {"num_layers": settings_of(name, layout)["num_layers"]}
    )


def file_of(folder: str, name: str, layout: str) -> Path:
    """Return the file of one rank's training, the same for layouts of the same sizes."""
    model = model_of(name, layout)
    return Path(folder, f"{name}, {model['num_layers']} x {model['hidden_size']}.pt")


def train_alone(folder: str, cases: list[list[str]]) -> None:
    """Train each compression on one rank, for layouts of one and of the other size, unless it is there."""
    from neox_model.parallel.logical import named_logical_parameters
    from support.layouts import whole_weight

    for name, layout in cases:
        path = file_of(folder, name, layout)
        if not path.exists():
            losses, engine, _, figures = trained(model_of(name, layout), ranks=1)
            weights = {name: whole_weight(value) for name, value in named_logical_parameters(engine.model)}
            torch.save({"losses": losses, "weights": weights, "figures": figures}, path)


def differences(folder: str, cases: list[list[str]], breaks: str = "") -> dict[str, float]:
    """Return the largest difference of a loss and of a weight from one rank's, by compression."""
    from neox_model.parallel.logical import named_logical_parameters
    from support.layouts import whole_weight

    found = {}
    for name, layout in cases:
        ranks = LAYOUTS[layout].ranks
        losses, engine, _, figures = trained(settings_of(name, layout), ranks=ranks, breaks=breaks)
        expected = torch.load(file_of(folder, name, layout), weights_only=True)
        of_losses = max(abs(one - other) for one, other in zip(losses, expected["losses"], strict=True))
        of_weights = 0.0
        for path, parameter in named_logical_parameters(engine.model):
            mine = tuple(slice(*limits) for limits in parameter.logical.slices)
            part = expected["weights"][path][mine]
            held = whole_weight(parameter)[tuple(slice(0, length) for length in part.shape)]
            of_weights = max(of_weights, float((held - part).abs().max()) if part.numel() else 0.0)
        assert figures == pytest.approx(expected["figures"], abs=1e-3)
        found[f"{name}: loss"], found[f"{name}: weight"] = of_losses, of_weights
    return found


def limits_of(name: str) -> dict[str, float]:
    """Return the tolerances of a compression."""
    parts = COMPRESSIONS[name]
    has_levels = "weights" if "weight_quantization" in parts else "pruned"
    kind = "inputs" if "activation_quantization" in parts else has_levels
    return dict(zip(("loss", "weight"), TOLERANCES[kind], strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of the runs on one rank, which all layouts are compared with."""
    return str(tmp_path_factory.mktemp("alone"))


def check_layout(folder: str, layout: str, compressions: Sequence[str]) -> None:
    """The compressions give one rank's losses, weights and figures on a layout."""
    cases = [[name, layout] for name in compressions]
    run_ranks(train_alone, size=1, folder=folder, cases=cases)
    size = LAYOUTS[layout].ranks
    for found in run_ranks(differences, size=size, folder=folder, cases=cases, timeout_seconds=600):
        limits = {
            f"{name}: {what}": limit for name in compressions for what, limit in limits_of(name).items()
        }
        assert found.keys() == limits.keys()
        assert {name: value for name, value in found.items() if not value <= limits[name]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ON)
def test_the_compressed_model_is_the_same_on_every_layout(alone: str, layout: str) -> None:
    check_layout(alone, layout, list(COMPRESSIONS))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "layout"), list(enumerate(SLOW)))
def test_every_second_compression_is_the_same_on_a_layout_of_two_kinds(
    alone: str, place: int, layout: str
) -> None:
    check_layout(alone, layout, list(COMPRESSIONS)[place % 2 :: 2])


@pytest.mark.sweep
@pytest.mark.parametrize("layout", SLOW)
def test_every_compression_is_the_same_on_a_layout_of_two_kinds(alone: str, layout: str) -> None:
    check_layout(alone, layout, list(COMPRESSIONS))


def test_masks_of_parts_of_a_matrix_are_found(alone: str) -> None:
    cases = [["smallest weights and rows", "tensor 2"]]
    run_ranks(train_alone, size=1, folder=alone, cases=cases)
    found = run_ranks(differences, size=2, folder=alone, cases=cases, breaks="masks")
    assert max(found[0].values()) > 1e-3


def difference_of_copy(settings: dict[str, Any], ranks: int) -> float:
    """Train, and return the largest difference of a weight of a copy from the weight of the computation."""
    from neox_model.assembly.choices import DTYPES
    from neox_model.assembly.model import build_stage
    from neox_model.extras.compression.matrices import compressed_matrices
    from neox_model.extras.compression.training import copy_compression
    from neox_model.train.copied_model import copy_weights
    from support.layouts import VOCAB, whole_weight

    _, engine, groups, _ = trained(settings, ranks=ranks)
    resolved = resolved_from(settings, devices=ranks)
    dtype = DTYPES[resolved.run.precision.weights]
    copy = build_stage(resolved.model, resolved.run, groups, vocab_size=VOCAB).to(dtype)
    copy_weights(engine.model, copy, groups)
    copy_compression(engine.model, copy, ITERATIONS, groups)
    copied = {matrix.name: matrix for matrix in compressed_matrices(copy)}
    found = []
    with torch.no_grad():
        for matrix in compressed_matrices(engine.model):
            expected = matrix.compression.of_weight(whole_weight(matrix.module.weight).to(dtype))
            # Stages of the copy may have other layers.
            if matrix.name in copied:
                other = copied[matrix.name]
                assert (expected != 0).any()
                found.append((other.compression.of_weight(other.module.weight) - expected).abs().max())
    return float(max(found))


COPIED = ["smallest weights and rows", "learned weights, rows and heads", "8 to 6 bits in groups, mixed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("layout", [None, "torch, pipeline 2 x data 2, ZeRO 1"])
def test_copies_of_a_compressed_model_compute_with_its_weights(name: str, layout: str | None) -> None:
    ranks = 1 if layout is None else LAYOUTS[layout].ranks
    settings = settings_of(name, layout, precision="bfloat16")
    assert run_ranks(difference_of_copy, size=ranks, settings=settings, ranks=ranks) == [0.0] * ranks


RESUMES: dict[str, dict[str, Any]] = {
    "tensor": {"model_parallel_size": 2, "precision": "bfloat16"},
    "pipeline": {"pipe_parallel_size": 2, "precision": "fp16", "gradient_accumulation_steps": 2},
    "zero3": {"zero_optimization": {"stage": 3}, "precision": "bfloat16", "checkpoint_activations": True},
}
RESUMED = ["static inputs", "smallest weights and rows", "learned weights, rows and heads", "snip in blocks"]
SMALL_HEADS = {"hidden_size": 24, "num_attention_heads": 6}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "zero3"])
def test_a_resumed_compression_continues_to_the_last_bit(tmp_path, layout: str) -> None:
    corpus = str(write_corpus(tmp_path))
    trainings = {}
    for name in RESUMED:
        settings = RESUMES[layout] | SMALL_HEADS | block(name) | {"train_iters": 6}
        trainings[name] = settings
        trainings[f"{name} resumed"] = settings | {
            "load": f"{tmp_path}/{name}",
            "restart_at": 4,
            "async_save": True,
        }
    run_ranks(
        train_all, size=2, folder=str(tmp_path), corpus=corpus, trainings=trainings, timeout_seconds=600
    )
    states = set()
    for name in RESUMED:
        whole, resumed = tensors_of(tmp_path / name, 6), tensors_of(tmp_path / f"{name} resumed", 6)
        assert whole.keys() == resumed.keys()
        assert [one for one in whole if not torch.equal(whole[one], resumed[one])] == []
        states |= {one.rpartition(".")[2] for one in whole if ".compression." in one}
        assert examine(tmp_path / name / checkpoint_name(6)).problems == ()
    assert {"inputs/range", "sparse/keep", "rows/keep", "sparse/score", "scores"} <= states
    pruned = tensors_of(tmp_path / "smallest weights and rows", 6)
    keep = pruned["model/layers.0.mlp.down.compression.prunings.sparse/keep"]
    assert keep.mean() == pytest.approx(0.6, abs=0.001)
    weight = pruned["layers.0.mlp.down.weight"]
    assert ((weight == 0) == (keep == 0)).all()
    rows = pruned["model/layers.0.mlp.up.compression.prunings.rows/keep"]
    assert (pruned["layers.0.mlp.up.bias"][rows[:, 0] == 0] == 0).all()
    assert rows.mean() == 0.5


@pytest.mark.slow
def test_periods_of_bits_follow_the_eigenvalues_of_the_layers_and_resume(tmp_path) -> None:
    corpus = str(write_corpus(tmp_path))
    group = {
        "params": {"start_bits": 8, "target_bits": 2, "quantization_period": 1},
        "modules": ["mlp"],
    }
    shared = {"enabled": True, "quantize_weight_in_forward": True, "quantize_verbose": True}
    settings = {
        "compression_training": {
            "weight_quantization": {"shared_parameters": shared, "different_groups": {"all": group}}
        },
        "eigenvalue": {"enabled": True, "layer_name": "layers", "layer_num": 2, "gas_boundary_resolution": 2},
        "train_iters": 6,
        "log_interval": 1,
    }
    trainings = {
        "whole": settings | {"log_dir": f"{tmp_path}/logs"},
        "resumed": settings | {"load": f"{tmp_path}/whole", "restart_at": 4},
    }
    run_ranks(train_all, size=2, folder=str(tmp_path), corpus=corpus, trainings=trainings)
    whole, resumed = tensors_of(tmp_path / "whole", 6), tensors_of(tmp_path / "resumed", 6)
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    record = (tmp_path / "logs" / "metrics.jsonl").read_text()
    for name in (
        "Train/Eigenvalues/ModelBlockParam_1",
        "compression/bits",
        "compression_error/layers.0.mlp.up",
    ):
        assert f'"{name}"' in record
    eigenvalues = whole["model/eigenvalues/values"]
    assert eigenvalues.abs().min() > 0
    largest = int(eigenvalues.abs().argmax())
    bits, changed, period = whole[f"model/layers.{largest}.mlp.up.compression.quantizer/progress"].tolist()
    # In iteration 1 the period becomes five iterations, and in iteration 6 twenty-five.
    assert (bits, changed, period) == (6, 6, 25)
    other = whole[f"model/layers.{1 - largest}.mlp.up.compression.quantizer/progress"].tolist()
    assert other[0] <= bits


def continue_and_compare(folder: str, corpus: str) -> dict[str, Any]:
    """Start to prune a plain model, and compute its logits in training and after loading it."""
    from neox_config.spec.resume import recorded_values
    from neox_model.assembly.model import build_model
    from neox_model.checkpoint.errors import CheckpointError
    from neox_model.checkpoint.load import load_weights
    from neox_model.extras.compression.matrices import compressed_matrices
    from neox_model.generate.run import load_forward
    from neox_model.parallel.groups import SINGLE_PROCESS
    from neox_model.parallel.linear import ColumnParallelLinear
    from neox_model.processes import load_tokenizer

    plain = {"train_iters": 2, "log_interval": 1} | SMALL_HEADS
    pruned = plain | block("learned weights, rows and heads") | {"train_iters": 4}
    inputs = plain | block("static inputs") | {"train_iters": 4}
    train_all(
        folder,
        corpus,
        {
            "plain": plain,
            "pruned": pruned | {"load": f"{folder}/plain", "finetune": True},
            "inputs": inputs | {"load": f"{folder}/plain", "finetune": True},
        },
    )
    found: dict[str, Any] = {}
    try:
        train_all(folder, corpus, {"again": pruned | {"load": f"{folder}/plain"}})
    except CheckpointError as error:
        found["refused"] = str(error)
    for name, settings in (("pruned", pruned), ("inputs", inputs)):
        resolved = resolved_from(SMALL_TRAINING | {"data_path": corpus} | settings)
        tokenizer = load_tokenizer(resolved.config.tokenizer)
        model = build_model(
            resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=tokenizer.vocab_size
        ).eval()
        config = recorded_values(resolved, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size)
        load_weights(Path(folder, name), model=model, groups=SINGLE_PROCESS, config=config)
        forward, _ = load_forward(resolved, f"{folder}/{name}", SINGLE_PROCESS, tokenizer)
        tokens = torch.arange(16).remainder(20)[None]
        with torch.no_grad():
            found[name] = float((model(tokens) - forward.model(tokens)).abs().max())
            for matrix in compressed_matrices(model):
                matrix.module.operands = partial(ColumnParallelLinear.operands, matrix.module)
            found[f"{name} without"] = float((model(tokens) - forward.model(tokens)).abs().max())
    return found


@pytest.mark.slow
def test_a_plain_model_is_pruned_from_its_weights_on_and_computes_alike_after_loading(tmp_path) -> None:
    corpus = str(write_corpus(tmp_path))
    [found] = run_ranks(continue_and_compare, size=1, folder=str(tmp_path), corpus=corpus)
    assert "set finetune: true" in found["refused"]
    for name in ("pruned", "inputs"):
        assert found[name] == 0
        assert found[f"{name} without"] > 1e-4


PLAIN: dict[str, tuple[dict[str, Any], int | None]] = {
    "smallest weights and rows": ({"precision": "bfloat16"}, 48),
    "learned weights, rows and heads": ({"activation": "swiglu", "mlp_width": 32}, None),
    "8 to 6 bits in groups, mixed": ({}, None),
    "snip 2:4, 8 bits": ({"precision": "fp16"}, None),
}


def make_plain(folder: str, corpus: str) -> dict[str, Any]:
    """Train each compression, write it as a plain model, and compute with that as any program does."""
    from neox_model.convert.checkpoints import Checkpoint
    from neox_model.convert.errors import ConversionError
    from neox_model.extras.compression.compress import compress
    from neox_model.generate.run import load_forward
    from neox_model.parallel.groups import SINGLE_PROCESS
    from neox_model.processes import load_tokenizer

    found: dict[str, Any] = {}
    for name, (more, width) in PLAIN.items():
        plain = SMALL_HEADS | {"train_iters": 6} | more
        train_all(folder, corpus, {name: plain | block(name)})
        result = compress(Path(folder, name, checkpoint_name(6)), Path(folder, f"{name} plain"))
        try:
            Checkpoint(Path(folder, name, checkpoint_name(6)))
        except ConversionError as error:
            result["refused"] = str(error)
        Checkpoint(Path(folder, f"{name} plain", checkpoint_name(6))).check_shapes()
        logits = []
        for kind, settings in (("", block(name)), (" plain", {} if width is None else {"mlp_width": width})):
            resolved = resolved_from(SMALL_TRAINING | {"data_path": corpus} | plain | settings)
            tokenizer = load_tokenizer(resolved.config.tokenizer)
            forward, _ = load_forward(resolved, f"{folder}/{name}{kind}", SINGLE_PROCESS, tokenizer)
            with torch.no_grad():
                logits.append(forward.model(torch.arange(16).remainder(20)[None]).double())
        result["difference"] = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
        found[name] = result
    return found


@pytest.mark.slow
def test_compressed_models_become_plain_ones_that_compute_alike(tmp_path) -> None:
    corpus = str(write_corpus(tmp_path))
    [found] = run_ranks(make_plain, size=1, folder=str(tmp_path), corpus=corpus, timeout_seconds=600)
    for name, result in found.items():
        assert "neox-convert compress" in result["refused"], name
        assert result["difference"] <= result["limit"], name
        assert (tmp_path / f"{name} plain" / "verification.json").is_file()
    assert shows(found["smallest weights and rows"]["class"], "with mlp-width 48")
    pruned = found["smallest weights and rows"]
    assert pruned["bytes_after"] < 0.85 * pruned["bytes_before"]
    # Half of 2:4, of all matrices but the output of the attention.
    sparse = found["snip 2:4, 8 bits"]["sparsity_of_compressed_matrices"]
    assert sparse == pytest.approx(0.5 * 11 / 12, abs=0.01)


# The bits of a packed number.
PACKED: dict[str, tuple[dict[str, Any], int]] = {
    "8 bits": (quantized_weights((8, 8), quantize_groups=1), 8),
    "4 bits in groups": (quantized_weights((4, 4), quantize_groups=288), 4),
    # Of 9, 3 and 12 weights in rows of 24 and 96.
    "4 bits in groups across rows": (quantized_weights((4, 4), quantize_groups=192), 4),
    "6 bits, rows": (quantized_weights((6, 6), quantize_groups=24) | pruned_rows("l1"), 6),
    "2 bits, 2:4": (
        quantized_weights((2, 2), quantize_groups=24)
        | sparse_weights(0.5, method="snip_momentum", block_pattern="2:4", schedule_offset=1),
        2,
    ),
    "1 bit": (quantized_weights((1, 1), quantize_groups=24), 2),
}
UNPACKED = {
    "asymmetric": quantized_weights((8, 8), quantization_type="asymmetric"),
    "still mixed": quantized_weights(
        (8, 8), fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.01}
    ),
}


def pack(folder: str, corpus: str) -> dict[str, Any]:
    """Train each compression, and write it with packed weights; return the results, or why not."""
    from neox_model.convert.errors import ConversionError, ProofError
    from neox_model.extras.compression import packed

    found: dict[str, Any] = {}
    shape = SMALL_HEADS | {"pos_emb": "rotary", "train_iters": 6, "precision": "bfloat16"}
    shape |= {"tokenizer_type": "HFTokenizer", "vocab_file": str(write_tokenizer(Path(folder)))}
    for name, parts in (UNPACKED | {name: parts for name, (parts, _) in PACKED.items()}).items():
        train_all(folder, corpus, {name: shape | {"compression_training": parts}})
        try:
            found[name] = packed.write_packed(
                Path(folder, name, checkpoint_name(6)), Path(folder, f"{name} packed")
            )
        except ConversionError as error:
            found[name] = str(error)
    pack_integers = packed.pack_integers

    def with_one_wrong(numbers: torch.Tensor, bits: int) -> torch.Tensor:
        """Plant a fault: the next lower level for one weight."""
        wrong = numbers.clone()
        wrong[0, int(numbers[0].argmax())] -= 1
        return pack_integers(wrong, bits)

    packed.pack_integers = with_one_wrong
    try:
        packed.write_packed(Path(folder, "8 bits", checkpoint_name(6)), Path(folder, "wrong"))
    except ProofError as error:
        found["wrong"] = str(error)
    finally:
        packed.pack_integers = pack_integers
    return found


@pytest.mark.slow
def test_packed_models_of_transformers_compute_alike_and_are_smaller(tmp_path) -> None:
    pytest.importorskip("compressed_tensors")
    corpus = str(write_corpus(tmp_path))
    [found] = run_ranks(pack, size=1, folder=str(tmp_path), corpus=corpus, timeout_seconds=600)
    assert "cannot be packed" in found["asymmetric"]
    assert "cannot be packed" in found["still mixed"]
    assert "not the same" in found["wrong"]
    for name in (*UNPACKED, "wrong"):
        assert not (tmp_path / f"{name} packed").exists()
        assert not (tmp_path / name / "config.json").exists()
    for name, (_, bits) in PACKED.items():
        result, folder = found[name], tmp_path / f"{name} packed"
        # The run computes in bfloat16: these are the logits of its numbers in float32.
        assert (result["largest_differences"]["logits"] <= 1e-5, result["limit"]) == (True, 1e-5), name
        stored = {}
        with safe_open(folder / "model.safetensors", "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                stored[key] = tensors.get_tensor(key)
        packed = {key: value for key, value in stored.items() if key.endswith("_packed")}
        assert len(packed) == result["packed_matrices"] == 8
        for key, value in packed.items():
            rows, columns = stored[key.replace("_packed", "_shape")].tolist()
            assert value.shape == (rows, ceil(columns * bits / 32)), key
        assert result["bytes_after"] == (folder / "model.safetensors").stat().st_size
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "verification.json",
        ]
    mlp = "gpt_neox.layers.0.mlp.dense_4h_to_h.weight_shape"
    with safe_open(tmp_path / "6 bits, rows packed" / "model.safetensors", "pt") as tensors:
        assert tensors.get_tensor(mlp).tolist() == [24, 48]


PRECISIONS = {
    "fp32": {},
    "bf16": {"precision": "bfloat16"},
    "fp16": {"precision": "fp16"},
    "bf16, ZeRO 3": {"precision": "bfloat16", "engine": "torch", "zero_optimization": {"stage": 3}},
}


def losses_of(settings: dict[str, Any], ranks: int) -> list[float]:
    return trained(settings, ranks=ranks)[0]


@pytest.mark.parametrize(
    "name", ["8 to 6 bits in groups, mixed", "learned weights, rows and heads", "snip 2:4, 8 bits"]
)
def test_losses_in_16_bits_are_near_those_of_32(name: str) -> None:
    found = {
        precision: run_ranks(
            losses_of,
            size=2 if "ZeRO" in precision else 1,
            settings=settings_of(name, None, **settings),
            ranks=2 if "ZeRO" in precision else 1,
        )[0]
        for precision, settings in PRECISIONS.items()
    }
    for precision, losses in found.items():
        assert losses == pytest.approx(found["fp32"], abs=0.03), precision
        assert losses[-1] < losses[0]


def weights_quantized(in_forward: bool) -> list[float]:
    settings = settings_of("asymmetric, stochastic", None, precision="bfloat16")
    shared = settings["compression_training"]["weight_quantization"]["shared_parameters"]
    settings["compression_training"] = {
        "weight_quantization": settings["compression_training"]["weight_quantization"]
        | {"shared_parameters": shared | {"quantize_weight_in_forward": in_forward}}
    }
    return losses_of(settings, 1)


def test_weights_quantized_at_the_update_train_like_those_quantized_in_the_forward_pass() -> None:
    at_update = run_ranks(weights_quantized, size=1, in_forward=False)
    assert at_update == run_ranks(weights_quantized, size=1, in_forward=True)
