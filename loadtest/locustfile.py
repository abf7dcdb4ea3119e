"""Locust over gRPC: `locust -f loadtest/locustfile.py`; its page asks for users, host and the traffic's profile.

Users are closed loops: each waits for its answer. One process gives some hundreds of calls a second; add --processes or
--worker for more, and use `prefixrank bench load` to find a capacity.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.experimental.gevent as grpc_gevent
from locust import User, between, events, task
from locust.env import Environment
from locust.exception import LocustError

from loadtest.asked import request_of
from loadtest.workload import PROFILES, Arrival, arrivals
from scorer.client import ScorerClient, ScorerError

grpc_gevent.init_gevent()
ENDLESS = 1e9
NO_PROXY = (("grpc.enable_http_proxy", 0),)
_users = itertools.count()


class FeedsLocust(grpc.UnaryUnaryClientInterceptor):
    """Tells Locust of each call: its time, its size, and its status where that is not OK."""

    def __init__(self, environment: Environment, name: str) -> None:
        self._environment = environment
        self._name = name

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], client_call_details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        started = time.perf_counter()
        call = continuation(client_call_details, request)
        error = call.exception()  # waits for the end
        self._environment.events.request.fire(
            request_type="grpc",
            name=self._name,
            response_time=(time.perf_counter() - started) * 1000,
            response_length=0 if error else call.result().ByteSize(),
            exception=f"{call.code().name}" if error else None,
            context={},
        )
        return call


@events.init_command_line_parser.add_listener
def _arguments(parser: Any) -> None:
    parser.add_argument("--traffic", choices=sorted(PROFILES), default="laptop", help="the traffic's profile")
    parser.add_argument("--deadline", type=float, default=60.0, help="of each call, in seconds")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")


class Searcher(User):
    """Scores one request after the other."""

    host = "localhost:50051"
    wait_time = between(0.0, 0.2)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        options = environment.parsed_options
        if options is None or self.host is None:
            raise LocustError("needs a host and options")
        self._profile, self._deadline = PROFILES[options.traffic], options.deadline
        seed = random.getrandbits(32) + next(_users)
        self._arrivals = arrivals(self._profile, 1.0, ENDLESS, seed, scale=options.scale)
        feeds = FeedsLocust(environment, f"Score {self._profile.name}")
        self._client = ScorerClient(self.host.removeprefix("http://"), channel_options=NO_PROXY, interceptors=[feeds])

    @task
    def score(self) -> None:
        arrival: Arrival = next(self._arrivals)
        try:
            self._client.score_request(request_of(self._profile, arrival), self._deadline)
        except ScorerError:
            return  # counted by the interceptor

    def on_stop(self) -> None:
        self._client.close()
