"""What calls that share a prefix have in common, for a proxy that sends them to the same replica."""

from __future__ import annotations

import hashlib

from prefixrank.v1 import scorer_pb2 as pb

HEADER = "x-prefixrank-affinity"


def affinity(request: pb.ScoreRequest | pb.WarmPrefixRequest | pb.BeamSearchRequest) -> str:
    """A digest of the tenant and of the prefix as the caller gave it.

    Empty where there is no prefix of the caller's own: all that is then shared is the profile's template, and every
    replica has that.
    """
    kind = request.WhichOneof("prefix")
    if kind is None:
        return ""
    own = getattr(request, kind)
    content = own.encode() if isinstance(own, str) else own.SerializeToString(deterministic=True)
    if not content:
        return ""
    parts = (request.tenant.encode(), kind.encode(), content)
    return hashlib.blake2b(b"".join(len(p).to_bytes(8, "big") + p for p in parts), digest_size=8).hexdigest()
