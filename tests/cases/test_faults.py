"""Fault injection: whatever fails, hangs or is cancelled, each call gets one answer or one status, the answers are
right, no page is lost, and the next call is served."""

import asyncio
import random
import threading
from collections import Counter
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest
import torch

from prefixrank.v1 import scorer_pb2 as pb
from scorer import score_request
from scorer.client import ScorerError, build_request
from tests.cases.live import OK, PROFILE, UNCUT, close, live, pages_in_use
from tests.tiny import tiny_model_dir

QUERY = "what is the capital of France"
TEXTS = [
    "The capital of France is Paris.",
    "Bananas grow in warm climates.",
    "x",
    "7 digits 1234567",
    "Seven ways. " * 9,
]
CODE = grpc.StatusCode
LATE = {CODE.DEADLINE_EXCEEDED, CODE.RESOURCE_EXHAUSTED}  # the latter where it was seen to be late before it began
SECONDS = 20  # within which everything ends


class Broken(Exception):
    """Whatever a library may raise."""


def broken():
    raise Broken("injected: secret words of a document")


def out_of_memory():
    raise MemoryError


def out_of_device_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def asked_to_exit():
    raise SystemExit(3)  # on a thread that is not the main one


FAILURES = {
    "error": broken,
    "memory": out_of_memory,
    "device memory": out_of_device_memory,
    "exit": asked_to_exit,
}


@dataclass
class Point:
    """A call on a request's way that does what a test says, once for each thing said; then it works again."""

    work: object
    todo: list = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    after: object = None

    def __call__(self, *args, **kwargs):
        if self.todo:
            self.todo.pop(0)()
        made = self.work(*args, **kwargs)
        return made if self.after is None else self.after(made)

    def hang(self):
        self.hanging.set()
        assert self.released.wait(SECONDS)


# Where it may happen, and whether it is on the device's thread.
POINTS = {
    "tokenize": (lambda s: (s.runtime.tokenization, "tokenize"), False),
    "plan": (lambda s: (s.runtime.engine, "_planner"), True),
    "begin": (lambda s: (s.runtime.engine.attention, "begin"), True),
    "forward": (lambda s: (s.runtime.engine.model, "forward"), True),
    "logits": (lambda s: (s.runtime.engine.model, "logits"), True),
    "log-sum-exp": (lambda s: (s.runtime.engine.model, "log_sum_exp"), True),
    "results": (lambda s: (score_request, "document_results"), False),
    "response": (lambda s: (score_request, "score_response"), False),
    "metrics": (lambda s: (s.at.metrics, "answered"), False),
}
HANGING = [name for name in POINTS if name not in ("results", "response", "metrics")]  # these are on the loop itself
on_the_device = pytest.mark.parametrize("point", [name for name, (_, device) in POINTS.items() if device])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(directory, tmp_path):
    """Passes of 96 tokens: a call of five documents needs several, over kept pages."""
    settings = {"max_pass_tokens": 96, "cache_tokens": 1024, "threads": 1}
    with live(directory, PROFILE, tmp_path, check=False, **settings) as made:
        made.scores(QUERY, TEXTS)  # everything has run once
        yield made


@pytest.fixture
def truth(server):
    return dict(zip(TEXTS, server.truth(QUERY, TEXTS), strict=True))


def put(monkeypatch, server, name, after=None):
    owner, attribute = POINTS[name][0](server)
    point = Point(getattr(owner, attribute), after=after)
    monkeypatch.setattr(owner, attribute, point)
    return point


def call(server, texts=TEXTS, **options):
    return server.at.client.score_request(build_request(QUERY, texts, max_tokens_per_document=UNCUT), **options)


def counted(server):
    return Counter({code.name: int(server.metric("requests_total", code=code.name)) for code in grpc.StatusCode})


def outcomes(server, work):
    """What each call ended with, once everything has ended; and how many ended with which code by the metrics."""
    before = counted(server)

    async def ended():
        async with asyncio.timeout(SECONDS):
            results = await work()
            while server.at.service.calls.in_flight:
                await asyncio.sleep(0.005)
            return results

    results = server.runner.run(ended())
    return results, counted(server) - before


