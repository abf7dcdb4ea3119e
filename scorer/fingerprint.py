"""Which checkpoint it is, by every byte that its K/V depends on: the same wherever it lies, on every machine."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformers.utils.hub import cached_file
from xxhash import xxh3_128

from scorer.errors import ModelError
from scorer.loading import places

log = logging.getLogger(__name__)

READERS = 8
BLOCK_BYTES = 16 << 20
SETTINGS = ("config.json", "adapter_config.json")  # the tokenizer has no part in K/V: blocks are named by token ids
INDEX = ".safetensors.index.json"
WHEREABOUTS = ("_name_or_path", "base_model_name_or_path")  # in SETTINGS: where something lay, not what it is


def checkpoint_of(source: str) -> bytes:
    """Of all that the model is made of: a checkpoint, or an adapter and its base model. Reads all of it."""
    began = time.perf_counter()
    digest = b"".join(fingerprint(place) for place in places(source))
    log.info("the checkpoint's fingerprint took %.1f s", time.perf_counter() - began)
    return digest


class Checkpoint:
    """The checkpoint that a process has loaded: read for its fingerprint only if somebody asks. Threads may share it.

    Its files are looked at before the model is loaded, so that others that lie there later are not taken for it.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._digest = b""
        self._seen: list[tuple[str, int, int, int]] = []
        self.look()

    def look(self) -> None:
        """Looks at the files where they were not there yet: they may have to be fetched."""
        self._seen = self._seen or _states(self._source)

    def digest(self) -> bytes:
        """As `checkpoint_of`; where that cannot be told any more, one that no other process has. Blocks."""
        with self._lock:
            self._digest = self._digest or self._read()
            return self._digest

    def _read(self) -> bytes:
        try:
            if self._seen and _states(self._source) == self._seen:
                digest = checkpoint_of(self._source)
                if _states(self._source) == self._seen:
                    return digest
        except ModelError as error:
            log.warning("%s", error)
        log.warning("%s is not what was loaded any more: the fingerprint is this process's own", self._source)
        return uuid4().bytes


def _states(source: str) -> list[tuple[str, int, int, int]]:
    """Which files there are and when each was last written; empty where they cannot be looked at."""
    try:
        files = [file for place in places(source) for file in _files(_local(place, None)).values()]
        told = [(str(file), file.stat()) for file in files]
    except (ModelError, OSError, ValueError):
        return []
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in told]


def fingerprint(place: str, hub: Path | None = None) -> bytes:
    """Of one directory of safetensors, one GGUF file or one repository of the hub, which lies in the cache `hub`.

    Raises ModelError where no weights are found or they cannot be read.
    """
    files = _files(_local(place, hub))
    if not files:
        raise ModelError(f"{place}: no weights that its K/V could be told apart by")
    try:
        with ThreadPool(READERS) as pool:  # daemon threads: a process may end in the middle of it
            digests = pool.map(_digest, files.values(), chunksize=1)
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}; kept K/V cannot be told apart without it") from None
    return blake2b(repr(list(zip(files, digests, strict=True))).encode(), digest_size=16).digest()


def _local(place: str, hub: Path | None) -> Path:
    path = Path(place).expanduser()
    if path.exists():
        return path
    try:
        found = cached_file(place, "config.json", cache_dir=hub, local_files_only=True)
    except OSError:  # as transformers raises where nothing is there
        found = None
    if found is None:
        raise ModelError(f"model {place!r}: neither a path nor in the hub's cache")
    return Path(found).parent


def _files(path: Path) -> dict[str, Path]:
    """What the model is read from, by its name within the checkpoint."""
    if path.is_file():
        return {"": path}
    names = {file.name for file in path.iterdir() if file.suffix == ".safetensors" or file.name in SETTINGS}
    for index in path.glob("*" + INDEX):
        names |= {index.name, *json.loads(index.read_bytes())["weight_map"].values()}
    return {name: path / name for name in sorted(names)}


def _digest(file: Path) -> bytes:
    if file.name in SETTINGS:
        return _of_settings(file.read_bytes())
    digest = xxh3_128()
    with file.open("rb", buffering=0) as opened:
        while block := opened.read(BLOCK_BYTES):
            digest.update(block)
    return digest.digest()


def _of_settings(content: bytes) -> bytes:
    told = json.dumps(_without(json.loads(content), WHEREABOUTS), sort_keys=True)
    return xxh3_128(told.encode()).digest()


def _without(told: Any, names: Sequence[str]) -> Any:
    if isinstance(told, dict):
        return {name: _without(value, names) for name, value in told.items() if name not in names}
    return [_without(value, names) for value in told] if isinstance(told, list) else told
