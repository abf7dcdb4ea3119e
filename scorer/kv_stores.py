"""The stores below the pages: host memory, a file, and a Redis or Valkey server. Blocking; called on threads."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from scorer.errors import ConfigError
from scorer.kv_entry import HEADER_BYTES, BadEntry, content_of, entry, header, read_header

ALIGNMENT = 4096  # of O_DIRECT
REMOTE_SECONDS = 0.5  # that a call to the remote store may take
REMOTE_TTL_SECONDS = 3600


class Store(ABC):
    """Blocks by their keys. Threads may share it.

    name   the metric's label
    first  (latency in seconds, bytes/s) that it is taken to have until it was measured
    """

    name: str
    first: tuple[float, float]

    @abstractmethod
    def has(self, key: bytes) -> bool:
        """Whether it holds the block as far as can be told without waiting."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """The block's content, None where it is not there. Raises BadEntry or OSError."""

    @abstractmethod
    def put(self, key: bytes, content: bytes) -> None:
        """Keeps a block. Raises OSError."""

    def close(self) -> None:
        """Lets go of what it holds."""
        return


class HostStore(Store):
    """In this process's memory, least recently used out first."""

    name = "host"
    first = (2e-5, 5e9)

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def has(self, key: bytes) -> bool:
        return key in self._held

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: bytes, content: bytes) -> None:
        with self._lock:
            if key in self._held or len(content) > self._most:
                return
            self._held[key] = content
            self._size += len(content)
            while self._size > self._most:
                _, dropped = self._held.popitem(last=False)
                self._size -= len(dropped)


class FileStore(Store):
    """Slots of one size in one file, each an entry with a checksum of its own.

    Nothing has to be written in order or synced: whatever a crash leaves behind is found by its checksum. The file is
    this process's alone, and bypasses the page cache where the file system can.
    """

    name = "file"
    first = (2e-4, 1e9)

    def __init__(self, path: Path, most_bytes: int, namespace: bytes, content_bytes: int) -> None:
        """Takes over what is sound in the file. Raises ConfigError where another process has it."""
        self._namespace = namespace
        self._size = -(-(HEADER_BYTES + content_bytes) // ALIGNMENT) * ALIGNMENT
        self.slots = most_bytes // self._size
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._file = _opened(path)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise ConfigError(f"kv_file {path}: another process uses it") from None
        self._buffer = mmap.mmap(-1, self._size)  # aligned as O_DIRECT wants it
        self._take_over()
        self._free = sorted(set(range(self.slots)) - set(self._held.values()), reverse=True)

    def _take_over(self) -> None:
        """Indexes the entries of this namespace; their contents are checked when they are read."""
        existing = os.fstat(self._file).st_size
        for slot in range(min(self.slots, existing // self._size)):
            with suppress(BadEntry):
                key, _, _ = read_header(self._read(slot, ALIGNMENT), self._namespace)
                self._held[key] = slot
        if existing > self.slots * self._size:
            os.ftruncate(self._file, self.slots * self._size)

    def _read(self, slot: int, count: int) -> bytes:
        read = os.preadv(self._file, [memoryview(self._buffer)[:count]], slot * self._size)
        return self._buffer[:read]

    def has(self, key: bytes) -> bool:
        return key in self._held

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            slot = self._held.get(key)
            if slot is None:
                return None
            self._held.move_to_end(key)
            try:
                return content_of(self._read(slot, self._size), self._namespace, key)
            except BadEntry:
                self._forget(key)
                raise

    def _forget(self, key: bytes) -> None:
        self._free.append(self._held.pop(key))

    def put(self, key: bytes, content: bytes) -> None:
        with self._lock:
            if key in self._held or not self.slots:
                return
            if HEADER_BYTES + len(content) > self._size:
                raise OSError(f"a block of {len(content)} bytes does not fit a slot of {self._size}")
            slot = self._free.pop() if self._free else self._held.popitem(last=False)[1]
            self._buffer.seek(0)
            self._buffer.write(header(self._namespace, key, content))
            self._buffer.write(content)
            try:
                written = os.pwritev(self._file, [self._buffer], slot * self._size)
            except OSError:
                self._free.append(slot)
                raise
            if written != self._size:
                self._free.append(slot)
                raise OSError(f"wrote {written} of {self._size} bytes: the disk is full")
            self._held[key] = slot

    def close(self) -> None:
        with self._lock, suppress(OSError):
            os.close(self._file)
        self._buffer.close()


def _opened(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:  # a file system in memory has no O_DIRECT
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


class RemoteStore(Store):
    """A Redis or Valkey server that several replicas share. It may hold what this process never wrote."""

    name = "remote"
    first = (1e-3, 5e8)

    def __init__(self, url: str, namespace: bytes) -> None:
        """Raises ConfigError where the client is not installed or the address is none."""
        try:
            import redis
        except ImportError:
            raise ConfigError("kv_remote: pip install 'prefixrank[redis]' brings the client") from None
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=REMOTE_SECONDS, socket_connect_timeout=REMOTE_SECONDS, retry=None
            )
        except ValueError as error:
            raise ConfigError(f"kv_remote: {error}") from None
        self._namespace = namespace
        self._error = redis.RedisError

    def has(self, key: bytes) -> bool:
        return True

    def get(self, key: bytes) -> bytes | None:
        try:
            data = self._client.get(self._name(key))
        except self._error as error:
            raise OSError(f"the remote store: {error}") from None
        return None if data is None else content_of(data, self._namespace, key)

    def put(self, key: bytes, content: bytes) -> None:
        try:
            self._client.set(self._name(key), entry(self._namespace, key, content), ex=REMOTE_TTL_SECONDS)
        except self._error as error:
            raise OSError(f"the remote store: {error}") from None

    def _name(self, key: bytes) -> bytes:
        return b"prefixrank:" + self._namespace.hex().encode() + b":" + key.hex().encode()

    def close(self) -> None:
        self._client.close()
