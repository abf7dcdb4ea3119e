"""The client: needs grpcio and protobuf, and nothing of what the server needs.

    with ScorerClient("localhost:50051") as client:
        response = client.score("capital of France", ["Paris is the capital.", "Bananas are yellow."])
        for result in response.results:
            print(result.id, result.score)

AsyncScorerClient has the same methods as coroutines.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypedDict, Unpack, cast

import grpc

from prefixrank.v1 import scorer_pb2 as pb
from prefixrank.v1 import scorer_pb2_grpc as pb_grpc

MAX_MESSAGE_BYTES = 64 << 20
DEFAULT_TIMEOUT = 60.0
AFFINITY = "x-prefixrank-affinity"
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


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request: its path, and what is allowed with what was given."""

    field: str
    description: str


class ScorerError(Exception):
    """A call that got a status instead of an answer.

    code                 the gRPC status code
    message              in words
    violations           with INVALID_ARGUMENT: the bad fields
    retry_after_seconds  with RESOURCE_EXHAUSTED: when to come again
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: Sequence[FieldViolation] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        self.code = code
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_seconds = retry_after_seconds
        super().__init__(f"{code.name}: {message}")


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
        ),
        tenant=options.get("tenant", ""),
        priority=options.get("priority", pb.PRIORITY_UNSPECIFIED),
    )


def affinity(request: pb.ScoreRequest) -> str:
    """What calls that share a prefix have in common: a digest of the tenant and of the prefix as the caller gave it.

    A proxy that hashes on it sends them to the same replica, where the prefix is cached. Empty where there is no prefix
    of the caller's own: all that is then shared is the profile's, which every replica has.
    """
    kind = request.WhichOneof("prefix")
    if kind is None:
        return ""
    own = getattr(request, kind)
    content = own.encode() if isinstance(own, str) else own.SerializeToString(deterministic=True)
    if not content:
        return ""
    parts = (request.tenant.encode(), kind.encode(), content)
    return hashlib.blake2b(b"".join(len(p).to_bytes(8) + p for p in parts), digest_size=8).hexdigest()


def _metadata(request: pb.ScoreRequest | None, token: str | None) -> tuple[tuple[str, str], ...]:
    found = affinity(request) if request is not None else ""
    own = ((AFFINITY, found),) if found else ()
    return own + ((("authorization", f"Bearer {token}"),) if token else ())


class ScorerClient:
    """Calls a server at `target` ("host:port"). Safe to share between threads; use it with `with`, or close it.

    credentials  for TLS, as grpc.ssl_channel_credentials makes them
    token        a bearer token, where the server asks for one
    """

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
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
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
            raise _scorer_error(error) from None

    def model_info(self, timeout: float | None = DEFAULT_TIMEOUT) -> pb.GetModelInfoResponse:
        """What is served. Raises ScorerError."""
        try:
            metadata = _metadata(None, self._token)
            return self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise _scorer_error(error) from None

    def wait_until_serving(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns once the service's health is SERVING. Raises TimeoutError after `timeout` seconds."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            try:
                if self._health(HEALTH_REQUEST, timeout=left, wait_for_ready=True) == SERVING:
                    return
            except grpc.RpcError as error:
                _raise_unless_passing(error)
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
            raise _scorer_error(error) from None

    async def model_info(self, timeout: float | None = DEFAULT_TIMEOUT) -> pb.GetModelInfoResponse:
        """See ScorerClient.model_info."""
        try:
            metadata = _metadata(None, self._token)
            return await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise _scorer_error(error) from None

    async def wait_until_serving(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """See ScorerClient.wait_until_serving."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            try:
                if await self._health(HEALTH_REQUEST, timeout=left, wait_for_ready=True) == SERVING:
                    return
            except grpc.RpcError as error:
                _raise_unless_passing(error)
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


def _raise_unless_passing(error: grpc.RpcError) -> None:
    """A server that is not up yet, or not in time, is waited for; anything else is wrong for good."""
    told = _scorer_error(error)
    if told.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise told from None


def _scorer_error(error: grpc.RpcError) -> ScorerError:
    """Errors of both channels have code(), details() and trailing_metadata(); only their bases do not say so."""
    call = cast("grpc.Call", error)
    violations, retry = _details(call.trailing_metadata() or ())
    return ScorerError(call.code(), call.details() or "", violations, retry)


def _details(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[list[FieldViolation], float | None]:
    """What google.rpc.Status says, where its messages are installed (googleapis-common-protos)."""
    status_bytes = next((value for key, value in metadata if key == "grpc-status-details-bin"), None)
    if not isinstance(status_bytes, bytes):
        return [], None
    try:
        from google.rpc import error_details_pb2, status_pb2
    except ImportError:
        return [], None
    violations: list[FieldViolation] = []
    retry: float | None = None
    for detail in status_pb2.Status.FromString(status_bytes).details:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Unpack(retry_info):
            retry = retry_info.retry_delay.ToTimedelta().total_seconds()
    return violations, retry
