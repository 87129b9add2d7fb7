import pytest
import torch
from torch import Tensor

from neox_model.generate.sampling import GREEDY, Sampling, SamplingTable, filtered, most_likely, penalized

# Most to least likely: places 2, 0, 3, 1.
PROBABILITIES = torch.tensor([0.3, 0.05, 0.5, 0.15])
LOGITS = PROBABILITIES.log() + 3.0
VOCABULARY = 200


def table(samplings: list[Sampling], *, vocabulary: int = 4, draws: int = 4000) -> SamplingTable:
    made = SamplingTable(slots=len(samplings), draws=draws, vocab_size=vocabulary, device=torch.device("cpu"))
    for slot, settings in enumerate(samplings):
        made.set(slot, settings, torch.tensor([1]), draws)
    return made


def drawn(samplings: list[Sampling], logits_BV: Tensor, count: int) -> Tensor:
    made = table(samplings, vocabulary=logits_BV.shape[1], draws=count)
    return torch.stack([made.choose(logits_BV, 0)[0] for _ in range(count)])


def kept(top_k: int = 0, top_p: float = 0.0, logits: Tensor = LOGITS) -> list[int]:
    found = filtered(
        logits[None],
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        count=min(top_k or 99, len(logits)),
    )[0]
    places = torch.nonzero(found > -torch.inf).flatten().tolist()
    assert torch.equal(found[places], logits[places])
    return places


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 2, "top_p": 0.1}])
def test_temperature_zero_is_greedy_with_any_filters(filters):
    assert drawn([Sampling(temperature=0.0, **filters)], LOGITS[None], 3).flatten().tolist() == [2, 2, 2]


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-46])
def test_a_temperature_close_to_zero_is_almost_greedy(temperature):
    assert drawn([Sampling(temperature=temperature)], 50 * LOGITS[None], 3).flatten().tolist() == [2, 2, 2]


@pytest.mark.parametrize(("count", "expected"), [(1, [2]), (2, [0, 2]), (3, [0, 2, 3]), (9, [0, 1, 2, 3])])
def test_top_k_keeps_the_likeliest(count, expected):
    assert kept(top_k=min(count, 4)) == expected


