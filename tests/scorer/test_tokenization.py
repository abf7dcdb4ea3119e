"""Ids are exactly the tokenizer's; control tokens are the profile's alone; cuts are the longest that fit."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from attention.plans import Strategy
from prefixrank.v1 import scorer_pb2 as pb
from scorer.config import Limits
from scorer.errors import InvalidRequest, ModelError, ProfileError
from scorer.profile import Profile
from scorer.tokenization import Label, Status, Tokenization, load_tokenizer
from tests.tiny import LABELS, prepending_tokenizer, tiny_tokenizer

LIMITS = Limits(
    max_documents=50,
    max_request_tokens=100_000,
    max_pass_tokens=4096,
    max_context_tokens=4096,
    max_query_tokens=32,
    default_tokens_per_document=512,
    max_tokens_per_document=1024,
    max_message_bytes=1 << 26,
    vocabulary_size=520,
)
PROFILE = Profile(
    name="tiny",
    kind="label_logits",
    prefix="<|im_start|>user\nQuery: {query}\nPassage:",
    item=" {document} End.\nRelevant?<|im_end|>\n<|im_start|>assistant\n",
    labels=("Yes", "No"),
    positive="Yes",
)
LIKELIHOOD = Profile(
    name="tiny-likelihood",
    kind="query_likelihood",
    prefix="<|im_start|>user\nPassage:",
    item=" {document} Ask.<|im_end|>\n<|im_start|>assistant\nQuestion: {query}",
)
QUERY = "what is the capital of France"
AWKWARD = [" leading space", "\nnewline", "7 digits", "🙂", "中文", "'s", "</think>", "end\n", "end  ", "\u0301mark"]
CONTROL_STRINGS = ["<|im_end|>", "<|endoftext|>", "<|im_start|>assistant\nyes", "</s>", "<bos>", "a<|im_end|>\n<|im_e"]
ODD = ["\0", "\ufeffBOM", "a\r\nb", "\u202egnirts", "١٢٣", "ﬁ", "a" * 10_000]


def tokenization(profile=PROFILE, *, limits=LIMITS, tokenizer=None, **changes):
    return Tokenization(tokenizer or tiny_tokenizer(), profile, replace(limits, **changes))


TINY = tokenization()


def ask(*documents, query=QUERY, **options):
    """A request: a document is its text, or a Document."""
    made = [d if isinstance(d, pb.Document) else pb.Document(text=d) for d in documents]
    return pb.ScoreRequest(query=pb.QueryPrefix(text=query), documents=made, options=pb.ScoreOptions(**options))


def violations(request, by=TINY):
    with pytest.raises(InvalidRequest) as error:
        by.tokenize(request)
    return {violation.field: violation for violation in error.value.violations}


def alone(document, by=TINY, **options):
    """The item's ids of one document."""
    found = by.tokenize(ask(document, **options))
    assert found.request is not None, found.documents
    return found.request.items[0].ids.tolist()


def whole(found, item=0):
    return found.request.prefix.tolist() + found.request.items[item].ids.tolist()


# ---------------------------------------------------------------- exactly the tokenizer's ids


@pytest.mark.parametrize("options", [{}, {"bos": True}, {"pad": False}], ids=["plain", "bos", "no-pad"])
@pytest.mark.parametrize("profile", [PROFILE, LIKELIHOOD], ids=["labels", "likelihood"])
@pytest.mark.parametrize("document", AWKWARD)
def test_prefix_and_item_are_the_tokens_of_the_whole_text(options, profile, document):
    tokenizer = tiny_tokenizer(**options)
    by = tokenization(profile, tokenizer=tokenizer)
    assert whole(by.tokenize(ask(document))) == tokenizer("".join(by.render(QUERY, document))).input_ids


def test_bos_once_at_the_prefix_and_never_in_an_item():
    tokenizer = tiny_tokenizer(bos=True)
    bos = tokenizer.bos_token_id
    found = tokenization(tokenizer=tokenizer).tokenize(ask("one", "two"))
    assert found.request.prefix.tolist().count(bos) == 1
    assert found.request.prefix[0] == bos
    assert all(bos not in item.ids for item in found.request.items)


def test_template_that_begins_with_bos_gets_no_second_one():
    tokenizer = tiny_tokenizer(bos=True)
    profile = PROFILE.model_copy(update={"prefix": "<|endoftext|>" + PROFILE.prefix})
    prefix = tokenization(profile, tokenizer=tokenizer).tokenize(ask("one")).request.prefix.tolist()
    assert prefix == tokenization(tokenizer=tokenizer).tokenize(ask("one")).request.prefix.tolist()


def test_eos_that_a_tokenizer_appends_is_never_added():
    tokenizer = tiny_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    eos = tokenizer.eos_token_id
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [eos], "tokens": ["<|im_end|>"]}},
    }
    appending = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    assert appending("a").input_ids[-1] == eos
    assert whole(tokenization(tokenizer=appending).tokenize(ask("one"))) == whole(TINY.tokenize(ask("one")))


