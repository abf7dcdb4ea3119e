"""Long texts: encoded in stretches they have the same ids, and what cannot fit is known before it is encoded."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from prefixrank.v1 import scorer_pb2 as pb
from scorer.embedded import embedded_model
from scorer.encoder import Encoder
from scorer.stretches import STRETCH, LeastTokens, separable, stretches
from scorer.tokenization import Status, load_tokenizer
from tests.scorer.test_tokenization import LIMITS, ask, tokenization, violations
from tests.tiny import prepending_tokenizer, tiny_tokenizer

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LIMITS = replace(LIMITS, max_context_tokens=200_000, max_request_tokens=1 << 22, max_tokens_per_document=100_000)


def split(pattern):
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, BYTES | {"use_regex": False}]}


def state(tokenizer=None, **changes):
    """A tokenizer's JSON, changed."""
    return json.loads((tokenizer or tiny_tokenizer()).backend_tokenizer.to_str()) | changes


def changed(**changes):
    """A tokenizer whose JSON is changed."""
    made = tiny_tokenizer()
    made.backend_tokenizer.__setstate__(json.dumps(state(made, **changes)).encode())
    return made


TOKENIZERS = {
    "tiny": tiny_tokenizer,
    "digits": lambda: changed(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]}
    ),
    "qwen": lambda: changed(normalizer={"type": "NFC"}, pre_tokenizer=split(QWEN)),
    "llama3": lambda: changed(pre_tokenizer=split(LLAMA3)),
    "embedded": lambda: load_tokenizer(embedded_model()),
}
PREPENDING = {
    "normalizer": lambda: prepending_tokenizer("bpe", "normalizer"),
    "unigram": lambda: prepending_tokenizer("unigram", "always"),
    "swallows": lambda: tiny_tokenizer_that_swallows(),
}


def tiny_tokenizer_that_swallows():
    made = tiny_tokenizer()
    made.backend_tokenizer.add_tokens([AddedToken("<blank>", lstrip=True, rstrip=True, normalized=False)])
    return made


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


PARTS = st.sampled_from(
    [
        *("a", "word", "Paris", "New", "York", "12", "1977", "x7", "don't", "we'll", "größte", "中文密码", "🙂"),
        *("e\u0301", "\u0301", "(", ").", "<|im_end|>", "<blank>", "\u1f82\u0301", "\x13"),
        *(" ", "  ", "   ", "\n", "\n\n", " \n ", "\t", "\u00a0", "\u200b"),
    ]
)
TEXTS = st.lists(PARTS, max_size=60).map("".join) | st.lists(PARTS, max_size=60).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, length=st.integers(1, 9))
def test_the_stretches_are_the_text_and_have_its_tokens(tokenizer, text, length):
    parts = list(stretches(text, length))
    assert "".join(parts) == text
    backend = tokenizer.backend_tokenizer
    whole, apart = (backend.encode_batch(some, add_special_tokens=False) for some in ([text], parts))
    assert [id_ for one in apart for id_ in one.ids] == whole[0].ids


def test_which_tokenizers_are_separable(tokenizer):
    assert separable(state(tokenizer))


@pytest.mark.parametrize("name", ["normalizer", "unigram"])
def test_which_are_not(name):
    assert not separable(state(PREPENDING[name]()))


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": split(r"[a-z]+ [a-z]+|\s+|\S+")},
        {"pre_tokenizer": split(r"(?<=a) ?\p{L}+|\s+|\S+")},
        {"pre_tokenizer": split(r" ?\p{L}+(?= )|\s+|\S+")},
        {"pre_tokenizer": split(r" ?\p{L}+$|\s+|\S+")},
        {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a b"}, "content": "ab"}},
    ],
    ids=str,
)
def test_what_merges_or_looks_across_a_space_is_not(changes):
    assert not separable(state(**changes))


@pytest.mark.parametrize("token", [AddedToken("New York"), AddedToken("New "), AddedToken("New", rstrip=True)], ids=str)
def test_added_tokens_across_a_space_are_not(token):
    made = tiny_tokenizer()
    made.backend_tokenizer.add_tokens([token])
    assert not separable(state(made))


# --- the fewest tokens


@pytest.fixture(scope="module", params=[*TOKENIZERS, *PREPENDING])
def any_tokenizer(request):
    return (TOKENIZERS | PREPENDING)[request.param]()


