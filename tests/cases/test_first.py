"""The cases of first.jsonl, each a test of its own: through a real gRPC server, mostly over tiny seeded checkpoints.

A test is named after its case and is given the case's input; the truth is transformers' own forward of one document.
"""

import asyncio
import json
import math
from collections import Counter
from functools import cache
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.plans import Strategy
from prefixrank.v1 import scorer_pb2 as pb
from scorer.__main__ import main
from scorer.client import build_request
from scorer.config import Config
from scorer.demo import Server
from scorer.embedded import embedded_model
from scorer.errors import ModelError, ProfileError, StartError
from scorer.profile import Profile, load_profile, record_golden
from scorer.server import load_runtime
from tests.cases.live import (
    APART,
    EMPTY,
    LIMIT,
    OK,
    PROFILE,
    QUERY_LIMIT,
    TOO_LONG,
    UNCUT,
    all_apart,
    close,
    ids_request,
    live,
    log_odds,
    plain_tokenizer,
    wire,
)
from tests.scorer.test_service import FakeRuntime, served
from tests.tiny import tiny_model_dir, tiny_tokenizer

CASES = {case["id"]: case for case in map(json.loads, Path(__file__).with_name("first.jsonl").open(encoding="utf-8"))}
LIKELIHOOD = Profile(
    name="tiny-likelihood",
    kind="query_likelihood",
    prefix="<|im_start|>user\nPassage:",
    item=" {document} Ask.<|im_end|>\n<|im_start|>assistant\nQuestion: {query}",
)
every_strategy = pytest.mark.parametrize("strategy", Strategy)


def pytest_generate_tests(metafunc):
    if "given" in metafunc.fixturenames:
        id_ = metafunc.function.__name__.removeprefix("test_").replace("_", "-")
        metafunc.parametrize("given", [CASES[id_]["input"]], ids=[id_])


def test_every_case_is_a_test_that_reads_its_input_here():
    reading = {
        name for name, test in globals().items() if name[:5] == "test_" and "given" in signature(test).parameters
    }
    assert len(CASES) == 33
    assert reading == {f"test_{id_.replace('-', '_')}" for id_ in CASES}


# ---------------------------------------------------------------- fixtures


