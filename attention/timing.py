"""How long a launch takes on one machine: a fit over measured launches, by the lengths alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention.cost import PACKED_ROWS, LaunchShape, scans, shapes
from attention.cuts import Cut, count_blocks
from attention.decode import DecodeStrategy
from attention.decode_timing import BUILT_IN, MOST_MS, DecodeLaw
from attention.fields import Fields, parse
from attention.layout import Ints
from attention.plans import HeadShape, MaskKind, Strategy
from attention.tiles import parts_of

Reals = NDArray[np.float64]
# What AUTO chooses among. naive and the dense masks are never fastest where they differ.
CANDIDATES = (
    Strategy.DIRECT_RAGGED,
    Strategy.SPLIT_CACHE,
    Strategy.DIRECT_RAGGED_GROUPED,
    Strategy.CASCADE,
    Strategy.CASCADE_CONTIGUOUS,
    Strategy.MULTI_ITEM,
    Strategy.PACKED_MULTI_ITEM,
    Strategy.FUSED,
)
PACKINGS = (64, 128)  # rows of a packed_multi_item request: one tile of fa2 at two query heads a group, one of fa3
# fa2 under a custom mask, which skips nothing: 97-117 TFLOP/s over the sizes measured on an H200; not calibrated.
DENSE_FLOPS = 1.1e14
KERNELS = ("fa2", "fa3")
HEAD_DIMS = (64, 128, 256)  # that FlashInfer has them for
FUSED_ROWS, FUSED_KEYS = 64, 64  # packed rows of a tile of `attention.fused_kernel`, and keys of a block
FUSED_RESIDENT = 2  # of its CTAs share a processor
MASKED_BLOCK = 1.3  # blocks without a mask that a masked one costs
TILE_BLOCKS = 2.0  # blocks that a tile's beginning and end cost
KV_TILE = 64  # keys that a CTA takes at a time: a partial tile costs about as much as half of these
MEASURED_PREFIX, MEASURED_TOKENS = 8192, 65_536  # the most that calibrations measure: of a prefix, of a request
ENOUGH = 90  # measured launches of one tile size that deserve a fit of their own
FIELDS = ("mean", "scale", "coefficients")
HEADS = ("heads", "kv_heads", "head_dim")
FA2_TILES = (16, 64, 128)  # packed rows
FEATURES, FUSED_FEATURES = 12, 7  # of fa2's and fa3's launches, and of our own kernel's
FUSED_FIT = f"fused/{MaskKind.MULTI_ITEM}/ragged"
LEAST_SCALE = 1e-6  # of a feature that hardly varied
REACH = 3.0  # standard deviations from what was measured that a fit is followed
# What a calibration may say; more is damage. Features and predictions are logarithms: e ** MOST_LOG is still a number.
MOST_LOG, MOST_HEADS, MOST_PROCESSORS = 300.0, 65_536, 65_536


class Ranked(NamedTuple):
    """A strategy and what it is predicted to take."""

    milliseconds: float
    strategy: Strategy
    packed_rows: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What the kernels' tiles meet: streaming multiprocessors."""

    name: str
    processors: int = 132


def fa2_tile(shape: LaunchShape, group: int) -> int:
    """Packed rows of fa2's tile: one size for a whole launch, from the average length."""
    average = float(shape.q_lens.mean()) * group
    return 16 if average <= 16 else 64 if average <= 64 else 128


