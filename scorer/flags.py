"""The settings as flags of the command line: one for each, of the same name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic.fields import FieldInfo

from scorer.config import Config

N = TypeVar("N", int, float)

# Settings of the listening service; the commands that run a model in this process have the others.
LISTENING = (
    "host",
    "port",
    "metrics_port",
    "health_port",
    "http_port",
    "http_timeout_seconds",
    "max_message_bytes",
    "max_tokenizing_bytes",
    "max_connection_age_seconds",
    "max_requests_per_second",
    "auth_tokens_file",
    "tls_certificate",
    "tls_key",
    "tls_client_ca",
    "log_format",
    "self_check_seconds",
    "otlp_endpoint",
    "drain_seconds",
    "awake_seconds",
)
SETTINGS = tuple(Config.model_fields)
MODEL_SETTINGS = tuple(name for name in SETTINGS if name not in LISTENING)


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of a flag that takes a whole number within these limits."""
    return lambda text: _within(text, int, "a whole number", least, most)


def number(least: float, most: float = 1e6) -> Callable[[str], float]:
    """The type of a flag that takes a number within these limits."""
    return lambda text: _within(text, float, "a number", least, most)


def _within(text: str, kind: Callable[[str], N], what: str, least: N, most: N) -> N:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{what} between {least:.10g} and {most:.10g}, got {text!r}")
    return value


POSITIVE = number(0.001)  # seconds, calls a second


def listed(each: Callable[[str], N], count: int | None = None) -> Callable[[str], tuple[N, ...]]:
    """The type of a flag that takes several of `each` with commas between; count: just so many."""

    def parse(text: str) -> tuple[N, ...]:
        parts = text.split(",")
        if count is not None and len(parts) != count:
            raise argparse.ArgumentTypeError(f"{count} numbers with commas between, got {text!r}")
        return tuple(each(part) for part in parts)

    return parse


def file_to_write(text: str) -> Path:
    """The type of a flag that names a file to write: refused before the work, where it is a directory."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"a file, got the directory {str(path)!r}")
    return path


def address(text: str) -> str:
    """The type of a flag that takes HOST:PORT."""
    parts = urlsplit(f"//{text}")
    try:
        whole = parts.netloc == text and parts.hostname and parts.port and not set(text) & set("@ ")
    except ValueError:  # a port that is none
        whole = False
    if not whole:
        raise argparse.ArgumentTypeError(f"HOST:PORT, got {text!r}")
    return text


def add_settings(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Adds the flags of these settings."""
    group = parser.add_argument_group("settings")
    group.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings")
    for name in names:
        field = Config.model_fields[name]
        told = f"{field.description} (default: {field.default})".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if field.annotation is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=told)
        else:
            group.add_argument(flag, metavar=_metavar(field), help=told)


def add_document_limit(parser: argparse.ArgumentParser) -> None:
    """How long a document of this command's requests may be."""
    told = "cuts longer ones (default: the profile's)"
    parser.add_argument("--max-tokens-per-document", type=whole(0), default=0, metavar="N", help=told)


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The settings given as flags; absent ones are left out."""
    return {name: value for name, value in vars(args).items() if name in Config.model_fields and value is not None}


def config_of(args: argparse.Namespace) -> Config:
    """The settings that the command runs with."""
    return Config.read(given_flags(args), file=args.config)


def as_arguments(flags: Mapping[str, Any], file: Path | None) -> list[str]:
    """The settings again as arguments, for a process that shall have the same ones."""
    arguments = [] if file is None else [f"--config={file}"]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        arguments.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={value}")
    return arguments


def _metavar(field: FieldInfo) -> str:
    kinds = get_args(field.annotation)
    choices = [k for k in kinds if isinstance(k, str)]
    if choices:
        return "{" + ",".join(choices) + "}"
    number = next(
        (name for kind, name in ((int, "N"), (float, "X")) if kind is field.annotation or kind in kinds), None
    )
    return number or "TEXT"
