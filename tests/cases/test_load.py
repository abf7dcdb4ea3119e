"""Kinds of load: calls that are given up, large ones behind each other, lists beyond every limit; memory stays flat."""

import asyncio
import random

import grpc
import numpy as np
import psutil
import pytest

from attention.plans import Strategy
from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import ScorerError, build_request
from tests.cases.live import OK, PROFILE, TOLERANCE, UNCUT, live, pages_in_use, wire
from tests.tiny import tiny_model_dir, tiny_tokenizer

QUERY = "what is the capital of France"
WORDS = """the capital of France is Paris bananas grow in warm climates open settings choose
    security""".split()  # noqa: SIM905
GROWTH_MIB = 64  # that 8,000 more documents may add: allocators' slack, not K/V, whose pages are taken once


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def texts(rng, count, longest):
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def test_ten_thousand_documents_of_mixed_length_leave_memory_flat(directory, tmp_path):
    rng, process = random.Random(0), psutil.Process()
    with live(directory, PROFILE, tmp_path, check=False, threads=1) as server:
        held, scored = [], 0
        for _ in range(5):
            results = server.score(QUERY, texts(rng, 2000, 15)).results
            assert {r.status for r in results} == {OK}
            assert len({r.score for r in results}) > 1200
            scored += len(results)
            held.append(process.memory_info().rss >> 20)
        assert scored == 10_000
        assert server.metric("documents_total", status="ok") == 10_000
        assert held[-1] - held[0] < GROWTH_MIB, held


@pytest.mark.parametrize("seed", range(3))
def test_calls_that_are_given_up_cost_the_others_nothing(seed, directory, tmp_path):
    """Thirty calls, a third of which give up at a random moment; the rest score as alone, and no page is lost."""
    rng = random.Random(seed)
    with live(directory, PROFILE, tmp_path, check=False, max_pass_tokens=256, cache_tokens=2048) as server:
        asked = [texts(rng, rng.randint(1, 12), 20) for _ in range(30)]
        alone = {text: score for each in asked for text, score in zip(each, server.scores(QUERY, each), strict=True)}
        before = server.metric("requests_total", code="CANCELLED")

        async def call(documents, patience):
            strategy = wire(rng.choice([None, *Strategy]))
            request = build_request(QUERY, documents, strategy=strategy, max_tokens_per_document=UNCUT)
            task = asyncio.create_task(server.at.client.score_request(request))
            await asyncio.wait((task,), timeout=patience)
            if patience is not None:
                task.cancel()
            return await asyncio.gather(task, return_exceptions=True)

        async def all_at_once():
            # Some at once, whatever the machine's speed; others perhaps in the middle.
            patience = [0.0 if n % 8 == 0 else rng.choice([None, None, rng.random() * 0.2]) for n in range(len(asked))]
            ended = await asyncio.gather(*map(call, asked, patience))
            async with asyncio.timeout(20):
                while server.at.service.calls.in_flight:
                    await asyncio.sleep(0.01)
            return ended

        given_up = 0
        for documents, (ended,) in zip(asked, server.runner.run(all_at_once()), strict=True):
            if isinstance(ended, asyncio.CancelledError):
                given_up += 1
                continue
            for text, result in zip(documents, ended.results, strict=True):
                assert result.score == pytest.approx(alone[text], abs=TOLERANCE)
        assert given_up >= 4
        assert 0 <= server.metric("requests_total", code="CANCELLED") - before <= given_up
        assert server.runtime.batcher.queued_tokens == 0
        assert pages_in_use(server.runtime.batcher) == 0


def test_a_deadline_shorter_than_the_queue_costs_the_device_nothing(directory, tmp_path):
    with live(directory, PROFILE, tmp_path, check=False, max_pass_tokens=256) as server:
        rng = random.Random(1)
        large, small = texts(rng, 2000, 40), texts(rng, 3, 5)

        async def scenario():
            first = asyncio.create_task(server.at.client.score(QUERY, large, timeout=120))
            while not server.runtime.batcher.queued_tokens:
                await asyncio.sleep(0.001)
            computed = server.metric("computed_tokens_total")
            with pytest.raises(ScorerError) as caught:
                await server.at.client.score(QUERY, small, timeout=0.0005)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            return caught.value.code, server.metric("computed_tokens_total") - computed

        code, computed = server.runner.run(scenario())
        # Refused at once where it arrives within its half millisecond.
        assert code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert computed == 0