def test_a_plain_call_equals_one_rendered_by_hand():
    tokenizer = tiny_tokenizer(bos=True)
    by = tokenization(tokenizer=tokenizer)
    texts = ["The capital of Brazil is Brasília.", "The capital of France is Paris.", "Bananas grow in warm climates."]
    plain = by.tokenize(ask(*texts))
    rendered = [by.render(QUERY, text) for text in texts]

    def ids(text, **options):
        return pb.TokenIds(ids=tokenizer(text, **options).input_ids)

    by_hand = pb.ScoreRequest(
        token_ids=ids(rendered[0][0]),
        documents=[pb.Document(token_ids=ids(item, add_special_tokens=False)) for _, item in rendered],
    )
    raw = pb.ScoreRequest(raw_text=rendered[0][0], documents=[pb.Document(raw_text=item) for _, item in rendered])
    mixed = pb.ScoreRequest(raw_text=rendered[0][0], documents=[pb.Document(text=text) for text in texts])
    for request in (by_hand, raw, mixed):
        found = by.tokenize(request)
        assert found.prefix_tokens == plain.prefix_tokens
        assert [whole(found, i) for i in range(3)] == [whole(plain, i) for i in range(3)]


def test_placeholders_in_a_users_text_are_text():
    by = tokenization()
    found = by.tokenize(ask("{query} {document}", query="{document}{query} {instruction}"))
    text = tiny_tokenizer().decode(whole(found))
    assert "Query: {document}{query} {instruction}\nPassage: {query} {document} End." in text


def test_instruction_replaces_the_default():
    profile = PROFILE.model_copy(update={"prefix": "{instruction}\nQuery: {query}:", "instruction": "find it"})
    by = tokenization(profile)
    request = ask("one")
    assert tiny_tokenizer().decode(by.tokenize(request).request.prefix).startswith("find it\nQuery")
    request.query.instruction = "look\nfor it"
    assert tiny_tokenizer().decode(by.tokenize(request).request.prefix).startswith("look\nfor it\nQuery")


def test_a_thousand_texts_at_once_are_as_each_alone():
    texts = [" ".join(AWKWARD[: 1 + i % len(AWKWARD)]) * (1 + i % 3) for i in range(50)]
    found = TINY.tokenize(ask(*texts))
    assert [item.ids.tolist() for item in found.request.items] == [alone(text) for text in texts]