@pytest.fixture(scope="module")
def least(any_tokenizer):
    return LeastTokens(state(any_tokenizer))


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(any_tokenizer, least, text):
    assert least(text) <= len(any_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def test_the_fewest_tokens_are_known(any_tokenizer, least):
    unigram = state(any_tokenizer)["model"]["type"] != "BPE"
    assert (least("a" * 10_000) == 0) == unigram


def test_composed_text_counts_less():
    made = state(changed(normalizer={"type": "NFC"}))
    assert LeastTokens(made)("é" * 1000) < LeastTokens(made)("e" * 2000)


# --- long texts of a request


def long_text(characters, seams=True):
    rng = random.Random(0)
    words = ["Paris", "rivers", "7", "größte", "🙂", "don't", "\n", "end.", "a", "is"]
    return (" " if seams else "_").join(rng.choice(words) for _ in range(characters // 4))


def in_one_go(by):
    """The same, encoding every text whole."""
    by._encoder._separable = False
    return by


@pytest.mark.parametrize("side", [pb.TRUNCATION_RIGHT, pb.TRUNCATION_LEFT, pb.TRUNCATION_NONE])
@pytest.mark.parametrize("limit", [1, 500, 90_000])
@pytest.mark.parametrize("seams", [True, False])
def test_a_long_document_is_cut_as_if_encoded_whole(side, limit, seams):
    request = ask(long_text(4 * STRETCH, seams), "a short one", max_tokens_per_document=limit, truncation=side)
    found, expected = (by.tokenize(request) for by in (tokenization(limits=LIMITS), whole_tokenization()))
    assert found.documents == expected.documents
    assert (found.request is None) == (expected.request is None)
    for one, other in zip(items_of(found), items_of(expected), strict=True):
        assert np.array_equal(one.ids, other.ids)


def items_of(found):
    return () if found.request is None else found.request.items


def whole_tokenization():
    return in_one_go(tokenization(limits=LIMITS))


def test_long_raw_texts_have_their_ids():
    text = long_text(4 * STRETCH) + " <|im_end|> and on"
    request = pb.ScoreRequest(raw_text=text, documents=[pb.Document(raw_text=text), pb.Document(raw_text=" b")])
    limits = replace(LIMITS, max_context_tokens=1 << 20)
    found = tokenization(limits=limits).tokenize(request).request
    expected = in_one_go(tokenization(limits=limits)).tokenize(request).request
    assert np.array_equal(found.prefix, expected.prefix)
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(found.items, expected.items, strict=True))


def test_words_are_counted_on_across_stretches():
    text = long_text(4 * STRETCH)
    encoder = Encoder(tiny_tokenizer(), "")
    long, whole = encoder.user_text(text, False), encoder._guarded(text, encoder._blind[False].encode(text), False)
    assert len(long.pieces) > 1
    for token in range(0, len(whole.ids), 5000):
        assert long.span(token) == whole.span(token)
        assert long.words_before(token, 3, 0) == whole.words_before(token, 3, 0)
        assert long.words_after(token, 2) == whole.words_after(token, 2)


def test_a_control_token_by_merging_is_broken_up_in_a_long_text_too():
    text = "word " * (STRETCH // 2) + "<|im_end|>"
    assert 1 not in tokenization(limits=LIMITS).tokenize(ask(text)).request.items[0].ids[:-8]


HUGE = "word " * (16 << 18)  # 16 MiB and more


@pytest.mark.parametrize(
    ("request_", "field", "limit"),
    [
        (ask("a", query=HUGE), "query.text", "at most 32 tokens"),
        (pb.ScoreRequest(raw_text=HUGE, documents=[pb.Document(text="a")]), "raw_text", "fewer than 4096 tokens"),
    ],
    ids=["query", "raw"],
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(request_, field, limit):
    by = tokenization(max_context_tokens=4096)
    by._encoder._as_is = by._encoder._blind = None  # nothing encodes any more
    (violation,) = violations(request_, by).values()
    assert violation.field == field
    assert limit in violation.limit
    assert violation.value.startswith("at least ")
    assert violation.value.endswith(f"tokens in {len(HUGE)} characters")


def test_a_huge_instruction_is_refused_before_it_is_encoded():
    profile = tokenization()._profile.model_copy(update={"prefix": "{instruction} {query}", "instruction": "Judge."})
    request = ask("a")
    request.query.instruction = HUGE
    assert violations(request, tokenization(profile))["query.instruction"].value.startswith("at least ")


def test_a_huge_raw_document_is_too_long_and_costs_the_others_nothing():
    found = tokenization().tokenize(ask(pb.Document(raw_text=HUGE), pb.Document(raw_text=" b")))
    huge, other = found.documents
    assert (huge.status, other.status) == (Status.TOO_LONG, Status.OK)
    assert huge.message.startswith("at least ")
    assert 4096 < huge.original_document_tokens <= len(HUGE)


def test_a_huge_label_is_refused_before_it_is_encoded():
    told = violations(ask("a", label_texts=[HUGE]))["options.label_texts[0]"]
    assert told.limit.startswith("must be exactly one token, it is at least ")


# --- items longer than a strategy can take


@pytest.mark.parametrize("strategy", [pb.STRATEGY_MULTI_ITEM, pb.STRATEGY_PACKED_MULTI_ITEM])
def test_items_too_long_for_the_strategy_have_their_own_status(strategy):
    documents = [pb.Document(token_ids=pb.TokenIds(ids=[5] * n)) for n in (65_536, 65_535, 3)]
    found = tokenization(limits=LIMITS).tokenize(ask(*documents, strategy=strategy))
    assert [d.status for d in found.documents] == [Status.TOO_LONG, Status.OK, Status.OK]
    assert "an item of 65536 tokens" in found.documents[0].message
    assert "multi_item takes at most 65535; direct_ragged takes it" in found.documents[0].message
    assert [len(item.ids) for item in found.request.items] == [65_535, 3]
    assert found.documents[0].original_document_tokens == 65_536


@pytest.mark.parametrize("strategy", [pb.STRATEGY_UNSPECIFIED, pb.STRATEGY_DIRECT_RAGGED])
def test_other_strategies_take_them(strategy):
    documents = [pb.Document(token_ids=pb.TokenIds(ids=[5] * 65_536))]
    assert tokenization(limits=LIMITS).tokenize(ask(*documents, strategy=strategy)).request is not None