@pytest.mark.parametrize(
    ("mass", "expected"),
    [(0.01, [2]), (0.49, [2]), (0.51, [0, 2]), (0.79, [0, 2]), (0.81, [0, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_token_that_crosses_it(mass, expected):
    assert kept(top_p=mass) == expected


def test_equal_logits_are_kept_or_dropped_together():
    assert kept(top_k=2, logits=torch.tensor([1.0, 2.0, 1.0, 0.0])) == [0, 1, 2]
    assert kept(top_p=0.3, logits=torch.ones(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), PROBABILITIES),
        (Sampling(temperature=0.5), PROBABILITIES**2 / (PROBABILITIES**2).sum()),
        (Sampling(temperature=1.0, top_k=2), torch.tensor([0.375, 0.0, 0.625, 0.0])),
        (Sampling(temperature=1.0, top_p=0.9), torch.tensor([0.3, 0.0, 0.5, 0.15]) / 0.95),
        # The two likeliest have 0.64 of the mass at temperature 2, 0.8 at 1: the temperature comes first.
        (
            Sampling(temperature=2.0, top_p=0.7),
            PROBABILITIES.sqrt().index_fill(0, torch.tensor([1]), 0.0) / 1.6421,
        ),
    ],
)
def test_tokens_come_with_their_probability(sampling, expected):
    tokens = drawn([sampling], LOGITS[None], 4000).flatten()
    assert torch.allclose(torch.bincount(tokens, minlength=4) / 4000, expected, atol=0.025)


def test_the_seed_of_a_sequence_determines_its_tokens_alone_and_among_others():
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    samplings = [
        Sampling(temperature=1.0, seed=3),
        GREEDY,
        Sampling(temperature=0.7, top_k=20, seed=3),
        Sampling(temperature=1.3, top_p=0.8, seed=4),
        Sampling(temperature=1.0, top_k=9, top_p=0.8, seed=5),
    ]
    together = drawn(samplings, logits.expand(5, -1), 50)
    for place, settings in enumerate(samplings):
        assert torch.equal(drawn([settings], logits, 50)[:, 0], together[:, place])
    assert len(set(together[:, 1].tolist())) == 1
    others = drawn([Sampling(temperature=1.0, seed=8)], logits, 50)
    assert not torch.equal(others[:, 0], together[:, 0])


def test_a_greedy_sequence_may_have_a_larger_top_k_than_the_sampled_ones_with_it():
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    greedy, sampled = Sampling(top_k=50, top_p=0.5), Sampling(temperature=1.0, top_k=5, seed=2)
    together = drawn([greedy, sampled], logits.expand(2, -1), 20)
    assert set(together[:, 0].tolist()) == {logits.argmax().item()}
    assert torch.equal(together[:, 1], drawn([sampled], logits, 20)[:, 0])


def test_the_logits_of_chosen_tokens_are_those_before_all_filters():
    made = table([Sampling(temperature=0.3, top_k=2, repetition_penalty=3.0, seed=1)])
    for _ in range(5):
        tokens, logits = made.choose(LOGITS[None], 0)
        assert logits.item() == LOGITS[tokens.item()]


def test_a_penalty_counts_the_prompt_and_every_chosen_token():
    # 1 is in the prompt; greedy order of the others: 2, then those that were not said.
    logits = torch.tensor([[2.0, 2.9, 3.0, 1.9]])
    made = table([Sampling(repetition_penalty=2.0)])
    assert [made.choose(logits, 0)[0].item() for _ in range(3)] == [2, 0, 3]


def test_a_sequence_in_a_reused_or_moved_slot_is_as_in_a_new_one():
    logits = torch.randn(1, 4, generator=torch.Generator().manual_seed(5))
    settings = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.5, seed=6)
    expected = drawn([settings], logits, 20).flatten().tolist()
    made = table([Sampling(temperature=0.1, repetition_penalty=9.0, seed=1), GREEDY], draws=20)
    for _ in range(5):
        made.choose(logits.expand(2, -1), 0)
    made.set(1, settings, torch.tensor([1]), 20)
    found = [made.choose(logits.expand(2, -1), 0)[0][1].item() for _ in range(10)]
    made.move(1, 0)
    found += [made.choose(logits, 0)[0][0].item() for _ in range(10)]
    assert found == expected
    # The first sequence had chosen other tokens, which are not those of the second one.
    made.set(0, Sampling(repetition_penalty=1e6), torch.tensor([3]), 20)
    assert made.choose(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 0)[0].item() == 2


def test_ties_beyond_top_k_count_in_the_mass_of_top_p():
    assert kept(top_k=2, top_p=0.8, logits=torch.tensor([5.0] + [1.0] * 20)) == list(range(21))
    assert kept(top_k=2, top_p=0.8, logits=torch.tensor([5.0, 1.0])) == [0]


def test_a_later_slot_has_its_own_settings():
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(6))
    mine = Sampling(temperature=1.1, top_k=30, top_p=0.8, repetition_penalty=3.0, seed=2)
    made = table([Sampling(temperature=0.1, top_k=2, seed=1), mine], vocabulary=VOCABULARY)
    found = [made.choose(logits, 1)[0].item() for _ in range(20)]
    assert found == drawn([mine], logits, 20).flatten().tolist()
    assert len(set(found)) > 10


def kept_by_definition(logits_V: Tensor, top_k: int, top_p: float) -> list[bool]:
    """Return which tokens are kept: a token goes if those that are more likely reach top_p without it."""
    exact = logits_V.double()
    is_kept = torch.ones(len(exact), dtype=torch.bool)
    if top_k:
        is_kept &= exact >= exact.sort(descending=True).values[top_k - 1]
    if 0.0 < top_p < 1.0:
        weights = (exact - exact.max()).exp() * is_kept
        order = exact.argsort(descending=True, stable=True)
        before = weights[order].cumsum(0) - weights[order]
        last = order[(before < top_p * weights.sum()).nonzero()[-1]]
        is_kept &= exact >= exact[last]
    return is_kept.tolist()


@pytest.mark.parametrize("kind", ["float32", "bfloat16, with many equal logits", "all equal", "one likely"])
@pytest.mark.parametrize("top_p", [0.0, 1e-300, 1e-9, 0.3, 0.9, 0.999999, 1.0])
@pytest.mark.parametrize("top_k", [0, 3, 700, 1500])
def test_filters_keep_the_tokens_of_their_definition(kind, top_p, top_k):
    """With more logits than are selected, and with so many that all are sorted."""
    logits = torch.randn(2, 1500, generator=torch.Generator().manual_seed(1)) * 2
    if kind != "float32":
        logits = logits.bfloat16().float()
    if kind == "all equal":
        logits[:] = -3.0
    if kind == "one likely":
        logits[:, 77] = 100.0
    found = filtered(
        logits,
        torch.full((2,), top_k),
        torch.full((2,), top_p, dtype=torch.float64),
        count=top_k or (1500 if 0 < top_p < 1 else 0),
        has_top_p=0 < top_p < 1,
    )
    for row, expected in zip(found, logits, strict=True):
        assert (row > -torch.inf).tolist() == kept_by_definition(expected, top_k, top_p)
        assert torch.equal(row[row > -torch.inf], expected[row > -torch.inf])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("penalty", [1.0, 1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9, 1.0, 1e30, 1e300])