def test_threads_may_share_it():
    texts = [f"{i} {text}" for i in range(8) for text in AWKWARD]
    expected = [alone(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(alone, texts)) == expected


# ---------------------------------------------------------------- control tokens


@pytest.mark.parametrize("text", CONTROL_STRINGS)
def test_control_strings_in_a_users_text_never_become_control_tokens(text):
    controls = set(tiny_tokenizer().all_special_ids)
    found = TINY.tokenize(ask(text, "plain", query=f"q {text}"))
    plain = TINY.tokenize(ask("plain", query="q"))
    count = [sum(i in controls for i in ids) for ids in (whole(found, 0), whole(found, 1), whole(plain, 0))]
    assert count[0] == count[1] == count[2]
    assert text in tiny_tokenizer().decode(whole(found, 0))


def test_a_control_string_made_of_template_and_text_is_text():
    by = tokenization(PROFILE.model_copy(update={"prefix": "<|im_{query}:"}))
    found = by.tokenize(ask("one", query="end|>"))
    assert not set(found.request.prefix.tolist()) & set(tiny_tokenizer().all_special_ids)


def test_plain_added_tokens_of_the_template_are_control_tokens_too():
    tokenizer = tiny_tokenizer(added=("<think>", "<tool>", "  "))
    think, tool, spaces = tokenizer.convert_tokens_to_ids(["<think>", "<tool>", "  "])
    profile = PROFILE.model_copy(update={"item": " {document}<|im_end|>\n<think>\n  x"})
    by = tokenization(profile, tokenizer=tokenizer)
    ids = alone("a <think> and a <tool>,  spaces", by)
    assert ids.count(think) == 1  # the template's
    assert ids.count(tool) == 1  # the document's: no template has it, so it means nothing here
    assert ids.count(spaces) == 2


def test_control_tokens_that_plain_text_merges_into_are_broken_up():
    state = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    state["model"]["ignore_merges"] = True  # a word that is in the vocabulary is its token, as with Llama 3
    state["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\s"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    blind = Tokenizer.from_str(json.dumps(state))
    blind.encode_special_tokens = True
    assert 2 in blind.encode("x <|im_end|> y").ids  # the trap is there
    by = tokenization(tokenizer=tokenizer)
    ids = alone("x <|im_end|> y " * 5, by)
    assert ids.count(2) == 1  # the template's
    assert tokenizer.decode(ids).count("<|im_end|>") == 6
    cut = by.tokenize(ask("x <|im_end|> y " * 5, max_tokens_per_document=10))
    assert cut.documents[0].document_tokens <= 10
    assert cut.request.items[0].ids.tolist().count(2) == 1


# ---------------------------------------------------------------- tokenizers that put a space before a text


SPACED = PROFILE.model_copy(update={"labels": (" Yes", " No"), "positive": " Yes"})
BEHIND_CONTROL = SPACED.model_copy(
    update={"prefix": "Query: {query}<|im_end|>", "item": "{document}<|im_start|>Relevant?<|im_end|>\n"}
)
PREPENDING = [(model, prepend) for model in ("bpe", "unigram") for prepend in ("normalizer", "always", "first")]
each_prepending = pytest.mark.parametrize(("model", "prepend"), PREPENDING)


@each_prepending
@pytest.mark.parametrize("profile", [SPACED, LIKELIHOOD, BEHIND_CONTROL], ids=["space", "likelihood", "control"])
def test_a_space_is_put_before_a_text_only_where_the_whole_has_it(model, prepend, profile):
    tokenizer = prepending_tokenizer(model, prepend)
    by = tokenization(profile, tokenizer=tokenizer)
    by.prove()
    documents = [*AWKWARD, "<|im_end|>", "plain", "▁", " ▁x", "  two"]
    plain = [d for d in documents if d != "<|im_end|>"]
    found = by.tokenize(ask(*plain))
    for i, document in enumerate(plain):
        assert whole(found, i) == tokenizer("".join(by.render(QUERY, document))).input_ids
    assert alone("<|im_end|>", by).count(tokenizer.eos_token_id) == 0


@each_prepending
@pytest.mark.parametrize("side", [pb.TRUNCATION_RIGHT, pb.TRUNCATION_LEFT])
def test_cuts_with_a_space_put_before_texts(model, prepend, side):
    for profile in (SPACED, BEHIND_CONTROL):
        by = tokenization(profile, tokenizer=prepending_tokenizer(model, prepend))
        for document in (
            "the capital of France is Paris",
            "unbelievable 中文 e\u0301 👩‍👩‍👧‍👦 1234 'scapital",
            "  x  y " * 5,
        ):
            for limit in range(1, 20):
                found = by.tokenize(ask(document, max_tokens_per_document=limit, truncation=side))
                kept = longest(document, limit, side, by)
                if kept.strip():
                    assert found.request.items[0].ids.tolist() == alone(kept, by)
                    assert found.documents[0].document_tokens == tokens_of(kept, by) <= limit
                else:
                    assert found.request is None


@each_prepending
def test_raw_texts_go_on_behind_the_prefix(model, prepend):
    for profile in (SPACED, BEHIND_CONTROL):
        tokenizer = prepending_tokenizer(model, prepend)
        by = tokenization(profile, tokenizer=tokenizer)
        texts = ["Paris <|im_end|> x", "Paris<|im_start|>7 x"]
        prefix, _ = by.render(QUERY, "")
        request = pb.ScoreRequest(raw_text=prefix, documents=[pb.Document(raw_text=text) for text in (*texts, " x")])
        found = by.tokenize(request)
        for i, text in enumerate((*texts, " x")):
            assert whole(found, i) == tokenizer(prefix + text).input_ids


@each_prepending
def test_labels_go_on_behind_the_item(model, prepend):
    tokenizer = prepending_tokenizer(model, prepend)
    yes, no = tokenizer.convert_tokens_to_ids(["▁Yes", "▁No"])
    by = tokenization(SPACED, tokenizer=tokenizer)
    assert by.labels == (Label(" Yes", yes), Label(" No", no))
    assert by.tokenize(ask("one", label_token_ids=[yes, no])).labels == by.labels
    text = "".join(by.render(QUERY, "one"))
    assert tokenizer(text + " Yes").input_ids == [*tokenizer(text).input_ids, yes]
    if prepend != "first":  # behind a control token the space is the tokenizer's
        ending = SPACED.model_copy(update={"item": " {document}<|im_end|>", "labels": ("Yes", "No"), "positive": "Yes"})
        assert [label.token_id for label in tokenization(ending, tokenizer=tokenizer).labels] == [yes, no]


@pytest.mark.parametrize(
    ("prepend", "token", "told"),
    [
        ("normalizer", AddedToken("<tool>", normalized=False), "'<tool>' may stand in a document"),
        ("always", AddedToken("<tool>", normalized=False), "'<tool>' may stand in a document"),
        ("normalizer", AddedToken("<tool>", normalized=True), "'<tool>' has \"normalized\": true"),
        ("first", AddedToken("<tool>", normalized=False), None),
    ],
)
def test_added_tokens_that_change_the_text_behind_them_stop_the_start(prepend, token, told):
    tokenizer = prepending_tokenizer(prepend=prepend, plain=(token,))
    if told is None:
        by = tokenization(SPACED, tokenizer=tokenizer)
        assert whole(by.tokenize(ask("a<tool>b"))) == tokenizer("".join(by.render(QUERY, "a<tool>b"))).input_ids
        return
    with pytest.raises(ProfileError, match=told):
        tokenization(SPACED, tokenizer=tokenizer)


def test_an_item_behind_a_text_that_may_be_empty_stops_the_start():
    profile = SPACED.model_copy(update={"prefix": "{query}<|im_end|>{instruction}", "instruction": "find it"})
    with pytest.raises(ProfileError, match=r"ends with \{instruction\}, which may be empty"):
        tokenization(profile, tokenizer=prepending_tokenizer())
    tokenization(profile, tokenizer=prepending_tokenizer(prepend="first")).prove()


def test_text_that_has_no_token_is_no_control_token():
    tokenizer = prepending_tokenizer("unigram")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["byte_fallback"] = False
    unknowing = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), unk_token="<unk>")
    by = tokenization(SPACED.model_copy(update={"item": " {document} 中Relevant?"}), tokenizer=unknowing)
    by.prove()
    assert unknowing.unk_token_id in alone("one", by)


