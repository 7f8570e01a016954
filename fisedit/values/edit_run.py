"""The settings that an edit was run with, and its cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import nextafter
from typing import TYPE_CHECKING, Any

from fisedit.errors import InputError, as_text
from fisedit.values.base import as_growth, copy_on_read, is_number, shallow_steps
from fisedit.values.edit_mask import MaskSource, RegionalPrompt, frozen

if TYPE_CHECKING:
    from fisedit.values.base import BoolGrid, Dilation


class Quality(StrEnum):
    """The trade-off between an edit's time and its fidelity to the dense one (`costs.schedules.FIRST_SCHEDULE`)."""

    FAST = "fast"
    BALANCED = "balanced"
    CLOSE = "close"


@dataclass(frozen=True, eq=False)
class EditMode:
    """The way an edit is computed: beside its config and its mask, what it takes to compute it again.

    Args:
        dilation: latent cells computed beyond the mask at each step, perhaps `Shallow`, or `Step.DENSE`; () for a
            dense run.
        structure: share of the steps that may inject the source's attention which do, 0 to 1.
        start: so many first steps are the parent's.
        checked: whether it is checked for drift, which moves roundings.
        erases: whether cells inside the mask do not attend to one another.
        regional: cells that attend to prompts of their own.
        rim: booleans [h, w], cells beside what the mask was that are painted too, since the change shows there; None
            where such cells were not looked for, or not yet.
    """

    dilation: tuple[Dilation, ...] = ()
    structure: float = 0.0
    start: int = 0
    checked: bool = False
    erases: bool = False
    regional: tuple[RegionalPrompt, ...] = ()
    rim: BoolGrid | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Copy the rim to memory that nothing can write to."""
        if self.rim is not None:
            object.__setattr__(self, "rim", frozen(self.rim))

    @property
    def needs_mask(self) -> bool:
        """Return whether every step ran inside the mask, since nothing else would have been the same picture."""
        return self.erases or bool(self.regional)

    @property
    def growth(self) -> tuple[int, ...]:
        """`dilation` as requests and files name it, whether a step is shallow or not."""
        return as_growth(self.dilation)

    @property
    def shallow(self) -> tuple[int, ...]:
        """Indices of the steps that reuse deep features."""
        return shallow_steps(self.dilation)


@copy_on_read("seconds")
@dataclass(frozen=True)
class EditStats:
    """The cost of an edit (or a generation), and the reasons for it.

    Args:
        mask_area: share of latent cells inside the mask.
        mask_source: where the mask came from.
        mask_confidence: The mask's confidence, 0 to 1.
        active_rows: active rows of each level at the widest growth, finest level first.
        growth: latent cells by which the active set exceeds the mask, one number per step; 64 for a dense one.
        unet_evaluations_dense: dense calls of the UNet (both guidance branches count as one).
        unet_evaluations_sparse: sparse calls of the UNet (both guidance branches count as one).
        macs: multiply-accumulates of the UNet and decoder that were spent.
        macs_dense: those that a dense run would have spent.
        seconds: wall seconds by stage, a copy each time: encode (of an opened picture), text, reference, rebuild (of a
            record), mask, plan, denoise, decode, total.
        recorded_bytes: bytes of features this result holds for later edits (its parents' not counted).
        fallback: why the edit ran dense, or "".
        steps_shared: first steps that were taken over from the parent, without a call.
        notes: things the user should know, such as a truncated prompt.
        unet_evaluations_captured: Sparse calls that were replayed from captured graphs.
        uncaptured: The reason why the others were not, or "" where no graphs were wanted.
    """

    mask_area: float
    mask_source: MaskSource
    mask_confidence: float
    active_rows: tuple[int, ...]
    growth: tuple[int, ...]
    unet_evaluations_dense: int
    unet_evaluations_sparse: int
    macs: int
    macs_dense: int
    seconds: dict[str, float]
    recorded_bytes: int
    fallback: str = ""
    notes: tuple[str, ...] = field(default=())
    steps_shared: int = 0
    unet_evaluations_captured: int = 0
    uncaptured: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        return asdict(self)


def first_step(strength: float, steps: int) -> int:
    """The index of the first timestep that an edit of this strength runs: that share of them, from the last.

    Raises:
        InputError: a strength out of range, or one that leaves no step to run.
    """
    if not is_number(strength) or not 0 < strength <= 1:
        raise InputError(f"strength must be in (0, 1], got {as_text(strength)}; 1 repaints, less keeps more")
    if int(steps * strength) < 1:
        raise InputError(
            f"strength must leave a step of {steps} to run, got {as_text(strength)}; use {1 / steps:.3g} or more"
        )
    return steps - int(steps * strength)


def strength_for_start(start: int, steps: int) -> float:
    """The strength of an edit whose first step has this index, so that `first_step` gives `start` again.

    Args:
        start: index of the first step, 0 to steps - 1.
        steps: number of steps, 1 to 999.

    Returns:
        Above 0 to 1.
    """
    strength = (steps - start) / steps
    return strength if int(steps * strength) == steps - start else nextafter(strength, 1.0)


def check_structure(structure: float) -> None:
    """Raise InputError for a share of injected attention that is not in [0, 1]."""
    if not (is_number(structure) and 0 <= structure <= 1):
        raise InputError(f"structure must be in [0, 1], got {as_text(structure)}")


def check_quality(quality: str) -> Quality:
    """The quality of that name. Raises InputError for another one."""
    if not isinstance(quality, str) or quality not in tuple(Quality):
        raise InputError(f"quality must be one of {', '.join(Quality)}, got {as_text(quality, 40)}")
    return Quality(quality)
