import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from neox_model.errors import StopRequested
from neox_model.generate.interruption import ending_on_signals

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@contextmanager
def converting() -> Iterator[None]:
    try:
        yield
    except StopRequested as stop:
        raise ValueError("cannot be read") from stop


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_that_other_code_passes_over_is_raised_at_the_end(number, code):
    before = signal.getsignal(number)
    with pytest.raises(StopRequested) as raised, ending_on_signals(), suppress(Exception):
        signal.raise_signal(number)
    assert raised.value.exit_code == code
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_that_other_code_converts_is_raised_at_the_end(number, code):
    with pytest.raises(StopRequested) as raised, ending_on_signals(), converting():
        signal.raise_signal(number)
    assert raised.value.exit_code == code


def test_other_errors_of_the_block_are_raised_as_they_are():
    with pytest.raises(ZeroDivisionError), ending_on_signals():
        _ = 1 // 0
