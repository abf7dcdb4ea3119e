"""Host memory that a GPU reads and writes beside the host's own work."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.layout import Ints


class Staging:
    """Pinned ints that travel in one piece, on the stream that is current where this is made."""

    def __init__(self, size: int) -> None:
        self._stream = torch.cuda.current_stream()
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def take(self) -> Ints:
        """The memory, once its last upload is through."""
        self._uploaded.synchronize()
        array: Ints = self._host.numpy()
        return array

    def upload(self, to: Tensor, used: int) -> None:
        to[:used].copy_(self._host[:used], non_blocking=True)
        self._uploaded.record(self._stream)  # finding the current one costs more than recording


def to_host(tensor: Tensor) -> Tensor:
    """A pinned copy, ready when the stream has come to it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
