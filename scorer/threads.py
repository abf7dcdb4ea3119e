"""Work on a thread of its own, whose every end is an answer or an exception for the one who waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadEnded(Exception):
    """The work asked its thread to exit, or the thread was closed before the work began."""


def guarded(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs it here. What would end a process, if an event loop met it, is an exception like others."""
    try:
        return work(*args, **kwargs)
    except (SystemExit, KeyboardInterrupt) as error:
        raise ThreadEnded(f"{type(error).__name__} on a thread") from error


async def on_thread(executor: Executor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs it on the executor. Raises what it raises, and ThreadEnded where the executor was closed before it began;
    CancelledError only where the awaiting task is cancelled."""
    try:
        submitted = executor.submit(lambda: guarded(work, *args, **kwargs))
    except RuntimeError as error:  # closed before
        raise ThreadEnded(str(error)) from None
    try:
        return await asyncio.wrap_future(submitted)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if submitted.cancelled() and task is not None and not task.cancelling():
            raise ThreadEnded("the thread was closed") from None
        raise


async def on_daemon(name: str, work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, on a daemon thread: neither the loop's end nor the process's waits for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001  raised again by the one who waits
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
