"""`make fuzz`: a hundred thousand inputs that are almost right; no crash, no INTERNAL, every refusal says something.

FUZZ_INPUTS of them in all, from FUZZ_SEED: six of ten on the wire, two as profiles, two as HTTP bodies. A real service
with a tiny model answers those that are right.
"""

import asyncio
import collections
import os
from importlib import resources

import grpc
import httpx
import pytest

from prefixrank.v1 import scorer_pb2 as pb
from scorer.config import Config
from scorer.errors import ProfileError
from scorer.http.app import make_app
from scorer.metrics import Metrics
from scorer.profile import _parse
from scorer.refusal import Refused
from scorer.register import decoder
from scorer.runtime import Runtime
from scorer.service import ScorerService
from tests.scorer.http.test_app import BODIES
from tests.targets.mutate import Mutator
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.target, pytest.mark.timeout(3600)]

INPUTS, SEED = int(os.environ.get("FUZZ_INPUTS", "100000")), int(os.environ.get("FUZZ_SEED", "0"))
AT_ONCE = 64
GOOD_BODIES = {
    "/v1/rerank": {"query": "q", "documents": ["a", {"text": "b"}], "rank_fields": ["text"]}
    | {"top_n": 1, "model": "m", "return_documents": True},
    "/v2/rerank": BODIES["/v2/rerank"] | {"top_n": 1, "max_tokens_per_doc": 5, "priority": 0},
    "/rerank": BODIES["/rerank"] | {"raw_scores": True, "truncate": True, "truncation_direction": "Left"},
    "/v1/score": BODIES["/v1/score"] | {"label_token_ids": [5, 6], "apply_softmax": True, "item_first": False},
    "/score": BODIES["/score"] | {"use_activation": False},
}


@pytest.fixture
def runtime(tmp_path):
    directory = tiny_model_dir(tmp_path)
    settings = {"model": str(directory), "profile": "instruct", "threads": 1, "max_message_bytes": 1 << 20}
    runtime = Runtime.load(Config.read(settings, environ={}))
    yield runtime
    runtime.close()


def over(runtime, scenario):
    """Runs `scenario(service)` on a service of its own loop."""

    async def all_of_it():
        service = ScorerService(Metrics("fuzz"), "fuzz")
        service.serve(runtime)
        try:
            return await scenario(service)
        finally:
            service.close()

    return asyncio.run(all_of_it())


def _checked(refusal, data):
    assert refusal.code is not grpc.StatusCode.INTERNAL, data.hex()
    assert refusal.message, data.hex()
    return refusal.code.name


def test_the_wire(runtime):
    mutator, decode, ends = Mutator(f"wire {SEED}"), decoder(pb.ScoreRequest), collections.Counter()

    async def one(service, data):
        try:
            response = await service.answer(decode(data), 60.0)
        except Refused as refused:
            ends[_checked(refused.refusal, data)] += 1
            return
        for result in response.results:
            assert not result.HasField("score") or abs(result.score) < float("inf"), data.hex()
        ends["OK"] += 1

    async def scenario(service):
        left = INPUTS * 6 // 10
        while left > 0:
            batch = [mutator.wire() for _ in range(min(AT_ONCE, left))]
            await asyncio.gather(*(one(service, data) for data in batch))
            left -= len(batch)

    over(runtime, scenario)
    print(dict(ends))
    assert ends.keys() <= {"OK", "INVALID_ARGUMENT"}
    assert ends["OK"] > INPUTS // 100, "some are right"
    assert ends["INVALID_ARGUMENT"] > INPUTS // 100, "some are wrong"


def test_profiles():
    good = [f.read_text(encoding="utf-8") for f in resources.files("scorer").joinpath("profiles").iterdir()]
    mutator, ends = Mutator(f"profile {SEED}"), collections.Counter()
    for _ in range(INPUTS * 2 // 10):
        data = mutator.damaged(mutator.random.choice(good).encode())
        try:
            _parse(data.decode("utf-8", "replace"), "fuzz")
            ends["loaded"] += 1
        except ProfileError as error:
            ends["refused" if str(error) else "refused without a word"] += 1
    print(dict(ends))
    assert ends.keys() == {"loaded", "refused"}
    assert min(ends.values()) > INPUTS // 1000


def test_http_bodies(runtime):
    mutator, ends = Mutator(f"http {SEED}"), collections.Counter()

    async def one(client, path, data):
        answer = await client.post(path, content=data, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 422), (answer.status_code, answer.text, path, data)
        assert answer.json(), (path, data)
        ends[answer.status_code] += 1

    async def scenario(service):
        app = make_app(service, "fuzz", 1 << 20, 60.0)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://fuzz") as client:
            left = INPUTS * 2 // 10
            while left > 0:
                paths = [mutator.random.choice(list(GOOD_BODIES)) for _ in range(min(AT_ONCE, left))]
                await asyncio.gather(*(one(client, path, mutator.body(GOOD_BODIES[path])) for path in paths))
                left -= len(paths)

    over(runtime, scenario)
    print(dict(ends))
    assert ends[200] > INPUTS // 1000
    assert ends[400] > INPUTS // 100
