"""The tiers below the pages as the settings want them."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch

from attention.kv_pages import KvPages
from scorer.config import Config
from scorer.errors import ConfigError
from scorer.kv_codec import CODECS
from scorer.kv_copies import PageCopies
from scorer.kv_entry import namespace_of
from scorer.kv_file import FileStore
from scorer.kv_remote import RemoteStore
from scorer.kv_stores import HostStore, Store
from scorer.kv_tiers import KvTiers
from scorer.model import ScoringModel

SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # of each file of weights: a checkpoint of the same shape differs nearly everywhere


def fingerprint(source: str) -> bytes:
    """Tells checkpoints apart by what is in them, wherever they lie: sizes, small files, and samples of large ones."""
    path = Path(source)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest = blake2b(digest_size=16)
    for file in files:
        if not file.exists():
            digest.update(source.encode())  # a repository of the hub
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for n in range(SAMPLES):
                opened.seek(size * n // SAMPLES)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.digest()


def make_tiers(config: Config, model: ScoringModel, kv_pages: KvPages, identity: bytes) -> KvTiers | None:
    """None where the settings want none. identity: of model and profile. Raises ConfigError."""
    if not (config.kv_host_bytes or config.kv_file or config.kv_remote):
        return None
    if config.cache_tokens == 0:
        raise ConfigError("kv_host_bytes, kv_file, kv_remote: they lie below the cache, and cache_tokens is 0")
    codec = CODECS[config.kv_codec]
    shapes = [
        (_page_shape(layer.kv_heads, layer.head_dim, config), _page_shape(layer.kv_heads, layer.value_dim, config))
        for layer in model.layers
    ]
    namespace = namespace_of(identity, codec.name, str(model.dtype), shapes)
    copies = PageCopies(kv_pages, codec, shapes, model.dtype)
    return KvTiers(copies, _stores(config, namespace, copies.row_bytes, model.device.type == "cuda"))


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
