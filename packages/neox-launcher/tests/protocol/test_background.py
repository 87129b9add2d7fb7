"""Output in the background never blocks, and states what is missing."""

import os
import threading

import pytest

from neox_launcher.protocol import background
from neox_launcher.protocol.background import BackgroundQueue, LossyFile
from support.refusals import refused, shows


class Reader:
    """A destination that stops until it is released."""

    def __init__(self, limit=10):
        self.seen, self.may_read = [], threading.Event()
        self.queue = BackgroundQueue(
            self.deliver, limit=limit, loss_item=lambda size: f"{size} lost", name="test"
        )

    def deliver(self, item):
        assert self.may_read.wait(60)
        self.seen.append(item)

    def put(self, item, **how):
        return self.queue.put(item, len(item), **how)

    def finish(self):
        self.may_read.set()
        assert self.queue.wait(60)
        return self.seen


@pytest.fixture
def reader():
    found = Reader()
    # The thread takes the first item.
    found.put("first")
    while found.queue._items:
        pass
    yield found
    found.may_read.set()


def test_items_are_delivered_in_order(reader):
    assert reader.put("one")
    assert reader.put("two")
    assert reader.finish() == ["first", "one", "two"]


def test_what_does_not_fit_is_dropped_and_its_size_stated_in_its_place(reader):
    assert reader.put("12345678")
    assert not reader.put("1234")
    # Accepted again only when half of the limit is free.
    assert not reader.put("1")
    assert reader.put("kept", is_kept=True)
    assert reader.finish() == ["first", "12345678", "5 lost", "kept"]
    assert reader.put("12345")
    assert reader.finish()[-1] == "12345"


def test_a_loss_at_the_end_is_stated(reader):
    assert not reader.put("12345678901")
    assert reader.finish() == ["first", "11 lost"]


def test_urgent_items_precede_others_and_keep_their_order(reader):
    for item, is_urgent in (("a", False), ("b", True), ("c", True)):
        reader.put(item, is_urgent=is_urgent)
    assert reader.finish() == ["first", "b", "c", "a"]


def test_waiting_ends_when_nothing_is_read(reader):
    assert reader.put("one")
    assert not reader.queue.wait(0.1, is_patient=True)
    assert reader.queue.discard() == ["first", "one"]
    assert reader.queue.is_empty
    # The thread is still delivering the first one.
    reader.put("two")
    assert reader.finish() == ["first", "two"]


def test_what_is_discarded_states_what_was_dropped(reader):
    assert reader.put("12345678")
    assert not reader.put("1234")
    assert reader.queue.discard() == ["first", "12345678", "4 lost"]


def test_a_destination_that_still_takes_items_is_behind_and_a_stopped_one_is_not(reader, monkeypatch):
    monkeypatch.setattr(background, "_STOPPED_SECONDS", 600.0)
    assert not reader.queue.is_behind
    reader.put("123456")
    assert reader.queue.is_behind
    monkeypatch.setattr(background, "_STOPPED_SECONDS", 0.0)
    assert not reader.queue.is_behind


def test_an_error_ends_the_thread_and_is_raised_in_the_caller():
    def fail(item):
        raise ConnectionError(item)

    queue = BackgroundQueue(fail, limit=10, loss_item=str, name="test")
    queue.put("lost", 4)
    while queue.is_empty is False:
        pass
    with refused(ConnectionError, "lost"):
        queue.check()
    with refused(ConnectionError, "lost"):
        queue.put("more", 4)


def test_a_full_disk_leaves_a_gap_that_is_stated_when_there_is_space_again(tmp_path):
    full, file = os.open("/dev/full", os.O_WRONLY), os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    reported = []
    lossy = LossyFile(full, report=reported.append)
    lossy.write(b"12345")
    lossy.write(b"678")
    assert shows([error.strerror for error in reported], "No space left")
    os.dup2(file, full)
    lossy.write(b"on")
    lossy.write(b"ward")
    os.close(full)
    os.close(file)
    gap = "[neox-launch: 8 bytes of output are missing here: No space left on device]"
    assert (tmp_path / "log").read_text() == f"\n{gap}\nonward"
