"""An arrival as the request that a search service would send."""

from __future__ import annotations

from loadtest.workload import Arrival, Profile, document_texts, prefix_text
from prefixrank.v1 import scorer_pb2 as pb

QUERY_TOKENS = 256  # a longer prefix is a user's history, not a query: it goes as the whole prefix


def request_of(profile: Profile, arrival: Arrival) -> pb.ScoreRequest:
    """A short prefix is the query of the served profile, a long one the whole prefix."""
    asked = pb.ScoreRequest(documents=[pb.Document(text=text) for text in document_texts(arrival)])
    prefix = prefix_text(profile, arrival)
    if arrival.prefix_tokens <= QUERY_TOKENS:
        asked.query.text = prefix
    else:
        asked.raw_text = prefix
    return asked
