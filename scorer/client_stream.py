"""A client's side of a stream: what may be sent, and what was answered."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

from prefixrank.v1 import scorer_pb2 as pb
from scorer.client_errors import ScorerError, error_of


class Sending:
    """The requests of one call. gRPC may read them on another thread than the one that takes the answers."""

    def __init__(self, timeout: float | None) -> None:
        """timeout: each request's own, in seconds."""
        self._timeout = timeout or 0.0
        self._under_way: set[str] = set()
        self._fault = ""

    def each(self, requests: Iterable[pb.ScoreRequest]) -> Iterator[pb.ScoreStreamRequest]:
        """As they are sent. Ends before one whose answer could not be told from another's."""
        for request in requests:
            if not self._may(request):
                return
            yield pb.ScoreStreamRequest(request=request, timeout_seconds=self._timeout)

    async def each_async(
        self, requests: AsyncIterable[pb.ScoreRequest] | Iterable[pb.ScoreRequest]
    ) -> AsyncIterator[pb.ScoreStreamRequest]:
        """The same for either kind of iterable."""
        if not isinstance(requests, AsyncIterable):
            for message in self.each(requests):
                yield message
            return
        async for request in requests:
            if not self._may(request):
                return
            yield pb.ScoreStreamRequest(request=request, timeout_seconds=self._timeout)

    def answered(self, response: pb.ScoreStreamResponse) -> tuple[str, pb.ScoreResponse | ScorerError]:
        """What the caller gets. From now on the id is free again."""
        self._under_way.discard(response.request_id)
        if response.WhichOneof("result") == "response":
            return response.request_id, response.response
        return response.request_id, error_of(response.error)

    def check(self) -> None:
        """Raises ValueError where a request was not sent."""
        if self._fault:
            raise ValueError(self._fault)

    def _may(self, request: pb.ScoreRequest) -> bool:
        if not request.request_id:
            self._fault = "a request of a stream needs a request_id: answers are matched by it"
        elif request.request_id in self._under_way:
            self._fault = f"the request_id {request.request_id!r} is that of a request that is still under way"
        else:
            self._under_way.add(request.request_id)
        return not self._fault
