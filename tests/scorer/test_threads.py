"""Whatever becomes of a thread, the one who waits for it hears of it."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from scorer.threads import ThreadEnded, on_daemon, on_thread


def run(scenario):
    """With an executor of one thread."""
    with ThreadPoolExecutor(1) as executor:
        return asyncio.run(asyncio.wait_for(scenario(executor), 10))


@contextmanager
def no_one_waits_for_new_threads():
    """The end of a process waits for every thread that is no daemon."""
    before = set(threading.enumerate())
    yield
    new = set(threading.enumerate()) - before
    assert new
    assert not [thread.name for thread in new if not thread.daemon]


def test_arguments_and_result_go_through():
    assert run(lambda executor: on_thread(executor, sorted, [3, 1, 2], reverse=True)) == [3, 2, 1]


def test_what_it_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        run(lambda executor: on_thread(executor, lambda: 1 / 0))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exit_is_an_exception_like_others(error):
    def work():
        raise error

    with pytest.raises(ThreadEnded, match=error.__name__):
        run(lambda executor: on_thread(executor, work))


def test_a_closed_executor_is_told():
    async def scenario(executor):
        executor.shutdown()
        await on_thread(executor, print)

    with pytest.raises(ThreadEnded):
        run(scenario)


def test_work_that_is_dropped_before_it_begins_is_told():
    async def scenario(executor):
        release = threading.Event()
        first = asyncio.create_task(on_thread(executor, release.wait, 10))
        second = asyncio.create_task(on_thread(executor, print))
        await asyncio.sleep(0.05)
        executor.shutdown(wait=False, cancel_futures=True)
        release.set()
        assert await first
        await second

    with pytest.raises(ThreadEnded, match="closed"):
        run(scenario)


@pytest.mark.parametrize("begun", [True, False])
def test_who_waits_may_be_cancelled(begun):
    async def scenario(executor):
        release = threading.Event()
        first = asyncio.create_task(on_thread(executor, release.wait, 10))
        second = asyncio.create_task(on_thread(executor, print))
        await asyncio.sleep(0.05)
        cancelled = first if begun else second
        cancelled.cancel()
        try:
            await cancelled
        except asyncio.CancelledError:
            return "cancelled"
        finally:
            release.set()

    assert run(scenario) == "cancelled"


def test_a_daemons_result_and_error_go_through():
    async def scenario():
        assert await on_daemon("sum", lambda: 1 + 1) == 2
        with pytest.raises(SystemExit):
            await on_daemon("exit", lambda: sys.exit(3))

    asyncio.run(scenario())


def test_neither_loop_nor_process_waits_for_a_daemon():
    ever = threading.Event()

    async def scenario():
        task = asyncio.ensure_future(on_daemon("ever", lambda: ever.wait(30)))
        await asyncio.sleep(0)
        return task

    try:
        with no_one_waits_for_new_threads():
            assert asyncio.run(scenario()).cancelled()
    finally:
        ever.set()
