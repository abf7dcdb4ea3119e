"""Real threads: who waits hears in time, small texts pass large ones, and what nobody waits for is not begun."""

import asyncio
import threading
import time

import pytest

from batching.errors import Expired
from batching.scheduler import Asked
from batching.tokenizing import LARGE_BYTES
from prefixrank.v1 import scorer_pb2 as pb
from scorer.errors import Overloaded
from scorer.tokenizer_threads import THREADS, TokenizerThreads
from tests.batching.fake import Counting

pytestmark = pytest.mark.timeout(30)
LARGE = LARGE_BYTES + 1


class NoException(BaseException):
    """What `except Exception` lets through."""


class Gated:
    """Tokenizes what the gate lets through, and remembers what it was given."""

    def __init__(self):
        self.gate = threading.Event()
        self.begun = []

    def __call__(self, request):
        self.begun.append(request.raw_text)
        assert self.gate.wait(20)
        return request.raw_text


def text(name):
    return pb.ScoreRequest(raw_text=name)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def run(scenario, most_bytes=1 << 30):
    """With threads, what they tokenize with, and who is told."""

    async def running():
        gated, told = Gated(), Counting()
        threads = TokenizerThreads(most_bytes, told)
        try:
            return await scenario(threads, gated, told)
        finally:
            gated.gate.set()
            threads.close()

    return asyncio.run(running())


def started(threads, gated, name, size=10, **how):
    return asyncio.create_task(threads.run(gated, text(name), size, **how))


def test_small_ones_are_answered_while_large_ones_take_long():
    async def scenario(threads, gated, told):
        large = [started(threads, gated, f"large {n}", LARGE) for n in range(3)]
        await until(lambda: len(gated.begun) == 1)
        small = [await threads.run(lambda request: request.raw_text, text(str(n)), 10) for n in range(8)]
        assert small == [str(n) for n in range(8)]
        assert gated.begun == ["large 0"]
        gated.gate.set()
        assert await asyncio.gather(*large) == ["large 0", "large 1", "large 2"]
        assert threads.bytes == 0

    run(scenario)


def test_a_deadline_holds_while_a_text_waits_and_while_a_thread_has_it():
    async def scenario(threads, gated, told):
        now = time.monotonic()
        ends = [started(threads, gated, str(n), deadline=now + 0.1) for n in range(THREADS + 3)]
        results = await asyncio.gather(*ends, return_exceptions=True)
        assert {str(end) for end in results} == {"the deadline came before this request was tokenized"}
        assert all(isinstance(end, Expired) for end in results)
        assert threads.bytes == THREADS * 10, "what the threads have"
        gated.gate.set()
        await until(lambda: threads.bytes == 0)
        assert len(gated.begun) == THREADS, "and what waited was never begun"
        assert told.counts == {"missed": THREADS + 3}

    run(scenario)


def test_a_deadline_that_has_come_is_refused_before_anything():
    async def scenario(threads, gated, told):
        for late in (0.0, 1e-9, 100.0):
            with pytest.raises(Expired, match=r"^its deadline has come$"):
                await threads.run(gated, text("late"), 10, deadline=time.monotonic() - late)
        assert (threads.bytes, gated.begun, told.counts) == (0, [], {})

    run(scenario)


def test_whose_caller_went_is_not_begun():
    async def scenario(threads, gated, told):
        first = [started(threads, gated, f"first {n}") for n in range(THREADS)]
        await until(lambda: len(gated.begun) == THREADS)
        waiting = [started(threads, gated, f"waiting {n}", deadline=time.monotonic() + 20) for n in range(5)]
        await until(lambda: threads.bytes == 10 * (THREADS + 5))
        for call in (*waiting[:4], first[0]):
            call.cancel()
        await until(lambda: threads.bytes == 10 * (THREADS + 1))
        gated.gate.set()
        assert await asyncio.gather(first[1], waiting[4]) == ["first 1", "waiting 4"]
        assert len(gated.begun) == THREADS + 1
        assert told.counts == {"cancelled": 5}

    run(scenario)


@pytest.mark.parametrize("error", [ZeroDivisionError(), NoException()])
def test_classes_have_their_turn_and_a_failure_is_its_own_callers(error):
    def fails(request):
        raise error

    async def scenario(threads, gated, told):
        first = [started(threads, gated, f"first {n}") for n in range(THREADS)]
        await until(lambda: len(gated.begun) == THREADS)
        low = [started(threads, gated, f"low {n}", asked=Asked(priority=-1)) for n in range(3)]
        high = started(threads, gated, "high", asked=Asked(priority=1))
        bad = asyncio.create_task(threads.run(fails, text("bad"), 10))
        await until(lambda: threads.bytes == 10 * (THREADS + 5))
        gated.gate.set()
        with pytest.raises(type(error)):
            await bad
        await asyncio.gather(*first, *low, high)
        assert gated.begun[THREADS] == "high"
        assert threads.bytes == 0

    run(scenario)


def test_a_tokenizer_that_times_out_is_no_deadline():
    def fails(request):
        raise TimeoutError("a socket's")

    async def scenario(threads, gated, told):
        with pytest.raises(TimeoutError, match="a socket's"):
            await threads.run(fails, text("a"), 10, deadline=time.monotonic() + 20)
        assert told.counts == {}

    run(scenario)


def test_too_many_bytes_are_refused_and_nothing_accepted_is_lost():
    async def scenario(threads, gated, told):
        gated.gate.set()
        calls = [started(threads, gated, str(n), (10, 400, LARGE)[n % 3], deadline=None) for n in range(300)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        refused = [end for end in ends if isinstance(end, Overloaded)]
        assert refused
        assert [end for end in ends if not isinstance(end, Overloaded)] == sorted(set(gated.begun), key=int)
        assert len(gated.begun) == 300 - len(refused)
        assert threads.bytes == 0

    run(scenario, most_bytes=LARGE * 20)


def test_who_waits_when_the_threads_are_closed_hears_of_it():
    async def scenario(threads, gated, told):
        calls = [started(threads, gated, str(n)) for n in range(THREADS + 3)]
        await until(lambda: len(gated.begun) == THREADS)
        threads.close()
        gated.gate.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert ends[:THREADS] == ["0", "1"]
        assert all(isinstance(end, asyncio.CancelledError) for end in ends[THREADS:])
        assert threads.bytes == 0
        with pytest.raises(RuntimeError):
            await threads.run(gated, text("after"), 10)
        assert threads.bytes == 0

    run(scenario)


def test_what_stands_before_a_newcomer_is_told():
    async def scenario(threads, gated, told):
        assert threads.ahead(10, 5, Asked(), None) == (5, (), 0.0)
        calls = [started(threads, gated, str(n), 1000, most_tokens=7) for n in range(4)]
        await until(lambda: threads.bytes == 4000 and len(gated.begun) == THREADS)
        assert threads.ahead(10, 5, Asked(), None).sizes == ((1000, 7),) * 4
        assert threads.ahead(10, 5, Asked(priority=1), None).sizes == ((1000, 7),) * THREADS
        gated.gate.set()
        await asyncio.gather(*calls)
        assert threads.ahead(1000, 5, Asked(), None).seconds > 0

    run(scenario)
