"""A client's side of a stream: what may be sent, and what was answered."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

from prefixrank.v1 import scorer_pb2 as pb
from scorer.client_call import seconds
from scorer.client_errors import ScorerError, error_of, is_cancelled


class Sending:
    """The requests of one call. gRPC may read them on another thread than the one that takes the answers."""

    def __init__(self, timeout: float | None) -> None:
        """timeout: each request's own, in seconds. Raises ValueError where it is none."""
        self._timeout = 0.0 if timeout is None else seconds("request_timeout", timeout)
        self._under_way: set[str] = set()
        self._fault: BaseException | None = None

    def each(self, requests: Iterable[pb.ScoreRequest]) -> Iterator[pb.ScoreStreamRequest]:
        """As they are sent, up to the first fault, which is kept: from gRPC the caller would not hear it.

        A fault is what the caller's own iterator raises, or a request whose answer could not be told from another's.
        """
        try:
            for request in requests:
                yield self._admitted(request)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001  raised by check()
            self._fault = error

    async def each_async(
        self, requests: AsyncIterable[pb.ScoreRequest] | Iterable[pb.ScoreRequest]
    ) -> AsyncIterator[pb.ScoreStreamRequest]:
        """The same for either kind of iterable."""
        if not isinstance(requests, AsyncIterable):
            for message in self.each(requests):
                yield message
            return
        try:
            async for request in requests:
                yield self._admitted(request)
        except GeneratorExit:
            raise
        except BaseException as error:
            if is_cancelled():  # by gRPC, as the call has ended
                raise
            self._fault = error

    def answered(self, response: pb.ScoreStreamResponse) -> tuple[str, pb.ScoreResponse | ScorerError]:
        """What the caller gets. From now on the id is free again."""
        self._under_way.discard(response.request_id)
        if response.WhichOneof("result") == "response":
            return response.request_id, response.response
        return response.request_id, error_of(response.error)

    def check(self) -> None:
        """Raises what ended the requests too early."""
        if self._fault is not None:
            raise self._fault

    def _admitted(self, request: pb.ScoreRequest) -> pb.ScoreStreamRequest:
        """As it is sent. Raises TypeError for what is no request, ValueError without an id of its own."""
        if not isinstance(request, pb.ScoreRequest):
            raise TypeError(f"requests: a ScoreRequest each, got {type(request).__name__}")
        if not request.request_id:
            raise ValueError("a request of a stream needs a request_id: answers are matched by it")
        if request.request_id in self._under_way:
            raise ValueError(f"the request_id {request.request_id!r} is that of a request that is still under way")
        self._under_way.add(request.request_id)
        return pb.ScoreStreamRequest(request=request, timeout_seconds=self._timeout)
