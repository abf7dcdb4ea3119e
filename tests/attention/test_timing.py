"""What a launch's time is fitted on, counted by hand, and what a strategy's time is made of."""

import json
import math
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from attention.cost import LaunchShape, shapes
from attention.plans import HeadShape, MaskKind, Strategy
from attention.timing import (
    CANDIDATES,
    PACKINGS,
    Fit,
    Machine,
    Ranked,
    TimeModel,
    built_in,
    fa2_tile,
    features,
    fits_for,
    kernels_for,
    kind_of,
    needed_fits,
    tiling,
)

HEADS = HeadShape(16, 8, 128, 128**-0.5, None)
FEATURES = {"fa2": 12, "fa3": 12, "fused": 7}


def ints(*values):
    return np.array(values, np.int32)


def causal(q_lens, kv_lens, paged=True):
    return LaunchShape(MaskKind.CAUSAL, paged, ints(*q_lens), ints(*kv_lens))


# --- tiles and names


@pytest.mark.parametrize(
    ("q_lens", "tile"), [([8], 16), ([8, 9], 64), ([32], 64), ([32, 33], 128), ([1, 1, 100], 128), ([500], 128)]
)
def test_one_tile_for_a_whole_launch_by_its_average_length(q_lens, tile):
    assert fa2_tile(causal(q_lens, q_lens), 2) == tile


def test_a_tile_has_query_tokens_of_one_group_of_heads_or_of_one_head():
    short, long = causal([8], [100]), causal([500], [600])
    assert tiling(short, "fa2", HEADS) == (16, 8, 8, 2)
    assert tiling(long, "fa2", HEADS) == (128, 64, 8, 2)
    assert tiling(long, "fa2", HeadShape(512, 2, 128, 1.0, None)) == (128, 1, 2, 2), "at least one token"
    assert tiling(short, "fa3", HEADS) == tiling(long, "fa3", HEADS) == (128, 128, 16, 1)


def test_fits_are_named_by_kernel_mask_source_and_tile():
    paged, ragged = causal([8], [100]), causal([500], [600], paged=False)
    assert (kind_of(paged), kind_of(ragged)) == ("causal/paged", "causal/ragged")
    assert fits_for(paged, "fa2", HEADS) == ("fa2/causal/paged/16", "fa2/causal/paged")
    assert fits_for(ragged, "fa2", HEADS) == ("fa2/causal/ragged/128", "fa2/causal/ragged")
    assert fits_for(ragged, "fa3", HEADS) == ("fa3/causal/ragged",)
    items = [shapes(s, 50, 0, ints(4, 4))[0] for s in (Strategy.MULTI_ITEM, Strategy.FUSED)]
    assert [kernels_for(shape) for shape in (paged, ragged, *items)] == [("fa2", "fa3")] * 3 + [("fused",)]


# --- features


def counted(shape, kernel, processors):
    """(tiles, keys) of a causal launch, tile after tile."""
    packed, tile, columns, resident = tiling(shape, kernel, HEADS)
    scanned = []
    for q, kv in zip(shape.q_lens.tolist(), shape.kv_lens.tolist(), strict=True):
        scanned += [min(kv - q + first + tile, kv) for first in range(0, q, tile)]
    return len(scanned), sum(scanned), packed, columns, processors * resident


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        ([4, 9, 1], [100, 2009, 301]),
        ([700, 3, 64], [700, 5003, 64]),
        ([40] * 300, [200] * 300),
        ([16] * 33, [500] * 33),
    ],
)
def test_features_of_a_launch(kernel, q_lens, kv_lens):
    shape = causal(q_lens, kv_lens)
    for processors in (2, 132):
        tiles, scanned, packed, columns, slots = counted(shape, kernel, processors)
        waves, longest = tiles * columns / slots, max(kv_lens)
        even = (scanned + 64 * tiles) * columns * packed / slots
        bound = even if kernel == "fa2" and waves < 1 else max(even, longest * packed)
        expected = [
            *map(math.log, (len(q_lens), sum(q_lens), sum(kv_lens), tiles * columns, even, longest, bound)),
            math.log(max(1.0, longest * packed / even)),
            math.log(max(q_lens) / (sum(q_lens) / len(q_lens))),
            math.log(longest / (sum(kv_lens) / len(kv_lens))),
            waves / math.ceil(waves),
            float(waves < 1),
        ]
        np.testing.assert_allclose(features(shape, kernel, HEADS, processors), expected, rtol=1e-12)


