"""A loop that naps between events misses none of them, and sleeps when none come."""

import asyncio
import socket
import threading

import pytest

from scorer import wakeful
from scorer.wakeful import NAP_SECONDS, WakefulSelector

AWAKE = 0.02


class Counting(WakefulSelector):
    """Naps on a clock of its own; `during` runs in the nap of that number."""

    def __init__(self, awake=AWAKE):
        self.now, self.naps, self.during = 0.0, 0, {}
        super().__init__(awake, lambda: self.now)

    def nap(self):
        self.naps += 1
        self.now += NAP_SECONDS
        self.during.get(self.naps, lambda: None)()


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def watching(selector, end):
    selector.register(end, 1)
    return selector


def test_what_comes_during_a_nap_is_found_after_it(pair):
    selector = watching(Counting(), pair[0])
    selector.during[3] = lambda: pair[1].send(b"x")
    ((key, _),) = selector.select(1.0)
    assert (key.fileobj, selector.naps) == (pair[0], 3)


def test_what_is_ready_already_costs_no_nap(pair):
    selector = watching(Counting(), pair[0])
    pair[1].send(b"x")
    assert len(selector.select(1.0)) == 1
    assert selector.naps == 0


@pytest.mark.parametrize("timeout", [0, -1, 10 * NAP_SECONDS])
def test_it_waits_no_longer_than_asked(pair, timeout):
    selector = watching(Counting(), pair[0])
    assert selector.select(timeout) == []
    assert selector.naps * NAP_SECONDS == pytest.approx(max(0, timeout), abs=1.5 * NAP_SECONDS)


def test_it_sleeps_where_nothing_comes_and_is_awake_again_after_an_event(pair):
    selector = watching(Counting(), pair[0])
    most = round(AWAKE / NAP_SECONDS) + 1
    waker = threading.Timer(0.05, pair[1].send, [b"x"])
    waker.start()
    assert len(selector.select(None)) == 1  # by the platform's own sleep: the clock stands still in it
    assert most - 2 <= selector.naps <= most
    pair[0].recv(1)
    waker.join()
    naps = selector.naps
    assert selector.select(5 * NAP_SECONDS) == []
    assert selector.naps > naps


def test_every_event_makes_the_time_awake_anew(pair):
    selector = watching(Counting(), pair[0])
    for _ in range(5):
        selector.now += 0.9 * AWAKE
        pair[1].send(b"x")
        assert len(selector.select(None)) == 1
        pair[0].recv(1)
    assert selector.naps == 0
    assert selector.now > 4 * AWAKE
    assert selector.select(3 * NAP_SECONDS) == []
    assert selector.naps in (3, 4)  # floats add up to a little less


def test_it_naps_where_the_process_has_very_many_files(pair, monkeypatch):
    selector = watching(WakefulSelector(0.01), pair[0])
    monkeypatch.setattr(wakeful, "FEW_FILES", selector.fileno())
    monkeypatch.setattr(wakeful.select, "select", lambda *_: pytest.fail("a descriptor that it does not take"))
    assert selector.select(0.02) == []
    pair[1].send(b"x")
    assert len(selector.select(0.02)) == 1


@pytest.mark.parametrize("awake", [0.0, 0.01])
def test_a_loop_of_it_keeps_timers_threads_and_sockets(awake):
    async def main():
        loop = asyncio.get_running_loop()
        wakeful.stay_awake(awake)
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            other.setblocking(False)
            order = []
            loop.call_later(0.03, order.append, "later")
            loop.call_later(0.001, order.append, "sooner")
            echoed = asyncio.create_task(loop.sock_recv(one, 5))
            await asyncio.to_thread(other.send, b"hello")
            order.append((await echoed).decode())
            await asyncio.sleep(0.06)
        return sorted(order), order.index("sooner") < order.index("later")

    assert wakeful.run(main()) == (["hello", "later", "sooner"], True)


def test_what_it_runs_may_fail():
    async def main():
        raise KeyError("the reason")

    with pytest.raises(KeyError, match="the reason"):
        wakeful.run(main())


def test_another_loop_is_left_as_it_is():
    async def main():
        wakeful.stay_awake(1.0)

    asyncio.run(main())