def settled(server):
    """Nothing waits, runs or is held."""

    async def quiet():
        async with asyncio.timeout(SECONDS):
            while (
                server.runtime.batcher.queued_tokens
                or pages_in_use(server.runtime.batcher)
                or server.at.service.tokenizers.bytes
            ):
                await asyncio.sleep(0.005)

    server.runner.run(quiet())


def right(response, truth, texts=TEXTS):
    assert {r.status for r in response.results} == {OK}
    close([r.score for r in response.results], [truth[text] for text in texts])


async def gathered(calls):
    return await asyncio.gather(*calls, return_exceptions=True)


# --- one fault


# A request to exit that is raised on the loop itself is one: it has to end the process.
ONE_FAULT = [(point, failure) for point in POINTS for failure in FAILURES if failure != "exit" or point in HANGING]


@pytest.mark.parametrize(("point", "failure"), ONE_FAULT)
def test_what_fails_fails_its_own_calls_and_no_others(point, failure, server, truth, monkeypatch, caplog):
    put(monkeypatch, server, point).todo.append(FAILURES[failure])
    errors = server.metric("internal_errors_total")
    ended, codes = outcomes(server, lambda: gathered(call(server) for _ in range(6)))
    failed = [each for each in ended if isinstance(each, BaseException)]
    assert failed
    for error in failed:
        assert isinstance(error, ScorerError)
        assert error.code is CODE.INTERNAL
        assert "secret" not in error.message
    for response in ended:
        if not isinstance(response, BaseException):
            right(response, truth)
    assert codes == Counter(OK=6 - len(failed), INTERNAL=len(failed))
    assert server.metric("internal_errors_total") - errors == len(failed)
    assert len(failed) < 6 or POINTS[point][1], "a call beside the device fails alone"
    right(server.runner.run(call(server)), truth)
    settled(server)


@pytest.mark.parametrize("point", HANGING)
def test_what_hangs_holds_up_nobody_past_a_deadline(point, server, truth, monkeypatch):
    hung = put(monkeypatch, server, point)
    hung.todo.append(hung.hang)

    async def scenario():
        calls = [asyncio.create_task(call(server, timeout=0.3)) for _ in range(3)]
        patient = asyncio.create_task(call(server))
        await asyncio.gather(*calls, return_exceptions=True)
        hung.released.set()
        return await gathered([*calls, patient])

    ended, codes = outcomes(server, scenario)
    late = [each for each in ended[:3] if isinstance(each, BaseException)]
    assert late
    assert {error.code for error in late} <= LATE
    for response in ended:
        if not isinstance(response, BaseException):
            right(response, truth)
    assert not isinstance(ended[3], BaseException)
    # On its way a call takes some of its time: where the server sees it go before its deadline, it counts as cancelled.
    assert sum(codes.values()) == 4
    assert set(codes) <= {"OK", "CANCELLED", *(code.name for code in LATE)}
    assert codes["OK"] == 4 - len(late)
    right(server.runner.run(call(server)), truth)
    settled(server)


@pytest.mark.parametrize("point", HANGING)
def test_a_call_cancelled_anywhere_is_gone(point, server, truth, monkeypatch):
    hung = put(monkeypatch, server, point)
    hung.todo.append(hung.hang)

    async def scenario():
        cancelled = asyncio.create_task(call(server))
        assert await asyncio.to_thread(hung.hanging.wait, SECONDS)
        other = asyncio.create_task(call(server, TEXTS[:2]))
        while server.at.service.calls.in_flight < 2 and not other.done():  # it may overtake the one that hangs
            await asyncio.sleep(0.005)
        before = counted(server)["CANCELLED"]
        cancelled.cancel()
        while counted(server)["CANCELLED"] == before:  # the server has heard of it, whatever still hangs
            await asyncio.sleep(0.005)
        hung.released.set()
        return await gathered([cancelled, other])

    (cancelled, other), codes = outcomes(server, scenario)
    assert isinstance(cancelled, asyncio.CancelledError)
    right(other, truth, TEXTS[:2])
    assert codes == Counter(OK=1, CANCELLED=1)
    settled(server)


