"""The loop that answers calls, alone and on two ranks."""

import asyncio
import signal
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from neox_data.tokenizers import build_tokenizer
from neox_model.generate.batch import NewTokens, Request
from neox_model.generate.engine import Reply, Update
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.serve import loop
from neox_model.serve.calls import Calls
from neox_model.serve.errors import ApiError
from support.distributed import run_ranks
from support.refusals import refused

TOKENIZER = build_tokenizer("CharLevelTokenizer")


class Countdown:
    """An engine that adds one letter per step to every text, up to its maximum."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.submitted, self.cancelled, self.steps = 0, [], 0

    @property
    def is_busy(self) -> bool:
        return bool(self.left)

    def submit(self, request: Request) -> int:
        self.left[self.submitted] = request.maximum_tokens
        self.submitted += 1
        return self.submitted - 1

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)
        del self.left[ticket]

    def step(self) -> list[Update]:
        self.steps += 1
        updates = []
        for ticket in list(self.left):
            self.left[ticket] -= 1
            reply = None
            if not self.left[ticket]:
                del self.left[ticket]
                reply = Reply(finish_reason="maximum-tokens", message=None)
            updates.append(Update(ticket=ticket, text="a", new=NewTokens([], []), reply=reply))
        return updates


def ask(count: int) -> Request:
    return Request(prompt=[1], maximum_tokens=count)


def run(client, engine=None, *, stop_seconds: float = 60.0, slots: int = 2, max_waiting: int = 2):
    """Run the loop in a thread while a coroutine uses the calls; it then requests the stop."""
    engine = engine or Countdown()
    calls, signals = Calls(slots=slots, max_waiting=max_waiting), loop.StopSignals(decides=True)
    thread = threading.Thread(
        target=loop.run_calls,
        args=(engine, SINGLE_RANK, signals, calls),
        kwargs={"stop_seconds": stop_seconds},
    )
    thread.start()
    try:
        return asyncio.run(client(calls, signals)), engine
    finally:
        signals.received = signal.SIGTERM
        thread.join(30)
        assert not thread.is_alive()


async def text(call) -> list[str]:
    texts = [""] * len(call.texts)
    async for place, update in call.updates():
        texts[place] += update.text
    return texts


def test_every_text_of_a_call_gets_its_own_updates():
    async def client(calls, signals):
        first, second = calls.open([ask(3), ask(1)]), calls.open([ask(5)])
        return await asyncio.gather(text(first), text(second))

    found, engine = run(client)
    assert found == [["aaa", "a"], ["aaaaa"]]
    assert engine.cancelled == []


def test_more_texts_than_slots_and_waiting_places_are_refused():
    async def client(calls, signals):
        with pytest.raises(ApiError) as never:
            calls.open([ask(1)] * 5)
        calls.open([ask(10**9)] * 3)
        with pytest.raises(ApiError) as later:
            calls.open([ask(1)] * 2)
        last = calls.open([ask(1)])
        calls.fail_all(ApiError(503, "the end"))
        with pytest.raises(ApiError) as ended:
            await text(last)
        return never.value.status, later.value.status, ended.value.status, calls.count

    assert run(client)[0] == (400, 429, 503, 0)


def test_a_cancelled_call_leaves_the_engine_and_another_one_continues():
    async def client(calls, signals):
        long, short = calls.open([ask(10**9)]), calls.open([ask(200)])
        calls.cancel(long)
        calls.cancel(long)
        found = await text(short)
        calls.cancel(short)
        return found

    found, engine = run(client)
    assert found == ["a" * 200]
    assert engine.cancelled == [0]


def test_a_stop_refuses_new_calls_and_completes_the_open_ones():
    async def client(calls, signals):
        call = calls.open([ask(2000)])
        signals.received = signal.SIGTERM
        while calls.refusal is None:
            await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as refused:
            calls.open([ask(1)])
        return refused.value.status, await text(call)

    assert run(client)[0] == (503, ["a" * 2000])


def test_texts_that_are_not_complete_in_time_end_with_an_error():
    async def client(calls, signals):
        call = calls.open([ask(10**9)])
        signals.received = signal.SIGTERM
        with refused(ApiError, "stopping"):
            await text(call)

    assert run(client, stop_seconds=0.0)[1].cancelled == [0]


def test_the_end_of_the_web_server_ends_the_loop():
    def check() -> None:
        raise ValueError("the web server has ended")

    calls = Calls(slots=1, max_waiting=1)
    with refused(ValueError, "ended"):
        loop.run_calls(Countdown(), SINGLE_RANK, loop.StopSignals(decides=True), calls, check=check)


def on_two_ranks(heartbeat: float) -> list[int]:
    """Stay idle for longer than the timeout of the group, then answer calls."""
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    group = Group(dist.get_rank(), 2, control, (0, 1))
    loop.HEARTBEAT_SECONDS = heartbeat
    engine, signals = Countdown(), loop.StopSignals(decides=group.rank == 0)
    if group.rank == 1:
        loop.run_calls(engine, group, signals, None)
        return [engine.submitted, engine.steps, *engine.cancelled]

    async def client(calls) -> None:
        await asyncio.sleep(5)
        long, short = calls.open([ask(10**9)]), calls.open([ask(7)])
        assert await text(short) == ["aaaaaaa"]
        calls.cancel(long)
        signals.received = signal.SIGTERM

    calls = Calls(slots=2, max_waiting=2)
    thread = threading.Thread(target=lambda: asyncio.run(client(calls)))
    thread.start()
    loop.run_calls(engine, group, signals, calls)
    thread.join()
    return [engine.submitted, engine.steps, *engine.cancelled]


@pytest.mark.slow
def test_an_idle_server_outlives_the_timeout_of_its_group():
    first, second = run_ranks(on_two_ranks, size=2, heartbeat=0.5)
    assert first == second
    assert (first[0], first[2:]) == (2, [0])
