"""Profiles: what is refused and how it is told, what changes a revision, and that a recorded copy loads back equal."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from scorer.errors import ProfileError
from scorer.profile import Golden, Profile, builtin_names, load_profile, record_golden

PLAIN = {
    "name": "plain",
    "kind": "label_logits",
    "prefix": "Query: {query}\nPassage:",
    "item": " {document} Relevant?",
    "labels": ["Yes", "No"],
    "positive": "Yes",
}
LIKELIHOOD = {
    "name": "likelihood",
    "kind": "query_likelihood",
    "prefix": "Passage:",
    "item": " {document} Question: {query}",
}


def make(base=PLAIN, **changes):
    return Profile.model_validate({**base, **changes})


def written(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_built_in_profiles_load_under_their_names():
    names = builtin_names()
    assert {"smollm2", "smollm2-query-likelihood", "instruct", "qwen3-reranker"} <= set(names)
    assert [load_profile(name).name for name in names] == list(names)


def test_only_profiles_that_were_run_are_verified():
    assert load_profile("smollm2").verified
    assert not load_profile("qwen3-reranker").verified
    assert not load_profile("instruct").verified


def test_embedded_profiles_have_diverse_golden_scores():
    for name in ("smollm2", "smollm2-query-likelihood"):
        scores = [golden.score for golden in load_profile(name).golden]
        assert len(scores) >= 5
        assert max(scores) - min(scores) > 0.5


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("prefix", "Query: {query}\n\nPassage:"),
        ("item", " {document}  Relevant?"),
        ("labels", ["Yes", "no"]),
        ("positive", "No"),
        ("kind", "query_likelihood"),
        ("limits", {"max_query_tokens": 7}),
        ("format", "chat"),
    ],
)
def test_revision_changes_with_all_that_can_change_a_score(change, value):
    base = LIKELIHOOD if change == "kind" else PLAIN
    assert make(base, **{change: value}).revision != make().revision


def test_one_newline_in_the_item_changes_the_revision():
    assert make(item=" {document} A\nB").revision != make(item=" {document} A\n\nB").revision


def test_instruction_and_system_change_the_revision():
    asked = make(prefix="{instruction} {query}:", instruction="find it", format="chat", system="be brief")
    assert asked.revision != asked.model_copy(update={"instruction": "find it!"}).revision
    assert asked.revision != asked.model_copy(update={"system": "be brief."}).revision


def test_revision_does_not_change_with_what_cannot():
    golden = [{"query": "q", "document": "d", "score": 1.5}]
    assert make(description="other", golden=golden, golden_tolerance=0.5, name="other").revision == make().revision
    assert make(labels=["No", "Yes"]).revision == make().revision


def test_positive_label_comes_first():
    assert make(labels=["No", "Yes"], positive="Yes").ordered_labels == ("Yes", "No")
    assert make(labels=["No", "Yes"], positive="No").ordered_labels == ("No", "Yes")
    assert make(LIKELIHOOD).ordered_labels == ()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prefix": "no place"}, "prefix: {query} is missing"),
        ({"prefix": "{query} {documents}"}, "prefix: {documents} has no place there"),
        ({"prefix": "{query} {document}"}, "prefix: {document} has no place there"),
        ({"item": "no place"}, "item: {document} must occur exactly once"),
        ({"item": "{document} {document}"}, "item: {document} must occur exactly once"),
        ({"item": "{document} {query}"}, "item: {query} has no place there"),
        ({"prefix": "{instruction} {query}"}, "instruction: goes with {instruction}"),
        ({"instruction": "find"}, "instruction: goes with {instruction}"),
        ({"system": "be brief"}, "system: only format = 'chat' has one"),
        ({"system": "{query}", "format": "chat"}, "system: {query} has no place there"),
        ({"positive": "Maybe"}, "positive: must be one of labels"),
        ({"positive": None}, "positive: must be one of labels"),
        ({"labels": ["Yes", "Yes"]}, "labels: the two are equal"),
        ({"labels": ["Yes", "No", "Maybe"]}, "labels: one or two"),
        ({"labels": []}, "labels: one or two"),
        ({"labels": ["Yes", ""]}, "labels: an empty text"),
    ],
)
def test_inconsistent_profile_is_refused(changes, told):
    with pytest.raises(ValidationError) as error:
        make(**changes)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"labels": ["Yes"], "positive": "Yes"}, "labels: query_likelihood reads the query"),
        ({"prefix": "{query}"}, "prefix: {query} has no place there"),
        ({"item": " {document} {query}?"}, "item: must end with {query}"),
        ({"item": " {document}"}, "item: must end with {query}"),
        ({"item": " {query} {document} {query}"}, "item: must end with {query}"),
        ({"format": "chat"}, "format: query_likelihood"),
    ],
)
def test_inconsistent_likelihood_profile_is_refused(changes, told):
    with pytest.raises(ValidationError) as error:
        make(LIKELIHOOD, **changes)
    assert told in str(error.value)


def test_one_label_is_enough():
    assert make(labels=["Yes"]).ordered_labels == ("Yes",)


def test_other_braces_are_text():
    assert make(prefix='{"q": "{query}"} { } {{}} {0}:').prefix == '{"q": "{query}"} { } {{}} {0}:'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name = ", "not TOML"),
        ('name = "x"\nkind = "guess"\nprefix = "{query}"\nitem = "{document}"', "kind: "),
        ('name = "x"\nkind = "label_logits"\nprefix = "{query}"', "item: Field required"),
        ('surprise = 1\nname = "x"\nkind = "label_logits"', "surprise: "),
        ('name = "x"\n[limits]\nmax_query_tokens = 0', "limits.max_query_tokens: "),
        ('name = "x"\n[limits]\ndefault_tokens_per_document = 9\nmax_tokens_per_document = 8', "limits: "),
        ('name = "x"\n[[golden]]\nquery = "q"\ndocument = "d"\nscore = nan', "golden.0.score: "),
    ],
)
def test_bad_file_is_told_with_its_name_and_field(tmp_path, text, told):
    path = written(tmp_path, text)
    with pytest.raises(ProfileError) as error:
        load_profile(path)
    assert str(path) in str(error.value)
    assert told in str(error.value)


def test_unknown_name_is_told_with_the_known_ones():
    with pytest.raises(ProfileError, match=r"no profile is called 'smollm3'; built in: .*qwen3-reranker"):
        load_profile("smollm3")


def test_missing_file_is_told(tmp_path):
    with pytest.raises(ProfileError, match="cannot read the profile"):
        load_profile(tmp_path / "absent.toml")


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(description=TEXT, query=TEXT, document=TEXT, score=st.floats(allow_nan=False, allow_infinity=False))
def test_recorded_profile_loads_back_equal(tmp_path_factory, description, query, document, score):
    path = tmp_path_factory.mktemp("profiles") / "recorded.toml"
    profile = make(description=description, prefix='\\ "{query}"\x7f\r\n\t{instruction}:', instruction="find\n'it'")
    recorded = record_golden(path, profile, [(query, document, score), ("q", "d", 3.0)])
    assert load_profile(path) == recorded
    assert recorded.verified
    assert recorded.golden[0] == Golden(query=query, document=document, score=score)
    assert recorded.revision == profile.revision


def test_golden_scores_are_finite():
    with pytest.raises(ValueError, match="finite"):
        Golden(query="q", document="d", score=math.inf)
