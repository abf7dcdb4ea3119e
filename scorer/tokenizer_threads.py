"""The threads that tokenize, and how many bytes may wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from google.protobuf.message import Message

from scorer.errors import Overloaded
from scorer.threads import guarded

M = TypeVar("M", bound=Message)
T = TypeVar("T")

THREADS = 2


class TokenizerThreads:
    """bytes: of the requests that wait for a thread or have one."""

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self._most = most_bytes
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    async def run(self, tokenize: Callable[[M], T], request: M, size: int | None = None) -> T:
        """Tokenizes on a thread. size: of the request in bytes, where it was counted already. Raises Overloaded where
        too many bytes wait for one."""
        size = request.ByteSize() if size is None else size
        with self._lock:
            if self.bytes and self.bytes + size > self._most:  # an idle service takes whatever a request may be
                told = f"{self.bytes} bytes wait to be tokenized and this request has {size}: the limit is {self._most}"
                raise Overloaded(told)
            self.bytes += size
        work = self._threads.submit(guarded, tokenize, request)
        # Not where the await ends: a thread goes on with the text of a caller who has gone.
        work.add_done_callback(lambda _: self._ended(size))
        return await asyncio.wrap_future(work)

    def _ended(self, size: int) -> None:
        with self._lock:
            self.bytes -= size

    def close(self) -> None:
        """What waits for a thread is not begun any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
