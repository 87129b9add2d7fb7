import logging

import pytest

from neox_model.generate.progress import Progress


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_progress_is_logged_every_ten_seconds_and_summed_up_at_the_end(caplog):
    times = iter([0.0, 5.0, 10.0, 15.0, 21.0, 40.0])
    progress = Progress(6, str, clock=lambda: next(times))
    for _ in range(4):
        progress.note(7)
        progress.add(7, None)
    progress.finish()
    assert caplog.messages == [
        "1 of 6 results; this replica has decoded 14 tokens, 1.4 tokens/s",
        "3 of 6 results; this replica has decoded 28 tokens, 1.3 tokens/s",
        "6 prompts in, 4 results out; 28 tokens in 40.0 s (0.7 tokens/s)",
    ]


def test_of_prompts_that_are_too_long_ten_are_named_and_all_counted(caplog):
    now = 0.0
    progress = Progress(1_200, lambda number: f"line {number + 2}", clock=lambda: now)
    progress.add(1, None)
    for _ in range(1_199):
        progress.add(0, "it is long")
    now = 2.0
    progress.finish()
    assert caplog.messages == [
        *(f"line {line} has no text: it is long" for line in range(3, 13)),
        "1,200 prompts in, 1,200 results out; 1,199 too long; 1 token in 2.0 s (0.5 tokens/s)",
    ]


def test_tokens_are_logged_before_the_first_result(caplog):
    times = iter([0.0, 5.0, 10.0, 15.0, 20.0])
    progress = Progress(1, str, clock=lambda: next(times))
    for _ in range(4):
        progress.note(2)
    assert caplog.messages == [
        "0 of 1 results; this replica has decoded 4 tokens, 0.4 tokens/s",
        "0 of 1 results; this replica has decoded 8 tokens, 0.4 tokens/s",
    ]