def test_a_launch_that_just_fills_the_machine_is_not_split():
    shape = causal([64] * 33, [5000] + [64] * 32)  # 33 tiles of 8 columns: 264 CTAs, two on each of 132 processors
    found = features(shape, "fa2", HEADS, 132)
    assert found[3] == pytest.approx(math.log(264))
    assert found[6] == pytest.approx(math.log(5000 * 128)), "bound by its longest CTA"
    assert (found[10], found[11]) == (1.0, 0.0)


def test_features_of_our_own_kernel():
    """One prefix of 128 fresh tokens, two items of 32 and 100: tiles of 32 tokens, blocks of 64 keys."""
    (shape,) = shapes(Strategy.FUSED, 128, 0, ints(32, 100))
    found = features(shape, "fused", HEADS, 132)
    # The prefix, tile after tile: none, none, one, one whole block before the block on its diagonal.
    prefix = [(0, 1), (0, 1), (1, 1), (1, 1)]
    # 32; then 100 as 32, 32, 32, 4: two whole blocks of the prefix, and of the item itself what is before and on it.
    items = [(2, 1), (2, 1), (2, 1), (3, 1), (3, 1)]
    full, masked = (np.array(column) for column in zip(*prefix, *items, strict=True))
    work = full + 1.3 * masked + 2.0
    slots = 132 * 2 / 8
    even, longest, waves = work.sum() / slots, work.max(), len(work) / slots
    expected = [
        *map(math.log, (even, longest, max(even, longest), waves)),
        waves / math.ceil(waves),
        0.0,
        math.log(masked.sum() / work.sum()),
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_our_own_kernel_splits_a_long_prefix():
    (shape,) = shapes(Strategy.FUSED, 8192, 8192, ints(4, 4))
    found = features(shape, "fused", HEADS, 132)
    assert found[5] == 1.0
    whole = 128 + 1.3 + 2.0
    assert found[1] < math.log(whole), "no part scans all of it"
    assert found[0] == pytest.approx(math.log(whole / (132 * 2 / 8)))


# --- fits


def test_a_fit_says_nothing_beyond_what_was_measured():
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 5, (200, 2))
    fit = Fit.of(x, np.exp(x.sum(axis=1)))
    edge = fit.mean + 3 * fit.scale
    np.testing.assert_allclose(fit.milliseconds((edge + 100)[None]), fit.milliseconds(edge[None]))
    low = fit.mean - 3 * fit.scale
    np.testing.assert_allclose(fit.milliseconds((low - 100)[None]), fit.milliseconds(low[None]))
    inside = fit.mean + 2.9 * fit.scale
    assert fit.milliseconds(inside[None]) < fit.milliseconds(edge[None])


