"""What a store below the pages is, and the fastest one: host memory."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import Tensor

from scorer.errors import ConfigError


class Store(ABC):
    """Blocks by their keys; a block's content is [bytes] uint8 in host memory. Blocking; threads may share it.

    name   the metric's label
    first  (latency in seconds, bytes/s) that it is taken to have until it was measured
    sure   whether what `has` says of a block is so
    """

    name: str
    first: tuple[float, float]
    sure: bool = True

    @abstractmethod
    def has(self, key: bytes) -> bool:
        """Whether it holds the block as far as can be told without waiting."""

    @abstractmethod
    def get(self, key: bytes) -> Tensor | None:
        """The block's content, None where it is not there; not to be written to. Raises BadEntry or OSError."""

    @abstractmethod
    def put(self, key: bytes, content: Tensor) -> None:
        """Keeps a block. Raises OSError."""

    def close(self) -> None:
        """Lets go of what it holds."""
        return


class HostStore(Store):
    """Slots of one size in this process's memory, least recently used out first.

    What `get` gave stays as it is while somebody holds it: a slot is free again when nobody does.
    """

    name = "host"
    first = (2e-5, 5e9)

    def __init__(self, most_bytes: int, content_bytes: int, pin: bool = False) -> None:
        """pin: for a GPU, which then copies from it without the CPU. Raises ConfigError where there is no room."""
        slots = most_bytes // content_bytes
        if not slots:
            raise ConfigError(f"kv_host_bytes {most_bytes}: one block takes {content_bytes}")
        self._slots = torch.empty(slots, content_bytes, dtype=torch.uint8)
        self._pinned = pin
        if pin:
            _pin(self._slots)
        self._free = deque(range(slots))
        self._held: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, key: bytes) -> bool:
        return key in self._held

    def get(self, key: bytes) -> Tensor | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: bytes, content: Tensor) -> None:
        if len(content) != self._slots.shape[1]:
            raise OSError(f"a block of {len(content)} bytes is not the {self._slots.shape[1]} of a slot")
        with self._lock:
            row = None if key in self._held else self._room()
        if row is not None:
            row.copy_(content)
            with self._lock:
                self._held[key] = row

    def _room(self) -> Tensor | None:
        """None where all that makes room is being read."""
        while not self._free and self._held:
            self._held.popitem(last=False)
        if not self._free:
            return None
        slot = self._free.pop()
        row = self._slots[slot]
        weakref.finalize(row, self._free.append, slot).atexit = False
        return row

    def close(self) -> None:
        self._held.clear()
        if self._pinned:
            _cudart().cudaHostUnregister(self._slots.data_ptr())


def _pin(memory: Tensor) -> None:
    """All of it, and no more, as torch's own allocator would: that one takes the next power of two."""
    error = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if error:
        raise ConfigError(f"kv_host_bytes: {memory.numel()} bytes cannot be pinned: CUDA error {error}")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
