"""A running server as the commands reach it: its address, a token, certificates; and `prefixrank health`."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from scorer.errors import ConfigError
from scorer.flags import POSITIVE, address

if TYPE_CHECKING:
    import grpc

    from scorer.client import AsyncScorerClient, ScorerClient

HEALTH_EXAMPLE = """example:
  prefixrank health --target localhost:50051

Exit codes: 0 the service is SERVING; 1 it is not, or not within --timeout seconds."""

LOOK_SECONDS = 3.0  # for one look at a server that does not serve


def target(text: str) -> str:
    """The type of a --target: HOST:PORT, or one of gRPC's names with a scheme, such as dns:///NAME:PORT."""
    return text if re.fullmatch(r"(dns|ipv4|ipv6|unix|unix-abstract|xds):\S*[^\s/:]\S*", text) else address(text)


def add_target(parser: argparse.ArgumentParser, default: str = "the model in this process") -> None:
    """Which server, and how to get in where it asks for it."""
    parser.add_argument("--target", type=target, metavar="HOST:PORT", help=f"a running server (default: {default})")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="whose first word is the bearer token")
    parser.add_argument("--server-ca", type=Path, metavar="FILE", help="PEM: speak TLS, the server's is signed by it")
    parser.add_argument("--client-certificate", type=Path, metavar="FILE", help="PEM: shown to the server (mTLS)")
    parser.add_argument("--client-key", type=Path, metavar="FILE", help="PEM: of the client's certificate")


def connect(args: argparse.Namespace) -> ScorerClient:
    """A client of `args.target`. Raises ConfigError."""
    from scorer.client import ScorerClient

    return ScorerClient(args.target, credentials(args), token=token(args.token_file))


def add_health(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `prefixrank health`."""
    add_target(parser, "localhost:50051")
    parser.set_defaults(target="localhost:50051")
    parser.add_argument("--timeout", type=POSITIVE, default=3.0, metavar="SECONDS", help="default: 3")


def health(args: argparse.Namespace) -> int:
    """Says whether the service is SERVING, by its exit code."""
    from scorer.client import ScorerError

    with connect(args) as client:
        try:
            client.wait_until_serving(args.timeout)
        except (TimeoutError, ScorerError):
            print(f"not serving: {why_not(args, args.target) or 'it began to just now'}")
            return 1
    print("serving")
    return 0


async def wait_for(client: AsyncScorerClient, args: argparse.Namespace, target: str) -> None:
    """Returns once the server serves; says on standard error why it waits. Raises ConfigError after args.timeout s."""
    from scorer.client import ScorerError

    if why := why_not(args, target):
        print(f"prefixrank: waiting up to {args.timeout:g} s for {target}: {why}", file=sys.stderr)
    try:
        await client.wait_until_serving(args.timeout)
    except (TimeoutError, ScorerError) as error:
        raise ConfigError(f"{target}: {error}: {why_not(args, target)}") from None


def why_not(args: argparse.Namespace, target: str) -> str:
    """What one look at the server's health meets, or "" where it serves. Raises ConfigError."""
    import grpc

    from scorer.client import HEALTH_CHECK, HEALTH_REQUEST, SERVING

    secure = credentials(args)
    opened = grpc.insecure_channel(target) if secure is None else grpc.secure_channel(target, secure)
    with opened as channel:
        try:
            look: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_CHECK)
            status = look(HEALTH_REQUEST, timeout=min(args.timeout, LOOK_SECONDS))
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "" if status == SERVING else "its health is not SERVING"


def credentials(args: argparse.Namespace) -> grpc.ChannelCredentials | None:
    """None where no TLS is asked for. Raises ConfigError."""
    if args.server_ca is None:
        if args.client_certificate or args.client_key:
            raise ConfigError("--client-certificate and --client-key need --server-ca")
        return None
    if (args.client_certificate is None) != (args.client_key is None):
        raise ConfigError("--client-certificate and --client-key go together")
    import grpc

    key, certificate = (None if path is None else _read(path) for path in (args.client_key, args.client_certificate))
    return grpc.ssl_channel_credentials(_read(args.server_ca), key, certificate)


def token(path: Path | None) -> str | None:
    """The first word of the file. Raises ConfigError."""
    if path is None:
        return None
    words = _read(path).decode("utf-8", "replace").split()
    if not words:
        raise ConfigError(f"--token-file {path}: holds no token")
    if not (words[0].isascii() and words[0].isprintable()):
        raise ConfigError(f"--token-file {path}: the token is not of printable ASCII characters")
    return words[0]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
