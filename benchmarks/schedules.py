"""Dilation schedules whose speed and fidelity are measured: how far every step computes beyond the mask, and which run
dense."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from fisedit.costs.schedules import DENSE_STEP_SHARE, interleaved_dense_steps, two_phase_dilation
from fisedit.values import Dilation, Quality, as_dilations, as_growth, with_shallow


def _interleaved(steps: int, share: float = DENSE_STEP_SHARE) -> tuple[int, ...]:
    """Return `interleaved_dense_steps` as growth."""
    return as_growth(interleaved_dense_steps(steps, share=share))


FAST, BALANCED = "2, then 1 from 1/2", "3, then 2 from 1/2"
CLOSE = "1, a fifth of the steps dense"

SCHEDULES: dict[str, Callable[[int], tuple[int, ...] | None]] = {
    "default": lambda _: None,
    "0": partial(two_phase_dilation, 0, 0),
    "1": partial(two_phase_dilation, 1, 1),
    "2": partial(two_phase_dilation, 2, 2),
    "3": partial(two_phase_dilation, 3, 3),
    "3, then 1 from 1/4": partial(two_phase_dilation, 3, 1, share=1 / 4),
    "3, then 1 from 1/2": partial(two_phase_dilation, 3, 1),
    FAST: partial(two_phase_dilation, 2, 1),
    BALANCED: partial(two_phase_dilation, 3, 2),
    "5": partial(two_phase_dilation, 5, 5),
    "1, 2 of 25 steps dense": partial(_interleaved, share=2 / 25),
    CLOSE: _interleaved,
    "1, 7 of 25 steps dense": partial(_interleaved, share=7 / 25),
}
"""Name -> from a number of steps to the dilation of every step, in latent cells; None for the planner's choice."""

QUALITIES = {FAST: Quality.FAST, BALANCED: Quality.BALANCED, CLOSE: Quality.CLOSE}
"""Schedule -> the quality that runs it on Stable Diffusion, whose cost decides between it and wider ones."""

SHIPPED: dict[str, Callable[[int], tuple[int, ...]]] = {
    FAST: partial(two_phase_dilation, 2, 1),
    BALANCED: partial(two_phase_dilation, 3, 2),
    CLOSE: _interleaved,
}
"""The schedules that Stable Diffusion runs by quality: fast, balanced and close. A model so small that calls take most
of its time runs the last one whichever is asked for."""

SHALLOW = ", some steps shallow"
"""The end of a schedule's name with which it reuses deep features, as fast and balanced edits do."""


def with_shallow_names(names: Collection[str]) -> list[str]:
    """Names of schedules, each that ships followed by the same one with shallow steps.

    Args:
        names: keys of `SCHEDULES`.
    """
    return [found for name in names for found in ((name, f"{name}{SHALLOW}") if name in SHIPPED else (name,))]


def dilations(growth: Collection[int], shallow: Collection[int]) -> tuple[Dilation, ...]:
    """The dilations of growth, with some sparse steps shallow.

    Args:
        growth: latent cells by step, as requests name them.
        shallow: indices of the shallow steps.
    """
    return with_shallow(as_dilations(tuple(growth)), shallow)
