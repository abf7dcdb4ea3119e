"""One block as it lies in a tier: a header that says whose and what it is, and checksums of it all.

The checksums tell damage, not forgery: who may write to a tier may write anything.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from torch import Tensor
from xxhash import xxh3_128_digest

MAGIC = b"PXKV"
VERSION = 2
NAME_BYTES = DIGEST_BYTES = 16
PLAIN, ZSTD = 0, 1  # how the content is packed
_FIELDS = struct.Struct(f"<4sHHQ{NAME_BYTES}s{NAME_BYTES}s{DIGEST_BYTES}s")
HEADER_BYTES = _FIELDS.size + DIGEST_BYTES


class BadEntry(Exception):
    """What was read is not the block that was asked for: torn, damaged, or another model's. reason: the metric's
    label."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the entry is {reason}")
        self.reason = reason


def namespace_of(*parts: object) -> bytes:
    """A name for everything that the contents depend on beside the block's own key."""
    return blake2b(repr(parts).encode(), digest_size=NAME_BYTES).digest()


def header(namespace: bytes, key: bytes, content: bytes | memoryview, packing: int = PLAIN) -> bytes:
    """The header of an entry."""
    digest = xxh3_128_digest(content)
    fields = _FIELDS.pack(MAGIC, VERSION, packing, len(content), namespace, key, digest)
    return fields + xxh3_128_digest(fields)


def entry(namespace: bytes, key: bytes, content: bytes | memoryview, packing: int = PLAIN) -> bytes:
    """A whole entry."""
    return header(namespace, key, content, packing) + bytes(content)


def key_of(data: memoryview | bytes, namespace: bytes) -> bytes:
    """Which block the entry that begins like this is of. Raises BadEntry."""
    return _read_header(data, namespace)[0]


def content_of(data: memoryview | bytes, namespace: bytes, key: bytes) -> tuple[memoryview, int]:
    """The content of the block that was asked for, within `data`, and how it is packed. Raises BadEntry."""
    found, packing, length, digest = _read_header(data, namespace)
    if found != key:
        raise BadEntry("foreign")
    content = memoryview(data)[HEADER_BYTES : HEADER_BYTES + length]
    if len(content) != length:
        raise BadEntry("truncated")
    if xxh3_128_digest(content) != digest:
        raise BadEntry("damaged")
    return content, packing


def _read_header(data: memoryview | bytes, namespace: bytes) -> tuple[bytes, int, int, bytes]:
    """(key, packing, length and digest of the content)"""
    fields = bytes(data[: _FIELDS.size])
    if len(data) < HEADER_BYTES or xxh3_128_digest(fields) != bytes(data[_FIELDS.size : HEADER_BYTES]):
        raise BadEntry("damaged")
    magic, version, packing, length, whose, key, digest = _FIELDS.unpack(fields)
    if magic != MAGIC or version != VERSION or whose != namespace:
        raise BadEntry("foreign")
    return key, packing, length, digest


def view_of(content: Tensor) -> memoryview:
    """The bytes of a row, not copied."""
    return content.numpy().data
