"""What a caller gets wrong, in both clients: its own error comes back to it, or one that names what is wrong."""

import asyncio
import math
import threading
from contextlib import contextmanager

import grpc
import pytest

from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import AsyncScorerClient, ScorerClient, ScorerError, build_request
from tests.scorer.test_client import Recording, both, call, recording

pytestmark = pytest.mark.timeout(60)
REQUEST = build_request("q", ["a"], request_id="1")


class Streaming(Recording):
    """Answers streams too, and a query "wait" only when its call has ended."""

    def __init__(self):
        super().__init__()
        self.deadlines, self.waiting, self.fails_at_the_end = [], threading.Event(), False

    def Score(self, request, context):  # noqa: N802
        self.deadlines.append(context.time_remaining())
        if request.query.text == "wait":
            ended = threading.Event()
            context.add_callback(ended.set)
            self.waiting.set()
            ended.wait(20)
        return super().Score(request, context)

    def ScoreStream(self, requests, context):  # noqa: N802
        for message in requests:
            answer = super().Score(message.request, context)
            yield pb.ScoreStreamResponse(request_id=message.request.request_id, response=answer)
        if self.fails_at_the_end:
            context.abort(grpc.StatusCode.INTERNAL, "after all requests")


@contextmanager
def streaming():
    """(target, servicer)"""
    servicer = Streaming()
    with recording(servicer=servicer) as (target, _, _):
        yield target, servicer


def ids_on_stream(target, flavour, requests, ids):
    """Appends the ids of what was answered to `ids`."""
    if flavour == "sync":
        with ScorerClient(target) as client:
            ids.extend(id_ for id_, _ in client.score_stream(requests))
        return

    async def worker(client):
        async for id_, _ in client.score_stream(requests):
            ids.append(id_)

    async def scenario():
        async with AsyncScorerClient(target) as client, asyncio.TaskGroup() as group:
            group.create_task(worker(client))

    try:
        asyncio.run(scenario())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def raising(error):
    yield REQUEST
    raise error


async def raising_async(error):
    yield REQUEST
    raise error


class Own(BaseException):
    """Not even an Exception."""


@pytest.mark.parametrize("error", [KeyError("a bug of the caller's"), ValueError("another"), Own("third")])
@pytest.mark.parametrize(("flavour", "source"), [("sync", raising), ("async", raising), ("async", raising_async)])
def test_what_the_callers_iterator_raises_reaches_the_caller(flavour, source, error):
    answered = []
    with streaming() as (target, _), pytest.raises(type(error)) as caught:
        ids_on_stream(target, flavour, source(error), answered)
    assert caught.value is error
    assert flavour == "async" or answered == ["1"]


@both
@pytest.mark.parametrize(
    ("requests", "told"),
    [
        (5, "'int' object is not iterable"),
        (["a"], "requests: a ScoreRequest each, got str"),
        ("abc", "requests: a ScoreRequest each, got str"),
        ([REQUEST, None], "requests: a ScoreRequest each, got NoneType"),
        (REQUEST, "not iterable"),
    ],
)
def test_what_is_no_iterable_of_requests_is_told(flavour, requests, told):
    with streaming() as (target, _), pytest.raises(TypeError, match=told):
        ids_on_stream(target, flavour, requests, [])


@both
def test_the_callers_error_is_told_where_the_call_fails_too(flavour):
    with streaming() as (target, servicer):
        servicer.fails_at_the_end = True
        with pytest.raises(ScorerError, match="INTERNAL: after all requests"):
            ids_on_stream(target, flavour, [REQUEST], [])
        with pytest.raises(KeyError):
            ids_on_stream(target, flavour, raising(KeyError("k")), [])


def test_a_task_that_is_cancelled_in_a_stream_ends_as_cancelled():
    async def scenario(target):
        begun = asyncio.Event()

        async def never():
            begun.set()
            await asyncio.Event().wait()
            yield REQUEST

        async def worker(client):
            return [id_ async for id_, _ in client.score_stream(never())]

        async with AsyncScorerClient(target) as client:
            task = asyncio.create_task(worker(client))
            await begun.wait()
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled()

    with streaming() as (target, _):
        assert asyncio.run(scenario(target))


TIMED = [
    ("timeout", "score", ("q", ["a"])),
    ("timeout", "score_request", (REQUEST,)),
    ("timeout", "warm_prefix", (pb.WarmPrefixRequest(raw_text="p"),)),
    ("timeout", "beam_search", (pb.BeamSearchRequest(raw_text="p"),)),
    ("timeout", "model_info", ()),
    ("timeout", "wait_until_serving", ()),
    ("timeout", "score_stream", ([REQUEST],)),
    ("request_timeout", "score_stream", ([REQUEST],)),
]


def called(target, flavour, method, *args, **options):
    """As `call`, and a stream to its end."""
    if method != "score_stream":
        return call(target, flavour, method, *args, **options)
    if flavour == "sync":
        with ScorerClient(target) as client:
            return list(client.score_stream(*args, **options))

    async def scenario():
        async with AsyncScorerClient(target) as client:
            return [answer async for answer in client.score_stream(*args, **options)]

    return asyncio.run(scenario())