@pytest.mark.parametrize("times", [1, 5])
def test_more_documents_than_the_limit_are_refused_with_both_numbers(times, directory, tmp_path):
    with live(directory, PROFILE, tmp_path, check=False, max_documents=40) as server:
        told = server.refused(build_request("q", ["a"] * (40 * times + 1)))
        assert told == {"documents": f"between 1 and 40 documents, got {40 * times + 1}"}
        assert len(server.scores("q", [f"a {i}" for i in range(40)])) == 40


def test_a_list_of_every_kind_of_document_has_a_verdict_for_each(directory, tmp_path):
    """Blank, too long, broken, whole, raw, equal: in order, and the good ones score as alone."""
    kinds = {
        "blank": (pb.Document(text=" \n"), pb.DOCUMENT_STATUS_EMPTY),
        "cut": (pb.Document(text="a b " * 300), OK),
        "raw": (pb.Document(raw_text=" a raw text"), OK),
        "raw, too long": (pb.Document(raw_text="a b " * 3000), pb.DOCUMENT_STATUS_TOO_LONG),
        "ids": (pb.Document(token_ids=pb.TokenIds(ids=[5, 6, 7])), OK),
        "ids, too high": (pb.Document(token_ids=pb.TokenIds(ids=[5, 60_000])), pb.DOCUMENT_STATUS_INVALID),
        "no ids": (pb.Document(token_ids=pb.TokenIds()), pb.DOCUMENT_STATUS_EMPTY),
        "zero width": (pb.Document(text="\u200b\ufeff"), pb.DOCUMENT_STATUS_EMPTY),
        "plain": (pb.Document(text="The capital of France is Paris."), OK),
    }
    with live(directory, PROFILE, tmp_path, check=False, max_context_tokens=600) as server:

        def send(documents):
            return server.send(pb.ScoreRequest(query=pb.QueryPrefix(text="q"), documents=documents)).results

        for seed in range(5):
            names = random.Random(seed).choices(list(kinds), k=40)
            results = send([kinds[name][0] for name in names])
            assert [r.status for r in results] == [kinds[name][1] for name in names]
            good = [(name, r.score) for name, r in zip(names, results, strict=True) if r.status == OK]
            for name, score in good:
                assert score == pytest.approx(send([kinds[name][0]])[0].score, abs=TOLERANCE)
            assert all(r.message for r in results if r.status != OK)


# --- tokenizers as they come


@pytest.mark.parametrize("setting", ["left", "right", "truncates", "pads", "no pad token"])
def test_how_a_tokenizer_would_pad_or_cut_is_no_matter(setting, directory, tmp_path):
    tokenizer = tiny_tokenizer(pad=setting != "no pad token")
    if setting in ("left", "right"):
        tokenizer.padding_side = tokenizer.truncation_side = setting
    if setting == "truncates":
        tokenizer.backend_tokenizer.enable_truncation(5)
        tokenizer.model_max_length = 5
    if setting == "pads":
        tokenizer.backend_tokenizer.enable_padding(length=50, pad_id=0, pad_token="<|endoftext|>")
    other = tiny_model_dir(tmp_path / "other", tokenizer=tokenizer)
    documents = ["The capital of France is Paris.", "x", "Bananas grow in warm climates. " * 5]
    with live(directory, PROFILE, tmp_path, check=False) as server:
        expected = server.scores(QUERY, documents)
        ids = server.ids(QUERY, documents[0])
    with live(other, PROFILE, tmp_path) as server:
        np.testing.assert_allclose(server.scores(QUERY, documents), expected, rtol=0, atol=TOLERANCE)
        assert server.ids(QUERY, documents[0]) == ids
