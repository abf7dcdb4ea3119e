"""A live server in this process over a checkpoint, and the truth to hold its scores against."""

import asyncio
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import ScorerError, build_request
from scorer.config import Config
from scorer.profile import Profile, record_golden
from scorer.runtime import Runtime
from tests.batching.fake import blocks_in_use
from tests.scorer.test_service import count, served

TOLERANCE = 1e-4
APART = 1e-3  # documents whose scores differ by less could be told apart by rounding alone
OK, EMPTY, TOO_LONG = pb.DOCUMENT_STATUS_OK, pb.DOCUMENT_STATUS_EMPTY, pb.DOCUMENT_STATUS_TOO_LONG
LIMIT = 24  # tokens of a document under PROFILE
QUERY_LIMIT = 32
PROFILE = Profile(
    name="tiny",
    kind="label_logits",
    prefix="<|im_start|>user\nQuery: {query}\nPassage:",
    item=" {document} End.\nRelevant?<|im_end|>\n<|im_start|>assistant\n",
    labels=("yes", "no"),
    positive="yes",
    limits={"max_query_tokens": QUERY_LIMIT, "default_tokens_per_document": LIMIT, "max_tokens_per_document": 512},
)
UNCUT = 512  # max_tokens_per_document of requests that are about something else


@dataclass(frozen=True)
class Live:
    """A server in this process; its loop runs while a call is under way."""

    runner: asyncio.Runner
    at: object
    runtime: Runtime
    directory: Path

    def send(self, request):
        return self.runner.run(self.at.client.score_request(request))

    def score(self, query, documents, strategy=None, **options):
        options.setdefault("max_tokens_per_document", UNCUT)
        return self.send(build_request(query, documents, strategy=wire(strategy), **options))

    def scores(self, query, documents, strategy=None, **options):
        results = self.score(query, documents, strategy, **options).results
        assert [r.status for r in results] == [OK] * len(documents), [r.message for r in results]
        return np.array([r.score for r in results])

    def refused(self, request):
        with pytest.raises(ScorerError) as caught:
            self.send(request)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        return {v.field: v.description for v in caught.value.violations}

    def ids(self, query, document, **options):
        """Prefix and item of one document as the service tokenises it."""
        found = self.runtime.tokenization.tokenize(build_request(query, [document], **options))
        return found.request.prefix.tolist(), found.request.items[0].ids.tolist()

    @property
    def labels(self):
        return [label.token_id for label in self.runtime.tokenization.labels]

    def truth(self, query, documents):
        """Log-odds by transformers alone, of the profile's text as its own tokenizer encodes it."""
        profile, tokenizer = self.runtime.profile, plain_tokenizer(self.directory)
        found = []
        for document in documents:
            text = (profile.prefix + profile.item).replace("{query}", query).replace("{document}", document)
            found.append(log_odds(self.directory, tokenizer(text).input_ids, self.labels))
        return np.array(found)

    def metric(self, name, **labels):
        return count(self.at.metrics, name, **labels)


@contextmanager
def live(directory, profile, tmp_path, check=True, **settings):
    """`profile`: a name, or a Profile that is written to a file as a user would."""
    if isinstance(profile, Profile):
        record_golden(path := tmp_path / f"{profile.revision}.toml", profile, ())
        profile = path
    runtime = Runtime.load(Config.read({"model": str(directory), "profile": str(profile), **settings}, environ={}))
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            if check:
                runtime.check()
            at = runner.run(stack.enter_async_context(served(runtime)))
            yield Live(runner, at, runtime, Path(directory))
        finally:
            runner.run(stack.aclose())
            runner.run(runtime.batcher.drain())
            runtime.close()


@cache
def plain_tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


@cache
def plain_model(directory):
    return AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=torch.float32, attn_implementation="eager"
    )


@torch.no_grad()
def log_odds(directory, ids, labels):
    positive, other = plain_model(directory)(torch.tensor([ids]), use_cache=False).logits[0, -1, labels].tolist()
    return positive - other


def wire(strategy):
    return pb.STRATEGY_UNSPECIFIED if strategy is None else pb.Strategy.Value(f"STRATEGY_{strategy.name}")


def ids_request(prefix, items, strategy=None):
    return pb.ScoreRequest(
        token_ids=pb.TokenIds(ids=prefix),
        documents=[pb.Document(token_ids=pb.TokenIds(ids=item)) for item in items],
        options=pb.ScoreOptions(strategy=wire(strategy)),
    )


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


def all_apart(scores):
    return min(abs(a - b) for a, b in combinations(scores, 2)) > APART


def pages_in_use(batcher):
    """Pages that some request holds; checks that each is free or in the index of what is kept for later."""
    cache = batcher.cache
    assert cache.pool.free + len(cache) == cache.pool.pages
    return blocks_in_use(cache)
