"""A request from Python's own values: what is no text is named."""

import pytest

from scorer.client import build_request


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"documents": "abc"}, "documents: a list of strings, got one str"),
        ({"documents": b"abc"}, "documents: a list of strings, got one bytes"),
        ({"ids": "a"}, "ids: a list of strings, got one str"),
        ({"label_texts": "yes"}, "label_texts: a list of strings, got one str"),
        ({"documents": ["a", None]}, r"documents\[1\]: a string, got NoneType"),
        ({"ids": [7]}, r"ids\[0\]: a string, got int"),
        ({"label_texts": ["a", 1.5]}, r"label_texts\[1\]: a string, got float"),
        ({"query": None}, "query: a string, got NoneType"),
        ({"query": ["q"]}, "query: a string, got list"),
        ({"instruction": 1}, "instruction: a string, got int"),
        ({"request_id": 1}, "request_id: a string, got int"),
        ({"tenant": b"t"}, "tenant: a string, got bytes"),
    ],
)
def test_what_is_no_text_is_named(given, told):
    with pytest.raises(TypeError, match=f"^{told}$"):
        build_request(**{"query": "q", "documents": ["a"], **given})


HALF = "a\ud83d"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"documents": ["a", HALF]}, r"documents\[1\]"),
        ({"ids": ["a", HALF]}, r"ids\[1\]"),
        ({"label_texts": [HALF]}, r"label_texts\[0\]"),
        ({"query": HALF}, "query"),
        ({"instruction": HALF}, "instruction"),
        ({"request_id": HALF}, "request_id"),
        ({"tenant": HALF}, "tenant"),
    ],
)
def test_half_a_surrogate_pair_is_named_with_its_place(given, name):
    with pytest.raises(ValueError, match=rf"^{name}: not UTF-8 text: code point U\+D83D at character 2$"):
        build_request(**{"query": "q", "documents": ["a", "b"], **given})


def test_an_option_that_is_none_is_one_not_given():
    plain = build_request("q", ["a"])
    assert (
        build_request("q", ["a"], ids=None, instruction=None, request_id=None, tenant=None, label_texts=None) == plain
    )