@pytest.mark.parametrize("point", ["forward", "logits"])
def test_numbers_that_are_none_are_no_scores(point, server, truth, monkeypatch):
    """One pass returns nothing but NaN, and what it left in pages that are kept is not read again."""
    bad = put(monkeypatch, server, point)
    times = []

    def spoil(made):
        times.append(1)
        return made * float("nan") if len(times) == 1 else made

    bad.after = spoil
    response = server.runner.run(call(server))
    for text, result in zip(TEXTS, response.results, strict=True):
        assert result.status in (OK, pb.DOCUMENT_STATUS_NUMERIC_ERROR)
        if result.status == OK:
            assert result.score == pytest.approx(truth[text], abs=1e-4)
        else:
            assert not result.HasField("score")
    assert pb.DOCUMENT_STATUS_NUMERIC_ERROR in {r.status for r in response.results}
    right(server.runner.run(call(server)), truth)
    settled(server)


# --- a device that is gone


@on_the_device
def test_a_device_that_fails_again_and_again_is_given_up_and_everybody_told(point, server, monkeypatch):
    put(monkeypatch, server, point).todo += [broken] * 100
    ended, codes = outcomes(server, lambda: gathered(call(server) for _ in range(12)))
    assert {error.code for error in ended} <= {CODE.INTERNAL, CODE.UNAVAILABLE}
    assert sum(codes.values()) == 12

    async def until_gone():
        async with asyncio.timeout(SECONDS):
            while True:
                (error,) = await gathered([call(server)])
                if error.code is CODE.UNAVAILABLE:
                    return await server.runtime.batcher.failed()

    assert "passes in a row failed" in server.runner.run(until_gone())
    assert pages_in_use(server.runtime.batcher) == 0


@pytest.mark.parametrize("point", ["plan", "forward"])
def test_a_device_that_hangs_for_good_is_given_up_and_everybody_told(point, directory, tmp_path, monkeypatch):
    """Callers without a deadline, too: the thread cannot be stopped, so the service ends."""
    with live(directory, PROFILE, tmp_path, check=False, max_pass_tokens=96, max_pass_seconds=2) as server:
        server.scores(QUERY, TEXTS)
        hung = put(monkeypatch, server, point)
        hung.todo.append(hung.hang)
        ended, codes = outcomes(server, lambda: gathered(call(server) for _ in range(6)))
        assert {error.code for error in ended} <= {CODE.INTERNAL, CODE.UNAVAILABLE}
        assert sum(codes.values()) == 6
        failed = server.runner.run(asyncio.wait_for(server.runtime.batcher.failed(), SECONDS))
        assert failed == "a pass did not end within 2 seconds"
        (error,) = server.runner.run(gathered([call(server)]))
        assert error.code is CODE.UNAVAILABLE
        hung.released.set()


def test_a_device_thread_that_is_gone_leaves_nobody_waiting(server, monkeypatch):
    """The thread is shut down under a pass, with calls behind it."""
    hung = put(monkeypatch, server, "forward")
    hung.todo.append(hung.hang)

    async def scenario():
        calls = [asyncio.create_task(call(server)) for _ in range(6)]
        assert await asyncio.to_thread(hung.hanging.wait, SECONDS)
        closing = asyncio.create_task(asyncio.to_thread(server.runtime.engine.close))
        await asyncio.sleep(0.05)
        hung.released.set()
        await closing
        return await gathered(calls)

    ended, codes = outcomes(server, scenario)
    assert sum(codes.values()) == 6
    for each in ended:
        assert isinstance(each, pb.ScoreResponse) or each.code in (CODE.INTERNAL, CODE.UNAVAILABLE)
    assert any(isinstance(each, ScorerError) for each in ended)


# --- many at once


