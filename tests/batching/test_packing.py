from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.cost import PACKED_ROWS
from attention.layout import LayoutError
from attention.plans import Strategy
from batching.items import Item, Items
from batching.packing import Group, alone, fold, pack, unpack
from batching.page_pool import PagePool
from batching.select import Budget, Threshold, choose
from batching.types import Reads, TokenizedRequest
from tests.attention.draw import examples
from tests.batching.fake import PAGE, ids, item, request

tokens = st.lists(st.integers(0, 99), min_size=1, max_size=9)


@st.composite
def items(draw):
    own = np.array(draw(tokens), np.int32)
    reads = np.array(sorted(draw(st.sets(st.integers(0, len(own) - 1)))), np.int32)
    width = draw(st.integers(1, 3))
    wanted = np.array(draw(st.lists(st.integers(0, 99), min_size=len(reads) * width, max_size=len(reads) * width)))
    return Item(own, reads, wanted.reshape(len(reads), width).astype(np.int32))


@st.composite
def groups(draw):
    asked = TokenizedRequest(
        np.array(draw(st.lists(st.integers(0, 99), max_size=9)), np.int32),
        tuple(draw(st.lists(items(), min_size=1, max_size=5))),
        draw(st.booleans()),
    )
    some = tuple(sorted(draw(st.sets(st.integers(0, len(asked.items) - 1), min_size=1))))
    sharing = st.sampled_from([Strategy.DIRECT_RAGGED, Strategy.MULTI_ITEM])
    own = draw(st.booleans())
    strategies = tuple(Strategy.NAIVE if own else draw(sharing) for _ in some)
    return Group(asked, some, strategies)