def tiling(shape: LaunchShape, kernel: str, heads: HeadShape) -> tuple[int, int, int, int]:
    """(packed rows of a tile, query tokens of it, CTAs a tile needs over all heads, CTAs that share a processor)."""
    group = heads.heads // heads.kv_heads
    if kernel == "fa2":
        packed = fa2_tile(shape, group)
        return packed, max(1, packed // group), heads.kv_heads, 2
    return 128, 128, heads.heads, 1


def features(shape: LaunchShape, kernel: str, heads: HeadShape, processors: int) -> Reals:
    """[F] what a launch's time is fitted on: logarithms of its counts under the kernel's own tiling."""
    if kernel == "fused":
        return _fused_features(shape, heads, processors)
    packed, tile, columns, resident = tiling(shape, kernel, heads)
    tiles, scanned, _ = scans(shape, tile)
    ctas, slots = tiles * columns, processors * resident
    even = (scanned + KV_TILE * tiles) * columns * packed / slots  # were the work spread evenly
    longest = float(shape.kv_lens.max())
    waves = ctas / slots
    # fa2 splits the keys of a launch that does not fill the machine; otherwise the longest CTA bounds it.
    splits = kernel == "fa2" and waves < 1
    bound = even if splits else max(even, longest * packed)
    return np.array(
        [
            np.log(len(shape.q_lens)),
            np.log(shape.rows),
            np.log(float(shape.kv_lens.sum())),
            np.log(ctas),
            np.log(even),
            np.log(longest),
            np.log(bound),
            np.log(max(even, longest * packed) / even),
            np.log(float(shape.q_lens.max()) / float(shape.q_lens.mean())),
            np.log(longest / float(shape.kv_lens.mean())),
            waves / np.ceil(waves),
            float(waves < 1),
        ]
    )


def _fused_features(shape: LaunchShape, heads: HeadShape, processors: int) -> Reals:
    """Our own kernel's: its tiles are known to the block, masked blocks and a tile's beginning and end cost more."""
    full, masked, keys = count_blocks(
        shape, Cut(max(1, FUSED_ROWS * heads.kv_heads // heads.heads), heads.kv_heads, FUSED_KEYS)
    )
    work = full + MASKED_BLOCK * masked + TILE_BLOCKS
    slots = processors * FUSED_RESIDENT / heads.kv_heads
    parts = parts_of(keys, heads.kv_heads)
    even, longest = work.sum() / slots, (work / parts).max()
    waves = parts.sum() / slots
    return np.array(
        [
            np.log(even),
            np.log(longest),
            np.log(max(even, longest)),
            np.log(waves),
            waves / np.ceil(waves),
            float((parts > 1).any()),
            np.log(masked.sum() / work.sum()),
        ]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """log milliseconds as a quadratic in standardised features."""

    mean: Reals
    scale: Reals
    coefficients: Reals

    @classmethod
    def of(cls, x: Reals, milliseconds: Reals, ridge: float = 1.0) -> Fit:
        """Least squares with a little shrinkage. x: [n, F]; milliseconds: [n]."""
        mean, scale = x.mean(axis=0), np.maximum(x.std(axis=0), LEAST_SCALE)
        terms = _quadratic((x - mean) / scale)
        penalty = ridge * np.eye(terms.shape[1])
        penalty[0, 0] = 0.0
        solved: Reals = np.linalg.solve(terms.T @ terms + penalty, terms.T @ np.log(milliseconds)).astype(np.float64)
        return cls(mean, scale, solved)

    def as_lists(self) -> dict[str, list[float]]:
        """For JSON, to nine digits."""
        return {name: [float(f"{value:.9g}") for value in getattr(self, name)] for name in FIELDS}

    def milliseconds(self, x: Reals) -> Reals:
        """[n] for features [n, F], held within what was measured: a quadratic says nothing outside."""
        inside = np.clip((x - self.mean) / self.scale, -REACH, REACH)
        predicted: Reals = np.exp(_quadratic(inside) @ self.coefficients)
        return predicted


def _quadratic(x: Reals) -> Reals:
    i, j = np.triu_indices(x.shape[1])
    return np.concatenate([np.ones((len(x), 1)), x, x[:, i] * x[:, j]], axis=1)


def kind_of(shape: LaunchShape) -> str:
    """Mask and source of keys: kernels differ in them."""
    return f"{shape.mask.value}/{'paged' if shape.paged else 'ragged'}"


def kernels_for(shape: LaunchShape) -> tuple[str, ...]:
    """The kernels that can run a launch: item masks over contiguous keys are our own's alone."""
    return ("fused",) if shape.mask is MaskKind.MULTI_ITEM and not shape.paged else KERNELS


def fits_for(shape: LaunchShape, kernel: str, heads: HeadShape) -> tuple[str, ...]:
    """Names of the fits that tell of a launch, best first: that of its very tile, and that of all tiles."""
    name = f"{kernel}/{kind_of(shape)}"
    return (f"{name}/{fa2_tile(shape, heads.heads // heads.kv_heads)}", name) if kernel == "fa2" else (name,)


@dataclass(frozen=True, slots=True, eq=False)
class TimeModel:
    """Milliseconds of launches on one machine.

    fits           by "kernel/mask/source" and, where enough was measured, "kernel/mask/source/tile"
    copy_ms        fixed and per token, of writing K/V rows to pages or gathering them
    merge_ms       fixed and per row, of merging two partial results
    decode         of the strategies of a decode step
    """

    machine: Machine
    heads: HeadShape
    fits: dict[str, Fit]
    copy_ms: tuple[float, float] = (0.0, 0.0)
    merge_ms: tuple[float, float] = (0.0, 0.0)
    decode: DecodeLaw = BUILT_IN

    def launch(self, shape: LaunchShape) -> tuple[str, float]:
        """The faster kernel for a launch, and its milliseconds."""
        if shape.mask is MaskKind.CUSTOM:
            return "fa2", self._dense(shape)
        times = {kernel: self._time(kernel, shape) for kernel in kernels_for(shape)}
        best = min(times, key=lambda kernel: times[kernel])
        return best, times[best]

    def _dense(self, shape: LaunchShape) -> float:
        pairs = float((shape.q_lens.astype(np.int64) * shape.kv_lens).sum())
        return 0.02 + 4e3 * self.heads.heads * self.heads.head_dim * pairs / DENSE_FLOPS

    def _time(self, kernel: str, shape: LaunchShape) -> float:
        names = [name for name in fits_for(shape, kernel, self.heads) if name in self.fits]
        assert names, f"nothing was measured for {kernel} {kind_of(shape)} launches"
        x = features(shape, kernel, self.heads, self.machine.processors)
        return float(self.fits[names[0]].milliseconds(x[None])[0])

    def strategy(
        self,
        strategy: Strategy,
        prefix: int,
        cached: int,
        lengths: Ints,
        packed_rows: int = PACKED_ROWS,
        writes: bool = True,
    ) -> float:
        """Milliseconds of one layer's attention, gathers and merges included.

        writes: with the time that writing the rows' K/V to pages takes, where the strategy reads pages.
        """
        made = shapes(strategy, prefix, cached, lengths, packed_rows)
        total = sum(self.launch(shape)[1] for shape in made)
        rows = prefix - cached + int(np.sum(lengths))
        if strategy in (Strategy.CASCADE, Strategy.CASCADE_CONTIGUOUS) and prefix:
            total += self.merge_ms[0] + self.merge_ms[1] * float(np.sum(lengths))
        if strategy not in (Strategy.CASCADE_CONTIGUOUS, Strategy.FUSED):
            total += self.copy_ms[0] + self.copy_ms[1] * rows if writes else 0.0
        elif cached:
            total += self.copy_ms[0] + self.copy_ms[1] * prefix
        return total

    def ranked(self, prefix: int, cached: int, lengths: Ints, among: Sequence[Strategy] = CANDIDATES) -> list[Ranked]:
        """The strategies of one prefix and its items, fastest first, packed_multi_item at its better packing."""
        ranked = [
            min(
                Ranked(self.strategy(strategy, prefix, cached, lengths, rows), strategy, rows)
                for rows in (PACKINGS if strategy is Strategy.PACKED_MULTI_ITEM else PACKINGS[-1:])
            )
            for strategy in among
        ]
        return sorted(ranked)

    def text(self) -> str:
        """As JSON, for `read`."""
        document = {
            "machine": {"name": self.machine.name, "processors": self.machine.processors},
            "heads": {name: getattr(self.heads, name) for name in HEADS},
            "copy_ms": self.copy_ms,
            "merge_ms": self.merge_ms,
            "fits": {name: fit.as_lists() for name, fit in self.fits.items()},
            "decode": self.decode.as_lists(),
        }
        return json.dumps(document, separators=(",", ":")) + "\n"

    def write(self, path: Path) -> None:
        """Its text."""
        path.write_text(self.text(), encoding="utf-8")

    @classmethod
    def read(cls, text: str) -> TimeModel:
        """What `write` wrote. Raises ValueError with the field's path and what it must be where it is something else:
        a calibration that is read predicts a time for every launch of every strategy."""
        try:
            given = Fields.of(parse(text), ("machine", "heads", "copy_ms", "merge_ms", "fits"), ("decode",))
            machine = given.part("machine", ("name", "processors"))
            decode = BUILT_IN
            if "decode" in given.values:
                decode = DecodeLaw.of(given.part("decode", [strategy.value for strategy in DecodeStrategy]))
            heads, fits = _heads_of(given.part("heads", HEADS)), _fits_of(given)
            copy, merge = (given.numbers(name, 2, 0.0, MOST_MS) for name in ("copy_ms", "merge_ms"))
            processors = machine.whole("processors", 1, MOST_PROCESSORS)
            laws = (copy[0], copy[1]), (merge[0], merge[1]), decode
            return cls(Machine(machine.text("name"), processors), heads, fits, *laws)
        except ValueError as error:
            raise ValueError(f"not a calibration: {error}") from None


def _heads_of(given: Fields) -> HeadShape:
    heads, kv_heads, head_dim = (given.whole(name, 1, MOST_HEADS) for name in HEADS)
    if heads % kv_heads:
        raise ValueError(f"heads.kv_heads: a divisor of the {heads} heads, got {kv_heads}")
    return HeadShape(heads, kv_heads, head_dim, scale=head_dim**-0.5, dtype=None)


def _fits_of(given: Fields) -> dict[str, Fit]:
    """Those that every launch needs, and those of one tile size."""
    needed = needed_fits()
    tiles = [f"{name}/{tile}" for name in needed if name.startswith("fa2/") for tile in FA2_TILES]
    fits = given.values["fits"]
    if isinstance(fits, dict) and [name for name in needed if name not in fits] == [FUSED_FIT]:
        raise ValueError(f"fits.{FUSED_FIT}: measured before the fused kernel: run prefixrank calibrate again")
    known = given.part("fits", needed, tiles)
    return {name: _fit_of(known.part(name, FIELDS), name) for name in known.values}


def _fit_of(given: Fields, name: str) -> Fit:
    count = FUSED_FEATURES if name.startswith("fused/") else FEATURES
    mean = given.numbers("mean", count, -MOST_LOG, MOST_LOG)
    scale = given.numbers("scale", count, 0.999 * LEAST_SCALE, MOST_LOG)  # as written to nine digits
    terms = _quadratic(np.full((1, count), REACH))[0]
    coefficients = np.array(given.numbers("coefficients", len(terms), -MOST_LOG, MOST_LOG))
    if (most := float(terms @ np.abs(coefficients))) > MOST_LOG:
        raise ValueError(f"{given.at('coefficients')}: add up to no more than {MOST_LOG:g} anywhere, got {most:.3g}")
    return Fit(np.array(mean), np.array(scale), coefficients)


def needed_fits() -> list[str]:
    """Names of the fits without which some launch of some strategy has no time."""
    heads, lengths = HeadShape(1, 1, 1, scale=1.0, dtype=None), np.ones(2, np.int32)
    made = [s for strategy in CANDIDATES for cached in (0, 1) for s in shapes(strategy, 2, cached, lengths)]
    names = {fits_for(s, kernel, heads)[-1]: None for s in made for kernel in kernels_for(s)}
    return list(names)


def built_in() -> TimeModel:
    """The calibration of one H200 that comes with the package; an H100 has the same processors and tiles."""
    text = resources.files("attention").joinpath("calibrations", "h200.json").read_text(encoding="utf-8")
    return TimeModel.read(text)