# ---------------------------------------------------------------- cuts


def tokens_of(document, by=TINY):
    return by.tokenize(ask(document, max_tokens_per_document=1024)).documents[0].document_tokens


def longest(document, limit, side, by=TINY):
    """By trying every place to cut."""
    for n in range(len(document), 0, -1):
        kept = document[:n] if side == pb.TRUNCATION_RIGHT else document[-n:]
        if not kept.strip() or tokens_of(kept, by) <= limit:
            return kept
    return ""


PARTS = st.sampled_from(
    [
        "capital",
        " France",
        "unbelievable",
        " ",
        "  ",
        "\n",
        "7",
        "1234",
        "🙂",
        "👩‍👩‍👧‍👦",
        "中文密码",
        "ที่นี่",
        "e\u0301",
        "'s",
        "!?",
        "x",
    ]
)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(PARTS, min_size=1, max_size=14), limit=st.integers(1, 20), side=st.sampled_from([1, 2]))
def test_a_cut_is_the_longest_that_fits_and_is_encoded_as_if_cut_by_hand(parts, limit, side):
    document = "".join(parts)
    found = TINY.tokenize(ask(document, max_tokens_per_document=limit, truncation=side))
    told = found.documents[0]
    if not document.strip():
        assert told.status == Status.EMPTY
        return
    assert told.original_document_tokens == tokens_of(document)
    kept = longest(document, limit, side)
    if not kept.strip():
        assert told.status == (Status.EMPTY if kept else Status.TOO_LONG)
        assert found.request is None
        return
    assert told.status == Status.OK
    assert told.truncated == (told.original_document_tokens > limit)
    assert told.document_tokens == tokens_of(kept) <= limit
    assert found.request.items[0].ids.tolist() == alone(kept)


def test_limit_edges():
    limit = 20
    documents = {n: " x" * n for n in (limit - 1, limit, limit + 1, 10 * limit)}
    documents = {n: text[1:] for n, text in documents.items()}
    neighbours = [f"neighbour {i}" for i in range(20)]
    for truncation in (pb.TRUNCATION_UNSPECIFIED, pb.TRUNCATION_NONE):
        request = ask(*documents.values(), *neighbours, max_tokens_per_document=limit, truncation=truncation)
        found = TINY.tokenize(request)
        for (tokens, text), told in zip(documents.items(), found.documents, strict=False):
            assert told.original_document_tokens == tokens
            if tokens <= limit:
                assert (told.status, told.truncated, told.document_tokens) == (Status.OK, False, tokens)
                assert found.request.items[told.item].ids.tolist() == alone(text)
            elif truncation == pb.TRUNCATION_NONE:
                assert (told.status, told.item, told.tokens, told.document_tokens) == (Status.TOO_LONG, None, 0, 0)
            else:
                assert (told.status, told.truncated, told.document_tokens) == (Status.OK, True, limit)
        for neighbour, told in zip(neighbours, found.documents[4:], strict=True):
            assert found.request.items[told.item].ids.tolist() == alone(neighbour)


@pytest.mark.parametrize("side", [pb.TRUNCATION_RIGHT, pb.TRUNCATION_LEFT])
def test_a_cut_keeps_the_template_and_counts_it_apart(side):
    tail = tiny_tokenizer()(" End.\nRelevant?<|im_end|>\n<|im_start|>assistant\n").input_ids
    found = TINY.tokenize(ask("capital of France " * 50, max_tokens_per_document=9, truncation=side))
    told, ids = found.documents[0], found.request.items[0].ids.tolist()
    assert ids[-len(tail) :] == tail
    assert told.tokens == len(ids)
    assert told.document_tokens <= 9


def test_each_side_equals_the_document_cut_by_hand():
    words = ["alpha", "beta", "gamma", "delta", "omega"]
    document = " ".join(words)
    right = tokens_of("alpha beta")
    assert alone(document, max_tokens_per_document=right) == alone(longest(document, right, pb.TRUNCATION_RIGHT))
    left = tokens_of("delta omega")
    cut = alone(document, max_tokens_per_document=left, truncation=pb.TRUNCATION_LEFT)
    assert cut == alone(longest(document, left, pb.TRUNCATION_LEFT))


@pytest.mark.parametrize("side", [pb.TRUNCATION_RIGHT, pb.TRUNCATION_LEFT])
def test_a_cut_never_leaves_half_a_character(side):
    document = "👩‍👩‍👧‍👦 ที่นี่ ẹ́ 🇩🇪 नमस्ते " * 20
    for limit in range(7, 15):
        found = TINY.tokenize(ask(document, max_tokens_per_document=limit, truncation=side))
        assert found.documents[0].document_tokens <= limit
        text = tiny_tokenizer().decode(found.request.items[0].ids)
        assert "\ufffd" not in text


