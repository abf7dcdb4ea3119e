"""Which checkpoint kept K/V is of: told by every byte, and by nothing but what it is."""

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.kv_pages import KvPages
from scorer.config import Config
from scorer.errors import ModelError
from scorer.fingerprint import BLOCK_BYTES, Checkpoint, checkpoint_of, fingerprint
from scorer.kv_setup import make_tiers
from scorer.runtime import Runtime
from tests.cases.live import PROFILE, TOLERANCE, live
from tests.models import tiny
from tests.scorer.test_kv_tiers import patient
from tests.scorer.test_threads import no_one_waits_for_new_threads
from tests.tiny import tiny_model_dir

SIZE = 3 * BLOCK_BYTES + 12_345


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of two files of weights, the first of several blocks, and what lies beside such files."""
    path = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    for name, size in (("model-1.safetensors", SIZE), ("model-2.safetensors", 1000)):
        (path / name).write_bytes(rng.bytes(size))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"rope_theta": 1e4, "_name_or_path": "/home/one"}))
    (path / "README.md").write_text("words")
    return path


def changed(file, at):
    """Changes one byte of a file, or changes it back."""
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("seed", range(12))
def test_one_changed_byte_anywhere_makes_another_checkpoint(large, seed):
    before = fingerprint(str(large))
    file = large / ("model-1.safetensors" if seed % 3 else "model-2.safetensors")
    at = int(np.random.default_rng(seed).integers(file.stat().st_size)) if seed else file.stat().st_size - 1
    changed(file, at)
    assert fingerprint(str(large)) != before
    changed(file, at)
    assert fingerprint(str(large)) == before


def test_a_file_of_weights_alone_is_told_by_every_byte_too(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(np.random.default_rng(0).bytes(2 * BLOCK_BYTES))
    before = fingerprint(str(file))
    assert fingerprint(str(shutil.copy(file, tmp_path / "renamed.gguf"))) == before
    changed(file, BLOCK_BYTES + 77)
    assert fingerprint(str(file)) != before


def test_the_place_the_time_and_what_lies_beside_do_not_matter(large, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(large, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    (copy / "config.json").write_text(json.dumps({"_name_or_path": "/srv/other", "rope_theta": 1e4}))
    (copy / "README.md").unlink()
    (copy / ".cache").mkdir()
    (copy / ".cache" / "model-1.safetensors").write_text("half of it")
    assert fingerprint(str(copy)) == fingerprint(str(large))


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_settings_matter(large, tmp_path, name):
    copy = tmp_path / "copy"
    shutil.copytree(large, copy)
    (copy / name).write_text(json.dumps({"rope_theta": 2e4}))
    assert fingerprint(str(copy)) != fingerprint(str(large))


def test_weights_below_the_directory_count_where_the_index_names_them(large, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(large, copy)
    (copy / "below").mkdir()
    (copy / "model-2.safetensors").rename(copy / "below" / "2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "below/2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    before = fingerprint(str(copy))
    changed(copy / "below" / "2.safetensors", 500)
    assert fingerprint(str(copy)) != before


def test_a_repository_of_the_hub_is_told_by_its_snapshot(large, tmp_path):
    """As its cache lays it out: names in a snapshot, contents among blobs."""
    repository = tmp_path / "models--some--model"
    snapshot, blobs = repository / "snapshots" / "c0ffee", repository / "blobs"
    for made in (snapshot, blobs, repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    for n, file in enumerate(large.iterdir()):
        shutil.copy(file, blobs / str(n))
        (snapshot / file.name).symlink_to(blobs / str(n))
    before = fingerprint("some/model", tmp_path)
    assert before == fingerprint(str(large))
    changed(snapshot / "model-1.safetensors", SIZE // 3)
    assert fingerprint("some/model", tmp_path) != before


def test_what_has_no_weights_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no weights"):
        fingerprint(str(tmp_path))
    with pytest.raises(ModelError, match="neither a path nor in the hub's cache"):
        fingerprint("no/such-model", tmp_path)


def test_a_process_may_end_in_the_middle_of_it(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")  # a disk that takes for ever
    with no_one_waits_for_new_threads():
        reading = threading.Thread(target=fingerprint, args=(str(tmp_path),), daemon=True)
        reading.start()
        end = (tmp_path / "model.safetensors").open("wb")  # returns once it is being read
    end.close()
    reading.join(10)
    assert not reading.is_alive()


def test_how_long_it_took_is_logged(large, caplog):
    with caplog.at_level("INFO"):
        checkpoint_of(str(large))
    assert "fingerprint" in caplog.text


def test_every_setting_that_changes_what_is_computed_has_a_namespace_of_its_own(large, tmp_path):
    model = tiny("qwen3")

    def namespace(revision="r", source=large, model=model, **settings):
        given = {"kv_file": str(tmp_path / "kv"), "kv_file_bytes": 1 << 24} | settings
        tiers = make_tiers(Config.read(given, {}), model, KvPages(4, 16), str(source), revision)
        try:
            return tiers._stores[0].store._namespace
        finally:
            tiers.close()
            (tmp_path / "kv").unlink()

    copy = tmp_path / "copy"
    shutil.copytree(large, copy)
    same = [namespace(), namespace(), namespace(source=copy)]
    changed(copy / "model-1.safetensors", 7)
    others = [
        namespace(quantization="fp8"),
        namespace(invariant=True),
        namespace(quantization="fp8", invariant=True),
        namespace(kv_codec="fp8"),
        namespace(revision="s"),
        namespace(source=copy),
        namespace(model=SimpleNamespace(layers=model.layers, device=model.device, dtype=torch.bfloat16)),
    ]
    assert len(set(same)) == 1
    assert len({*same, *others}) == 1 + len(others)


def test_without_a_tier_nothing_is_read():
    assert make_tiers(Config.read({}, {}), tiny("qwen3"), KvPages(0, 16), "/nowhere", "r") is None


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Two checkpoints of tens of MB that differ in a few kB: only norms were trained."""
    base, tuned = (tmp_path_factory.mktemp(name) for name in ("base", "tuned"))
    tiny_model_dir(base, hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    shutil.copytree(base, tuned, dirs_exist_ok=True)
    weights = load_file(tuned / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith("norm.weight")]:
        weights[name] *= 1 + 0.5 * torch.rand(weights[name].shape, generator=generator)
    save_file(weights, tuned / "model.safetensors", metadata={"format": "pt"})
    return base, tuned


def test_a_fine_tune_of_few_bytes_never_scores_with_its_bases_kept_prefixes(tuned, tmp_path):
    query, documents = "q " * 14, ["one", "another document", "a third"]
    settings = {"kv_file": str(tmp_path / "kv"), "kv_file_bytes": 1 << 26, "page_size": 4}
    found = []
    for directory in (tuned[0], *tuned):
        with live(directory, PROFILE, tmp_path, **settings) as server:
            patient(server.runtime.batcher)
            for n in range(3):  # wanted twice it is copied down
                server.runtime.batcher.cache.clear()
                scores = server.scores(query, documents)
                np.testing.assert_allclose(scores, server.truth(query, documents), atol=TOLERANCE)
                if not n:
                    found.append(sum(server.runtime.batcher.ahead.counts.fetched_tokens.values()))
                server.runner.run(server.runtime.batcher.ahead.settle())
                server.runtime.tiers.flush()
    assert found[0] == found[2] == 0
    assert found[1] > 0, "the first request after a restart finds its own"


def test_files_that_are_others_than_were_loaded_are_not_taken_for_them(large, tmp_path, caplog):
    copy = Path(shutil.copytree(large, tmp_path / "copy"))
    loaded = Checkpoint(str(copy))
    assert loaded.digest() == checkpoint_of(str(large))
    changed(copy / "model-2.safetensors", 5)
    assert loaded.digest() == checkpoint_of(str(large)), "what was read stays told"
    unread = Checkpoint(str(copy))
    changed(copy / "model-2.safetensors", 5)
    own = unread.digest()
    assert own not in (checkpoint_of(str(large)), Checkpoint(str(copy)).digest())
    assert own == unread.digest()
    assert "not what was loaded" in caplog.text


def test_files_that_are_gone_have_a_fingerprint_of_the_process_own(tmp_path):
    gone = [Checkpoint(str(tmp_path / "none")).digest() for _ in range(2)]
    assert gone[0] != gone[1]


def test_files_that_had_to_be_fetched_are_looked_at_when_they_are_there(large, tmp_path):
    fetched = Checkpoint(str(tmp_path / "copy"))
    shutil.copytree(large, tmp_path / "copy")
    fetched.look()
    assert fetched.digest() == checkpoint_of(str(large))


def served(directory, **settings):
    """The fingerprint that a service over this checkpoint tells."""
    runtime = Runtime.load(Config.read({"model": str(directory), "profile": "instruct", **settings}, environ={}))
    try:
        return runtime.fingerprint()
    finally:
        runtime.close()


def test_a_service_is_told_by_all_that_its_scores_depend_on(tmp_path):
    model = tiny_model_dir(tmp_path / "model")
    told = {"": served(model)}
    assert served(shutil.copytree(model, tmp_path / "copied" / "elsewhere")) == told[""]
    assert served(model, max_documents=7, cache_tokens=160, policy="threshold") == told[""], "these change no score"
    told |= {f"{name}={value}": served(model, **{name: value}) for name, value in SETTINGS}
    for name in ("weights", "tokenizer"):
        other = Path(shutil.copytree(model, tmp_path / name / "model"))
        OTHER[name](other)
        told[name] = served(other)
    assert len(set(told.values())) == len(told), told


SETTINGS = (("dtype", "bfloat16"), ("max_context_tokens", 200), ("max_request_tokens", 3000))


def _other_weights(directory):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(torch.uint8).view(-1)[0] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})


def _other_tokenizer(directory):
    file = directory / "tokenizer.json"
    told = json.loads(file.read_text())
    told["model"]["merges"].pop()
    file.write_text(json.dumps(told))


OTHER = {"weights": _other_weights, "tokenizer": _other_tokenizer}
