import random
from collections import Counter
from itertools import islice
from statistics import median

import pytest

from loadtest.asked import request_of
from loadtest.workload import PROFILES, WORDS, Arrival, arrivals, document_texts, lognormal, prefix_text, text
from scorer.measure_commands import LOAD_PROFILES


def some(name, count=400, **kwargs):
    return list(islice(arrivals(PROFILES[name], 10.0, 1e9, **kwargs), count))


def quantile(values, q):
    return sorted(values)[int(q * len(values))]


def test_the_command_line_knows_every_profile():
    assert set(LOAD_PROFILES) == PROFILES.keys()


def test_a_seed_is_a_trace():
    assert some("feed") == some("feed")
    assert some("feed") != some("feed", seed=1)
    assert document_texts(some("jobs", 1)[0]) == document_texts(some("jobs", 1)[0])


def test_arrivals_are_poisson_at_the_rate():
    gaps = [b.at - a.at for a, b in zip(some("laptop", 4000), some("laptop", 4000)[1:], strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.05)
    assert median(gaps) == pytest.approx(0.0693, rel=0.1)


@pytest.mark.parametrize("burst", [1, 3, 10])
def test_bursts_keep_the_mean_rate(burst):
    found = list(arrivals(PROFILES["laptop"], 20.0, 1000.0, burst=burst))
    assert len(found) == pytest.approx(20_000, rel=0.05)
    inside = sum(a.at % 10 < 1 for a in found)
    assert inside / len(found) == pytest.approx(burst / 10, rel=0.05)


def test_web_rerank_has_the_lengths_of_ms_marco():
    items = [n for a in some("web-rerank", 60) for n in a.items]
    assert quantile(items, 0.5) == pytest.approx(76, rel=0.05)
    assert quantile(items, 0.95) == pytest.approx(155, rel=0.1)
    assert {len(a.items) for a in some("web-rerank", 10)} == {100}


def test_a_users_prefix_comes_back_three_to_five_times():
    uses = Counter(a.prefix for a in some("feed", 4000))
    done = [n for prefix, n in uses.items() if prefix < 800]
    assert set(done) <= {3, 4, 5}
    assert len({a.prefix_tokens for a in some("feed", 4000) if a.prefix == 7}) == 1


def test_titles_are_zipf_and_the_adversary_repeats_nothing():
    titles = Counter(a.prefix for a in some("titles", 500))
    assert titles[0] > titles[20] > 0
    assert titles.most_common(1)[0][0] in (0, 1, 2)
    assert len({a.prefix for a in some("adversarial", 50)}) == 50
    assert {a.prefix_tokens for a in some("adversarial", 5)} == {8000}


def test_scale_shortens_every_length():
    (small,), (large,) = some("long", 1, scale=0.1), some("long", 1)
    assert len(small.items) == len(large.items)
    assert sum(small.items) == pytest.approx(sum(large.items) / 10, rel=0.1)


def test_text_has_a_word_a_token_and_equal_prefixes_equal_text():
    assert len(text("a", 300).split()) == 300
    assert text("a", 30) == text("a", 30) != text("b", 30)
    assert len(set(WORDS)) > 100
    one, two = Arrival(0, 7, 20, (3, 4), 1), Arrival(9, 7, 20, (5,), 2)
    assert prefix_text(PROFILES["feed"], one) == prefix_text(PROFILES["feed"], two)
    assert [len(d.split()) for d in document_texts(one)] == [3, 4]


def test_lognormal_has_its_quantiles():
    draws = [lognormal(100, 200)(random.Random(i)) for i in range(3000)]
    assert quantile(draws, 0.5) == pytest.approx(100, rel=0.05)
    assert quantile(draws, 0.95) == pytest.approx(200, rel=0.1)


def test_a_long_prefix_is_the_whole_prefix_and_a_short_one_a_query():
    short = request_of(PROFILES["web-rerank"], Arrival(0, 0, 7, (3,), 0))
    long = request_of(PROFILES["feed"], Arrival(0, 0, 2048, (3, 4), 0))
    assert len(short.query.text.split()) == 7
    assert (short.WhichOneof("prefix"), long.WhichOneof("prefix")) == ("query", "raw_text")
    assert [len(d.text.split()) for d in long.documents] == [3, 4]
