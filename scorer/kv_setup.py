"""The tiers below the pages as the settings want them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from attention.kv_pages import KvPages
from scorer.build import build_version
from scorer.config import Config
from scorer.errors import ConfigError
from scorer.fingerprint import checkpoint_of
from scorer.kv_codec import CODECS
from scorer.kv_copies import PageCopies
from scorer.kv_entry import namespace_of
from scorer.kv_file import FileStore
from scorer.kv_remote import RemoteStore
from scorer.kv_stores import HostStore, Store
from scorer.kv_tiers import KvTiers
from scorer.model import ScoringModel


def make_tiers(config: Config, model: ScoringModel, kv_pages: KvPages, source: str, revision: str) -> KvTiers | None:
    """None where the settings want none. source: of the model; revision: the profile's. Raises StartError."""
    if not (config.kv_host_bytes or config.kv_file or config.kv_remote):
        return None
    if config.cache_tokens == 0:
        raise ConfigError("kv_host_bytes, kv_file, kv_remote: they lie below the cache, and cache_tokens is 0")
    codec = CODECS[config.kv_codec]
    shapes = [
        (_page_shape(layer.kv_heads, layer.head_dim, config), _page_shape(layer.kv_heads, layer.value_dim, config))
        for layer in model.layers
    ]
    namespace = namespace_of(checkpoint_of(source), revision, codec.name, *_computed_by(config, model), shapes)
    copies = PageCopies(kv_pages, codec, shapes, model.dtype, model.device)
    return KvTiers(copies, _stores(config, namespace, copies.row_bytes, model.device.type == "cuda"))


def _computed_by(config: Config, model: ScoringModel) -> tuple[object, ...]:
    """What K/V of one checkpoint depends on beside its tokens: another release may round, or mend, differently."""
    releases = build_version(), transformers.__version__
    return (str(model.dtype), config.quantization, config.invariant, *releases)


def _page_shape(kv_heads: int, head_dim: int, config: Config) -> torch.Size:
    return torch.Size((config.page_size, kv_heads, head_dim))


def _stores(config: Config, namespace: bytes, content: int, pin: bool) -> list[Store]:
    stores: list[Store] = []
    if config.kv_host_bytes:
        stores.append(HostStore(config.kv_host_bytes, content, pin))
    if config.kv_file:
        stores.append(FileStore(Path(config.kv_file), config.kv_file_bytes, namespace, content))
    if config.kv_remote:
        stores.append(RemoteStore(config.kv_remote, namespace, content, config.kv_remote_compression == "zstd"))
    return stores
