import pytest

from neox_launcher.protocol.eta import Eta


def test_the_pace_leaves_the_first_iteration_out_and_forgets_slowly():
    now = 0.0
    pace = Eta(lambda: now)
    assert pace.note(1) is None
    now = 60.0
    assert pace.note(31) == pytest.approx(2.0)
    assert pace.note(31) == pytest.approx(2.0)
    for _ in range(100):
        now += 600.0
        speed = pace.note(int(31 + (now - 60.0) / 4))
    assert speed == pytest.approx(4.0, rel=1e-3)
    # A restart begins at an earlier checkpoint.
    assert pace.note(20) is None


def test_a_pause_is_left_out_of_the_pace():
    now = 0.0
    pace = Eta(lambda: now)
    pace.leave_out()
    pace.note(1)
    now = 4.0
    assert pace.note(3) == pytest.approx(2.0)
    now = 1000.0
    pace.leave_out()
    now = 1006.0
    assert pace.note(5) == pytest.approx(10.0 / 4, rel=1e-2)
