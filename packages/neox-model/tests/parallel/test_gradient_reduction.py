import pytest
import torch

from neox_model.parallel import gradient_reduction
from neox_model.parallel.gradient_reduction import EarlyReduction, GradientReduction
from support.distributed import run_ranks


def reduce_in_buckets() -> list:
    """Average gradients of several shapes and types; runs in every rank."""
    from neox_model.parallel.topology import create_groups

    gradient_reduction.BUCKET_ELEMENTS = 10
    data = create_groups(1, 1).data
    found = []
    for settings in (
        {},
        {"divides_first": True},
        {"predivide_factor": 2.0},
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
    ):
        base = [torch.arange(float(count)) / divisor for count, divisor in ((4, 3), (12, 3), (3, 1), (5, 3))]
        gradients = [values * (1 + data.rank) for values in base]
        gradients[2] = gradients[2].bfloat16()
        gradients[3] = gradients[3].view(1, 5).expand(2, 5).clone().t()
        GradientReduction(group=data, **settings)(gradients)
        expected = [values * 2 for values in base]
        expected[3] = expected[3].view(1, 5).expand(2, 5).t()
        found.append(
            max(float((g.float() - e).abs().max()) for g, e in zip(gradients, expected, strict=True))
        )
    return found


def test_gradients_become_their_mean_over_data_parallel_ranks():
    for found in run_ranks(reduce_in_buckets, size=3):
        assert found[:4] == pytest.approx([0.0] * 4, abs=1e-5)
        assert 0.0 < found[4] < 0.2


def test_a_single_rank_keeps_its_gradients():
    from neox_model.parallel.groups import SINGLE_RANK

    gradient = torch.tensor([1.0, 2.0])
    GradientReduction(group=SINGLE_RANK, divides_first=True)([gradient])
    assert gradient.tolist() == [1.0, 2.0]


def reduce_during_backward(limit: int) -> dict:
    """Train with and without messages during the backward pass; runs in every rank."""
    from neox_model.parallel.topology import create_groups

    gradient_reduction.EARLY_BUCKET_ELEMENTS, gradient_reduction.EARLY_ELEMENTS = 20, limit
    data = create_groups(1, 1).data
    reduction = GradientReduction(group=data)
    events: list[str] = []
    start, finish = GradientReduction.start, GradientReduction.finish

    def noted_start(self, flat):
        events.append(f"send {flat.numel()}")
        return start(self, flat)

    def noted_finish(self, sent, work):
        events.append(f"receive {sent.numel()}")
        return finish(self, sent, work)

    GradientReduction.start, GradientReduction.finish = noted_start, noted_finish
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    parameters = [torch.nn.Parameter(torch.ones(4)), *layers.parameters()]
    # As in float32 sums of 16-bit gradients: this one is accumulated in another tensor.
    master = torch.nn.Parameter(parameters[1].detach().clone())
    holders = [parameters[0], master, *parameters[2:]]

    def take_over(parameter):
        master.grad = parameter.grad.clone() if master.grad is None else master.grad + parameter.grad
        parameter.grad = None

    parameters[1].register_post_accumulate_grad_hook(take_over)
    early = EarlyReduction(reduction, parameters, holders)
    generator = torch.Generator().manual_seed(data.rank)

    def update(*, is_early: bool) -> list[torch.Tensor]:
        for micro_batch in range(2):
            hidden = torch.randn(5, 4, generator=generator)
            if is_early and micro_batch == 1:
                early.begin()
            for layer in layers:
                hidden = layer(hidden).relu()
            hidden.register_hook(lambda gradient: events.append("backward starts"))
            hidden.sum().backward()
            events.append("backward ends")
        gradients = [holder.grad for holder in holders if holder.grad is not None]
        early(gradients)
        for holder in holders:
            holder.grad = None
        return gradients

    state = generator.get_state()
    found = update(is_early=True)
    noted = events.copy()
    generator.set_state(state)
    events.clear()
    expected = update(is_early=False)
    apart = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    return {"events": noted, "late": events, "apart": apart, "count": len(found)}


@pytest.mark.parametrize(
    ("limit", "early"),
    [
        (60, ["send 20", "send 20", "send 20", "backward ends", "receive 20"]),
        # No more than two messages are copied at the same time.
        (40, ["send 20", "send 20", "receive 20", "send 20", "backward ends"]),
    ],
)
def test_gradients_are_sent_as_they_arrive_in_the_last_micro_batch(limit, early):
    for found in run_ranks(reduce_during_backward, size=2, limit=limit):
        assert found["apart"] == 0.0
        # The first parameter is not used.
        assert found["count"] == 6
        passes = ["backward starts", "backward ends"]
        assert found["late"] == [*passes, *passes, "send 60", "receive 60"]
        assert found["events"] == [*passes, "backward starts", *early, "receive 20", "receive 20"]
