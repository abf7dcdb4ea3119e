"""The limits that fit: arithmetic alone, in bytes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorer.errors import ConfigError
from scorer.memory import PARTS, Asked, Growth, Needs, Wanted, fit

MiB = 1 << 20
GROWTH = Growth(fixed=10 * MiB, row=20_000, chunk_row=60_000, chunk=4096, key=500)
NEEDS = Needs(weights=1000 * MiB, eager=(GROWTH,), kv_token=100_000, page_size=16)
WANTED = Wanted(
    Asked("--max-pass-tokens", None, 16_384, 256),
    None,
    Asked("--cache-tokens", None, 1 << 19),
    model_context=40_960,
)

sizes = st.integers(0, 1 << 17)
growths = st.builds(Growth, st.integers(0, 1 << 28), sizes, sizes, st.integers(1, 1 << 14), st.integers(0, 1 << 12))
needs = st.builds(
    Needs,
    weights=st.integers(0, 1 << 33),
    eager=st.lists(growths, min_size=1, max_size=2).map(tuple),
    kv_token=st.integers(1, 1 << 18),
    page_size=st.sampled_from([1, 16, 64]),
    graphs=growths,
    workspace=st.integers(0, 1 << 29),
    scratch=st.tuples(st.floats(0, 2), st.integers(0, 2048)),
)
asked = st.one_of(st.none(), st.integers(1, 1 << 16))


@st.composite
def wanted(draw):
    model_context = draw(st.integers(1, 1 << 16))
    context = st.builds(Asked, st.just("--max-context-tokens"), asked, st.just(model_context))
    return Wanted(
        Asked("--max-pass-tokens", draw(asked), 16_384, 256),
        draw(st.one_of(st.none(), context)),
        Asked("--cache-tokens", draw(asked), 1 << 18),
        model_context,
    )


@given(st.integers(0, 1 << 38), needs, wanted())
def test_what_is_chosen_fits_and_what_is_asked_for_is_kept(budget, needs, wanted):
    try:
        plan = fit(budget, needs, wanted)
    except ConfigError:
        return
    assert plan.total <= budget
    assert set(plan.parts) == set(PARTS)
    rows = max(plan.pass_tokens, plan.context_tokens)
    assert plan.parts["activations"] == max(g.bytes(rows, rows + plan.context_tokens) for g in needs.eager)
    assert plan.pass_tokens == wanted.pass_tokens.asked or wanted.pass_tokens.asked is None
    if wanted.cache_tokens.asked is not None:
        assert 0 <= wanted.cache_tokens.asked - plan.cache_tokens < needs.page_size
    assert plan.context_tokens <= wanted.model_context
    if wanted.context_tokens and wanted.context_tokens.asked:
        assert plan.context_tokens == wanted.context_tokens.asked
    assert plan.cache_tokens % needs.page_size == 0
    if wanted.cache_tokens.asked is None:  # one more page would not have fitted, or is more than is wanted
        page = needs.page_size * needs.kv_token
        most = wanted.cache_tokens.most
        assert plan.total + page > budget or plan.cache_tokens + needs.page_size > most


@given(st.integers(0, 1 << 36), st.integers(0, 1 << 36), needs, wanted())
def test_more_memory_never_takes_a_limit_down(less, more, needs, wanted):
    less, more = sorted((less, more))
    try:
        small = fit(less, needs, wanted)
    except ConfigError:
        return
    large = fit(more, needs, wanted)
    assert large.pass_tokens >= small.pass_tokens
    assert large.pass_tokens > small.pass_tokens or large.context_tokens >= small.context_tokens


def test_with_room_the_limits_are_the_usual_ones_and_the_rest_is_for_prefixes():
    plan = fit(80_000 * MiB, NEEDS, WANTED)
    assert (plan.pass_tokens, plan.context_tokens, plan.cache_tokens) == (16_384, 16_384, 1 << 19)
    tighter = fit(20_000 * MiB, NEEDS, WANTED)
    assert tighter.pass_tokens == 16_384
    assert plan.context_tokens <= tighter.cache_tokens < 1 << 19


def test_the_cache_gives_way_first_then_the_pass():
    small = fit(2000 * MiB, NEEDS, WANTED)
    assert small.pass_tokens < 16_384
    assert small.cache_tokens >= small.context_tokens, "a prefix is kept while its request runs as several passes"


def test_on_a_cpu_the_context_gives_way_before_the_pass():
    wanted = replace(WANTED, context_tokens=Asked("--max-context-tokens", None, 40_960, 512))
    wanted = replace(wanted, pass_tokens=Asked("--max-pass-tokens", None, 1024, 256))
    plan = fit(2000 * MiB, NEEDS, wanted)
    assert plan.pass_tokens == 1024
    assert 512 <= plan.context_tokens < 40_960


def test_a_context_beyond_what_the_model_was_made_for_is_refused_with_both_figures():
    wanted = replace(WANTED, context_tokens=Asked("--max-context-tokens", 2048, 2048), model_context=2048)
    assert fit(80_000 * MiB, NEEDS, wanted).context_tokens == 2048
    wanted = replace(wanted, context_tokens=Asked("--max-context-tokens", 2049, 2048))
    with pytest.raises(ConfigError, match="--max-context-tokens 2049: the model was made for 2048 tokens"):
        fit(80_000 * MiB, NEEDS, wanted)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"pass_tokens": Asked("--max-pass-tokens", 65_536, 16_384)}, r"--max-pass-tokens 65536 need .* activations"),
        ({"cache_tokens": Asked("--cache-tokens", 1 << 20, 1)}, r"--cache-tokens 1048576 need .* cache 97.66 GiB"),
    ],
)
def test_what_was_asked_for_and_does_not_fit_is_refused_with_the_figures(changed, told):
    with pytest.raises(ConfigError, match=told) as caught:
        fit(3000 * MiB, NEEDS, replace(WANTED, **changed))
    assert "of 2.93 GiB" in str(caught.value)
    assert "; lower --" in str(caught.value)


def test_a_model_that_is_larger_than_the_device_is_refused():
    with pytest.raises(ConfigError, match=r"^the weights alone need more than there is: .*take a smaller model"):
        fit(500 * MiB, NEEDS, WANTED)
    with pytest.raises(ConfigError, match=r"^the smallest limits need"):
        fit(1010 * MiB, NEEDS, WANTED)


def test_chunks_bound_what_the_wide_layers_take():
    assert GROWTH.bytes(65_536, 0) - GROWTH.bytes(65_535, 0) == GROWTH.row
    assert GROWTH.bytes(8, 0) - GROWTH.bytes(7, 0) == GROWTH.row + GROWTH.chunk_row
