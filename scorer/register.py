"""How gRPC calls the service's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from prefixrank.v1 import scorer_pb2 as pb
from scorer.service import SERVICE, ScorerService
from scorer.undecodable import Undecodable

M = TypeVar("M", bound=Message)


def register(service: ScorerService, server: grpc.aio.Server) -> None:
    """Like the stubs' add_ScorerServiceServicer_to_server, but bytes that are no message reach the service too, which
    refuses and counts them; grpc itself would answer UNKNOWN."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Score": grpc.unary_unary_rpc_method_handler(
            service.Score, decoder(pb.ScoreRequest), pb.ScoreResponse.SerializeToString
        ),
        "ScoreStream": grpc.stream_stream_rpc_method_handler(
            service.ScoreStream, decoder(pb.ScoreStreamRequest), pb.ScoreStreamResponse.SerializeToString
        ),
        "WarmPrefix": grpc.unary_unary_rpc_method_handler(
            service.WarmPrefix, decoder(pb.WarmPrefixRequest), pb.WarmPrefixResponse.SerializeToString
        ),
        "BeamSearch": grpc.unary_unary_rpc_method_handler(
            service.BeamSearch, decoder(pb.BeamSearchRequest), pb.BeamSearchResponse.SerializeToString
        ),
        "GetModelInfo": grpc.unary_unary_rpc_method_handler(
            service.GetModelInfo, decoder(pb.GetModelInfoRequest), pb.GetModelInfoResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def decoder(kind: type[M]) -> Callable[[bytes], M | Undecodable]:
    """Reads a message; bytes that are none become something that says so."""

    def decode(data: bytes) -> M | Undecodable:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Undecodable.of(kind.DESCRIPTOR.full_name, len(data))

    return decode
