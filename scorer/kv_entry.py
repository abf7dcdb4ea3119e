"""One block as it lies in a tier: a header that says whose and what it is, and a checksum of it all."""

from __future__ import annotations

import struct
from hashlib import blake2b

MAGIC = b"PXKV"
VERSION = 1
NAME_BYTES = DIGEST_BYTES = 16
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


def header(namespace: bytes, key: bytes, content: bytes) -> bytes:
    """The header of an entry."""
    fields = _FIELDS.pack(MAGIC, VERSION, 0, len(content), namespace, key, _digest(content))
    return fields + _digest(fields)


def entry(namespace: bytes, key: bytes, content: bytes) -> bytes:
    """A whole entry."""
    return header(namespace, key, content) + content


def read_header(data: bytes, namespace: bytes) -> tuple[bytes, int, bytes]:
    """(key, length and digest of the content). Raises BadEntry."""
    fields = data[: _FIELDS.size]
    if len(data) < HEADER_BYTES or _digest(fields) != data[_FIELDS.size : HEADER_BYTES]:
        raise BadEntry("damaged")
    magic, version, _, length, whose, key, digest = _FIELDS.unpack(fields)
    if magic != MAGIC or version != VERSION or whose != namespace:
        raise BadEntry("foreign")
    return key, length, digest


def content_of(data: bytes, namespace: bytes, key: bytes) -> bytes:
    """The content of the block that was asked for. Raises BadEntry."""
    found, length, digest = read_header(data, namespace)
    if found != key:
        raise BadEntry("foreign")
    content = data[HEADER_BYTES : HEADER_BYTES + length]
    if len(content) != length:
        raise BadEntry("truncated")
    if _digest(content) != digest:
        raise BadEntry("damaged")
    return content


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