def test_a_fit_is_standardised_and_shrinks_all_but_its_level():
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.uniform(1, 5, 50), np.full(50, 7.0)])
    fit = Fit.of(x, np.full(50, 3.0))
    np.testing.assert_allclose(fit.mean, x.mean(axis=0))
    np.testing.assert_allclose(fit.scale, [x[:, 0].std(), 1e-6])
    np.testing.assert_allclose(fit.coefficients, [math.log(3.0)] + [0.0] * 5, atol=1e-12)
    steep = np.exp(x[:, 0])
    weak, strong = (np.abs(Fit.of(x, steep, ridge).coefficients[1]) for ridge in (1e-9, 1e3))
    assert strong < weak / 10
    plain = Fit.of(x, steep).coefficients
    np.testing.assert_array_equal(plain, Fit.of(x, steep, 1.0).coefficients)
    terms = (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()
    design = np.column_stack([np.ones(50), terms, np.zeros(50), terms**2, np.zeros(50), np.zeros(50)])
    solved = np.linalg.solve(design.T @ design + np.diag([0.0, *[1.0] * 5]), design.T @ x[:, 0])
    np.testing.assert_allclose(plain, solved, atol=1e-9)


# --- strategies


def constant(kernel, milliseconds):
    """A fit that says the same of every launch."""
    count = FEATURES[kernel]
    return Fit(np.zeros(count), np.ones(count), np.array([math.log(milliseconds)] + [0.0] * (count * (count + 3) // 2)))


def model(fa2=3.0, fa3=5.0, fused=7.0, **more):
    kinds = [f"{mask}/{source}" for mask in ("none", "causal", "multi_item") for source in ("paged", "ragged")]
    fits = {f"{k}/{kind}": constant(k, t) for k, t in (("fa2", fa2), ("fa3", fa3)) for kind in kinds}
    fits["fused/multi_item/ragged"] = constant("fused", fused)
    return TimeModel(Machine("test"), HEADS, fits | more, (0.5, 0.01), (0.25, 0.001))


def test_the_faster_kernel_runs_a_launch_by_the_fit_of_its_tile():
    shape = causal([8], [100])
    assert model().launch(shape) == ("fa2", pytest.approx(3.0))
    assert model(fa3=2.0).launch(shape) == ("fa3", pytest.approx(2.0))
    assert model(**{"fa2/causal/paged/16": constant("fa2", 9.0)}).launch(shape) == ("fa3", pytest.approx(5.0))
    with pytest.raises(AssertionError, match="nothing was measured for fa2 causal/paged launches"):
        TimeModel(Machine("test"), HEADS, {}).launch(shape)


def test_dense_masks_take_their_flops_over_a_measured_rate():
    (shape,) = shapes(Strategy.CUSTOM_MASK, 1000, 200, ints(30, 70))
    name, milliseconds = model().launch(shape)
    flops = 4 * 16 * 128 * (1000 - 200 + 100) * 1100
    assert name == "fa2"
    assert milliseconds == pytest.approx(0.02 + 1e3 * flops / 1.1e14)


LENGTHS = ints(30, 70, 100)
WRITTEN = 0.5 + 0.01 * (400 - 100 + 200)
MERGED = 0.25 + 0.001 * 200


@pytest.mark.parametrize(
    ("strategy", "launches", "more"),
    [
        (Strategy.DIRECT_RAGGED, 3.0, WRITTEN),
        (Strategy.SPLIT_CACHE, 6.0, WRITTEN),
        (Strategy.DIRECT_RAGGED_GROUPED, 6.0, WRITTEN),  # one launch up to 64 rows, one of the longer ones
        (Strategy.CASCADE, 9.0, WRITTEN + MERGED),
        (Strategy.CASCADE_CONTIGUOUS, 9.0, MERGED + 0.5 + 0.01 * 400),  # the cached prefix is gathered
        (Strategy.MULTI_ITEM, 3.0, WRITTEN),
        (Strategy.PACKED_MULTI_ITEM, 3.0, WRITTEN),
        (Strategy.FUSED, 7.0, 0.5 + 0.01 * 400),
    ],
)
def test_a_strategy_takes_its_launches_and_what_it_writes_gathers_and_merges(strategy, launches, more):
    assert model().strategy(strategy, 400, 100, LENGTHS) == pytest.approx(launches + more)
    unwritten = 0.0 if more == WRITTEN else more - WRITTEN if strategy is Strategy.CASCADE else more
    assert model().strategy(strategy, 400, 100, LENGTHS, writes=False) == pytest.approx(launches + unwritten)


@pytest.mark.parametrize(("strategy", "expected"), [(Strategy.CASCADE_CONTIGUOUS, 9.0 + MERGED), (Strategy.FUSED, 7.0)])
def test_what_is_contiguous_gathers_only_what_is_cached(strategy, expected):
    assert model().strategy(strategy, 400, 0, LENGTHS) == pytest.approx(expected)


def test_without_a_prefix_nothing_is_merged():
    assert model().strategy(Strategy.CASCADE, 0, 0, LENGTHS) == pytest.approx(3.0 + 0.5 + 0.01 * 200)


def test_strategies_are_ranked_and_packed_as_is_best():
    made = model(fa2=1.0, fa3=1.0, fused=1.0)
    ranked = made.ranked(400, 400, LENGTHS)
    assert ranked == sorted(ranked)
    assert {strategy for _, strategy, _ in ranked} == set(CANDIDATES)
    for entry in ranked:
        packings = PACKINGS if entry.strategy is Strategy.PACKED_MULTI_ITEM else (128,)
        times = [made.strategy(entry.strategy, 400, 400, LENGTHS, rows) for rows in packings]
        assert entry == Ranked(min(times), entry.strategy, packings[times.index(min(times))])
    only = made.ranked(400, 400, LENGTHS, (Strategy.FUSED, Strategy.CASCADE))
    assert [strategy for _, strategy, _ in only] == [
        strategy for _, strategy, _ in ranked if strategy in (Strategy.FUSED, Strategy.CASCADE)
    ]


def test_a_real_calibration_packs_by_what_it_measured():
    """Both packings are tried: over all lengths, each is better somewhere."""
    made = built_in()
    best = set()
    for length in (4, 16, 40, 64, 90, 200):
        (found,) = made.ranked(2048, 2048, np.full(64, length, np.int32), (Strategy.PACKED_MULTI_ITEM,))
        times = {
            rows: made.strategy(Strategy.PACKED_MULTI_ITEM, 2048, 2048, np.full(64, length), rows) for rows in PACKINGS
        }
        assert found.milliseconds == min(times.values()) == times[found.packed_rows]
        best.add(found.packed_rows)
    assert best == set(PACKINGS)


# --- calibrations on disk


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    given = built_in()
    given.write(tmp_path / "c.json")
    text = (tmp_path / "c.json").read_text()
    assert text.endswith("}\n")
    assert ", " not in text.replace(given.machine.name, ""), "it is small"
    again = TimeModel.read(text)
    assert (again.machine, again.heads) == (given.machine, given.heads)
    assert (again.copy_ms, again.merge_ms) == (given.copy_ms, given.merge_ms)
    assert again.fits.keys() == given.fits.keys()
    for name, fit in given.fits.items():
        for part in ("mean", "scale", "coefficients"):
            np.testing.assert_allclose(getattr(again.fits[name], part), getattr(fit, part), rtol=1e-8)


def test_numbers_are_written_to_nine_digits():
    told = Fit(np.array([1 / 3]), np.array([2 / 3e5]), np.array([1e9 / 7, 0.0, 1.0])).as_lists()
    assert told == {"mean": [0.333333333], "scale": [6.66666667e-06], "coefficients": [142857143.0, 0.0, 1.0]}


def test_the_built_in_calibration_is_an_h200s():
    made = built_in()
    assert "H200" in made.machine.name
    assert made.machine.processors == 132
    assert (made.heads.heads, made.heads.kv_heads, made.heads.head_dim) == (16, 8, 128)
    assert made.heads.scale == pytest.approx(128**-0.5)
    assert made.heads.dtype is None


@pytest.mark.parametrize("text", ["", "[]", '{"fits": {}}', '{"fits": {"a": {}}, "heads": {}}', "7"])
def test_something_else_is_no_calibration(text):
    with pytest.raises(ValueError, match="not a calibration: "):
        TimeModel.read(text)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("times") / "c.json"
    built_in().write(file)
    return file.read_text()


def places(value, path=()):
    """The path of every object, list and value in a document; of a list its first and last."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield (*path, 0)
        yield (*path, len(value) - 1)


def put(document, path, value):
    reduce(lambda inner, step: inner[step], path[:-1], document)[path[-1]] = value


def taken(document, path):
    return reduce(lambda inner, step: inner[step], path[:-1], document).pop(path[-1])


def no_damage(path, bad):
    """What a field may well be."""
    signed = path[-1] in (0, 11, 90, 6, 35) and path[-2] in ("mean", "coefficients")
    return (path == ("machine", "name") and bad == "8") or (signed and bad == -1.5)


BAD = [None, True, "8", -1.5, float("nan"), float("inf"), 10**400, [], {}, [1], {"a": 1}]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_damaged_value_is_refused_wherever_it_is(written, bad):
    """Each field of the whole document in turn: what is read is what `strategy` can compute with, or named."""
    for path in list(places(json.loads(written)))[1:]:
        document = json.loads(written)
        if no_damage(path, bad):
            continue
        put(document, path, bad)
        with pytest.raises(ValueError, match=r"^not a calibration: ") as told:
            TimeModel.read(json.dumps(document))
        assert str(path[0]) in str(told.value)
        assert len(str(told.value)) < 300


def test_a_field_that_is_missing_or_unknown_is_named(written):
    optional = {"decode", *(f"fits.{name}" for name in built_in().fits if name.count("/") == 3)}
    for path in list(places(json.loads(written)))[1:]:
        document, told = json.loads(written), ".".join(map(str, path))
        taken(document, path)
        if told in optional:
            TimeModel.read(json.dumps(document))
            continue
        with pytest.raises(ValueError, match=r"^not a calibration: ") as error:
            TimeModel.read(json.dumps(document))
        parent = ".".join(map(str, path[:-1])) if isinstance(path[-1], int) else told
        assert parent in str(error.value)
    for path in places(json.loads(written)):
        document = json.loads(written)
        inner = reduce(lambda value, step: value[step], path, document)
        if isinstance(inner, dict):
            inner["processsors"] = 1
            with pytest.raises(ValueError, match="processsors: no such field; there are "):
                TimeModel.read(json.dumps(document))


def test_a_calibration_of_before_the_fused_kernel_says_so(written):
    document = json.loads(written)
    del document["fits"]["fused/multi_item/ragged"]
    with pytest.raises(ValueError, match="measured before the fused kernel: run prefixrank calibrate again"):
        TimeModel.read(json.dumps(document))


def test_values_out_of_bounds_name_the_bounds(written):
    for path, bad, told in [
        (("heads", "kv_heads"), 0, "heads.kv_heads: a whole number from 1 to 65,536, got 0"),
        (("heads", "kv_heads"), 5, "heads.kv_heads: a divisor of the 16 heads, got 5"),
        (("machine", "processors"), 132.0, "machine.processors: a whole number from 1 to 65,536, got 132.0"),
        (("copy_ms",), [0.1], "copy_ms: a list of 2 numbers, got 1"),
        (("merge_ms", 1), -1e-9, r"merge_ms\[1\]: a finite number from 0 to 10000, got -1e-09"),
        (("fits", "fa3/none/paged", "scale", 3), 0, r"fits.fa3/none/paged.scale\[3\]: .* got 0$"),
        (("fits", "fa3/none/paged", "coefficients", 9), 299, "fits.fa3/none/paged.coefficients: add up to no more"),
        (("machine", "name"), " ", 'machine.name: a text that is not empty, got " "'),
    ]:
        document = json.loads(written)
        put(document, path, bad)
        with pytest.raises(ValueError, match=told):
            TimeModel.read(json.dumps(document))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"machine": ' + "9" * 5000 + "}", "\0", '{"heads": 1'])
def test_text_that_is_no_json_is_no_calibration(text):
    with pytest.raises(ValueError, match=r"^not a calibration: "):
        TimeModel.read(text)


def test_every_launch_of_every_strategy_has_a_fit_that_must_be_there():
    """So that what was read without an error never lacks one later."""
    made, rng = built_in(), np.random.default_rng(0)
    least = replace(made, fits={name: made.fits[name] for name in needed_fits()})
    for _ in range(30):
        prefix, lengths = int(rng.integers(1, 3000)), rng.integers(1, 400, int(rng.integers(1, 40)))
        for cached in (0, prefix // 2, prefix):
            for strategy in Strategy:
                have = 0 if strategy is Strategy.NAIVE else cached
                assert 0 < least.strategy(strategy, prefix, have, lengths) < float("inf")
