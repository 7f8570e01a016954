"""What an edit would do, before it is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fisedit.masking.masks import count_components
from fisedit.values import (
    EditMask,
    EditScript,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, eq=False)
class Preview:
    """What an edit would do, before it is run.

    Args:
        mask: where it would paint, with heatmap and confidence; found by words, it is joined by cells beside it that
            show the edit once they are decoded.
        diff: what the words change.
        macs: multiply-accumulates that it would spend.
        macs_dense: those of a dense run.
        fallback: why it would run dense, or "".
        nothing: why it would do nothing, or "".
        seconds: that it would take, by this machine's cost table; None where there is none.
        seconds_dense: those of a dense run; None where there is no cost table.
        recorded_bytes: that it would keep for later edits, about.
        notes: things the user should know, such as words that the model does not know.
    """

    mask: EditMask
    diff: EditScript
    macs: int
    macs_dense: int
    fallback: str = ""
    nothing: str = ""
    seconds: float | None = None
    seconds_dense: float | None = None
    recorded_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def confidence(self) -> float:
        """How well the attention separated inside from outside, 0 to 1."""
        return self.mask.confidence

    @property
    def pieces(self) -> int:
        """Connected pieces of the mask, which `instance` counts."""
        return count_components(self.mask.grid)
