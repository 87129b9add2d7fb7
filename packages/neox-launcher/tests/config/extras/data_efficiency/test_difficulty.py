"""By hand; tests/integration/test_deepspeed_schedules.py compares them with DeepSpeed's."""

from neox_config.extras.data_efficiency.difficulty import fixed_discrete, fixed_root


def test_a_linear_pace_by_hand() -> None:
    # After t of 10 iterations 8 + t / 10 * 24, down to a multiple of 8.
    schedule = fixed_root(smallest=8, largest=32, iterations=10, multiple=8, degree=1)
    assert [schedule(iteration) for iteration in range(12)] == [8, 8, 8, 16, 16, 16, 24, 24, 24, 32, 32, 32]


def test_a_root_pace_by_hand() -> None:
    # The square root of t / 16 at t = 1, 4, 9, 16 is 1/4, 1/2, 3/4, 1 of the way from 10 to 50.
    schedule = fixed_root(smallest=10, largest=50, iterations=16, multiple=10, degree=2)
    assert [schedule(t - 1) for t in (1, 3, 4, 8, 9, 15, 16, 100)] == [20, 20, 30, 30, 40, 40, 50, 50]


def test_the_first_difficulty_is_a_multiple_at_or_above_the_smallest() -> None:
    schedule = fixed_root(smallest=8, largest=64, iterations=100, multiple=16, degree=1)
    assert schedule(0) == 16
    assert fixed_root(smallest=3, largest=5, iterations=9, multiple=16, degree=1)(0) == 5


def test_a_discrete_pace_by_hand() -> None:
    schedule = fixed_discrete(difficulties=[1, 2, 3], last_iterations=[5, 10])
    assert [schedule(t - 1) for t in (1, 5, 6, 10, 11, 99)] == [1, 1, 2, 2, 3, 3]