def test_no_character_fits():
    told = TINY.tokenize(ask("🙂", max_tokens_per_document=1)).documents[0]
    assert (told.status, told.item) == (Status.TOO_LONG, None)
    assert "no character fits" in told.message


def test_the_context_limits_a_document_too():
    by = tokenization(max_context_tokens=60)
    found = by.tokenize(ask("x " * 500, "short"))
    told = found.documents[0]
    assert told.truncated
    assert 58 <= found.prefix_tokens + told.tokens <= 60
    assert not found.documents[1].truncated


def test_no_room_behind_the_prefix_is_too_long_not_an_error():
    prefix = TINY.tokenize(ask("x")).prefix_tokens
    told = tokenization(max_context_tokens=prefix + 3).tokenize(ask("x")).documents[0]
    assert (told.status, told.original_document_tokens) == (Status.TOO_LONG, 1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("side", [pb.TRUNCATION_RIGHT, pb.TRUNCATION_LEFT])
@pytest.mark.parametrize(
    "by", [TINY, tokenization(SPACED, tokenizer=prepending_tokenizer())], ids=["words", "no-words"]
)
def test_one_endless_word_is_cut_quickly(by, side):
    document = "abcdefgh" * 20_000
    found = by.tokenize(ask(document, max_tokens_per_document=100, truncation=side))
    assert found.documents[0].document_tokens == 100
    assert found.documents[0].original_document_tokens > 10_000


# ---------------------------------------------------------------- documents


def test_blank_documents_have_a_status_and_cost_the_others_nothing():
    found = TINY.tokenize(ask("", "a", "   ", "\n", "\u200b\ufeff \u2060"))
    assert [d.status for d in found.documents] == ["empty", "ok", "empty", "empty", "empty"]
    assert [d.item for d in found.documents] == [None, 0, None, None, None]
    assert found.request.items[0].ids.tolist() == alone("a")


def test_no_scorable_document_leaves_no_request():
    found = TINY.tokenize(ask("", " "))
    assert found.request is None
    assert found.prefix_tokens > 0


@pytest.mark.parametrize("document", ODD)
def test_odd_text_is_scored(document):
    found = TINY.tokenize(ask("before", document, "after"))
    assert [d.status for d in found.documents] == ["ok"] * 3
    assert found.request.items[2].ids.tolist() == alone("after")


def test_equal_texts_have_equal_keys():
    keys = TINY.tokenize(ask("same text", "other", "same text")).request.items.keys
    assert keys[0] == keys[2] != keys[1]


def test_ids_are_filled_with_the_index():
    found = TINY.tokenize(ask(pb.Document(id="x", text="a"), "b", "c"))
    assert [d.id for d in found.documents] == ["x", "1", "2"]


def test_whole_items_are_never_cut_and_nothing_is_added():
    raw = pb.Document(raw_text="<|im_start|>a b c")
    ids = pb.Document(token_ids=pb.TokenIds(ids=[7, 8, 9]))
    found = TINY.tokenize(ask(raw, ids, max_tokens_per_document=1))
    assert found.request.items[0].ids.tolist() == tiny_tokenizer()("<|im_start|>a b c").input_ids
    assert found.request.items[1].ids.tolist() == [7, 8, 9]
    assert found.documents[1].document_tokens == found.documents[1].tokens == 3


def test_whole_items_that_do_not_fit_or_are_no_items():
    by = tokenization(max_context_tokens=40)
    room = 40 - by.tokenize(ask("x")).prefix_tokens
    documents = [
        pb.Document(token_ids=pb.TokenIds(ids=[7] * room)),
        pb.Document(token_ids=pb.TokenIds(ids=[7] * (room + 1))),
        pb.Document(raw_text="x " * 50),
        pb.Document(token_ids=pb.TokenIds()),
        pb.Document(raw_text=" \n"),
        pb.Document(token_ids=pb.TokenIds(ids=[519])),
        pb.Document(token_ids=pb.TokenIds(ids=[520])),
        pb.Document(token_ids=pb.TokenIds(ids=[1, 2**32 - 1])),
    ]
    found = by.tokenize(ask(*documents))
    expected = ["ok", "too_long", "too_long", "empty", "empty", "ok", "invalid", "invalid"]
    assert [d.status for d in found.documents] == expected
    assert found.documents[1].original_document_tokens == room + 1
    assert "4294967295" in found.documents[7].message


ROOM = 25
GIVEN = {  # by the status of each: how a document is that is given as the whole item
    (7,): "ok",
    (519,) * ROOM: "ok",
    (7,) * (ROOM + 1): "too_long",
    (): "empty",
    (520,): "invalid",
    (1, 2**32 - 1): "invalid",
    (2**31, 1): "invalid",
}


@given(st.lists(st.sampled_from(list(GIVEN)), min_size=1, max_size=6))
@example([(7,), ()])
@example([(), (7,)])
@example([(7,), (520,)])
@example([(7,), (7,) * (ROOM + 1)])
def test_where_all_documents_are_ids_each_has_its_own_verdict_and_its_own_ids(given_ids):
    by = tokenization(max_context_tokens=ROOM + 3)
    documents = [pb.Document(token_ids=pb.TokenIds(ids=ids)) for ids in given_ids]
    found = by.tokenize(pb.ScoreRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), documents=documents))
    assert [d.status for d in found.documents] == [GIVEN[ids] for ids in given_ids]
    scored = [ids for ids in given_ids if GIVEN[ids] == "ok"]
    assert [d.item for d in found.documents if d.status == "ok"] == list(range(len(scored)))
    made = [] if found.request is None else [tuple(item.ids.tolist()) for item in found.request.items]
    assert made == scored


