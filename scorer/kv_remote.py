"""Blocks in a Redis or Valkey server."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from scorer.errors import ConfigError
from scorer.kv_entry import PLAIN, ZSTD, BadEntry, content_of, entry, view_of
from scorer.kv_stores import Store

SECONDS = 0.5  # that a call may take
TTL_SECONDS = 3600
LEVEL = 1  # of zstd: higher ones take longer for the same size


class RemoteStore(Store):
    """A server that several replicas share. It may hold what this process never wrote."""

    name = "remote"
    first = (1e-3, 5e8)
    sure = False

    def __init__(self, url: str, namespace: bytes, content_bytes: int, compress: bool = False) -> None:
        """compress: what is written; what is read may be either. Raises ConfigError where the client is not installed
        or the address is none."""
        try:
            import redis
            import zstandard
        except ImportError as error:
            raise ConfigError(f"kv_remote: {error}: pip install 'prefixrank[redis]' brings it") from None
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS, retry=None
            )
        except ValueError as error:
            raise ConfigError(f"kv_remote: {error}") from None
        self._namespace = namespace
        self._content_bytes = content_bytes
        self._compress = compress
        self._zstd: Any = zstandard
        self._error = redis.RedisError

    def has(self, key: bytes) -> bool:
        return True

    def get(self, key: bytes) -> Tensor | None:
        try:
            data = self._client.get(self._name(key))
        except self._error as error:
            raise OSError(f"the remote store: {error}") from None
        if data is None:
            return None
        content, packing = content_of(data, self._namespace, key)
        return torch.from_numpy(np.frombuffer(self._unpacked(content, packing), np.uint8).copy())

    def _unpacked(self, content: memoryview, packing: int) -> memoryview | bytes:
        """Never more than a block's bytes, whatever the entry says."""
        if packing == PLAIN:
            return content
        try:
            assert packing == ZSTD, "a version has a number of its own"
            unpacked: bytes = self._zstd.ZstdDecompressor().decompress(content, max_output_size=self._content_bytes)
        except self._zstd.ZstdError:
            raise BadEntry("damaged") from None
        return unpacked

    def put(self, key: bytes, content: Tensor) -> None:
        data, packing = view_of(content), PLAIN
        if self._compress:
            data, packing = memoryview(self._zstd.ZstdCompressor(level=LEVEL).compress(data)), ZSTD
        try:
            self._client.set(self._name(key), entry(self._namespace, key, data, packing), ex=TTL_SECONDS)
        except self._error as error:
            raise OSError(f"the remote store: {error}") from None

    def _name(self, key: bytes) -> bytes:
        return b"prefixrank:" + self._namespace.hex().encode() + b":" + key.hex().encode()

    def close(self) -> None:
        self._client.close()
