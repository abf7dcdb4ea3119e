"""The rule between decode strategies: fitted to times that follow the law, it finds the law and the faster strategy."""

import numpy as np
import pytest

from attention.decode import DecodeStrategy
from attention.decode_timing import BUILT_IN, DecodeLaw, DecodePoint, crossover
from attention.timing import TimeModel, built_in

BATCH, CASCADE = DecodeStrategy.BATCH_DECODE, DecodeStrategy.CASCADE_DECODE
TRUE = DecodeLaw({BATCH: (0.004, 1e-5, 2e-6), CASCADE: (0.009, 1e-5, 2e-6, 5e-7, 3e-8, 1e-5, 0.001, 1e-5)})
GRID = [DecodePoint(p, n, s) for p in (128, 1024, 8192, 32_768) for n in (8, 64, 512) for s in (4, 64)]


def rows(noise=0.0):
    rng = np.random.default_rng(0)
    return [(s, p, TRUE.time(s, p) * (1 + noise * rng.uniform(-1, 1))) for p in GRID for s in DecodeStrategy]


def test_it_finds_the_law_behind_exact_times():
    law = DecodeLaw.fit(rows())
    for strategy in DecodeStrategy:
        assert law.milliseconds[strategy] == pytest.approx(TRUE.milliseconds[strategy], rel=1e-6, abs=1e-12)


def test_noise_costs_little():
    """At measured points, the choice of a law fitted to times that are off by up to 5 %."""
    law = DecodeLaw.fit(rows(0.05))
    regret = [TRUE.time(law.choose(p), p) / TRUE.time(TRUE.choose(p), p) - 1 for p in GRID]
    assert max(regret) < 0.05
    assert all(term >= 0 for terms in law.milliseconds.values() for term in terms)


def test_too_few_measurements_are_refused():
    with pytest.raises(ValueError, match="3 measurements of cascade_decode are too few"):
        DecodeLaw.fit([row for row in rows() if row[0] is BATCH] + [row for row in rows() if row[0] is CASCADE][:3])


@pytest.mark.parametrize("law", [TRUE, BUILT_IN])
def test_the_more_beams_the_earlier_the_cascade_pays(law):
    prompts = [256 << i for i in range(8)]  # from the shortest on that laws are fitted to
    found = [crossover(law, beams, 16, prompts) for beams in (8, 32, 128, 512)]
    assert all(prompt is not None for prompt in found)
    assert found == sorted(found, reverse=True)


def test_where_it_never_pays_there_is_no_crossover():
    slow = DecodeLaw({BATCH: TRUE.milliseconds[BATCH], CASCADE: (9.0, *[0.0] * 7)})
    assert crossover(slow, 32, 16, [64, 1024]) is None


def test_a_calibration_keeps_the_law(tmp_path):
    model = built_in()
    assert model.decode == BUILT_IN, "the packaged file has no measured law"
    given = TimeModel(model.machine, model.heads, model.fits, model.copy_ms, model.merge_ms, TRUE)
    given.write(tmp_path / "calibration.json")
    text = (tmp_path / "calibration.json").read_text()
    assert TimeModel.read(text).decode == TRUE
    with pytest.raises(ValueError, match="not a calibration"):
        TimeModel.read(text.replace('"cascade_decode"', '"other"'))