@st.composite
def kept_groups(draw):
    """Groups of which some have pages of their own for their prefix, with some of it written."""
    made, page = [], 0
    for group in draw(st.lists(groups(), min_size=1, max_size=4)):
        prefix = len(group.request.prefix)
        needed = -(-prefix // PAGE)
        if prefix and Strategy.NAIVE not in group.strategies and draw(st.booleans()):
            pages = np.arange(page, page + needed, dtype=np.int32)
            group = replace(group, cached=draw(st.integers(0, prefix)), pages=pages)
            page += needed
        made.append(group)
    return made


@given(given_groups=st.lists(groups(), min_size=1, max_size=4))
@examples(150)
def test_unpack_inverts_pack(given_groups):
    """Each read gets a number that names its row, and each item finds the numbers of its own tokens."""
    batch = pack(given_groups)
    rows = np.repeat(batch.read_rows, np.diff(batch.read_indptr))
    reads = Reads(
        (batch.input_ids[rows] * 1000 + batch.read_ids).astype(np.float32), batch.read_rows.astype(np.float32)
    )
    scored = unpack(batch, reads)
    assert [len(scored[number]) for number in range(len(given_groups))] == [len(g.items) for g in given_groups]
    for number, group in enumerate(given_groups):
        for index, strategy in zip(group.items, group.strategies, strict=True):
            one, got = group.request.items[index], scored[number].pop(0)
            want = one.ids[one.read_offsets][:, None] * 1000 + one.read_ids
            np.testing.assert_array_equal(got.logits, want.reshape(got.logits.shape))
            assert got.strategy is strategy
            assert (got.lse is not None) == (group.request.normalize and len(one.read_offsets) > 0)
    assert batch.leaf_strategies == tuple(share.strategy for share in batch.shares)
    assert batch.shares[1:] == list(batch.shares)[1:]
    assert batch.shares[-1] == list(batch.shares)[-1]
    layout = batch.layout
    read = (layout.parent, layout.length, layout.cached, batch.input_ids, batch.read_indptr, batch.read_ids)
    assert {part.dtype for part in read} == {np.dtype(np.int32)}, "what kernels read"
    assert batch.normalize.dtype == np.bool_


@given(given_groups=st.lists(groups(), min_size=1, max_size=4))
@examples(100)
def test_every_path_spells_prefix_and_item(given_groups):
    batch = pack(given_groups)
    layout = batch.layout
    layout.validate()
    for leaf, share in zip(layout.leaves, batch.shares, strict=True):
        path = layout.path(int(leaf))
        rows = np.concatenate([np.arange(layout.row_start[s], layout.row_start[s + 1]) for s in path])
        asked = given_groups[share.request].request
        want = np.concatenate([asked.prefix, asked.items[share.item].ids])
        np.testing.assert_array_equal(batch.input_ids[rows], want)
        np.testing.assert_array_equal(batch.position_ids[rows], np.arange(len(want)))


def test_fold_keeps_order_and_finds_equals():
    unique, places = fold(Items.of([item(1, 2), item(3), item(1, 2), item(1, 2, labels=(1, 3))]))
    assert len(unique) == 3
    assert places.tolist() == [0, 1, 0, 2]


# --- items by column


def same(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("ids", "read_offsets", "read_ids"))


@given(given_items=st.lists(items(), max_size=6), data=st.data())
@examples(200)
def test_items_by_column_are_the_items_that_were_given(given_items, data):
    made = Items.of(given_items)
    wanted = [one if one.read_ids.size else replace(one, read_ids=np.zeros((0, 0), np.int32)) for one in given_items]
    assert len(made) == len(wanted)
    assert all(map(same, made, wanted))
    assert made.squares == sum(len(one.ids) ** 2 for one in given_items)
    some = data.draw(st.lists(st.integers(0, len(given_items) - 1), max_size=6)) if given_items else []
    taken = made.take(some)
    assert all(map(same, taken, [wanted[i] for i in some]))
    assert taken.keys == [made.keys[i] for i in some]
    first, last = data.draw(st.integers(-7, 7)), data.draw(st.integers(-7, 7))
    assert all(map(same, made[first:last], wanted[first:last]))
    for one, own in zip(wanted, made.keys, strict=True):
        for other, its in zip(wanted, made.keys, strict=True):
            assert (own == its) == (one.read_ids.shape == other.read_ids.shape and same(one, other))


@given(parts=st.lists(tokens, min_size=1, max_size=6), labels=st.lists(st.integers(0, 9), max_size=2), data=st.data())
@examples(100)
def test_items_read_at_their_end_are_those_made_one_by_one(parts, labels, data):
    made = Items.read_at_end(np.concatenate([ids(*part) for part in parts]), ids(*map(len, parts)), ids(*labels))
    alone_ = Items.of(Item(ids(*part), ids(len(part) - 1), ids(*labels)[None]) for part in parts)
    some = data.draw(st.lists(st.integers(0, len(parts) - 1)))
    for one, other in ((made, alone_), (made.take(some), alone_.take(some))):
        assert all(map(same, one, other))
        assert one.keys == other.keys
        columns = ("ids", "lengths", "reads", "read_offsets", "widths", "read_ids")
        assert {getattr(one, name).dtype for name in columns} == {np.dtype(np.int32)}


def test_an_item_that_is_not_there():
    with pytest.raises(IndexError):
        Items.of([item(1)])[1]
    assert same(Items.of([item(1), item(2, 3)])[-1], item(2, 3))


def test_the_choice_is_by_length_and_says_why():
    asked = request([1, 2], [1] * 8, [1] * 9)
    choice = choose(asked, asked.items, Threshold(multi_item_max_tokens=8))
    assert choice.strategies == (Strategy.MULTI_ITEM, Strategy.DIRECT_RAGGED)
    assert choice.reason == "1 of 2 of at most 8 tokens: multi_item; 1 of 2 longer than 8 tokens: direct_ragged"


waiting = st.tuples(st.integers(0, 30), st.lists(st.integers(1, 40), min_size=1, max_size=8), st.booleans())


@given(queue=st.lists(waiting, min_size=1, max_size=6), tokens=st.integers(1, 100))
@examples(200)
def test_a_pass_keeps_its_budget_and_always_takes_something(queue, tokens):
    budget = Budget(tokens, 12)
    counts = [0 if budget.full else budget.take(prefix, items, each) for prefix, items, each in queue]
    costs = [
        sum(items[:n]) + prefix * (n if each else min(n, 1))
        for (prefix, items, each), n in zip(queue, counts, strict=True)
    ]
    assert counts[0] >= 1
    assert sum(costs) <= tokens or sum(counts) == 1
    assert sum(counts) <= 12
    for (prefix, items, each), count in zip(queue, counts, strict=True):
        assert count <= len(items)
        whole = sum(items) + prefix * (len(items) if each else 1)
        assert count in (0, len(items)) or whole > tokens, "what fits into a pass stays together"


def test_pages_come_back():
    pool = PagePool(4)
    assert [pool.take(count).tolist() for count in (1, 0, 4, 1)] == [[0], [], [1, 2, 3], []]
    pool.release(np.array([1, 3, 2], np.int32))
    assert (pool.free, pool.take(2).tolist(), pool.free) == (3, [2, 3], 1)


def test_a_page_is_released_once():
    pool = PagePool(2)
    page = pool.take(1)
    pool.release(page)
    with pytest.raises(AssertionError):
        pool.release(page)


def test_an_item_of_every_read_kind_packs():
    batch = pack([Group(request([5], [1, 2]), (0,), (Strategy.MULTI_ITEM,))])
    assert batch.read_rows.tolist() == [2]
    assert batch.read_ids.tolist() == ids(1, 2).tolist()


@given(given_groups=kept_groups())
@examples(100)
def test_an_item_of_a_pass_is_a_pass_of_its_own(given_groups):
    """The same ids, positions, reads and pages as within the pass; nothing of the others."""
    batch = pack(given_groups, PAGE)
    batch.layout.validate()
    for number, share in enumerate(batch.shares):
        one = alone(batch, number)
        one.layout.validate()
        asked = given_groups[share.request].request
        item_, whole = asked.items[share.item], np.concatenate([asked.prefix, asked.items[share.item].ids])
        path = batch.layout.path(int(batch.layout.leaves[number]))
        assert one.layout.parent.tolist() == list(range(-1, len(path) - 1))
        assert one.layout.parent.dtype == np.int32
        assert one.layout.length.tolist() == batch.layout.length[list(path)].tolist()
        assert one.layout.cached.tolist() == batch.layout.cached[list(path)].tolist()
        cached = int(one.layout.cached.sum())
        assert one.input_ids.tolist() == whole[cached:].tolist()
        assert one.position_ids.tolist() == list(range(cached, len(whole)))
        begin = len(whole) - len(item_.ids) - cached
        reads = [begin + offset for offset in item_.read_offsets.tolist()]
        assert one.read_rows.tolist() == reads
        assert one.read_indptr.tolist() == [item_.read_ids.shape[1] * n for n in range(len(reads) + 1)]
        assert one.read_ids.tolist() == item_.read_ids.ravel().tolist()
        assert one.normalize.tolist() == [asked.normalize] * len(reads)
        assert list(one.shares) == [share._replace(first=0, last=len(reads), strategy=Strategy.DIRECT_RAGGED)]
        assert one.leaf_strategies == (Strategy.DIRECT_RAGGED,)
        assert len(one.pages) == len(path)
        assert all(kept is batch.pages[segment] for kept, segment in zip(one.pages, path, strict=True))
        assert one.packed_rows == batch.packed_rows


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_prefixes_that_begin_with_the_same_pages_share_as_far_as_all_of_them_do(order):
    beginnings = [[*range(12)], [*range(8), 70, 71], [*range(4), 80, 81, 82, 83, 84]]
    tables = [[5, 6, 7], [5, 6, 8], [5, 9, 3]]
    shared = [
        Group(request(beginnings[i], [i, i]), (0,), (Strategy.DIRECT_RAGGED,), 0, np.array(tables[i], np.int32))
        for i in order
    ]
    batch = pack(shared, PAGE)
    batch.layout.validate()
    assert sorted(batch.layout.length[~batch.layout.is_leaf].tolist()) == [2, 4, 4, 4, 5]
    assert sorted(kept.tolist() for kept in batch.pages if kept is not None) == [[5], [6], [7], [8], [9, 3]]
    for leaf, share in zip(batch.layout.leaves, batch.shares, strict=True):
        rows = [
            row
            for segment in batch.layout.path(int(leaf))
            for row in range(batch.layout.row_start[segment], batch.layout.row_start[segment + 1])
        ]
        number = order[share.request]
        assert batch.input_ids[rows].tolist() == [*beginnings[number], number, number]


def test_shared_pages_need_the_page_size():
    group = Group(request([1, 2, 3, 4, 5], [6]), (0,), (Strategy.DIRECT_RAGGED,), 5, np.array([0, 1], np.int32))
    assert pack([group]).layout.length.tolist() == [5, 1], "a table of one group holds all of its prefix"
    other = Group(request([1, 2, 3, 4, 9], [6]), (0,), (Strategy.DIRECT_RAGGED,), 4, np.array([0, 2], np.int32))
    with pytest.raises(AssertionError, match=r"^shared pages need the page size$"):
        pack([group, other])


def test_what_several_pages_keep_of_a_long_prefix_is_cached_as_far_as_it_goes():
    """Three groups that share one page, two of them another: each segment knows its own part of what is cached."""
    beginnings = [[*range(12)], [*range(8), 70, 71], [*range(4), 80]]
    tables, cached = [[5, 6, 7], [5, 6, 8], [5, 9]], [10, 10, 4]
    made = [
        Group(request(begin, [i]), (0,), (Strategy.DIRECT_RAGGED,), have, np.array(table, np.int32))
        for i, (begin, have, table) in enumerate(zip(beginnings, cached, tables, strict=True))
    ]
    batch = pack(made, PAGE)
    found = {
        tuple(kept.tolist()): (int(length), int(have))
        for kept, length, have in zip(batch.pages, batch.layout.length, batch.layout.cached, strict=True)
        if kept is not None
    }
    assert found == {(5,): (4, 4), (6,): (4, 4), (7,): (4, 2), (8,): (2, 2), (9,): (1, 0)}


def test_groups_that_disagree_on_what_their_common_pages_hold_are_refused():
    first, second = (
        Group(request([*range(8)], [9]), (0,), (Strategy.FUSED,), have, np.array([3, last], np.int32))
        for have, last in ((2, 4), (8, 5))
    )
    with pytest.raises(LayoutError, match=r"^a segment with cached tokens continues a wholly cached parent$"):
        pack([first, second], PAGE)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_pass_has_the_rows_of_what_is_packed_in_it(order):
    packed = Group(request([1], [2]), (0,), (Strategy.PACKED_MULTI_ITEM,), packed_rows=48)
    other = Group(request([3], [4]), (0,), (Strategy.MULTI_ITEM,), packed_rows=16)
    both = (packed, other)
    assert pack([both[i] for i in order]).packed_rows == 48
    assert pack([other]).packed_rows == PACKED_ROWS


@pytest.mark.parametrize(
    ("items", "strategies", "cached", "told"),
    [
        ((), (), 0, "a group has at least one item"),
        ((0,), (Strategy.NAIVE, Strategy.NAIVE), 0, "one strategy an item"),
        ((0,), (Strategy.FUSED,), 1, "a cached prefix lies in pages"),
        (
            (0, 1),
            (Strategy.NAIVE, Strategy.FUSED),
            0,
            "a naive item has a prefix of its own: naive goes for all items of a request or none",
        ),
    ],
)
def test_a_group_is_checked(items, strategies, cached, told):
    with pytest.raises(AssertionError, match=f"^{told}$"):
        Group(request([1], [2], [3]), items, strategies, cached)
