"""A running server as the commands reach it: its address, a token, certificates; and `prefixrank health`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scorer.errors import ConfigError
from scorer.flags import number

if TYPE_CHECKING:
    import grpc

    from scorer.client import ScorerClient

HEALTH_EXAMPLE = """example:
  prefixrank health --target localhost:50051

Exit codes: 0 the service is SERVING; 1 it is not, or not within --timeout seconds."""


def add_remote(parser: argparse.ArgumentParser) -> None:
    """How to get in where the server asks for it."""
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="whose first word is the bearer token")
    parser.add_argument("--server-ca", type=Path, metavar="FILE", help="PEM: speak TLS, the server's is signed by it")
    parser.add_argument("--client-certificate", type=Path, metavar="FILE", help="PEM: shown to the server (mTLS)")
    parser.add_argument("--client-key", type=Path, metavar="FILE", help="PEM: of the client's certificate")


def connect(args: argparse.Namespace) -> ScorerClient:
    """A client of `args.target`. Raises ConfigError."""
    from scorer.client import ScorerClient

    try:
        return ScorerClient(args.target, credentials(args), token=token(args.token_file))
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None


def add_health(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `prefixrank health`."""
    told = "a running server (default: localhost:50051)"
    parser.add_argument("--target", metavar="HOST:PORT", default="localhost:50051", help=told)
    parser.add_argument("--timeout", type=number(0), default=3.0, metavar="SECONDS", help="default: 3")
    add_remote(parser)


def health(args: argparse.Namespace) -> int:
    """Says whether the service is SERVING, by its exit code."""
    with connect(args) as client:
        try:
            client.wait_until_serving(args.timeout)
        except TimeoutError:
            print("not serving")
            return 1
    print("serving")
    return 0


def credentials(args: argparse.Namespace) -> grpc.ChannelCredentials | None:
    """None where no TLS is asked for. Raises ConfigError or OSError."""
    if args.server_ca is None:
        if args.client_certificate or args.client_key:
            raise ConfigError("--client-certificate and --client-key need --server-ca")
        return None
    if (args.client_certificate is None) != (args.client_key is None):
        raise ConfigError("--client-certificate and --client-key go together")
    import grpc

    key, certificate = (
        None if path is None else path.read_bytes() for path in (args.client_key, args.client_certificate)
    )
    return grpc.ssl_channel_credentials(args.server_ca.read_bytes(), key, certificate)


def token(path: Path | None) -> str | None:
    """The first word of the file. Raises ConfigError or OSError."""
    if path is None:
        return None
    words = path.read_text(encoding="utf-8").split()
    if not words:
        raise ConfigError(f"--token-file {path}: holds no token")
    return words[0]
