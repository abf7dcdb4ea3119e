"""The processes of a tensor-parallel server. The one that the user started is rank 0: it listens, schedules and
answers, and starts the others, one a GPU, which hold their shard of the model and follow it.

So signals, ports, exit codes and the drain are those of a server with one GPU. Where torchrun started all of them, its
variables say which rank this is, and the others are watched by torchrun.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from scorer import wakeful
from scorer.config import Config
from scorer.place import Place, given_place, order

if TYPE_CHECKING:
    from scorer.runtime import Runtime

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
STOP_SECONDS = 10.0  # for a rank to end after it was told


class Ranks:
    """The processes that this one, rank 0, started. A context: at its end they are gone."""

    def __init__(self, config: Config, count: int, command: Sequence[str] = ()) -> None:
        """command: of a follower; the default is our own."""
        address = f"tcp://127.0.0.1:{_free_port()}"
        self.place = Place(0, count, 0, address)
        self._processes = [
            _started(config, Place(rank, count, rank, address), command or (sys.executable, "-m", "scorer.follower"))
            for rank in range(1, count)
        ]

    async def lost(self) -> str:
        """Returns, saying which, once one of them has ended; until then it waits."""
        while True:
            for rank, process in enumerate(self._processes, 1):
                if (code := process.poll()) is not None:
                    return f"rank {rank} of {self.place.count} ended with exit code {code}"
            await asyncio.sleep(POLL_SECONDS)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            assert process.stdin is not None, "it was opened"
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("a rank did not end within %g s: it is killed", STOP_SECONDS)
                process.kill()
                process.wait()


def run(config: Config, serve: Callable[..., Coroutine[Any, Any, int]]) -> int:
    """Serves over several ranks, or follows as torchrun says; returns the exit code."""
    from scorer.server import load_runtime

    def load(config: Config) -> Runtime:
        return load_runtime(config, place)

    if (place := given_place(config)) is not None:
        if place.rank:
            from scorer.follower import follow

            return follow(config, place)
        return wakeful.run(serve(config, load))
    with Ranks(config, config.tensor_parallel) as ranks:
        place = ranks.place
        return wakeful.run(serve(config, load, lost=ranks.lost))


def _started(config: Config, place: Place, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A follower. It reads its settings from the pipe, which stays open: where it closes, rank 0 is gone."""
    environment = os.environ | {"LOCAL_RANK": str(place.local), "RANK": str(place.rank)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None, "it was asked for"
    process.stdin.write(order(config, place).encode() + b"\n")
    process.stdin.flush()
    return process


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
