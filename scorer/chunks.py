"""Position-wise layers a chunk of rows at a time, so that their wide middles stay small however long a pass is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

CHUNK_ROWS = 4096


class Chunks:
    """Makes the position-wise modules of a decoder run in chunks. rows: of a chunk; may be changed at any time."""

    def __init__(self, attentions: Iterable[nn.Module], decoder: nn.Module) -> None:
        """attentions: the modules that mix tokens; the probe has shown that nothing else does."""
        self.rows = CHUNK_ROWS
        mixing = {id(module) for module in attentions}
        for module in decoder.modules():
            children = list(module.children())
            if id(module) in mixing:  # norms of its heads; its products are no wider inside than outside
                for child in children:
                    if not isinstance(child, nn.Linear) and not list(child.children()):
                        self._wrap(child)
            elif any(id(child) in mixing for child in children):
                for child in children:
                    if id(child) not in mixing:
                        self._wrap(child)

    def _wrap(self, module: nn.Module) -> None:
        module.forward = self._chunked(module.forward)

    def _chunked(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if len(args) == 1 and not kwargs else None
            if not isinstance(x, Tensor) or x.dim() < 3 or x.shape[0] != 1 or x.shape[1] <= self.rows:
                return whole(*args, **kwargs)
            first = whole(x[:, : self.rows])
            if not isinstance(first, Tensor) or first.shape[:2] != (1, self.rows):
                return whole(x)  # it tells more than its rows, such as where experts sent them
            out = first.new_empty((1, x.shape[1], *first.shape[2:]))
            out[:, : self.rows] = first
            del first
            for begin in range(self.rows, x.shape[1], self.rows):
                out[:, begin : begin + self.rows] = whole(x[:, begin : begin + self.rows])
            return out

        return forward