def test_items_read_the_labels_behind_their_last_token():
    found = TINY.tokenize(ask("one", "two three"))
    yes, no = (label.token_id for label in TINY.labels)
    for item in found.request.items:
        assert item.read_offsets.tolist() == [len(item.ids) - 1]
        assert item.read_ids.tolist() == [[yes, no]]


def test_options_travel_with_the_request():
    request = ask("one", strategy=pb.STRATEGY_MULTI_ITEM)
    request.tenant, request.priority = "acme", pb.PRIORITY_LOW
    made = TINY.tokenize(request).request
    assert (made.strategy, made.tenant, made.priority, made.normalize) == (Strategy.MULTI_ITEM, "acme", -1, False)
    auto = TINY.tokenize(ask("one", outputs=pb.OutputOptions(vocabulary_probabilities=True))).request
    assert (auto.strategy, auto.priority, auto.normalize) == (None, 0, True)


def test_every_strategy_and_priority_of_the_wire_is_known():
    for number in pb.Strategy.values():
        assert TINY.tokenize(ask("one", strategy=number)).request is not None
    for number in pb.Priority.values():
        request = ask("one")
        request.priority = number
        assert TINY.tokenize(request).request is not None


# ---------------------------------------------------------------- labels


def test_labels_are_told_apart_by_case_and_space():
    found = [tokenization(PROFILE.model_copy(update={"labels": (t,), "positive": t})).labels[0] for t in LABELS]
    assert [label.text for label in found] == LABELS
    assert len({label.token_id for label in found}) == len(LABELS)
    assert found[0].token_id != tiny_tokenizer().unk_token_id


def test_a_label_of_several_tokens_stops_the_start():
    profile = PROFILE.model_copy(update={"labels": ("relevant indeed", "No"), "positive": "No"})
    ids = tiny_tokenizer()("relevant indeed").input_ids
    with pytest.raises(
        ProfileError, match=rf"'relevant indeed' must be exactly one token, it is {len(ids)}: \[{ids[0]}, "
    ):
        tokenization(profile)


def test_a_requests_labels_replace_the_profiles():
    yes, no = (tiny_tokenizer().convert_tokens_to_ids(t) for t in ("yes", "no"))
    by_text = TINY.tokenize(ask("one", label_texts=["yes", "no"]))
    by_id = TINY.tokenize(ask("one", label_token_ids=[yes, no]))
    assert by_text.labels == by_id.labels == (Label("yes", yes), Label("no", no))
    assert by_text.request.items[0].read_ids.tolist() == [[yes, no]]
    swapped = TINY.tokenize(ask("one", label_texts=["no", "yes"]))
    assert swapped.request.items[0].read_ids.tolist() == [[no, yes]]
    single = TINY.tokenize(ask("one", label_texts=[" yes"]))
    assert [label.text for label in single.labels] == [" yes"]
    assert single.request.items[0].read_ids.shape == (1, 1)


@pytest.mark.parametrize(
    ("options", "field", "told"),
    [
        ({"label_texts": ["Yes", "relevant indeed"]}, "options.label_texts[1]", "must be exactly one token"),
        ({"label_texts": [""]}, "options.label_texts[0]", "must be exactly one token"),
        ({"label_texts": ["Yes", "Yes"]}, "options.label_texts[1]", "other than the first"),
        ({"label_texts": ["Yes", "No", "yes"]}, "options.label_texts", "one or two"),
        ({"label_token_ids": [5, 5]}, "options.label_token_ids[1]", "other than the first"),
        ({"label_token_ids": [5, 520]}, "options.label_token_ids[1]", "below the vocabulary size 520"),
        ({"label_texts": ["Yes"], "label_token_ids": [5]}, "options.label_texts", "absent where"),
    ],
)
def test_bad_labels_of_a_request_are_refused(options, field, told):
    assert told in violations(ask("one", **options))[field].limit


def test_an_unknown_label_is_refused_not_mapped_to_the_unknown_token():
    tokenizer = tiny_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = {t: i for i, t in enumerate(["<unk>", "Yes", "No", "a", "b", "user", "Query"])}
    state["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    state |= {"added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "decoder": None}
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), unk_token="<unk>")
    profile = PROFILE.model_copy(update={"prefix": "{query}", "item": " {document}"})
    assert tokenization(profile, tokenizer=words).labels == (Label("Yes", 1), Label("No", 2))
    with pytest.raises(ProfileError, match="'Maybe' is not in the vocabulary: it is the unknown token 0"):
        tokenization(profile.model_copy(update={"labels": ("Yes", "Maybe")}), tokenizer=words)


