"""A little traffic for the checks that need a server at work."""

import asyncio
import contextlib
import time

from scorer.client import AsyncScorerClient, ScorerError
from scorer.demo import LOOPBACK_OPTIONS, demo_queries


async def traffic(target, seconds, concurrency=3):
    """Scores the demo's queries, with one refused call in ten; returns how many were answered and refused."""
    answered = refused = 0
    queries, end = demo_queries(), time.monotonic() + seconds

    async def work(client, number):
        nonlocal answered, refused
        while time.monotonic() < end:
            number += 1
            query = queries[number % len(queries)]
            documents = [d["text"] for d in query["documents"]][: 1 + number % 4]
            try:
                await client.score(query["query"], documents if number % 10 else [], timeout=30)
                answered += 1
            except ScorerError:
                refused += 1

    async with AsyncScorerClient(target, channel_options=LOOPBACK_OPTIONS) as client:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*(work(client, 7 * worker) for worker in range(concurrency)))
    return answered, refused
