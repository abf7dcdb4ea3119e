"""A rank other than 0: it loads its shard and runs what rank 0, which started it, tells."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from scorer import logs
from scorer.config import Config
from scorer.errors import StartError
from scorer.place import Place, read_order

if TYPE_CHECKING:
    from scorer.engine import Engine
    from scorer.parallel import Group

log = logging.getLogger(__name__)


def follow(config: Config, place: Place) -> int:
    """Follows rank 0 until it says stop, and returns the exit code. It alone is told by signals when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from scorer.device import load_device

    try:
        held = load_device(config, place)
        assert held.group is not None, "a follower has someone to follow"
        obey(held.engine, held.group)
        held.engine.close()
        held.group.leave()
    except StartError as error:
        log.error("rank %d cannot start: %s", place.rank, error)
        return 1
    except Exception as error:  # noqa: BLE001 - whatever it was, this rank is out of step and must not go on
        log.error("rank %d fails: %s: %s", place.rank, type(error).__name__, error)
        return 1
    return 0


def obey(engine: Engine, group: Group) -> None:
    """Runs what rank 0 tells, until Stop."""
    from scorer.parallel import Alone, Forward, Scrub

    while True:
        order = group.told()
        if isinstance(order, Forward):
            engine.shard(order.batch, order.fast)
        elif isinstance(order, Alone):
            engine.model.alone(order.ids, order.keep)
        elif isinstance(order, Scrub):
            engine.scrub(order.first_page)
        else:
            return


def _end_with_rank_0() -> None:
    """The pipe closes with rank 0, however it ended; then there is nothing to wait for, in whatever call this is."""
    sys.stdin.read()
    os._exit(1)


def main() -> int:
    config, place = read_order(sys.stdin.readline())
    logs.configure(config.log_format)
    threading.Thread(target=_end_with_rank_0, name="rank 0", daemon=True).start()
    return follow(config, place)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
