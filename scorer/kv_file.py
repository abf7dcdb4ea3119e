"""Blocks in one file on a local disk."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scorer.errors import ConfigError
from scorer.kv_entry import HEADER_BYTES, BadEntry, content_of, header, key_of, view_of
from scorer.kv_stores import Store

ALIGNMENT = 4096  # of O_DIRECT
MARK = b"PrefixRank prefix K/V, layout 1\n"  # what the file begins with; its slots begin ALIGNMENT later


class FileStore(Store):
    """Slots of one size in one file, each an entry with checksums of its own.

    But for the mark at its beginning nothing has to be written in order or synced: whatever a crash leaves behind is
    found by its checksum. The file is this process's alone, and bypasses the page cache where the file system can.
    """

    name = "file"
    first = (2e-4, 1e9)

    def __init__(self, path: Path, most_bytes: int, namespace: bytes, content_bytes: int) -> None:
        """Takes over what is sound in the file. Raises ConfigError where there is none to be had, or no
        room in it."""
        self._namespace = namespace
        self._size = -(-(HEADER_BYTES + content_bytes) // ALIGNMENT) * ALIGNMENT
        self.slots = max(0, most_bytes - ALIGNMENT) // self._size
        if not self.slots:
            raise ConfigError(
                f"kv_file_bytes {most_bytes}: one block takes {self._size}, and the beginning {ALIGNMENT}"
            )
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._buffers = threading.local()
        self._file = _opened(path)
        try:
            _own(path, self._file)
            self._take_over()
        except OSError as error:
            os.close(self._file)
            raise ConfigError(f"kv_file {path}: {error.strerror}") from None
        except ConfigError:
            os.close(self._file)
            raise
        self._free = sorted(set(range(self.slots)) - set(self._held.values()), reverse=True)

    def _take_over(self) -> None:
        """Indexes the entries of this namespace; their contents are checked when they are read."""
        existing = os.fstat(self._file).st_size
        for slot in range(min(self.slots, (existing - ALIGNMENT) // self._size)):
            with suppress(BadEntry):
                self._held[key_of(self._read(slot, ALIGNMENT), self._namespace)] = slot
        if existing > self._at(self.slots):
            os.ftruncate(self._file, self._at(self.slots))

    def _at(self, slot: int) -> int:
        return ALIGNMENT + slot * self._size

    @property
    def _buffer(self) -> mmap.mmap:
        """The calling thread's own, aligned as O_DIRECT wants it."""
        if not hasattr(self._buffers, "own"):
            self._buffers.own = mmap.mmap(-1, self._size)
        return self._buffers.own  # type: ignore[no-any-return]

    def _read(self, slot: int, count: int) -> memoryview:
        buffer = memoryview(self._buffer)
        return buffer[: os.preadv(self._file, [buffer[:count]], self._at(slot))]

    def has(self, key: bytes) -> bool:
        return key in self._held

    def get(self, key: bytes) -> Tensor | None:
        with self._lock:
            slot = self._held.get(key)
            if slot is None:
                return None
            self._held.move_to_end(key)
        data = self._read(slot, self._size)
        with self._lock:
            if self._held.get(key) != slot:  # meanwhile given to another block
                return None
            try:
                content, _ = content_of(data, self._namespace, key)
            except BadEntry:
                self._free.append(self._held.pop(key))
                raise
        return torch.from_numpy(np.frombuffer(content, np.uint8).copy())

    def put(self, key: bytes, content: Tensor) -> None:
        if HEADER_BYTES + len(content) > self._size:
            raise OSError(f"a block of {len(content)} bytes does not fit a slot of {self._size}")
        with self._lock:
            if key in self._held:
                return
            slot = self._free.pop() if self._free else self._held.popitem(last=False)[1]
        written = False
        try:
            self._write(slot, key, view_of(content))
            written = True
        finally:
            with self._lock:
                if written:
                    self._held[key] = slot
                else:
                    self._free.append(slot)

    def _write(self, slot: int, key: bytes, content: memoryview) -> None:
        buffer = self._buffer
        buffer.seek(0)
        buffer.write(header(self._namespace, key, content))
        buffer.write(content)
        written = os.pwritev(self._file, [buffer], self._at(slot))
        if written != self._size:
            raise OSError(f"wrote {written} of {self._size} bytes: the disk is full")

    def close(self) -> None:
        with self._lock, suppress(OSError):
            os.close(self._file)


def _opened(path: Path) -> int:
    """Open for reading and writing, made where nothing is. Raises ConfigError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its other end
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        except OSError:  # a file system in memory has no O_DIRECT
            return os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"kv_file {path}: {error.strerror}; name a file that can be made or written") from None


def _own(path: Path, file: int) -> None:
    """Locks the file and marks it, where it is empty, as ours. Raises ConfigError, or OSError where it cannot be read
    or written."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise ConfigError(f"kv_file {path}: not a regular file; name a file that can be made or written")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(f"kv_file {path}: another process uses it") from None
    with mmap.mmap(-1, ALIGNMENT) as buffer:
        read = os.preadv(file, [buffer], 0)
        if buffer[: len(MARK)] == MARK:
            return
        if os.fstat(file).st_size > ALIGNMENT or any(buffer[:read]):  # zeros alone: a crash before the mark was there
            raise ConfigError(
                f"kv_file {path}: it exists and holds something other than prefix K/V of this layout; name another "
                "file, or remove it"
            )
        buffer[: len(MARK)] = MARK
        os.pwritev(file, [buffer], 0)
        os.fsync(file)
