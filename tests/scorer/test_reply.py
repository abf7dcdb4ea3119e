"""Results of many documents at once are those of each alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.plans import Strategy
from batching.types import RequestScores, Scored
from prefixrank.v1 import scorer_pb2 as pb
from scorer.reply import document_results
from scorer.tokenized import DocumentTokens, Label, Status, Tokenized
from tests.attention.draw import examples

YES_NO = (Label("yes", 1), Label("no", 2))
ASKED = pb.ScoreRequest()

logits = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def answered(draw):
    """A request's documents, of which some have no item, and their scores, of which some are missing."""
    kind, width = draw(st.sampled_from([("label_logits", 2), ("label_logits", 1), ("classification", 1)]))
    rare = draw(st.sampled_from([0, 9]))  # of ten, so that often all have a score

    def seldom():
        return rare == 9 and draw(st.integers(0, 9)) == 9

    documents, scored = [], []
    for number in range(draw(st.integers(1, 8))):
        tokens, cut, empty = draw(st.integers(1, 9)), draw(st.booleans()), seldom()
        status = Status.EMPTY if empty else Status.OK
        item = None if empty else len(scored)
        documents.append(DocumentTokens(str(number), status, "why" * empty, tokens, tokens, tokens + cut, cut, item))
        if not empty:
            row = draw(st.lists(logits if rare else st.floats(-99, 99, width=32), min_size=width, max_size=width))
            strategy = draw(st.sampled_from([Strategy.FUSED, Strategy.NAIVE]))
            scored.append(None if seldom() else Scored(np.array([row], np.float32), None, strategy))
    return kind, Tokenized(None, tuple(documents), YES_NO[:width], 0), tuple(scored)


def results(kind, tokenized, scored):
    return document_results(ASKED, tokenized, RequestScores(scored, "", 0, 0, 1, 0.0, 0.0, 0.0), kind).results


@given(case=answered())
@examples(300)
def test_results_together_are_those_of_each_document_alone(case):
    kind, tokenized, scored = case
    found = results(kind, tokenized, scored)
    assert len(found) == len(tokenized.documents)
    # One more document, never scored, is never told together with the others.
    other = DocumentTokens("other", Status.EMPTY, "", 0, 0, 0, False, None)
    alone = results(kind, replace(tokenized, documents=(*tokenized.documents, other)), scored)
    assert [r.SerializeToString(deterministic=True) for r in found] == [
        r.SerializeToString(deterministic=True) for r in alone[:-1]
    ]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_none_costs_no_other_document_its_score(bad):
    documents = tuple(DocumentTokens(str(i), Status.OK, "", 3, 3, 3, False, i) for i in range(3))
    rows = np.array([[[1.0, 0.5]], [[bad, 0.0]], [[2.0, 0.5]]], np.float32)
    scored = tuple(Scored(row, None, Strategy.FUSED) for row in rows)
    found = results("label_logits", Tokenized(None, documents, YES_NO, 0), scored)
    numeric = pb.DOCUMENT_STATUS_NUMERIC_ERROR
    assert [r.status for r in found] == [pb.DOCUMENT_STATUS_OK, numeric, pb.DOCUMENT_STATUS_OK]
    assert [r.score for r in found if r.HasField("score")] == [0.5, 1.5]
