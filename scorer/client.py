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
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Self, TypedDict, Unpack, cast

import grpc

from prefixrank.v1 import scorer_pb2 as pb
from prefixrank.v1 import scorer_pb2_grpc as pb_grpc
from scorer import affinity
from scorer.client_errors import FieldViolation, ScorerError, raise_unless_passing, scorer_error
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


class RequestOptions(TypedDict, total=False):
    """What a request for texts may say beside query and documents. The proto explains each; unset leaves the choice to
    the service."""

    ids: Sequence[str] | None
    instruction: str | None
    request_id: str
    top_n: int
    max_tokens_per_document: int
    truncation: pb.Truncation.ValueType
    strategy: pb.Strategy.ValueType
    label_logits: bool
    vocabulary_probabilities: bool
    label_texts: Sequence[str]
    partial_ok: bool
    tenant: str
    priority: pb.Priority.ValueType


def build_request(query: str, documents: Sequence[str], **options: Unpack[RequestOptions]) -> pb.ScoreRequest:
    """A request for texts. Without `ids`, a document's id is its position.

    Raises ValueError where there is not one id for each document, TypeError for an unknown option.
    """
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options {sorted(unknown)}")
    ids = options.get("ids")
    if ids is None:
        ids = [""] * len(documents)
    if len(ids) != len(documents):
        raise ValueError(f"{len(ids)} ids for {len(documents)} documents")
    return pb.ScoreRequest(
        request_id=options.get("request_id", ""),
        query=pb.QueryPrefix(text=query, instruction=options.get("instruction")),
        documents=[pb.Document(id=id, text=text) for id, text in zip(ids, documents, strict=True)],
        options=pb.ScoreOptions(
            strategy=options.get("strategy", pb.STRATEGY_UNSPECIFIED),
            max_tokens_per_document=options.get("max_tokens_per_document", 0),
            truncation=options.get("truncation", pb.TRUNCATION_UNSPECIFIED),
            top_n=options.get("top_n", 0),
            outputs=pb.OutputOptions(
                label_logits=options.get("label_logits", False),
                vocabulary_probabilities=options.get("vocabulary_probabilities", False),
            ),
            label_texts=options.get("label_texts", ()),
            partial_ok=options.get("partial_ok", False),
        ),
        tenant=options.get("tenant", ""),
        priority=options.get("priority", pb.PRIORITY_UNSPECIFIED),
    )


def _metadata(
    request: pb.ScoreRequest | pb.WarmPrefixRequest | pb.BeamSearchRequest | None, token: str | None
) -> tuple[tuple[str, str], ...]:
    found = affinity.affinity(request) if request is not None else ""
    own = ((affinity.HEADER, found),) if found else ()
    authorization = (("authorization", f"Bearer {token}"),) if token else ()
    return own + authorization + _trace()


def _trace() -> tuple[tuple[str, str], ...]:
    """The current span as W3C trace context, in a program that has OpenTelemetry loaded."""
    propagate = sys.modules.get("opentelemetry.propagate")
    carrier: dict[str, str] = {}
    if propagate is not None:
        propagate.inject(carrier)
    return tuple(carrier.items())


