"""The estimates of the gradient noise scale are unbiased, and their averages forget."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from neox_model.train.callbacks.tensors import GradientNoise, estimate
from neox_model.train.state import TrainState
from support.runs import a_run


def test_the_estimates_are_unbiased():
    """Gradients of samples are normal around a known one: the trace of their covariance is known too."""
    generator = np.random.default_rng(1)
    true, deviation = np.array([0.3, -0.1, 0.2]), np.array([1.0, 2.0, 0.5])
    found = []
    for _ in range(4000):
        samples = true + deviation * generator.standard_normal((12, 3))
        small = float(np.mean([np.sum(part.mean(0) ** 2) for part in np.split(samples, 3)]))
        large = float(np.sum(samples.mean(0) ** 2))
        found.append(estimate(small=4, small_square=small, large=12, large_square=large))
    noise, signal = np.mean(found, axis=0)
    assert noise == pytest.approx(np.sum(deviation**2), rel=0.02)
    assert signal == pytest.approx(np.sum(true**2), abs=0.02)


def test_the_average_forgets_old_estimates():
    scale = GradientNoise(count=2, on_host=False)
    a_run(scale, state=TrainState(last_iteration=9, samples_per_iteration=8))

    expected = estimate(small=8, small_square=5.0, large=16, large_square=4.0)
    for small, large in ((5.0, 4.0), (900.0, 70.0), *[(5.0, 4.0)] * 1000):
        scale._measured = [(torch.tensor(2.0), torch.tensor(small), torch.tensor(large))]
        found = scale.measure()
    averages = found["gradient_noise_scale/noise"], found["gradient_noise_scale/signal"]
    assert averages == pytest.approx(tuple(expected), rel=1e-3)


def test_a_weight_that_is_trained_later_had_no_gradient_before():
    state = TrainState(last_iteration=9, samples_per_iteration=8)
    scale = GradientNoise(count=2, on_host=False)
    a_run(scale, state=state)
    for gradients in (
        {"old": torch.tensor([3.0])},
        {"new": torch.tensor([4.0, 0.0]), "old": torch.tensor([3.0])},
    ):
        scale._look(
            SimpleNamespace(
                norm=torch.cat(list(gradients.values())).norm(),
                weights=lambda gradients=gradients: ((name, None, one) for name, one in gradients.items()),
                norm_of=lambda sums: torch.cat(list(sums.values())).norm(),
            )
        )
    found = scale.measure()
    # The mean gradient of both updates is (3, 2, 0).
    noise, signal = estimate(small=8, small_square=(9 + 25) / 2, large=16, large_square=13)
    assert found["gradient_noise_scale/noise"] == pytest.approx(noise)
    assert found["gradient_noise_scale/signal"] == pytest.approx(signal)
