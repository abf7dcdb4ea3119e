"""No collection in the middle of what one would spoil."""

import gc
import weakref

import pytest

from scorer.garbage import uncollected


class Ring:
    """Garbage that only the collector frees, like an old CUDA graph."""

    def __init__(self):
        self.itself = self


def left_over():
    return weakref.ref(Ring())


@pytest.fixture
def eager():
    """A collector that would run at nearly every allocation."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


def test_nothing_is_freed_inside_and_all_of_it_afterwards(eager):
    with uncollected():
        found = left_over()
        kept = [[n] for n in range(2_000)]
        assert found() is not None
    kept.extend([n] for n in range(2_000))
    assert found() is None


def test_the_collector_runs_again_after_a_failure():
    with pytest.raises(RuntimeError, match="a capture"), uncollected():
        raise RuntimeError("a capture")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with uncollected(), uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_inside_of_another_it_ends_with_the_outer_one():
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