@pytest.mark.parametrize("seed", range(8))
def test_a_storm_of_faults_loses_no_call_no_page_and_no_score(seed, server, truth, monkeypatch):
    """Calls of random documents meet random faults at random points, cancel and expire at random moments."""
    rng = random.Random(seed)
    points = {name: put(monkeypatch, server, name) for name in POINTS}
    calls, given_up, hurried = 40, set(), set()

    def soon():
        threading.Event().wait(rng.random() * 0.02)

    async def one(number):
        await asyncio.sleep(rng.random() * 0.5)
        texts = rng.choices(TEXTS, k=rng.randint(1, 8))
        timeout = rng.choice([None, None, None, rng.random() * 0.1])
        if timeout is not None:
            hurried.add(number)
        task = asyncio.create_task(call(server, texts, timeout=timeout))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.05)
            given_up.add(number)
            task.cancel()
        (ended,) = await gathered([task])
        return texts, ended

    async def storm():
        tasks = [asyncio.create_task(one(number)) for number in range(calls)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.03)
            name = rng.choice(list(points))
            if not points[name].todo:
                # Never two at the device: three failures in a row are another test.
                busy = any(points[n].todo for n, (_, device) in POINTS.items() if device)
                if not (busy and POINTS[name][1]):
                    faults = [soon, *FAILURES.values()] if name in HANGING else [broken, out_of_memory]
                    points[name].todo += [rng.choice(faults), lambda: None, lambda: None, lambda: None]
        return await asyncio.gather(*tasks)

    ended, codes = outcomes(server, storm)
    kinds = Counter()
    for number, (texts, result) in enumerate(ended):
        if isinstance(result, pb.ScoreResponse):
            right(result, truth, texts)
            kinds["OK"] += 1
        elif isinstance(result, asyncio.CancelledError):
            assert number in given_up
        else:
            assert result.code is CODE.INTERNAL or (result.code in LATE and number in hurried), result
            kinds[result.code.name] += 1
    assert kinds["OK"] > 5
    assert kinds["INTERNAL"] > 0
    assert codes["INTERNAL"] >= kinds["INTERNAL"]  # one that was given up may have failed as well
    assert kinds["OK"] <= codes["OK"] <= kinds["OK"] + len(given_up)
    assert sum(codes.values()) <= calls
    settled(server)
    for name in points:
        points[name].todo.clear()
    right(server.runner.run(call(server)), truth)
    assert np.isfinite(list(truth.values())).all()


# --- streams and warming


@pytest.mark.parametrize("point", POINTS)
def test_on_a_stream_each_request_has_one_answer_whatever_fails(point, server, truth, monkeypatch):
    put(monkeypatch, server, point).todo.append(broken)
    before = counted(server)
    asked = [build_request(QUERY, TEXTS, request_id=f"r{number}", max_tokens_per_document=UNCUT) for number in range(8)]

    async def scenario():
        async with asyncio.timeout(SECONDS):
            return [answer async for answer in server.at.client.score_stream(asked)]

    answers = server.runner.run(scenario())
    assert sorted(id for id, _ in answers) == sorted(request.request_id for request in asked)
    failed = [answer for _, answer in answers if isinstance(answer, ScorerError)]
    assert failed
    assert {error.code for error in failed} == {CODE.INTERNAL}
    for _, answer in answers:
        if not isinstance(answer, ScorerError):
            right(answer, truth)
    assert counted(server) - before == Counter(OK=8 - len(failed), INTERNAL=len(failed))
    settled(server)


@on_the_device
def test_a_prefix_that_could_not_be_warmed_is_not_taken_for_warm(point, server, truth, monkeypatch):
    """The pages of a pass that failed hold nothing."""
    fault = put(monkeypatch, server, point)
    query = "a query that nobody asked before"
    expected = server.truth(query, TEXTS)

    async def warmed():
        return await gathered([server.at.client.warm_prefix(pb.WarmPrefixRequest(query=pb.QueryPrefix(text=query)))])

    fault.todo.append(broken)
    (first,) = server.runner.run(warmed())
    assert first.code is CODE.INTERNAL
    response = server.score(query, TEXTS)
    assert response.usage.cached_prefix_tokens == 0
    close([r.score for r in response.results], expected)
    (second,) = server.runner.run(warmed())
    assert second.status in (pb.WARM_STATUS_WARMED, pb.WARM_STATUS_ALREADY_WARM)
    settled(server)
