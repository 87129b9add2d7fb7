"""The order of trials, and the end of a stage."""

import pytest

from neox_config.schema.sections.autotuning import Autotuning
from neox_launcher.autotuning.results import Result
from neox_launcher.autotuning.search import in_order, search
from neox_launcher.autotuning.space import Candidate, Experiment
from support.refusals import shows


def candidate(stage, micro_batch, seconds):
    experiment = Experiment(zero_stage=stage, micro_batch=micro_batch, accumulation=1)
    return Candidate(experiment=experiment, seconds=seconds, samples=micro_batch)


# Samples per second by the estimate: stage 0 has 1, 4 and 2; stage 1 has 2, 8 and 4.
CANDIDATES = [
    candidate(0, 1, 1.0),
    candidate(0, 2, 0.5),
    candidate(0, 4, 2.0),
    candidate(1, 1, 0.5),
    candidate(1, 2, 0.25),
    candidate(1, 4, 1.0),
]


def tried(stages):
    return [(one.experiment.zero_stage, one.experiment.micro_batch) for stage in stages for one in stage]


@pytest.mark.parametrize(
    ("tuner", "expected"),
    [
        ("gridsearch", [(1, 1), (1, 2), (1, 4), (0, 1), (0, 2), (0, 4)]),
        ("model_based", [(1, 2), (1, 4), (1, 1), (0, 2), (0, 4), (0, 1)]),
    ],
)
def test_stages_and_their_trials_are_ordered(tuner, expected):
    assert tried(in_order(CANDIDATES, Autotuning(tuner_type=tuner), seed=1)) == expected


def test_the_best_latency_is_the_shortest_estimate():
    tuning = Autotuning(tuner_type="model_based", metric="latency")
    assert tried(in_order(CANDIDATES, tuning, seed=1))[:3] == [(1, 2), (1, 1), (1, 4)]


def test_a_random_order_follows_the_seed_and_is_complete():
    tuning = Autotuning(tuner_type="random")
    many = [candidate(0, size, 1.0) for size in range(1, 30)]
    (one,), (same,), (other,) = (in_order(many, tuning, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert sorted(tried([one])) == tried([many])


class Runner:
    """Fake trials with given samples per second or failures by stage and micro-batch."""

    def __init__(self, outcomes):
        self.outcomes, self.tried = outcomes, []

    def __call__(self, experiment):
        key = (experiment.zero_stage, experiment.micro_batch)
        self.tried.append(key)
        found = self.outcomes[key]
        if isinstance(found, str):
            return Result(experiment=experiment, status=found, reason="a reason")
        return Result(
            experiment=experiment,
            status="measured",
            seconds=1.0,
            samples_per_second=found,
            tflops_per_device=1.0,
        )


def run(outcomes, **tuning):
    runner = Runner(outcomes)
    stages = {}
    for stage, size in outcomes:
        stages.setdefault(stage, []).append(candidate(stage, size, 1.0))
    return runner, list(search(stages.values(), Autotuning(**tuning), runner))


def test_a_stage_ends_after_its_maximum_of_trials():
    runner, _ = run({(0, 1): 1.0, (0, 2): 2.0, (0, 4): 3.0, (1, 1): 1.0}, tuner_num_trials=2)
    assert runner.tried == [(0, 1), (0, 2), (1, 1)]


def test_a_stage_ends_without_improvement_and_the_next_starts_counting_anew():
    outcomes = {(0, 1): 5.0, (0, 2): 4.0, (0, 4): 6.0, (0, 8): 6.0, (0, 16): 5.0, (0, 32): 9.0, (1, 1): 1.0}
    runner, _ = run(outcomes, tuner_early_stopping=2)
    assert runner.tried == [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (1, 1)]


def test_larger_micro_batches_are_left_out_of_the_stage_after_out_of_memory():
    outcomes = {(0, 1): 1.0, (0, 2): "out of memory", (0, 4): 4.0, (1, 4): 2.0}
    runner, results = run(outcomes)
    assert runner.tried == [(0, 1), (0, 2), (1, 4)]
    assert [result.status for result in results] == ["measured", "out of memory", "left out", "measured"]
    assert shows(results[2].reason, "micro-batch 2 was")


def test_other_failures_leave_nothing_out():
    runner, _ = run({(0, 1): "failed", (0, 2): 2.0})
    assert runner.tried == [(0, 1), (0, 2)]


def test_refused_experiments_do_not_count_as_trials():
    outcomes = {(0, 1): "refused", (0, 2): "refused", (0, 4): 1.0}
    runner, _ = run(outcomes, tuner_early_stopping=1, tuner_num_trials=1)
    assert runner.tried == [(0, 1), (0, 2), (0, 4)]
