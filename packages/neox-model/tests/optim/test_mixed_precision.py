import copy
from types import SimpleNamespace

import pytest
import torch

from neox_config.facts.learning_rate import WarmupThenDecay
from neox_config.spec.update import LossScaling
from neox_model.optim import mixed_precision
from neox_model.optim.adam import adam
from neox_model.optim.loss_scale import LossScale
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer, guard_loss, skips_on_device
from neox_model.parallel.groups import SINGLE_PROCESS
from support.distributed import run_ranks
from support.read_backs import ReadBacks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = {
    "fused AdamW": lambda groups: adam(groups, lr=0.1),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "uncorrected Adam": lambda groups: adam(groups, lr=0.1, bias_correction=False),
}


def curve(peak=0.1):
    return WarmupThenDecay(style="linear", peak=peak, floor=0.0, warmup=0.2, decay_iterations=20)


def make(kind="fused AdamW", *, dtype=FP32, sums_in=FP32, max_norm=0.0, scale=None, **settings):
    """Return a small model, its update and its loss function; the weights are always the same."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 1))
    optimizer = KINDS[kind]([{"params": list(model.parameters()), "weight_decay": 0.01}])
    scaling = None
    if scale is not None:
        scaling = LossScale(
            LossScaling(initial=scale, **{"is_dynamic": False} | settings), torch.device("cpu")
        )
    update = MixedPrecisionOptimizer(
        optimizer,
        LearningRateSchedule(optimizer, curve()),
        dtype=dtype,
        accumulation_dtype=sums_in,
        max_norm=max_norm,
        reduce=lambda gradients: None,
        groups=SINGLE_PROCESS,
        loss_scale=scaling,
    )

    def backward(seed, factor=1.0):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        loss = model(inputs).float().square().mean() * factor
        guard_loss(loss, None if scaling is None else scaling.value).backward()

    return SimpleNamespace(model=model, update=update, backward=backward, optimizer=optimizer)


def state_of(run):
    """Everything that an update may change."""
    tensors = [*run.update.masters, *run.model.parameters()]
    for states in run.optimizer.state.values():
        tensors += [value for value in states.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("kind", KINDS)
def test_in_fp32_it_is_a_plain_loop_with_clipping_bit_for_bit(kind):
    run = make(kind, max_norm=0.05)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 1))
    optimizer = KINDS[kind]([{"params": list(model.parameters()), "weight_decay": 0.01}])
    for iteration in range(6):
        run.backward(iteration)
        run.update.step()
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(iteration))
        model(inputs).square().mean().backward()
        norms = [torch.linalg.vector_norm(parameter.grad) for parameter in model.parameters()]
        # Squares are summed over ranks; torch's norm of norms may differ from that by rounding.
        norm = torch.stack(norms).square().sum().sqrt()
        torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(norms), rtol=1e-6, atol=0.0)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
        optimizer.param_groups[0]["lr"] = curve().rate(iteration)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(run.update.norm, norm)
    for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_updates_fp32_masters_with_the_fp32_sum_of_its_gradients(kind):
    run = make(kind, dtype=BF16)
    masters = [master.detach().clone().requires_grad_() for master in run.update.masters]
    reference = KINDS[kind]([{"params": masters, "weight_decay": 0.01}])
    for iteration in range(3):
        sums = [torch.zeros_like(master) for master in masters]
        for micro_batch in range(3):
            twin = copy.deepcopy(run.model)
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(iteration * 3 + micro_batch))
            twin(inputs.to(BF16)).float().square().mean().backward()
            for total, parameter in zip(sums, twin.parameters(), strict=True):
                total += parameter.grad.float()
            run.backward(iteration * 3 + micro_batch)
        run.update.step()
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        reference.param_groups[0]["lr"] = curve().rate(iteration)
        reference.step()
        for ours, theirs, weight in zip(run.update.masters, masters, run.model.parameters(), strict=True):
            assert ours.dtype == FP32
            assert weight.dtype == BF16
            assert torch.equal(ours, theirs)
            assert torch.equal(weight, theirs.to(BF16))


@pytest.mark.parametrize(("dtype", "sums_in"), [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
def test_a_tied_weight_without_a_gradient_joins_the_sum_in_the_others_format(monkeypatch, dtype, sums_in):
    tied, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [tied, other]}], lr=0.1)
    update = MixedPrecisionOptimizer(
        optimizer,
        LearningRateSchedule(optimizer, curve()),
        dtype=dtype,
        accumulation_dtype=sums_in,
        max_norm=0.0,
        reduce=lambda gradients: None,
        groups=SINGLE_PROCESS,
        ties=[(tied, None)],
    )
    formats = []

    def sum_over_stages(gradient, group):
        formats.append(gradient.dtype)
        gradient += torch.tensor([1.0, 2.0])

    monkeypatch.setattr(mixed_precision, "all_reduce", sum_over_stages)
    other.sum().backward()
    update.step()
    assert formats == [sums_in]
    assert torch.equal(update.masters[0], torch.tensor([1.0, 2.0]) * -curve().rate(0))


def test_gradients_are_summed_in_16_bit_if_requested():
    exact, rounded = make(dtype=BF16), make(dtype=BF16, sums_in=BF16)
    for run in (exact, rounded):
        for seed in range(64):
            run.backward(seed)
    assert all(parameter.grad is None for parameter in exact.model.parameters())
    assert all(master.grad is None for master in rounded.update.masters)
    pairs = zip(exact.update.masters, rounded.model.parameters(), strict=True)
    differences = [(one.grad - other.grad.float()).norm() / one.grad.norm() for one, other in pairs]
    assert 1e-4 < max(differences) < 0.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_every_loss_scale_gives_the_same_update(kind, max_norm):
    results = []
    for scale in (1.0, 128.0, 65536.0):
        run = make(kind, dtype=FP16, max_norm=max_norm, scale=scale)
        for seed in range(2):
            run.backward(seed)
            run.update.step()
        results.append(([master.detach() for master in run.update.masters], run.update.norm))
    for masters, norm in results[1:]:
        assert torch.allclose(norm, results[0][1], rtol=1e-3)
        for one, other in zip(masters, results[0][0], strict=True):
            assert torch.allclose(one, other, atol=2e-4)


def test_an_update_without_unscaling_is_another():
    """The loss is scaled, the gradients are not unscaled: what the test above would find."""
    right, wrong = (make("SGD with momentum", dtype=FP16, scale=128.0) for _ in range(2))
    for run in (right, wrong):
        run.backward(0)
    wrong.update.loss_scale = None
    for run in (right, wrong):
        run.update.step()
    assert float(wrong.update.norm / right.update.norm) == pytest.approx(128.0, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_changes_nothing(kind, dtype, value):
    scale = {"scale": 8.0, "is_dynamic": True, "hysteresis": 1} if dtype == FP16 else {}
    run, undisturbed = (
        make(kind, dtype=dtype, max_norm=1.0, **scale),
        make(kind, dtype=dtype, max_norm=1.0, **scale),
    )
    for each in (run, undisturbed):
        each.backward(0)
        each.update.step()
    before = state_of(run)
    run.backward(1, factor=value)
    run.update.step()
    assert bool(run.update.found_inf)
    assert all(torch.equal(old, new) for old, new in zip(before, state_of(run), strict=True))
    assert run.update.schedule.applied_updates == 1
    if dtype == FP16:
        assert float(run.update.loss_scale.value) == 4.0
        undisturbed.update.loss_scale.value = torch.tensor(4.0)
    for each in (run, undisturbed):
        each.backward(2)
        each.update.step()
    assert not bool(run.update.found_inf)
    assert all(
        torch.equal(one, other) for one, other in zip(state_of(run), state_of(undisturbed), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_first_update_leaves_no_trace(kind):
    run, undisturbed = make(kind), make(kind)
    run.backward(0, factor=float("nan"))
    run.update.step()
    for each in (run, undisturbed):
        for seed in (1, 2):
            each.backward(seed)
            each.update.step()
    assert all(
        torch.equal(one, other) for one, other in zip(state_of(run), state_of(undisturbed), strict=True)
    )


def test_a_loss_that_is_not_finite_makes_its_gradients_nan():
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = weight.sum() + torch.tensor(float("inf"))
    guard_loss(loss, None).backward()
    assert weight.grad.isnan().all()


@pytest.mark.parametrize("scale", [None, 256.0])
def test_a_guarded_loss_is_the_same_loss(scale):
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    factor = None if scale is None else torch.tensor(scale)
    loss = guard_loss(weight.square().sum(), factor)
    loss.backward()
    assert loss.item() == 5.0
    assert weight.grad.tolist() == [2.0 * (scale or 1.0), 4.0 * (scale or 1.0)]


@pytest.mark.parametrize(("kind", "expected"), [("fused AdamW", 0), ("SGD with momentum", 1)])
def test_an_update_reads_back_only_for_optimizers_that_cannot_skip(kind, expected):
    run = make(kind, dtype=FP16, max_norm=1.0, scale=64.0, is_dynamic=True)
    assert skips_on_device(run.optimizer) is (expected == 0)
    run.backward(0)
    run.update.step()
    run.backward(1)
    with ReadBacks() as reads:
        run.update.step()
        _ = run.update.schedule.current_rate
    assert reads.count == expected


def copies_of_a_tied_weight() -> list[int]:
    """Train two stages with a tied weight and other weights on three replicas; runs in six ranks."""
    from neox_model.parallel.gradient_reduction import GradientReduction
    from neox_model.parallel.topology import create_groups

    groups = create_groups(1, 2)
    generator = torch.Generator().manual_seed(1)
    tied = torch.nn.Parameter(torch.randn(5000, generator=generator))
    other = torch.nn.Parameter(torch.randn(20_000, generator=generator))
    # As in a pipeline: first in the message of one stage, last in that of the other.
    parameters = [tied, other] if groups.pipe.rank == 0 else [other, tied]
    tied.is_stage_copy = groups.pipe.rank > 0
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    update = MixedPrecisionOptimizer(
        optimizer,
        LearningRateSchedule(optimizer, curve()),
        dtype=torch.float32,
        accumulation_dtype=torch.float32,
        max_norm=1.0,
        reduce=GradientReduction(group=groups.data),
        groups=groups,
        ties=[(tied, groups.pipe.process_group)],
    )
    generator = torch.Generator().manual_seed(groups.world.rank)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        update.step()
    found = [torch.empty_like(tied.data) for _ in range(6)]
    torch.distributed.all_gather(found, tied.data)
    return [int((one != found[0]).sum()) for one in found]


@pytest.mark.slow
def test_copies_of_a_tied_weight_stay_equal_on_three_replicas():
    assert run_ranks(copies_of_a_tied_weight, size=6) == [[0] * 6] * 6
