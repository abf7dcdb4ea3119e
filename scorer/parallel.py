"""The ranks of one model in step: rank 0 tells each pass before it runs it, the others run it on their shards.

A pass is told as plain data. Each rank plans it for its own heads, so that nothing of a device travels; page ids are
the same on all of them, each keeps the K/V of its heads.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from batching.types import Ints, PackedBatch
from scorer.errors import first_line
from scorer.place import Place

log = logging.getLogger(__name__)
T = TypeVar("T")

LOADING = timedelta(hours=1)  # ranks may read their shards at different speeds
IDLE = timedelta(days=365)  # how long a rank may wait to be told something


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """Run this pass. fast: by the hand-fused path; else by the model's own modules."""

    batch: PackedBatch
    fast: bool


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """Run one sequence through transformers' own forward."""

    ids: Ints
    keep: int


@dataclass(frozen=True, slots=True)
class Scrub:
    """Clear pages from this one on."""

    first_page: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing follows."""


Order = Forward | Alone | Scrub | Stop


class Group:
    """The ranks. Orders travel apart from the tensors of the passes, and in the order in which they were told."""

    def __init__(self, place: Place, cuda: bool) -> None:
        """Waits for all of them. Raises where they do not come."""
        self.rank, self.count = place.rank, place.count
        if cuda:
            torch.cuda.set_device(place.local)
            os.environ.setdefault("LOCAL_RANK", str(place.local))  # transformers asks it for this rank's GPU
        given: dict[str, Any] = {} if place.rendezvous == "env://" else {"rank": place.rank, "world_size": place.count}
        device = torch.device("cuda", place.local) if cuda else None
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            init_method=place.rendezvous,
            timeout=LOADING,
            device_id=device,
            **given,
        )
        self._orders = dist.new_group(backend="gloo", timeout=IDLE)

    def tell(self, order: Order) -> None:
        """Rank 0 says what all do next."""
        self._broadcast(order)

    def forward(self, batch: PackedBatch, fast: bool) -> None:
        """Rank 0 is about to run this pass, by the hand-fused path or by the model's own modules."""
        self.tell(Forward(batch, fast))

    def alone(self, ids: Ints, keep: int) -> None:
        """Rank 0 is about to run this sequence through transformers' own forward."""
        self.tell(Alone(ids, keep))

    def scrub(self, first_page: int) -> None:
        """Rank 0 clears these pages."""
        self.tell(Scrub(first_page))

    def stop(self) -> None:
        """Nothing follows; this rank leaves too. A rank that is gone already needs no telling."""
        try:
            self.tell(Stop())
        except RuntimeError as error:
            log.warning("not every rank could be told to stop: %s", first_line(error))
        self.leave()

    def told(self) -> Order:
        """The next thing to do, on all other ranks."""
        return cast(Order, self._broadcast(None))

    def agreed(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return cast(T, self._broadcast(value))

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        number = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(number, dist.ReduceOp.MIN, self._orders)
        return int(number)

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, self._orders)
        return values

    def sum(self, tensor: torch.Tensor) -> None:
        """Sums it over all ranks, in place, behind what the stream does before. All of them must call it."""
        dist.all_reduce(tensor)

    def leave(self) -> None:
        """Ends this rank's part, after Stop."""
        dist.destroy_process_group()

    def _broadcast(self, value: object) -> object:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._orders)
        return box[0]