def numbers(message):
    """Every float of a message, at any depth."""
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        if field.message_type:
            for each in values:
                yield from numbers(each)
        elif field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            yield from values


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tiny(model_dir, tmp_path_factory):
    with live(model_dir, PROFILE, tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """The embedded model, whose scores mean something. Its start is proved in the server of test_readme."""
    with live(embedded_model(), "smollm2", tmp_path_factory.mktemp("profile"), check=False) as made:
        yield made


@pytest.fixture(params=["tiny", "embedded"])
def either(request):
    return request.getfixturevalue(request.param)


# ---------------------------------------------------------------- labels


def test_label_not_one_token(given, tiny, model_dir, tmp_path):
    bad = given["labels"][0]
    shown = str(plain_tokenizer(model_dir)(bad).input_ids[:3])[1:-1]
    profile = PROFILE.model_copy(update={"labels": tuple(given["labels"]), "positive": bad})
    with (
        pytest.raises(ProfileError, match=f"'{bad}' must be exactly one token.*{shown}"),
        live(model_dir, profile, tmp_path),
    ):
        pass
    told = tiny.refused(build_request("q", ["a"], label_texts=given["labels"]))
    assert list(told) == ["options.label_texts[0]"]
    assert bad in told["options.label_texts[0]"]
    assert shown in told["options.label_texts[0]"]


def test_label_case_and_space(given, either):
    found = {}
    for text in given["labels"]:
        (result,) = either.score("q", ["a b"], label_texts=[text], label_logits=True).results
        (label,) = result.label_logits
        assert plain_tokenizer(either.directory)(text, add_special_tokens=False).input_ids == [label.token_id]
        found[label.token_id] = result.score
    assert len(found) == len(given["labels"])
    assert all_apart(found.values())
    assert set(either.refused(build_request("q", ["a"], label_texts=["Zebra-like"]))) == {"options.label_texts[0]"}


@every_strategy
def test_label_order_swaps_columns(given, tiny, strategy):
    documents = ["a", "b c d", "the capital of France is Paris"]
    a, b = (
        tiny.score("q", documents, strategy, label_texts=given[name], label_logits=True).results
        for name in ("labels_a", "labels_b")
    )
    for one, other in zip(a, b, strict=True):
        assert [x.logit for x in one.label_logits] == [x.logit for x in reversed(other.label_logits)]
        assert one.log_odds == -other.log_odds
        assert one.probability == pytest.approx(1 - other.probability, abs=1e-12)


def test_label_order_of_the_profile_is_no_matter(tiny, model_dir, tmp_path):
    given = CASES["label-order-swaps-columns"]["input"]
    documents = ["a", "b c d", "the capital of France is Paris"]
    scores = []
    for name in ("labels_a", "labels_b"):
        changes = {"labels": tuple(given[name]), "positive": given["positive"]}
        with live(model_dir, PROFILE.model_copy(update=changes), tmp_path) as made:
            scores.append(made.scores("q", documents).tolist())
            assert [label.text for label in made.runner.run(made.at.client.model_info()).labels] == ["yes", "no"]
    assert scores[0] == scores[1]
    close(np.array(scores[0]), tiny.scores("q", documents))  # whose prefix may be cached: sums in another order


# ---------------------------------------------------------------- template


def test_template_whitespace(given, model_dir, tmp_path, capsys):
    plain, recorded, changed = (tmp_path / f"{name}.toml" for name in ("plain", "recorded", "changed"))
    record_golden(plain, PROFILE, ())
    assert main(["verify", f"--model={model_dir}", f"--profile={plain}", f"--record={recorded}"]) == 0
    before = load_profile(recorded)
    text = recorded.read_text(encoding="utf-8")
    assert text.count(r"End.\nRelevant") == 1
    changed.write_text(text.replace(r"End.\nRelevant", r"End.\n\nRelevant"), encoding="utf-8")
    after = load_profile(changed)
    assert before.golden == after.golden
    assert before.golden
    assert before.revision != after.revision

    def start(profile):
        return load_runtime(Config.read({"model": str(model_dir), "profile": str(profile)}, environ={}))

    start(recorded).close()
    with pytest.raises(ProfileError, match=r"golden pair .* scored -?\d+\.\d+, expected -?\d+\.\d+ within 0\.02"):
        start(changed)


def test_plain_call_equals_hand_templated(given, either):
    profile, tokenizer = either.runtime.profile, plain_tokenizer(either.directory)
    query, documents = given["query"], given["documents"]
    prefix = tokenizer(profile.prefix.replace("{query}", query)).input_ids
    items = [tokenizer(profile.item.replace("{document}", document)).input_ids for document in documents]
    by_hand = either.send(ids_request(prefix, items))
    plain = either.score(query, documents)
    assert [r.score for r in plain.results] == [r.score for r in by_hand.results]
    assert plain.usage.prefix_tokens == by_hand.usage.prefix_tokens == len(prefix)
    assert [r.tokens for r in plain.results] == [len(item) for item in items]
    assert all_apart([r.score for r in plain.results])


def test_no_labels_for_causal_model(given, model_dir, tmp_path):
    assert given["profile"] == "none"
    server = Server([f"--model={model_dir}"])
    with pytest.raises(StartError, match=r"needs a profile that names its template and labels: add --profile"):
        server.wait_until_listening()
    assert server.stop() == 1
    bare = tmp_path / "bare.toml"
    bare.write_text('name = "bare"\nkind = "label_logits"\nprefix = "{query}:"\nitem = " {document}."\n')
    with pytest.raises(ProfileError, match=r"labels: one or two texts, each one token"):
        load_profile(bare)


def test_empty_prompt_one_token(given, either):
    tokenizer = plain_tokenizer(either.directory)
    response = either.score(given["query"], given["documents"])
    assert response.usage.prefix_tokens >= len(tokenizer(given["query"]).input_ids)
    for document, result in zip(given["documents"], response.results, strict=True):
        own = len(tokenizer(document).input_ids)
        assert result.document_tokens >= own
        assert result.tokens > result.document_tokens
    assert all_apart([r.score for r in response.results])


# ---------------------------------------------------------------- isolation


@every_strategy
def test_reverse_order(given, tiny, strategy):
    order = given["permutation"]
    scores = tiny.scores(given["query"], given["documents"], strategy)
    reverse = tiny.scores(given["query"], [given["documents"][i] for i in order], strategy)
    close(reverse, scores[order])
    close(scores, tiny.truth(given["query"], given["documents"]))
    assert all_apart(scores)


@every_strategy
def test_first_document_answers(given, tiny, strategy):
    query, documents = given["query"], given["documents"]
    close(tiny.scores(query, documents, strategy)[1:], tiny.scores(query, documents[1:], strategy))


def test_isolation_where_scores_mean_something(embedded):
    """The isolation cases again, on a model that would be swayed by a neighbour that answers."""
    given = CASES["first-document-answers"]["input"]
    query, documents = given["query"], given["documents"]
    scores = embedded.scores(query, documents)
    close(embedded.scores(query, documents[1:]), scores[1:])
    close(embedded.scores(query, documents[::-1]), scores[::-1])
    close(scores, embedded.truth(query, documents))
    assert scores[2] > max(scores[3], scores[5]), "Paris before London and bananas"


@every_strategy
def test_five_very_different(given, tiny, strategy):
    scores = tiny.scores(given["query"], given["documents"], strategy)
    assert all_apart(scores)
    close(scores, tiny.truth(given["query"], given["documents"]))
    close(scores, [tiny.scores(given["query"], [document], strategy)[0] for document in given["documents"]])


# ---------------------------------------------------------------- positions


@cache
def grown(directory, prefix, item, items):
    """Seeded ids: a prefix, `items` distinct items of `item` tokens, and the truth for each."""
    rng = np.random.default_rng([prefix, item])
    start = rng.integers(3, 500, prefix).tolist()
    made = [rng.integers(3, 500, item).tolist() for _ in range(items)]
    return start, made, [log_odds(directory, start + ids, grown.labels) for ids in made]


@every_strategy
def test_prefix_grows_by_one(given, tiny, strategy):
    grown.labels = tiny.labels
    most = max(given["items"])
    for prefix in given["prefix_tokens"]:
        for item in given["item_tokens"]:
            start, made, truth = grown(tiny.directory, prefix, item, most)
            for items in given["items"]:
                response = tiny.send(ids_request(start, made[:items], strategy))
                assert {r.strategy for r in response.results} == {wire(strategy)}
                close([r.score for r in response.results], truth[:items])


@pytest.mark.parametrize("strategy", [None, *Strategy])
def test_items_of_all_lengths_behind_a_growing_prefix(tiny, strategy):
    given = CASES["prefix-grows-by-one"]["input"]
    grown.labels = tiny.labels
    for prefix in given["prefix_tokens"]:
        start, _, _ = grown(tiny.directory, prefix, 1, max(given["items"]))
        made = [grown(tiny.directory, prefix, item, max(given["items"]))[1][0] for item in given["item_tokens"]]
        truth = [log_odds(tiny.directory, start + ids, tiny.labels) for ids in made]
        close([r.score for r in tiny.send(ids_request(start, made, strategy)).results], truth)


# ---------------------------------------------------------------- shape


@every_strategy
def test_one_document(given, tiny, strategy):
    documents = ["the capital of France is Paris"] * given["documents"]
    (first,), (second,) = (tiny.scores("q", documents, strategy) for _ in range(2))
    assert first == second
    close(first, tiny.truth("q", documents))


def test_zero_documents(given, tiny):
    assert set(tiny.refused(build_request("q", ["a"] * given["documents"]))) == {"documents"}


@pytest.mark.parametrize("strategy", [None, *Strategy])
def test_blank_documents(given, tiny, strategy):
    results = tiny.score(given["query"], given["documents"], strategy).results
    assert [r.index for r in results] == [0, 1, 2, 3]
    assert [r.status for r in results] == [EMPTY, OK, EMPTY, EMPTY]
    assert [r.HasField("score") for r in results] == [False, True, False, False]
    assert all(r.message for r in results if r.status == EMPTY)
    close(results[1].score, tiny.truth(given["query"], ["a"])[0])


def test_empty_query(given, tiny):
    assert set(tiny.refused(build_request(given["query"], given["documents"]))) == {"query.text"}


def test_duplicate_ids(given, tiny):
    ids, texts = zip(*given["documents"], strict=True)
    told = tiny.refused(build_request("q", texts, ids=ids))
    assert list(told) == ["documents[1].id"]
    assert repr(ids[1]) in told["documents[1].id"]


@every_strategy
def test_duplicate_texts(given, tiny, strategy):
    response = tiny.score("q", given["documents"], strategy)
    first, other, again = response.results
    assert first.score == again.score
    assert abs(first.score - other.score) > APART
    usage = response.usage
    prefixes = (
        2 * usage.prefix_tokens if strategy is Strategy.NAIVE else usage.prefix_tokens - usage.cached_prefix_tokens
    )
    assert usage.computed_tokens == prefixes + first.tokens + other.tokens


# ---------------------------------------------------------------- length


def of_tokens(n):
    """A document of n tokens: " x" is one."""
    return " ".join("x" * n)


def test_limit_edges(given, tiny):
    lengths = [LIMIT - 1, LIMIT, LIMIT + 1, 10 * LIMIT]
    assert given["document_tokens"] == ["limit-1", "limit", "limit+1", "10*limit"]
    neighbours = [f"passage {i} of a hundred" for i in range(100)]
    unharmed = tiny.scores("q", neighbours)
    for truncation in (pb.TRUNCATION_RIGHT, pb.TRUNCATION_LEFT, pb.TRUNCATION_NONE):
        documents = [of_tokens(n) for n in lengths] + neighbours
        results = tiny.score("q", documents, max_tokens_per_document=0, truncation=truncation).results
        edges = results[:4]
        assert [r.original_document_tokens for r in edges] == lengths
        assert [r.status for r in edges[:2]] == [OK, OK]
        assert [r.document_tokens for r in edges[:2]] == lengths[:2]
        close([r.score for r in results[4:]], unharmed)
        if truncation == pb.TRUNCATION_NONE:
            assert [r.status for r in edges[2:]] == [TOO_LONG, TOO_LONG]
            assert not any(r.HasField("score") or r.truncated for r in edges[2:])
        else:
            assert [r.truncated for r in edges] == [False, False, True, True]
            assert [r.document_tokens for r in edges[2:]] == [LIMIT, LIMIT]
            by_hand = of_tokens(LIMIT) if truncation == pb.TRUNCATION_RIGHT else " " + of_tokens(LIMIT)
            close([r.score for r in edges[2:]], tiny.truth("q", [by_hand] * 2))


def test_cut_keeps_tail(given, either):
    assert given["document"] == "10 x the limit"
    limit = 12
    document = of_tokens(10 * limit)
    _, whole = either.ids("q", "x")
    _, cut = either.ids("q", document, max_tokens_per_document=limit)
    tail = plain_tokenizer(either.directory)(either.runtime.profile.item.split("{document}")[1]).input_ids
    assert cut[-len(tail) :] == whole[-len(tail) :] == tail
    assert len(cut) == len(whole) - 1 + limit
    (result,) = either.score("q", [document], max_tokens_per_document=limit).results
    assert (result.truncated, result.document_tokens, result.original_document_tokens) == (True, limit, 10 * limit)
    assert result.score == either.scores("q", [of_tokens(limit)])[0]


@pytest.mark.parametrize("side", [pb.TRUNCATION_RIGHT, pb.TRUNCATION_LEFT], ids=["right", "left"])
def test_cut_unicode(given, either, side):
    document, limit = given["document"], given["max_tokens"]
    for most in range(1, limit + 1):
        (result,) = either.score("q", [document], max_tokens_per_document=most, truncation=side).results
        assert result.document_tokens <= most
        if result.status != OK:  # so few tokens hold no character
            assert result.status in (EMPTY, TOO_LONG)
            assert not result.HasField("score")
            continue
        assert result.truncated
        prefix, item = either.ids("q", document, max_tokens_per_document=most, truncation=side)
        text = plain_tokenizer(either.directory).decode(prefix + item)
        head, tail = either.runtime.profile.item.split("{document}")
        kept = (
            text.split(head, maxsplit=text.count(head))[-1] if False else text[text.index("Passage:") + 9 : -len(tail)]
        )
        assert "\ufffd" not in kept
        assert kept.strip()
        assert document.startswith(kept) if side == pb.TRUNCATION_RIGHT else document.endswith(kept)
    assert result.status == OK, "seven tokens hold a character"


def test_cut_side(given, tiny):
    document, limit = given["document"], 8
    for side in given["sides"]:
        cuts = [document[:n] if side == "right" else document[-n:] for n in range(1, len(document) + 1)]
        whole = tiny.score("q", cuts).results
        by_hand = max((r for r in whole if r.status == OK and r.document_tokens <= limit), key=lambda r: r.index)
        truncation = pb.Truncation.Value(f"TRUNCATION_{side.upper()}")
        (result,) = tiny.score("q", [document], max_tokens_per_document=limit, truncation=truncation).results
        assert result.truncated
        assert result.document_tokens == by_hand.document_tokens
        close(result.score, by_hand.score)
        assert abs(result.score - whole[-1].score) > APART


def test_long_query(given, tiny):
    assert given["query"] == "limit+1 tokens"
    fits = "x" + " x" * (QUERY_LIMIT - 1)
    tiny.scores(fits, ["a"])
    told = tiny.refused(build_request(fits + " x", ["a"]))
    assert list(told) == ["query.text"]
    assert str(QUERY_LIMIT) in told["query.text"]
    assert str(QUERY_LIMIT + 1) in told["query.text"]


# ---------------------------------------------------------------- text


def test_special_token_text(given, either):
    tokenizer = plain_tokenizer(either.directory)
    control = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    _, template = either.ids("q", "x")
    expected = Counter(id_ for id_ in template if id_ in control)
    for document in given["documents"]:
        _, item = either.ids("q", document)
        assert Counter(id_ for id_ in item if id_ in control) == expected, document
    neighbour = either.scores("q", ["a neighbour"])
    scores = either.scores("q", [*given["documents"], "a neighbour"])
    close(scores[-1:], neighbour)
    assert all_apart(scores[:-1])


@pytest.mark.parametrize("strategy", [None, *Strategy])
def test_odd_text(given, tiny, strategy):
    neighbours = ["a neighbour", "and another one"]
    results = tiny.score("q", [*given["documents"], *neighbours], strategy).results
    for document, result in zip(given["documents"], results, strict=False):
        assert result.HasField("score") == (result.status == OK), document
        assert result.status in (OK, EMPTY), document
    assert results[len(given["documents"]) - 1].truncated
    close([r.score for r in results[-2:]], tiny.truth("q", neighbours))


@pytest.mark.parametrize("profile", [PROFILE, LIKELIHOOD, "instruct"], ids=["labels", "likelihood", "chat"])
def test_seam(given, model_dir, profile, tmp_path):
    tokenizer = plain_tokenizer(model_dir)
    with live(model_dir, profile, tmp_path) as made:
        tokenization = made.runtime.tokenization
        for document in given["documents"]:
            prefix, item = made.ids("what is it", document)
            text = "".join(tokenization.render("what is it", document))
            assert prefix + item == tokenizer(text).input_ids, document
        results = made.score("what is it", given["documents"]).results
        assert [r.status for r in results] == [OK] * len(given["documents"])


# ---------------------------------------------------------------- numbers


def fake_scores(pairs):
    """Results for documents whose label logits are these, through a server over a fake model."""

    async def scenario():
        async with served(FakeRuntime()) as at:
            documents = [f"logits {positive!r} {other!r}" for positive, other in pairs]
            return (await at.client.score("q", documents, label_logits=True)).results

    return asyncio.run(scenario())


def test_near_one(given):
    results = fake_scores(given["logit_pairs"])
    scores = [r.log_odds for r in results]
    assert scores == sorted(set(scores))
    assert scores == pytest.approx([a - b for a, b in given["logit_pairs"]], abs=1e-6)
    assert [r.probability for r in results] == pytest.approx([1.0] * 4, abs=1e-8)


def test_very_negative(given):
    low, high = given["logits"]
    unlikely, likely = fake_scores([(low, high), (high, low)])
    assert (unlikely.log_odds, likely.log_odds) == (low - high, high - low)
    assert 0 <= unlikely.probability < 1e-60
    assert likely.probability == 1.0
    assert all(map(math.isfinite, [*numbers(unlikely), *numbers(likely)]))


@pytest.mark.parametrize("strategy", [None, *Strategy])
def test_nan_weights(given, model_dir, tmp_path, strategy):
    assert given["model"].startswith("one NaN planted")
    healthy = ["the capital of France", "a b c d", "seven ways to cook rice"]
    documents = [healthy[0], "x 7 x", *healthy[1:]]
    with live(model_dir, PROFILE, tmp_path, check=False) as made:
        sick = plain_tokenizer(model_dir)("7").input_ids[-1]
        assert not any(sick in ids for document in healthy for ids in made.ids("q", document))
        before = made.scores("q", healthy, strategy)
        weights = made.runtime.engine.model.hf.get_input_embeddings().weight
        weights[sick, 5] = math.nan
        response = made.score("q", documents, strategy, label_logits=True, vocabulary_probabilities=True)
        assert [r.status for r in response.results] == [OK, pb.DOCUMENT_STATUS_NUMERIC_ERROR, OK, OK]
        bad = response.results[1]
        assert bad.message
        assert not any(bad.HasField(name) for name in ("score", "log_odds", "probability"))
        assert not bad.label_logits
        close([r.score for r in response.results if r.status == OK], before)
        assert made.metric("non_finite_scores_total") == 1
        assert made.metric("documents_total", status="numeric_error") == 1
        weights[:] = math.nan
        everywhere = made.score("q", documents, strategy, label_logits=True, vocabulary_probabilities=True)
        assert {r.status for r in everywhere.results} == {pb.DOCUMENT_STATUS_NUMERIC_ERROR}
        assert made.metric("non_finite_scores_total") == 1 + len(documents)
        assert made.metric("requests_total", code="INTERNAL") == 0
        for reply in (response, everywhere):
            assert all(map(math.isfinite, numbers(reply)))


def test_nan_in_all_weights_refuses_the_start(model_dir, tmp_path):
    sick = tiny_model_dir(tmp_path / "sick")
    weights = {name: torch.full_like(value, math.nan) for name, value in load_file(sick / "model.safetensors").items()}
    save_file(weights, sick / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"gives (\d+) of \1 samples no finite score"), live(sick, PROFILE, tmp_path):
        pass


def test_sigmoid_equals_softmax(given, tiny):
    documents = [f"document {i} of some" for i in range(20)]
    for result in tiny.score("q", documents, label_texts=given["labels"], label_logits=True).results:
        yes, no = (np.float64(label.logit) for label in result.label_logits)
        softmax = np.exp(yes - max(yes, no)) / (np.exp(yes - max(yes, no)) + np.exp(no - max(yes, no)))
        assert 1 / (1 + math.exp(-result.log_odds)) == pytest.approx(softmax, abs=1e-6)
        assert result.probability == pytest.approx(softmax, abs=1e-6)
        assert result.score == result.log_odds


# ---------------------------------------------------------------- reply


@pytest.mark.parametrize("strategy", [None, *Strategy])
def test_usage_sums(given, tiny, strategy):
    documents = [f"document {i} " + "and more " * (7 * i) for i in range(given["documents"])]
    response = tiny.score("q", documents, strategy)
    tokens = [sum(map(len, tiny.ids("q", document, max_tokens_per_document=UNCUT))) for document in documents]
    usage, prefix = response.usage, len(tiny.ids("q", "x")[0])
    assert usage.prefix_tokens == prefix
    assert usage.prefix_tokens + usage.item_tokens == prefix + sum(r.tokens for r in response.results)
    assert usage.computed_tokens + usage.saved_tokens == sum(tokens)
    assert usage.saved_tokens == (0 if strategy is Strategy.NAIVE else 6 * prefix + usage.cached_prefix_tokens)


# ---------------------------------------------------------------- tokenizer


EIGHT = [f"document {i} " + "with more " * i for i in range(8)]


def test_pad_token_missing(given, tmp_path):
    assert given["tokenizer"] == "no pad token"
    directory = tiny_model_dir(tmp_path / "model", tokenizer=tiny_tokenizer(pad=False))
    assert plain_tokenizer(directory).pad_token is None
    with live(directory, PROFILE, tmp_path) as made:
        together = made.scores("q", EIGHT)
        close(together, [made.scores("q", [document])[0] for document in EIGHT])
        close(together, made.truth("q", EIGHT))


def test_bos_tokenizer(given, tmp_path):
    assert given["tokenizer"] == "adds BOS"
    directory = tiny_model_dir(tmp_path / "model", "llama", tokenizer=tiny_tokenizer(bos=True))
    bos = plain_tokenizer(directory).bos_token_id
    with live(directory, PROFILE, tmp_path) as made:
        for document in EIGHT:
            prefix, item = made.ids("q", document)
            assert prefix[0] == bos
            assert (prefix + item).count(bos) == 1
        close(made.scores("q", EIGHT), made.truth("q", EIGHT))


def test_added_tokens_beyond_vocab(given, tmp_path):
    assert given["tokenizer"] == "labels are added tokens past vocab_size"
    directory = tiny_model_dir(tmp_path / "model", tokenizer=tiny_tokenizer(added=("[[relevant]]", "[[not]]")))
    tokenizer = plain_tokenizer(directory)
    profile = PROFILE.model_copy(update={"labels": ("[[relevant]]", "[[not]]"), "positive": "[[relevant]]"})
    with live(directory, profile, tmp_path) as made:
        assert min(made.labels) >= tokenizer.vocab_size
        scores = made.scores("q", EIGHT)
        close(scores, made.truth("q", EIGHT))
        assert all_apart(scores)
