import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from neox_model.errors import StopRequested
from neox_model.generate import interruption
from neox_model.generate.interruption import ending_on_signals


@contextmanager
def converting() -> Iterator[None]:
    try:
        yield
    except BaseException as stop:
        raise ValueError("cannot be read") from stop


@pytest.mark.parametrize("foreign", [lambda: suppress(BaseException), converting])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_other_code_passes_over_or_converts_is_raised_at_the_end(number, code, foreign):
    before = signal.getsignal(number)
    with pytest.raises(StopRequested) as raised, ending_on_signals(), foreign():
        signal.raise_signal(number)
    assert raised.value.exit_code == code
    assert signal.getsignal(number) == before


def test_code_that_tries_again_after_each_error_is_ended():
    tries = []

    def download() -> None:
        for number in range(3):
            tries.append(number)
            with suppress(Exception):
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StopRequested), ending_on_signals():
        download()
    assert tries == [0]


def test_other_errors_of_the_block_are_raised_as_they_are():
    with pytest.raises(ZeroDivisionError), ending_on_signals():
        _ = 1 // 0


@contextmanager
def twice(seconds_between, monkeypatch) -> Iterator[None]:
    """Receive a signal, and after some seconds again, while code of others passes over the first."""
    now = [100.0]
    monkeypatch.setattr(interruption.time, "monotonic", lambda: now[0])
    with suppress(BaseException):
        signal.raise_signal(signal.SIGTERM)
    now[0] += seconds_between
    signal.raise_signal(signal.SIGTERM)
    yield


@pytest.mark.parametrize(("seconds_between", "ends"), [(0.5, False), (2.0, True)])
def test_a_signal_within_a_second_of_the_first_is_the_same_request(monkeypatch, seconds_between, ends):
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    try:
        with pytest.raises(StopRequested), ending_on_signals(), twice(seconds_between, monkeypatch):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [signal.SIGTERM] * ends