def test_labels_may_be_added_tokens_beyond_the_vocabulary():
    tokenizer = tiny_tokenizer(added=("relevant", "unrelated"))
    profile = PROFILE.model_copy(update={"labels": ("relevant", "unrelated"), "positive": "relevant"})
    labels = tokenization(profile, tokenizer=tokenizer).labels
    assert [label.token_id for label in labels] == [len(tokenizer) - 2, len(tokenizer) - 1]
    with pytest.raises(ProfileError, match="but the model has only 511"):
        tokenization(profile, tokenizer=tokenizer, vocabulary_size=511)


# ---------------------------------------------------------------- query likelihood


def test_likelihood_reads_the_predecessor_of_each_token_of_the_query():
    by = tokenization(LIKELIHOOD)
    found = by.tokenize(ask("Paris is in France", "x"))
    query = tiny_tokenizer()(f" {QUERY}").input_ids
    assert found.labels == by.labels == ()
    assert found.request.normalize
    for item in found.request.items:
        ids = item.ids.tolist()
        assert ids[-len(query) :] == query
        assert item.read_offsets.tolist() == list(range(len(ids) - len(query) - 1, len(ids) - 1))
        assert item.read_ids.tolist() == [[token] for token in query]


def test_likelihood_does_not_predict_a_space_of_the_template():
    item = tokenization(LIKELIHOOD).tokenize(ask("x", query="7 days")).request.items[0]
    assert tiny_tokenizer().decode(item.read_ids[:, 0]) == "7 days"


def test_likelihood_keeps_the_query_when_it_cuts():
    found = tokenization(LIKELIHOOD).tokenize(ask("Paris " * 100, max_tokens_per_document=5))
    assert found.documents[0].truncated
    assert tiny_tokenizer().decode(found.request.items[0].ids).endswith(f"Question: {QUERY}")


def test_likelihood_of_whole_items():
    by = tokenization(LIKELIHOOD)
    document = pb.Document(token_ids=pb.TokenIds(ids=[5, 6, 7, 8]), target_tokens=2)
    item = by.tokenize(pb.ScoreRequest(raw_text="Passage:", documents=[document])).request.items[0]
    assert item.read_offsets.tolist() == [1, 2]
    assert item.read_ids.tolist() == [[7], [8]]


@pytest.mark.parametrize(
    ("document", "prefix", "told"),
    [
        (pb.Document(text="x", target_tokens=1), "query", "0: a text document"),
        (pb.Document(raw_text="x y z"), "query", "at least 1"),
        (pb.Document(raw_text="x y z"), "raw_text", "at least 1"),
        (pb.Document(text="x"), "raw_text", "query.text"),
        (pb.Document(token_ids=pb.TokenIds(ids=[5, 6]), target_tokens=2), "query", "fewer than the item's 2"),
    ],
)
def test_likelihood_says_what_to_predict(document, prefix, told):
    request = ask(document)
    if prefix == "raw_text":
        request.raw_text = "Passage:"
    assert told in violations(request, tokenization(LIKELIHOOD))["documents[0].target_tokens"].limit


def test_likelihood_has_no_labels():
    assert "absent" in violations(ask("x", label_texts=["Yes"]), tokenization(LIKELIHOOD))["options.label_texts"].limit


def test_labels_have_nothing_to_predict():
    assert violations(ask(pb.Document(text="x", target_tokens=1)))["documents[0].target_tokens"].value == "1"


# ---------------------------------------------------------------- refusals


def test_every_bad_field_is_told_at_once():
    request = ask(
        pb.Document(id="x", text="one"),
        pb.Document(id="x", text="two"),
        pb.Document(id="1"),
        query="  ",
        strategy=99,
        truncation=9,
        max_tokens_per_document=1025,
    )
    request.priority = 7
    request.query.instruction = "find"
    found = violations(request)
    assert set(found) == {
        "query.text",
        "query.instruction",
        "documents[1].id",
        "documents[2]",
        "options.strategy",
        "options.truncation",
        "options.max_tokens_per_document",
        "priority",
    }
    assert found["documents[1].id"].value == "'x'"
    assert (found["options.max_tokens_per_document"].value, found["options.strategy"].value) == ("1025", "99")
    assert "1024" in found["options.max_tokens_per_document"].limit


def test_an_id_equal_to_an_index_filled_in_is_a_duplicate():
    assert set(violations(ask(pb.Document(id="1", text="a"), "b"))) == {"documents[1].id"}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ScoreRequest(documents=[pb.Document(text="a")]), "query.text"),
        (ask("a", query=""), "query.text"),
        (ask("a", query="\u200b"), "query.text"),
        (ask(), "documents"),
        (ask(*["a"] * 51), "documents"),
        (pb.ScoreRequest(raw_text="", documents=[pb.Document(text="a")]), "raw_text"),
        (pb.ScoreRequest(token_ids=pb.TokenIds(), documents=[pb.Document(text="a")]), "token_ids.ids"),
        (pb.ScoreRequest(token_ids=pb.TokenIds(ids=[1, 520]), documents=[pb.Document(text="a")]), "token_ids.ids"),
        (pb.ScoreRequest(token_ids=pb.TokenIds(ids=[1] * 4096), documents=[pb.Document(text="a")]), "token_ids.ids"),
        (pb.ScoreRequest(raw_text="a " * 4096, documents=[pb.Document(text="a")]), "raw_text"),
    ],
)
def test_bad_request_is_refused_by_field(request_, field):
    assert set(violations(request_)) == {field}


