"""What computes a pass's attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attention.layout import Layout
from attention.plans import MaskKey, Pages, Plan

if TYPE_CHECKING:
    from torch import Tensor


# (layer, q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim], scale, key) -> [rows, heads, head_dim]
Attend = Callable[[int, "Tensor", "Tensor", "Tensor", float, MaskKey], "Tensor"]


class Attention(ABC):
    """Runs any plan of a pass. One object lives as long as its engine.

    isolates_nan  NaN in the keys or values that a row does not see leaves the row as it is
    """

    name: str
    isolates_nan: bool

    @abstractmethod
    def begin(self, layout: Layout, pages: Pages, plans: Mapping[MaskKey, Plan]) -> Attend:
        """Prepares one pass, once for all of its layers; the answer is called layer after layer."""

    @abstractmethod
    def scrub(self, first_page: int) -> None:
        """Removes what a pass may have left in pages from `first_page` on, after it met NaN."""