def test_extreme_settings_draw_possible_tokens_with_the_logits_of_the_model(dtype, penalty, temperature):
    logits = (torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(4)) * 100).to(dtype)
    sampling = Sampling(temperature=temperature, top_p=0.5, repetition_penalty=penalty, seed=1)
    made = table([sampling], vocabulary=VOCABULARY, draws=20)
    found = [made.choose(logits, 0) for _ in range(20)]
    assert [value.item() for _, value in found] == [logits[0, token].item() for token, _ in found]
    if temperature < 1.0:
        first = logits.argmax().item() if penalty >= 1.0 or logits[0, 1] <= 0 else 1
        assert found[0][0].item() == first


def test_a_random_number_of_zero_draws_a_possible_token():
    made = table([Sampling(temperature=1.0, top_k=1)])
    made._uniform_BT[:] = 0.0
    assert made.choose(LOGITS[None], 0)[0].item() == 2


@pytest.mark.parametrize("top_k", [0, 1, 7, VOCABULARY])
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.7, 0.6])
def test_filtered_probabilities_are_those_of_transformers(top_k, top_p, penalty):
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, VOCABULARY, generator=generator) * 4
    said = torch.randint(0, VOCABULARY, (3, 20), generator=generator)
    temperature = 0.7
    processors = [logits_process.RepetitionPenaltyLogitsProcessor(penalty)]
    processors += [logits_process.TemperatureLogitsWarper(temperature)]
    processors += [logits_process.TopKLogitsWarper(top_k)] if top_k else []
    processors += [logits_process.TopPLogitsWarper(top_p)] if 0 < top_p < 1 else []
    expected = logits.clone()
    for process in processors:
        expected = process(said, expected)
    seen = torch.zeros(3, VOCABULARY, dtype=torch.bool).scatter(1, said, True)
    found = filtered(
        penalized(logits, seen, torch.full((3,), penalty)) / temperature,
        torch.full((3,), top_k),
        torch.full((3,), top_p, dtype=torch.float64),
        count=VOCABULARY if top_k == 0 else top_k,
    )
    torch.testing.assert_close(found.softmax(1), expected.softmax(1), rtol=0, atol=1e-6)
    assert torch.equal(found > -torch.inf, expected > -torch.inf)


def test_equal_logits_are_no_choice_of_a_greedy_sequence_among_sampled_ones():
    """Also in a slot whose earlier sequence had random numbers."""
    made = table([Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2)], draws=20)
    made.set(0, GREEDY, torch.tensor([1]), 20)
    found = [made.choose(torch.zeros(2, 4), 0)[0].tolist() for _ in range(20)]
    assert {first for first, _ in found} == {0}
    assert len({second for _, second in found}) > 1


def test_top_k_beyond_the_vocabulary_is_off():
    logits = torch.randn(1, 4, generator=torch.Generator().manual_seed(7))
    found, expected = (drawn([Sampling(temperature=1.0, top_k=k, seed=3)], logits, 40) for k in (99, 0))
    assert torch.equal(found, expected)


def test_logits_of_16_bits_are_filtered_and_drawn_in_float32():
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(8)) * 4
    # The largest is subtracted from the others: these differences have no exact value in 16 bits.
    logits = (logits - logits.max() + 0.3).bfloat16()
    samplings = [Sampling(temperature=2.0, top_p=0.95, seed=seed) for seed in range(64)]
    rows = logits.expand(64, -1)
    assert torch.equal(drawn(samplings, rows, 200), drawn(samplings, rows.float(), 200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_equal_logits_those_of_lower_ids_are_listed_first(dtype):
    random = torch.Generator().manual_seed(9)
    logits = torch.randint(-3, 4, (5, 1000), generator=random).to(dtype) / 2
    logits[0] = torch.tensor([0.0, -0.0]).repeat(500)
    logits[1, 7:] = -torch.inf
    total = logits.float().logsumexp(1)
    for count in (1, 8, 600, 1000):
        ids, values = most_likely(logits, total, count)
        expected = logits.float().sort(dim=1, descending=True, stable=True)
        assert torch.equal(ids, expected.indices[:, :count])
        assert torch.equal(values, expected.values[:, :count] - total.unsqueeze(1))
    assert torch.equal(most_likely(logits, total, 1)[0][:, 0], logits.argmax(1))
