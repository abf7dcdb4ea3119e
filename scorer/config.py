"""The settings: read once from flags, environment and file, complete before they are frozen.

This is the only module that reads the environment or a settings file. An unknown or malformed value stops the start.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from batching.shares import FairShares
from scorer.errors import ConfigError

ENV_PREFIX = "PREFIXRANK_"
EMBEDDED = "embedded"
MiB = 1 << 20
THREADS_PER_CORE = 4  # more only get in each other's way, and thousands take minutes to start


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask. All are counts of tokens unless the name says otherwise.

    max_request_tokens refuses; max_pass_tokens splits. max_context_tokens bounds prefix and one item together.
    cache_tokens are those of prefixes whose K/V may be kept.
    """

    max_documents: int
    max_request_tokens: int
    max_pass_tokens: int
    max_context_tokens: int
    max_query_tokens: int
    default_tokens_per_document: int
    max_tokens_per_document: int
    max_message_bytes: int
    vocabulary_size: int
    max_num_beams: int = 0
    max_beam_tokens: int = 0
    cache_tokens: int = 0


class Config(BaseModel):
    """Every setting of the service. The field's name is the flag (`--max-pass-tokens`) and, in capitals behind
    PREFIXRANK_, the environment variable; flags win over the environment, the environment over the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(EMBEDDED, description="a directory with safetensors, a .gguf file, or 'embedded'")
    profile: str | None = Field(None, description="name of a built-in profile or path of a TOML file")
    allow_download: bool = Field(False, description="let --model name a repository on the Hugging Face hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and activations")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="GPUs, or processes on a CPU, over which the model is sharded; for serve"
    )
    threads: int = Field(0, ge=0, description="torch threads on a CPU, 4 a core at most; 0: torch's own choice")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0: any free one")
    metrics_port: int = Field(9100, ge=-1, le=65535, description="Prometheus port; 0: any free one, -1: none")
    max_message_bytes: int = Field(64 * MiB, ge=1024, description="largest gRPC message, in and out")
    max_tokenizing_bytes: int = Field(
        256 * MiB, ge=1, description="bytes of requests that wait to be tokenized; above it calls are refused"
    )
    max_connection_age_seconds: float = Field(
        0.0, ge=0, description="after which a gRPC client shall connect anew, to meet new replicas; 0: never"
    )
    health_port: int = Field(
        -1, ge=-1, le=65535, description="port of gRPC health without TLS, for probes that speak none; 0: any, -1: none"
    )
    http_port: int = Field(-1, ge=-1, le=65535, description="HTTP port (needs the http extra); 0: any, -1: none")
    http_timeout_seconds: float = Field(60.0, gt=0, description="deadline of an HTTP request")
    auth_tokens_file: str | None = Field(
        None, description="file of bearer tokens, one 'TOKEN [TENANT]' a line, read again when it changes; None: open"
    )
    max_requests_per_second: float = Field(
        0.0, ge=0, description="scoring calls of one token, or of all without tokens; 0: as many as the queue takes"
    )
    tls_certificate: str | None = Field(None, description="PEM file: gRPC and HTTP then speak TLS only")
    tls_key: str | None = Field(None, description="PEM file of the certificate's key")
    tls_client_ca: str | None = Field(None, description="PEM file: clients must show a certificate it signed (mTLS)")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="of standard error; auto: text on a terminal, JSON elsewhere"
    )
    drain_seconds: float = Field(30.0, ge=0, description="how long SIGTERM waits for accepted calls")
    awake_seconds: float | None = Field(
        None,
        ge=0,
        le=60,
        description="how long after an event the server naps and does not sleep, for a tenth of a core; 0: it sleeps "
        "at once, None: 0.05 with a GPU, 0 on a CPU",
    )

    max_documents: int = Field(2000, ge=1, description="documents of one request; more is refused")
    max_request_tokens: int = Field(4 * MiB, ge=1, description="tokens of one request; more is refused")
    max_pass_tokens: int = Field(
        0,
        ge=0,
        description="tokens of one forward pass; a larger request is split; 0: 1024 on a CPU, 16384 on a GPU, or what "
        "memory allows",
    )
    max_pass_seconds: float = Field(
        600.0, ge=0, description="a pass that takes longer is taken for a hung device, which ends the service; 0: never"
    )
    max_queue_tokens: int = Field(16 * MiB, ge=1, description="tokens waiting; above it calls are refused")
    max_context_tokens: int = Field(
        0,
        ge=0,
        description="prefix and one item; 0: what the model was made for or memory allows, on a GPU at most one pass",
    )

    page_size: int = Field(16, ge=1, le=256, description="tokens of one K/V page")
    cache_tokens: int | None = Field(
        None,
        ge=0,
        description="tokens of prefix K/V kept for later passes and requests; 0: none, None: what memory allows, on a "
        "CPU up to 16384",
    )
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="of the device's memory that is free at the start, what the service may take"
    )
    max_beam_tokens: int = Field(
        8192, ge=0, description="generated tokens of all beams whose K/V there is room for; 0: no beam search"
    )
    constraints: dict[str, str] = Field(
        {}, description="files of allowed sequences for beam search, as NAME=FILE,NAME=FILE or a table"
    )
    kv_host_bytes: int = Field(0, ge=0, description="of host memory for prefix K/V that left the cache; 0: none")
    kv_file: str | None = Field(None, description="file for prefix K/V that left the cache; a local SSD's")
    kv_file_bytes: int = Field(8 * 1024 * MiB, ge=1, description="largest size of kv_file")
    kv_remote: str | None = Field(None, description="redis:// address of a store that replicas share")
    kv_remote_compression: Literal["none", "zstd"] = Field(
        "none", description="of what kv_remote is sent; worth it on networks below some 3 Gbit/s"
    )
    kv_codec: Literal["exact", "fp8"] = Field("exact", description="of prefix K/V that left the cache")
    tenant_weights: dict[str, float] = Field(
        {}, description="fair shares of tenants that differ from 1, as NAME=WEIGHT,NAME=WEIGHT or a table"
    )
    attention: Literal["auto", "torch", "flashinfer"] = Field("auto", description="what computes the attention")
    compile: Literal["auto", "off"] = Field(
        "auto",
        description="the hand-fused path with CUDA graphs where model and GPU allow it; off: the model's modules",
    )
    quantization: Literal["none", "fp8"] = Field(
        "none", description="fp8: matrix products in FP8, scaled by row and channel; needs the hand-fused path"
    )
    invariant: bool = Field(
        False, description="the same document gets the same bits whatever shares its pass; needs the hand-fused path"
    )
    policy: Literal["auto", "threshold", "measured"] = Field(
        "auto",
        description="how AUTO chooses; auto: fused where graphs replay it, measured on FlashInfer, else threshold",
    )
    multi_item_max_tokens: int = Field(128, ge=0, description="threshold: items up to this length run as multi_item")
    calibration: str | None = Field(None, description="file that prefixrank calibrate wrote; None: the built-in H200's")

    tolerance: float | None = Field(None, gt=0, description="of the start's self-check, in log-odds; None: by dtype")
    self_check_seconds: float = Field(
        60.0, ge=0, description="how often served documents are scored again alone, to export the drift; 0: never"
    )
    otlp_endpoint: str | None = Field(
        None,
        description="OTLP/gRPC collector of traces, http://HOST:4317, or https (needs the otel extra); None: no traces",
    )
    require_golden: bool = Field(False, description="refuse to start on a profile without golden scores")

    @field_validator("tenant_weights", "constraints", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        """From a flag or the environment it comes as text."""
        if not isinstance(value, str):
            return value
        return dict(pair.rpartition("=")[::2] for pair in value.split(",") if pair)

    @field_validator("tenant_weights")
    @classmethod
    def _positive(cls, value: dict[str, float]) -> dict[str, float]:
        FairShares(value)  # says which is beyond the limits
        return value

    @field_validator("threads")
    @classmethod
    def _a_few_a_core(cls, value: int) -> int:
        cores = os.cpu_count() or 1
        if value > THREADS_PER_CORE * cores:
            most = f"{THREADS_PER_CORE * cores}, {THREADS_PER_CORE} for each of this machine's {cores} cores"
            raise ValueError(f"at most {most}")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            address = parts.hostname and parts.port and not set(parts.netloc) & set("@ ")  # a bad port: ValueError
            whole = value.startswith(("http://", "https://")) and address
            if not whole or parts.path.strip("/") or parts.query or parts.fragment:
                raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
        return value

    @classmethod
    def read(
        cls,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> Config:
        """Merges file, environment and flags, later ones winning, and validates the whole.

        Raises ConfigError naming each bad setting and where it came from.
        """
        values: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for source, given in (
            (str(file), _from_file(file)),
            ("the environment", _from_environment(os.environ if environ is None else environ)),
            ("the command line", {k: v for k, v in (flags or {}).items() if v is not None}),
        ):
            values.update(given)
            origin.update(dict.fromkeys(given, source))
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("; ".join(_complaint(e, origin) for e in error.errors())) from None


def _complaint(error: Any, origin: Mapping[str, str]) -> str:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    told = "unknown setting" if error["type"] == "extra_forbidden" else error["msg"]
    return f"{name} (from {origin.get(name, 'the defaults')}): {told}, got {error['input']!r}"


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the settings file {file}: {error}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {k.removeprefix(ENV_PREFIX).lower(): v for k, v in environ.items() if k.startswith(ENV_PREFIX)}


def torchrun_place(environ: Mapping[str, str] | None = None) -> tuple[int, int, int] | None:
    """(rank, ranks, rank on this machine) as torchrun tells them; None where it did not start this process."""
    environ = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    rank, count, local = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return rank, count, local


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/prefixrank, or ~/.cache/prefixrank."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prefixrank"
