"""Beam search over arrays, with a toy model that is a table: what it finds is held against trying every sequence."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.beams import Ancestry, BeamOptions, BeamState, Candidates, EarlyStopping, Ended
from batching.trie import ROOT, Trie

EOS = 0


def table(vocabulary, seed, sharp=1.0):
    """log-probabilities of the next token by all tokens before it, as a function."""
    rows = {}

    def of(before):
        if before not in rows:
            rng = np.random.default_rng([seed, len(before), *before])
            logits = (rng.standard_normal(vocabulary) * sharp).astype(np.float32)
            rows[before] = logits - np.logaddexp.reduce(logits)
        return rows[before]

    return of


def run(options, model, trie=None, shuffle=None):
    """A whole search; returns its state and how many steps it took."""
    state, steps = BeamState(options, trie), 0
    while not state.done:
        rows = np.stack([model(tuple(tokens)) for tokens in state.tokens.tolist()])
        pairs = state.wanted()
        if pairs is None:
            beams, tokens = (part.ravel() for part in np.indices(rows.shape))
        else:
            beams, tokens = pairs
        if shuffle is not None:
            order = shuffle.permutation(len(beams))
            beams, tokens = beams[order], tokens[order]
        state.advance(Candidates(rows[beams, tokens], beams.astype(np.int32), tokens.astype(np.int32)))
        steps += 1
    return state, steps


def every_sequence(vocabulary, longest):
    """Those that end with EOS, or are as long as allowed."""
    plain = range(1, vocabulary)
    for length in range(1, longest + 1):
        for body in itertools.product(plain, repeat=length - 1):
            yield (*body, EOS)
    yield from itertools.product(plain, repeat=longest)


def total(model, tokens):
    return float(sum(model(tokens[:i])[token] for i, token in enumerate(tokens)))


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
def test_wide_enough_it_finds_the_best_of_all_sequences(penalty):
    model, vocabulary, longest = table(4, seed=1), 4, 4
    options = BeamOptions(128, longest, penalty, EarlyStopping.NEVER, (EOS,))
    state, _ = run(options, model)
    scored = sorted(
        ((total(model, s) / len(s) ** penalty, s) for s in every_sequence(vocabulary, longest)), reverse=True
    )
    assert len(state.finished) == min(128, len(scored))
    for found, (score, tokens) in zip(state.finished[:10], scored[:10], strict=True):
        assert found.tokens == tokens
        assert found.score == pytest.approx(score, abs=1e-5)
        assert found.log_probs == pytest.approx([model(tokens[:i])[t] for i, t in enumerate(tokens)], abs=1e-6)


def test_the_order_of_candidates_does_not_matter():
    model, options = table(30, seed=2), BeamOptions(5, 6, 1.0, EarlyStopping.HEURISTIC, (EOS, 3))
    expected, _ = run(options, model)
    for seed in range(5):
        found, _ = run(options, model, shuffle=np.random.default_rng(seed))
        assert found.finished == expected.finished


def test_what_ends_outside_the_first_num_beams_does_not_count():
    state = BeamState(BeamOptions(2, 5, eos_ids=(EOS,)))
    state.advance(
        Candidates(np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32)), np.zeros(4, np.int32), np.array([1, 2, EOS, 3]))
    )
    assert not state.finished
    assert state.tokens.tolist() == [[1], [2]]


def test_early_stopping_ends_a_search_as_soon_as_it_may():
    """A model that likes to end at once, and to go on behind it: three rules, three lengths."""

    def model(before):
        row = np.full(4, np.log(0.01), np.float32)
        row[EOS], row[1] = np.log(0.5), np.log(0.48)
        return row

    steps = {rule: run(BeamOptions(2, 12, 1.0, rule, (EOS,)), model)[1] for rule in EarlyStopping}
    assert steps[EarlyStopping.FULL] == 2
    assert steps[EarlyStopping.FULL] <= steps[EarlyStopping.HEURISTIC] <= steps[EarlyStopping.NEVER] == 12


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rule", EarlyStopping)
@pytest.mark.parametrize("penalty", [-16.0, 16.0])
def test_the_steepest_penalties_still_tell_sequences_apart(penalty, rule):
    """400 ** 16 is beyond float32."""
    model = table(9, seed=4)
    options = BeamOptions(3, 400, penalty, rule, (EOS,))
    ranks = run(options, model)[0].finished + run(replace(options, eos_ids=()), model)[0].finished
    assert max(len(h.tokens) for h in ranks) == 400
    for h in ranks:
        assert h.score == pytest.approx(sum(h.log_probs) / len(h.tokens) ** penalty, rel=1e-5)
    assert len({h.score for h in ranks}) == len(ranks)


def test_without_eos_every_sequence_has_full_length():
    state, steps = run(BeamOptions(3, 4), table(9, seed=3))
    assert steps == 4
    assert [(len(h.tokens), h.ended) for h in state.finished] == [(4, Ended.LENGTH)] * 3


def test_a_beam_that_cannot_be_is_not():
    """Minus infinity is no continuation, also where there is no other."""
    state = BeamState(BeamOptions(4, 3))
    state.advance(Candidates(np.array([-1.0, -np.inf, -np.inf], np.float32), np.zeros(3, np.int32), np.arange(3)))
    assert state.tokens.tolist() == [[0]]
    state.advance(Candidates(np.full(3, -np.inf, np.float32), np.zeros(3, np.int32), np.arange(3)))
    assert state.done
    assert not state.finished


def searched(options, model, allowed=None):
    """The same search with lists of tuples, a beam at a time. Returns what is finished, and the steps."""
    running, finished, steps = [((), (), np.float32(0))], [], 0
    width, eos = options.num_beams, options.eos_ids
    begins = None if allowed is None else {s[:n] for s in allowed for n in range(1, len(s) + 1)}
    while True:
        steps += 1
        found = [
            ((*tokens, token), (*logs, float(log)), np.float32(score + log))
            for tokens, logs, score in running
            for token, log in enumerate(model(tokens))
            if begins is None or (*tokens, token) in begins or (token in eos and tokens in allowed)
        ]
        found = sorted(found, key=lambda each: -each[2])[: max(2, 1 + len(eos)) * width]
        goes_on = []
        for place, (tokens, logs, score) in enumerate(found):
            if tokens[-1] in eos:
                why = Ended.EOS
            elif steps == options.max_new_tokens:
                why = Ended.LENGTH
            elif begins is not None and not eos and not any(b[:-1] == tokens for b in begins):
                why = Ended.CONSTRAINT
            elif len(goes_on) < width:
                goes_on.append((tokens, logs, score))
                continue
            else:
                continue
            if place < width:
                finished.append((tokens, logs, float(score) / steps**options.length_penalty, why))
        finished = sorted(finished, key=lambda each: -each[2])[:width]
        running = goes_on
        if not running or over(options, running[0][2], steps, [score for _, _, score, _ in finished]):
            return finished, steps


def over(options, best, length, finished):
    """Whether a search with such scores of finished sequences, best first, ends."""
    if len(finished) < options.num_beams:
        return False
    if options.early_stopping is EarlyStopping.FULL:
        return True
    if options.early_stopping is EarlyStopping.NEVER and options.length_penalty > 0:
        length = options.max_new_tokens
    return not float(best) / length**options.length_penalty > finished[-1]


@st.composite
def searches(draw):
    options = BeamOptions(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 7)),
        draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.5])),
        draw(st.sampled_from(EarlyStopping)),
        draw(st.sampled_from([(), (EOS,), (EOS, 2)])),
    )
    allowed = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5).map(tuple), min_size=1, max_size=12)
    return (
        options,
        table(7, draw(st.integers(0, 2**31)), draw(st.sampled_from([0.3, 1.0, 4.0]))),
        draw(st.one_of(st.none(), allowed.map(set))),
    )


@settings(max_examples=200, deadline=None)
@given(searches(), st.integers(0, 2**31))
def test_a_search_is_what_it_is_with_lists_of_tuples(search, seed):
    options, model, allowed = search
    state, steps = run(options, model, None if allowed is None else Trie.of(sorted(allowed)))
    finished, taken = searched(options, model, allowed)
    assert steps == taken
    assert [(h.tokens, h.log_probs, h.score, h.ended) for h in state.finished] == finished
    for kept, dtype in ((state.scores, np.float32), (state.tokens, np.int32), (state.log_probs, np.float32)):
        assert kept.dtype == dtype, "what the device takes"


def test_a_search_that_ended_takes_no_step():
    state = BeamState(BeamOptions(1, 1))
    given_once = Candidates(np.zeros(1, np.float32), np.zeros(1, np.int32), np.ones(1, np.int32))
    state.advance(given_once)
    with pytest.raises(AssertionError, match=r"^a search that ended takes no step$"):
        state.advance(given_once)


ALLOWED = [(1, 2, 3), (1, 2), (1, 4, 4, 4), (5,), (2, 2, 2)]


def test_a_constraint_lets_through_its_sequences_and_nothing_else():
    model, trie = table(8, seed=4), Trie.of(ALLOWED)
    state, _ = run(BeamOptions(8, 6, 0.0, EarlyStopping.NEVER, (EOS,)), model, trie)
    scored = sorted(((total(model, (*s, EOS)), (*s, EOS)) for s in ALLOWED), reverse=True)
    assert [h.tokens for h in state.finished] == [tokens for _, tokens in scored]
    assert [h.score for h in state.finished] == pytest.approx([score for score, _ in scored], abs=1e-5)


def test_without_eos_an_allowed_sequence_ends_where_nothing_continues_it():
    state, _ = run(BeamOptions(8, 6, 0.0, EarlyStopping.NEVER), table(8, seed=5), Trie.of(ALLOWED))
    assert {h.tokens for h in state.finished} == {s for s in ALLOWED if s != (1, 2)}
    assert {h.ended for h in state.finished} == {Ended.CONSTRAINT}


def test_a_constraint_may_name_its_eos():
    state, _ = run(
        BeamOptions(4, 6, 0.0, EarlyStopping.NEVER, (EOS,)), table(8, seed=6), Trie.of([(1, EOS), (1,), (2,)])
    )
    assert sorted(h.tokens for h in state.finished) == [(1, EOS), (2, EOS)]


def test_one_that_is_cut_by_length_ends_as_far_as_it_came():
    state, _ = run(BeamOptions(4, 2, 0.0, EarlyStopping.NEVER, (EOS,)), table(8, seed=7), Trie.of([(1, 2, 3), (4,)]))
    assert {(h.tokens, h.ended) for h in state.finished} == {((1, 2), Ended.LENGTH), ((4, EOS), Ended.EOS)}


sequences = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5).map(tuple), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(sequences)
def test_a_trie_holds_its_sequences(given_sequences):
    trie = Trie.of(given_sequences)
    prefixes = {s[:n] for s in given_sequences for n in range(len(s) + 1)}
    assert trie.nodes == len(prefixes)
    node_of = {(): ROOT}
    for prefix in sorted(prefixes, key=len)[1:]:
        parent = np.array([node_of[prefix[:-1]]], np.int32)
        node_of[prefix] = int(trie.step(parent, np.array(prefix[-1:], np.int32))[0])
    assert sorted(node_of.values()) == list(range(trie.nodes))
    nodes = np.array(list(node_of.values()), np.int32)
    found = trie.pairs(nodes, (9,))
    got = {(list(node_of)[b], t) for b, t in zip(found.beams.tolist(), found.tokens.tolist(), strict=True)}
    wanted = {(p[:-1], p[-1]) for p in prefixes if p} | {(s, 9) for s in given_sequences}
    assert got == wanted
    assert len(found.beams) == len(wanted)
    assert (found.beams.dtype, found.tokens.dtype) == (np.int32, np.int32)
    assert (trie.children.dtype, trie.edges.dtype, trie.terminal.dtype) == (np.int32, np.int64, np.bool_)


@pytest.mark.parametrize("bad", [[], [(1,), ()]])
def test_a_trie_of_nothing_is_refused(bad):
    with pytest.raises(ValueError, match=r"^a constraint has at least one sequence, and each at least one token$"):
        Trie.of(bad)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 2**31), min_size=1, max_size=6))
def test_forking_follows_every_beams_own_tokens(width, seeds):
    """Against the plain way: each beam carries a list of what its tokens are, copied whenever it forks."""
    ancestry, held = Ancestry(width), {0: ("prompt",)}
    assert ancestry.slots.tolist() == [[0]]
    paths = [("prompt",)]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        parents = rng.integers(0, len(paths), rng.integers(1, width + 1)).astype(np.int32)
        ancestry.fork(parents)
        paths = [(*paths[parent], (seed, i)) for i, parent in enumerate(parents)]
        for slot, path in zip(ancestry.slots[:, -1].tolist(), paths, strict=True):
            assert slot not in held, "a slot is written once"
            held[slot] = path
        assert [[held[s][-1] for s in row] for row in ancestry.slots.tolist()] == [list(path) for path in paths]
    assert max(held) < 1 + width * len(seeds)
    assert ancestry.slots.dtype == np.int32, "kernels read it"
    with pytest.raises(AssertionError, match=r"^a step has at most `width` beams$"):
        ancestry.fork(np.zeros(width + 1, np.int32))
