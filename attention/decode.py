"""Plans of a decode step: every beam's one new token attends to the prompt's pages and to its own history. Pure.

A beam's history is a row of slots: beams that share earlier tokens name the same slots there. As all beams of a step
stand at the same position, a sliding window hides the same leading keys from all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from attention.layout import Ints, indptr, ranges
from attention.plans import PagedKv

LEVEL_KEYS = 2048  # keys, each scanned by one row less, that a level more must save to be worth its launch


class DecodeStrategy(StrEnum):
    """The ways to compute a decode step's attention."""

    BATCH_DECODE = "batch_decode"
    CASCADE_DECODE = "cascade_decode"


@dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """The geometry of a step over n beams.

    page_size      tokens of a page; slot = page * page_size + offset
    prompt_pages   pages of the prompt's tokens, in order
    prompt_tokens  how many there are
    history        [n, s] slots of each beam's own tokens, in order, the new one last; s is at least 1. Beams with the
                   same slot in a column have the same slots before it
    """

    page_size: int
    prompt_pages: Ints
    prompt_tokens: int
    history: Ints

    @property
    def beams(self) -> int:
        return len(self.history)

    @property
    def position(self) -> int:
        """Of the new tokens."""
        return self.prompt_tokens + int(self.history.shape[1]) - 1

    @property
    def write_slots(self) -> Ints:
        """[n] where the K/V of the new tokens goes."""
        return self.history[:, -1]

    def prompt_slots(self, first: int = 0) -> Ints:
        """Slots of the prompt's tokens from `first` on."""
        place = np.arange(first, self.prompt_tokens, dtype=np.int32)
        return (self.prompt_pages[place // self.page_size] * np.int32(self.page_size) + place % self.page_size).astype(
            np.int32
        )


@dataclass(frozen=True, slots=True, eq=False)
class DecodeLaunch:
    """One kernel call without a mask: the rows of request g see all of its keys.

    q_rows     [qo_indptr[G]]  beams, request after request
    qo_indptr  [G+1]
    kv         pages of `page_size` tokens of each request; all requests of a launch have as many keys
    """

    q_rows: Ints
    qo_indptr: Ints
    kv: PagedKv
    page_size: int

    @property
    def requests(self) -> int:
        return len(self.qo_indptr) - 1

    def slots(self) -> Ints:
        """[G, keys] slots of each request's keys."""
        pages = self.kv.paged_kv_indices
        every = ranges(pages * np.int32(self.page_size), np.full(len(pages), self.page_size, np.int32))
        keys = self.kv.lengths(self.page_size)
        assert (keys == keys[0]).all(), "the requests of a launch have as many keys"
        return every.reshape(self.requests, -1)[:, : keys[0]]


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """Launches whose results for a beam are merged by their log-sum-exp; each beam is in every one of them."""

    launches: tuple[DecodeLaunch, ...]


def plan_decode(step: Decode, strategy: DecodeStrategy, window: int | None = None, deep: bool = True) -> DecodePlan:
    """The plan of a step. window: transformers' `sliding_window`. deep: more levels where beams share later history."""
    first = 0 if window is None else max(0, step.position + 1 - window)
    begin = max(0, first - step.prompt_tokens)  # of the history: what a short window leaves of it
    history = step.history[:, begin:]
    if strategy is DecodeStrategy.BATCH_DECODE:
        prompt = step.prompt_slots(min(first, step.prompt_tokens))
        keys = np.concatenate([np.tile(prompt, (step.beams, 1)), history], axis=1)
        beams = np.arange(step.beams + 1, dtype=np.int32)
        return DecodePlan((_by_slots(beams[:-1], beams, keys),))
    launches = [_prompt_level(step, first)] if first < step.prompt_tokens else []
    bounds = [0, *(shared_levels(history) if deep else ()), history.shape[1]]
    # Groups stand together at each level: sorted by the last slot that they share, the outermost level first.
    order = np.lexsort(history[:, [high - 1 for high in reversed(bounds[1:])]].T).astype(np.int32)
    for low, high in pairwise(bounds):
        launches.append(_level(history[order], order, low, high))
    return DecodePlan(tuple(launches))


def shared_levels(history: Ints, level_keys: int = LEVEL_KEYS) -> list[int]:
    """Columns before which beams are worth grouping by what they share, ascending.

    A slot belongs to one beam of its step, so beams share their history up to a column where they share its slot.
    """
    distinct = 1 + (np.diff(np.sort(history, axis=0), axis=0) != 0).sum(axis=0)

    def refine(low: int, high: int, groups: int) -> list[int]:
        """Cuts of columns [low, high), which `groups` requests would scan."""
        cuts = np.arange(low + 1, high)
        if not len(cuts):
            return []
        saved = (groups - distinct[cuts - 1]) * (cuts - low)
        cut = int(cuts[np.argmax(saved)])
        if saved.max() < level_keys:
            return []
        return [*refine(low, cut, int(distinct[cut - 1])), cut, *refine(cut, high, groups)]

    return refine(0, history.shape[1], len(history))


def _prompt_level(step: Decode, first: int) -> DecodeLaunch:
    """All beams as one request over the prompt."""
    rows, bounds = np.arange(step.beams, dtype=np.int32), indptr([step.beams])
    if first % step.page_size:  # a window that begins inside a page
        return _by_slots(rows, bounds, step.prompt_slots(first)[None])
    pages = step.prompt_pages[first // step.page_size : -(-step.prompt_tokens // step.page_size)]
    last = np.array([(step.prompt_tokens - 1) % step.page_size + 1], np.int32)
    return DecodeLaunch(rows, bounds, PagedKv(indptr([len(pages)]), pages, last), step.page_size)


def _level(history: Ints, order: Ints, low: int, high: int) -> DecodeLaunch:
    """Columns [low, high) for the beams in this order: those that share the last of them are one request."""
    begins = np.flatnonzero(np.diff(history[:, high - 1], prepend=-1))
    return _by_slots(order, np.append(begins, len(history)).astype(np.int32), history[begins, low:high])


def _by_slots(rows: Ints, bounds: Ints, slots: Ints) -> DecodeLaunch:
    """Requests whose keys are named slot by slot: [G, keys]."""
    groups, keys = slots.shape
    kv = PagedKv(
        indptr(np.full(groups, keys, np.int32)),
        np.ascontiguousarray(slots, np.int32).ravel(),
        np.ones(groups, np.int32),
    )
    return DecodeLaunch(rows, bounds, kv, 1)


def expand(launches: Sequence[DecodeLaunch], beams: int, slots: int) -> Ints:
    """[beams, slots] how many times each beam attends to each slot."""
    counts = np.zeros((beams, slots), np.int32)
    for launch in launches:
        keys = launch.slots()
        for g in range(launch.requests):
            rows = launch.q_rows[launch.qo_indptr[g] : launch.qo_indptr[g + 1]]
            np.add.at(counts, (rows[:, None], keys[g][None, :]), 1)
    return counts


def scanned(plan: DecodePlan) -> int:
    """Keys that the plan's requests read, each request its own: what its bytes follow from."""
    return sum(int(launch.kv.lengths(launch.page_size).sum()) for launch in plan.launches)