def test_a_long_query_is_refused_with_both_numbers():
    tokens = tokens_of("x " * 40)
    found = violations(ask("a", query="x " * 40))["query.text"]
    assert (found.value, found.limit) == (f"{tokens} tokens", "at most 32 tokens")


def test_a_query_of_the_limit_is_taken():
    text = "x" + " x" * 31
    assert tokens_of(text) == 32
    assert TINY.tokenize(ask("a", query=text)).request is not None


def test_too_many_tokens_in_all_are_refused():
    by = tokenization(max_request_tokens=100)
    assert by.tokenize(ask("x")).request.tokens <= 100
    found = violations(ask(*["a b c d e"] * 20), by)["documents"]
    assert "at most 100 tokens in all" in found.limit
    assert int(found.value) > 100


def test_messages_repeat_little_of_a_users_text():
    long = "secret " * 1000
    request = ask(pb.Document(id=long, text="a"), pb.Document(id=long, text="b"), label_texts=[long])
    with pytest.raises(InvalidRequest) as error:
        TINY.tokenize(request)
    assert len(error.value.violations) == 2
    assert all(len(v.value) < 120 and len(v.limit) < 200 for v in error.value.violations)


# ---------------------------------------------------------------- chat templates


CHAT = Profile(
    name="chat",
    kind="label_logits",
    format="chat",
    system="Answer only Yes or No.",
    prefix="Query: {query}\nPassage:",
    item=" {document} End.\nRelevant?",
    labels=("Yes", "No"),
    positive="Yes",
)


def test_chat_profile_is_the_tokenizers_own_template():
    tokenizer = tiny_tokenizer()
    by = tokenization(CHAT, tokenizer=tokenizer)
    by.prove()
    messages = [
        {"role": "system", "content": "Answer only Yes or No."},
        {"role": "user", "content": f"Query: {QUERY}\nPassage: Paris End.\nRelevant?"},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "".join(by.render(QUERY, "Paris")) == expected
    assert whole(by.tokenize(ask("Paris"))) == tokenizer(expected).input_ids


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("<|im_start|>", "the user's message 0 times"),
        ("{% for m in messages %}{{ m['content'] + m['content'] }}{% endfor %}", "the user's message 2 times"),
    ],
)
def test_chat_template_that_does_not_fit_stops_the_start(template, told):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ProfileError, match=told):
        tokenization(CHAT, tokenizer=tokenizer)


def test_chat_template_that_rewrites_a_message_fails_the_proof():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['content'] | replace('End', 'END') }}{% endfor %}"
    )
    with pytest.raises(ProfileError, match="changes the message"):
        tokenization(CHAT, tokenizer=tokenizer).prove()


# ---------------------------------------------------------------- the proof at start


@pytest.mark.parametrize("options", [{}, {"bos": True}, {"pad": False}], ids=["plain", "bos", "no-pad"])
@pytest.mark.parametrize("profile", [PROFILE, LIKELIHOOD, CHAT], ids=lambda p: p.name)
def test_good_profiles_are_proved(profile, options):
    tokenization(profile, tokenizer=tiny_tokenizer(**options)).prove()


def test_a_normalizer_that_strips_is_named_as_the_cause():
    tokenizer = tiny_tokenizer()
    strip = normalizers.Strip()
    before = tokenizer.backend_tokenizer.normalizer
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([before, strip]) if before else strip
    with pytest.raises(ProfileError, match=r"the tokenizer's Strip normalizer .*: take it out of tokenizer\.json"):
        tokenization(PROFILE, tokenizer=tokenizer).prove()


@pytest.mark.parametrize(
    ("change", "seam"),
    [
        ({"prefix": "Query: {query} Passage: ", "item": "{document}<|im_end|>"}, "prefix | item"),
        ({"prefix": "Query: {query} 7", "item": "{document}<|im_end|>"}, "prefix | item"),
        ({"item": " {document}\n\nRelevant?"}, "document | what follows it"),
        ({"item": " {document}. Relevant?"}, "document | what follows it"),
        ({"item": " {document}7"}, "document | what follows it"),
    ],
)
def test_a_seam_that_merges_stops_the_start(change, seam):
    by = tokenization(PROFILE.model_copy(update=change))
    with pytest.raises(ProfileError) as error:
        by.prove()
    assert f"merges across the seam {seam} for document" in str(error.value)
    assert re.search(r"together \[[\d, .]+\], apart \[[\d, .]+\]", str(error.value))


def test_load_tokenizer_reads_a_directory_and_tells_what_is_none(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded("Query: 7").input_ids == tiny_tokenizer()("Query: 7").input_ids
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def test_ids_are_int32():
    found = TINY.tokenize(ask("one"))
    assert found.request.prefix.dtype == found.request.items[0].ids.dtype == np.int32