class ScorerClient:
    """Calls a server at `target` ("host:port"). Safe to share between threads; use it with `with`, or close it.

    credentials  for TLS, as grpc.ssl_channel_credentials makes them
    token        a bearer token, where the server asks for one
    interceptors gRPC's client interceptors, the first one outermost
    """

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        channel_options: Sequence[ChannelOption] = (),
        token: str | None = None,
        interceptors: Sequence[Any] = (),
    ) -> None:
        self._token = token
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
        """Scores texts. `timeout` is the deadline in seconds. Raises ScorerError, and as build_request does."""
        return self.score_request(build_request(query, documents, **options), timeout)

    def score_request(self, request: pb.ScoreRequest, timeout: float | None = DEFAULT_TIMEOUT) -> pb.ScoreResponse:
        """Scores a request built by hand. Raises ScorerError."""
        try:
            return self._stub.Score(request, timeout=timeout, metadata=_metadata(request, self._token))
        except grpc.RpcError as error:
            raise scorer_error(error) from None

    def score_stream(
        self,
        requests: Iterable[pb.ScoreRequest],
        *,
        request_timeout: float | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Iterator[tuple[str, pb.ScoreResponse | ScorerError]]:
        """Scores many requests on one call; yields each answer with its request_id when it is done.

        request_timeout: each one's own deadline in seconds; timeout: that of the whole call. A request that fails is an
        answer too. Each request needs a request_id of its own. Raises ScorerError where the call itself fails, and
        ValueError at the end where a request has no id or that of one whose answer was not yielded yet: neither it nor
        those behind it were sent.
        """
        sending = Sending(request_timeout)
        try:
            metadata = _metadata(None, self._token)
            for response in self._stub.ScoreStream(sending.each(requests), timeout=timeout, metadata=metadata):
                yield sending.answered(response)
        except grpc.RpcError as error:
            raise scorer_error(error) from None
        sending.check()

    def warm_prefix(
        self, request: pb.WarmPrefixRequest, timeout: float | None = DEFAULT_TIMEOUT
    ) -> pb.WarmPrefixResponse:
        """Computes a prefix before its documents are known. Raises ScorerError."""
        try:
            return self._stub.WarmPrefix(request, timeout=timeout, metadata=_metadata(request, self._token))
        except grpc.RpcError as error:
            raise scorer_error(error) from None

    def beam_search(
        self, request: pb.BeamSearchRequest, timeout: float | None = DEFAULT_TIMEOUT
    ) -> pb.BeamSearchResponse:
        """Generates the most probable continuations of a prompt. Raises ScorerError."""
        try:
            return self._stub.BeamSearch(request, timeout=timeout, metadata=_metadata(request, self._token))
        except grpc.RpcError as error:
            raise scorer_error(error) from None

    def model_info(self, timeout: float | None = DEFAULT_TIMEOUT, fingerprint: bool = False) -> pb.GetModelInfoResponse:
        """What is served; with its fingerprint, for which the first one waits. Raises ScorerError."""
        try:
            request, metadata = pb.GetModelInfoRequest(fingerprint=fingerprint), _metadata(None, self._token)
            return self._stub.GetModelInfo(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise scorer_error(error) from None

    def wait_until_serving(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns once the service's health is SERVING. Raises TimeoutError after `timeout` seconds."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            try:
                if self._health(HEALTH_REQUEST, timeout=left, wait_for_ready=True) == SERVING:
                    return
            except grpc.RpcError as error:
                raise_unless_passing(error)
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"not serving after {timeout:g} s")

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncScorerClient:
    """ScorerClient for asyncio; use it with `async with`, or close it."""

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        channel_options: Sequence[ChannelOption] = (),
        token: str | None = None,
    ) -> None:
        self._token = token
        options = (*channel_options, *CHANNEL_OPTIONS)  # gRPC takes the first of equal names
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options)
        self._stub = cast("pb_grpc.ScorerServiceAsyncStub", pb_grpc.ScorerServiceStub(self._channel))
        self._health = self._channel.unary_unary(HEALTH_CHECK, _raw, _raw)

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
        try:
            return await self._stub.Score(request, timeout=timeout, metadata=_metadata(request, self._token))
        except grpc.RpcError as error:
            raise scorer_error(error) from None

    async def score_stream(
        self,
        requests: AsyncIterable[pb.ScoreRequest] | Iterable[pb.ScoreRequest],
        *,
        request_timeout: float | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> AsyncIterator[tuple[str, pb.ScoreResponse | ScorerError]]:
        """See ScorerClient.score_stream."""
        sending = Sending(request_timeout)
        try:
            metadata = _metadata(None, self._token)
            wrapped = sending.each_async(requests)
            async for response in self._stub.ScoreStream(wrapped, timeout=timeout, metadata=metadata):
                yield sending.answered(response)
        except grpc.RpcError as error:
            raise scorer_error(error) from None
        sending.check()

    async def warm_prefix(
        self, request: pb.WarmPrefixRequest, timeout: float | None = DEFAULT_TIMEOUT
    ) -> pb.WarmPrefixResponse:
        """See ScorerClient.warm_prefix."""
        try:
            return await self._stub.WarmPrefix(request, timeout=timeout, metadata=_metadata(request, self._token))
        except grpc.RpcError as error:
            raise scorer_error(error) from None

    async def beam_search(
        self, request: pb.BeamSearchRequest, timeout: float | None = DEFAULT_TIMEOUT
    ) -> pb.BeamSearchResponse:
        """See ScorerClient.beam_search."""
        try:
            return await self._stub.BeamSearch(request, timeout=timeout, metadata=_metadata(request, self._token))
        except grpc.RpcError as error:
            raise scorer_error(error) from None

    async def model_info(
        self, timeout: float | None = DEFAULT_TIMEOUT, fingerprint: bool = False
    ) -> pb.GetModelInfoResponse:
        """See ScorerClient.model_info."""
        try:
            request, metadata = pb.GetModelInfoRequest(fingerprint=fingerprint), _metadata(None, self._token)
            return await self._stub.GetModelInfo(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise scorer_error(error) from None

    async def wait_until_serving(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """See ScorerClient.wait_until_serving."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            try:
                if await self._health(HEALTH_REQUEST, timeout=left, wait_for_ready=True) == SERVING:
                    return
            except grpc.RpcError as error:
                raise_unless_passing(error)
            await asyncio.sleep(POLL_SECONDS)
        raise TimeoutError(f"not serving after {timeout:g} s")

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _raw(message: bytes) -> bytes:
    return message