@both
@pytest.mark.parametrize(("name", "method", "args"), TIMED)
@pytest.mark.parametrize("bad", [0, -1, -1e30, math.inf, math.nan, "5", True, [1]])
def test_what_is_no_number_of_seconds_is_refused_by_name(flavour, name, method, args, bad):
    with pytest.raises(ValueError, match=f"^{name}: a positive finite number of seconds, got"):
        called("127.0.0.1:1", flavour, method, *args, **{name: bad})


@both
@pytest.mark.parametrize("timeout", [60, 4e9, 9e9, 1e12, 1e308, pytest.param(10**400, id="10**400"), None])
def test_a_time_that_grpc_cannot_hold_is_a_long_one(flavour, timeout):
    with streaming() as (target, servicer):
        call(target, flavour, "score", "q", ["a"], timeout=timeout)
        called(target, flavour, "score_stream", [REQUEST], timeout=timeout)
        if timeout is not None:
            call(target, flavour, "wait_until_serving", timeout=timeout)
        left = servicer.deadlines[0]
    if timeout is not None:
        assert left > min(timeout, 27_000 * 3600) / 2  # more hours gRPC sends to no server


CALLS = [
    ("score", ("q", ["a"])),
    ("score_request", (REQUEST,)),
    ("warm_prefix", (pb.WarmPrefixRequest(raw_text="p"),)),
    ("beam_search", (pb.BeamSearchRequest(raw_text="p"),)),
    ("model_info", ()),
    ("wait_until_serving", ()),
    ("score_stream", ([REQUEST],)),
]


@both
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize(("method", "args"), CALLS)
def test_a_closed_client_says_so(flavour, used, method, args):
    def sync(target):
        client = ScorerClient(target)
        if used:
            client.model_info()
        client.close()
        answer = getattr(client, method)(*args)
        return list(answer)

    async def scenario(target):
        client = AsyncScorerClient(target)
        if used:
            await client.model_info()
        await client.close()
        answer = getattr(client, method)(*args)
        return [part async for part in answer] if method == "score_stream" else await answer

    with streaming() as (target, _), pytest.raises(ScorerError, match="CANCELLED: the client is closed"):
        sync(target) if flavour == "sync" else asyncio.run(scenario(target))


@both
def test_a_call_under_way_when_its_client_is_closed_gets_an_error_and_no_cancellation(flavour):
    def sync(target, servicer):
        client = ScorerClient(target)
        threading.Thread(target=lambda: (servicer.waiting.wait(20), client.close())).start()
        client.score("wait", ["a"])

    async def scenario(target, servicer):
        client = AsyncScorerClient(target)
        task = asyncio.create_task(client.score("wait", ["a"]))
        await asyncio.to_thread(servicer.waiting.wait, 20)
        await client.close()
        await task

    with streaming() as (target, servicer), pytest.raises(ScorerError) as caught:
        sync(target, servicer) if flavour == "sync" else asyncio.run(scenario(target, servicer))
    assert caught.value.code is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("kind", [ScorerClient, AsyncScorerClient])
@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("sécret", r"U\+00E9 at character 2"),
        ("two\nlines", r"U\+000A at character 4"),
        ("nul\0", r"U\+0000 at character 4"),
        ("\x7fdel", r"U\+007F at character 1"),
    ],
)
def test_a_token_that_no_header_holds_is_refused_at_once_and_not_told(kind, bad, told):
    with pytest.raises(ValueError, match=f"^token: printable ASCII, got {told}$"):
        kind("127.0.0.1:1", token=bad)
    with pytest.raises(TypeError, match="token: a string, got bytes"):
        kind("127.0.0.1:1", token=b"secret")


@both
def test_white_space_round_a_token_is_not_sent(flavour):
    sent = []

    class Listening(Recording):
        def Score(self, request, context):  # noqa: N802
            sent.append(dict(context.invocation_metadata()).get("authorization"))
            return super().Score(request, context)

    async def scenario(target):
        async with AsyncScorerClient(target, token=" secret\r\n") as client:
            await client.score("q", ["a"])

    with recording(servicer=Listening()) as (target, _, _):
        if flavour == "async":
            asyncio.run(scenario(target))
        else:
            with ScorerClient(target, token=" secret\r\n") as client:
                client.score("q", ["a"])
    assert sent == ["Bearer secret"]


def test_an_async_client_made_where_no_loop_runs_works_in_the_first_and_names_what_is_wrong_in_the_second():
    async def scenario(client):
        return (await client.score("q", ["a"])).results[0].score

    async def closed(client):
        await client.close()

    with recording() as (target, _, _):
        asyncio.run(asyncio.sleep(0))  # after it there is no current loop
        client = AsyncScorerClient(target)
        assert asyncio.run(scenario(client)) == 1
        with pytest.raises(RuntimeError, match="stays in the event loop of its first call: make one in each loop"):
            asyncio.run(scenario(client))
        asyncio.run(closed(client))
