"""The client: needs grpcio and protobuf, and nothing of what the server needs.

    with ScorerClient("localhost:50051") as client:
        response = client.score("capital of France", ["Paris is the capital.", "Bananas are yellow."])
        for result in response.results:
            print(result.id, result.score)

AsyncScorerClient has the same methods as coroutines.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar, Unpack, cast

import grpc

from prefixrank.v1 import scorer_pb2 as pb
from prefixrank.v1 import scorer_pb2_grpc as pb_grpc
from scorer.client_call import bearer, deadline, metadata, seconds
from scorer.client_errors import FieldViolation, ScorerError, is_cancelled, raise_unless_passing, scorer_error
from scorer.client_request import RequestOptions, build_request
from scorer.client_stream import Sending

__all__ = [
    "ROUND_ROBIN",
    "AsyncScorerClient",
    "FieldViolation",
    "RequestOptions",
    "ScorerClient",
    "ScorerError",
    "build_request",
]

MAX_MESSAGE_BYTES = 64 << 20
DEFAULT_TIMEOUT = 60.0
POLL_SECONDS = 0.1

Request = TypeVar("Request")
Response = TypeVar("Response")
Opened = tuple[asyncio.AbstractEventLoop, grpc.aio.Channel, "pb_grpc.ScorerServiceAsyncStub"]
ChannelOption = tuple[str, Any]
CHANNEL_OPTIONS: tuple[ChannelOption, ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

# grpc.health.v1 without its package: the request is field 1, the service's name; the reply's field 1 is the status.
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
SERVICE = pb.DESCRIPTOR.services_by_name["ScorerService"].full_name.encode()
HEALTH_REQUEST = bytes((0x0A, len(SERVICE))) + SERVICE
SERVING = b"\x08\x01"

# For a target with several addresses, such as "dns:///prefixrank-headless:50051": each call to the next replica that is
# SERVING, and a call that met one that stops once more to another.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": SERVICE.decode()},
    "methodConfig": [
        {
            "name": [{"service": SERVICE.decode()}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.02s",
                "maxBackoff": "0.2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
ROUND_ROBIN: tuple[ChannelOption, ...] = (("grpc.service_config", json.dumps(_SERVICE_CONFIG)),)


class ScorerClient:
    """Calls a server at `target` ("host:port"). Safe to share between threads; use it with `with`, or close it.

    credentials  for TLS, as grpc.ssl_channel_credentials makes them
    token        a bearer token, where the server asks for one; ValueError where no header may hold it
    interceptors gRPC's client interceptors, the first one outermost

    Each `timeout` is in seconds, None for no limit. Raises ValueError where it is not a positive finite number.
    """

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        channel_options: Sequence[ChannelOption] = (),
        token: str | None = None,
        interceptors: Sequence[Any] = (),
    ) -> None:
        self._token = bearer(token)
        self._closed = False
        options = (*channel_options, *CHANNEL_OPTIONS)  # gRPC takes the first of equal names
        if credentials is None:
            channel = grpc.insecure_channel(target, options)
        else:
            channel = grpc.secure_channel(target, credentials, options)
        self._channel = grpc.intercept_channel(channel, *interceptors)
        self._stub = pb_grpc.ScorerServiceStub(self._channel)
        self._health = self._channel.unary_unary(HEALTH_CHECK, _raw, _raw)

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        **options: Unpack[RequestOptions],
    ) -> pb.ScoreResponse:
        """Scores texts. `timeout` is the deadline. Raises ScorerError, and as build_request does."""
        return self.score_request(build_request(query, documents, **options), timeout)

    def score_request(self, request: pb.ScoreRequest, timeout: float | None = DEFAULT_TIMEOUT) -> pb.ScoreResponse:
        """Scores a request built by hand. Raises ScorerError."""
        return self._ask(self._stub.Score, request, timeout)

    def score_stream(
        self,
        requests: Iterable[pb.ScoreRequest],
        *,
        request_timeout: float | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Iterator[tuple[str, pb.ScoreResponse | ScorerError]]:
        """Scores many requests on one call; yields each answer with its request_id when it is done.

        request_timeout: each one's own deadline in seconds; timeout: that of the whole call. A request that fails is an
        answer too. Each request needs a request_id of its own. Raises ScorerError where the call itself fails. What
        `requests` raises is raised here, after the answers to those before it; so is a ValueError where a request has
        no id or that of one whose answer was not yielded yet: neither it nor those behind it were sent.
        """
        sending, end = Sending(request_timeout), deadline(timeout)
        try:
            with self._telling():
                wrapped, headers = sending.each(requests), metadata(None, self._token)
                for response in self._stub.ScoreStream(wrapped, timeout=end, metadata=headers):
                    yield sending.answered(response)
        except ScorerError:
            sending.check()
            raise
        sending.check()

    def warm_prefix(
        self, request: pb.WarmPrefixRequest, timeout: float | None = DEFAULT_TIMEOUT
    ) -> pb.WarmPrefixResponse:
        """Computes a prefix before its documents are known. Raises ScorerError."""
        return self._ask(self._stub.WarmPrefix, request, timeout)

    def beam_search(
        self, request: pb.BeamSearchRequest, timeout: float | None = DEFAULT_TIMEOUT
    ) -> pb.BeamSearchResponse:
        """Generates the most probable continuations of a prompt. Raises ScorerError."""
        return self._ask(self._stub.BeamSearch, request, timeout)

    def model_info(self, timeout: float | None = DEFAULT_TIMEOUT, fingerprint: bool = False) -> pb.GetModelInfoResponse:
        """What is served; with its fingerprint, for which the first one waits. Raises ScorerError."""
        return self._ask(self._stub.GetModelInfo, pb.GetModelInfoRequest(fingerprint=fingerprint), timeout)

    def wait_until_serving(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns once the service's health is SERVING. Raises TimeoutError after `timeout` seconds."""
        end = time.monotonic() + seconds("timeout", timeout)
        while (left := end - time.monotonic()) > 0:
            try:
                with self._telling():
                    if self._health(HEALTH_REQUEST, timeout=left, wait_for_ready=True) == SERVING:
                        return
            except ScorerError as error:
                raise_unless_passing(error)
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"not serving after {timeout:g} s")

    def _ask(
        self, method: grpc.UnaryUnaryMultiCallable[Request, Response], request: Request, timeout: float | None
    ) -> Response:
        end = deadline(timeout)
        with self._telling():
            return method(request, timeout=end, metadata=metadata(request, self._token))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Makes a ScorerError of what gRPC raises."""
        try:
            yield
        except grpc.RpcError as error:
            raise scorer_error(error) from None
        except ValueError:  # gRPC's answer on a closed channel
            if self._closed:
                raise closed_error() from None
            raise

    def close(self) -> None:
        """Ends the calls under way; every further one raises ScorerError, CANCELLED."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncScorerClient:
    """ScorerClient for asyncio; use it with `async with`, or close it.

    It belongs to the event loop of its first call and raises RuntimeError in another, such as a second asyncio.run's.
    """

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        channel_options: Sequence[ChannelOption] = (),
        token: str | None = None,
    ) -> None:
        self._token = bearer(token)
        self._closed = False
        options = (*channel_options, *CHANNEL_OPTIONS)  # gRPC takes the first of equal names
        if credentials is None:
            self._open = partial(grpc.aio.insecure_channel, target, options)
        else:
            self._open = partial(grpc.aio.secure_channel, target, credentials, options)
        self._opened: Opened | None = None

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        **options: Unpack[RequestOptions],
    ) -> pb.ScoreResponse:
        """See ScorerClient.score."""
        return await self.score_request(build_request(query, documents, **options), timeout)

    async def score_request(
        self, request: pb.ScoreRequest, timeout: float | None = DEFAULT_TIMEOUT
    ) -> pb.ScoreResponse:
        """See ScorerClient.score_request."""
        return await self._ask(self._stub.Score, request, timeout)

    async def score_stream(
        self,
        requests: AsyncIterable[pb.ScoreRequest] | Iterable[pb.ScoreRequest],
        *,
        request_timeout: float | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> AsyncIterator[tuple[str, pb.ScoreResponse | ScorerError]]:
        """See ScorerClient.score_stream."""
        sending, end = Sending(request_timeout), deadline(timeout)
        try:
            with self._telling():
                wrapped, headers = sending.each_async(requests), metadata(None, self._token)
                async for response in self._stub.ScoreStream(wrapped, timeout=end, metadata=headers):
                    yield sending.answered(response)
        except ScorerError:
            sending.check()
            raise
        sending.check()

    async def warm_prefix(
        self, request: pb.WarmPrefixRequest, timeout: float | None = DEFAULT_TIMEOUT
    ) -> pb.WarmPrefixResponse:
        """See ScorerClient.warm_prefix."""
        return await self._ask(self._stub.WarmPrefix, request, timeout)

    async def beam_search(
        self, request: pb.BeamSearchRequest, timeout: float | None = DEFAULT_TIMEOUT
    ) -> pb.BeamSearchResponse:
        """See ScorerClient.beam_search."""
        return await self._ask(self._stub.BeamSearch, request, timeout)

    async def model_info(
        self, timeout: float | None = DEFAULT_TIMEOUT, fingerprint: bool = False
    ) -> pb.GetModelInfoResponse:
        """See ScorerClient.model_info."""
        return await self._ask(self._stub.GetModelInfo, pb.GetModelInfoRequest(fingerprint=fingerprint), timeout)

    async def wait_until_serving(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """See ScorerClient.wait_until_serving."""
        end = time.monotonic() + seconds("timeout", timeout)
        health = self._here()[1].unary_unary(HEALTH_CHECK, _raw, _raw)
        while (left := end - time.monotonic()) > 0:
            try:
                with self._telling():
                    if await health(HEALTH_REQUEST, timeout=left, wait_for_ready=True) == SERVING:
                        return
            except ScorerError as error:
                raise_unless_passing(error)
            await asyncio.sleep(POLL_SECONDS)
        raise TimeoutError(f"not serving after {timeout:g} s")

    async def _ask(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Response], request: Request, timeout: float | None
    ) -> Response:
        end = deadline(timeout)
        with self._telling():
            return await method(request, timeout=end, metadata=metadata(request, self._token))

    def _here(self) -> Opened:
        """The first call's event loop, the channel and its methods: where the client is made there may be no loop."""
        if self._closed:
            raise closed_error()
        loop = asyncio.get_running_loop()
        if self._opened is None:
            channel = self._open()
            stub = cast("pb_grpc.ScorerServiceAsyncStub", pb_grpc.ScorerServiceStub(channel))
            self._opened = loop, channel, stub
        if self._opened[0] is not loop:
            raise RuntimeError("an AsyncScorerClient stays in the event loop of its first call: make one in each loop")
        return self._opened

    @property
    def _stub(self) -> pb_grpc.ScorerServiceAsyncStub:
        return self._here()[2]

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Makes a ScorerError of what gRPC raises."""
        try:
            yield
        except grpc.RpcError as error:
            raise scorer_error(error) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):  # what a call gets when its channel is closed
            if self._closed and not is_cancelled():
                raise closed_error() from None
            raise

    async def close(self) -> None:
        """See ScorerClient.close."""
        self._closed = True
        if self._opened is not None:
            await self._opened[1].close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def closed_error() -> ScorerError:
    return ScorerError(grpc.StatusCode.CANCELLED, "the client is closed")


def _raw(message: bytes) -> bytes:
    return message
