"""Schedules of an edit's steps: how far each computes beyond the mask, which are dense and which shallow.

Knows numbers of steps; `costs.model` chooses between them.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from fisedit.values import Dilation, Quality, Step

DILATION_PAIRS = ((2, 1), (3, 2), (4, 3), (5, 5))
"""Latent cells computed beyond the mask, in the first and the second half of the steps.

Each pair comes nearer to the dense edit than those before it. With the first, one edit in ten becomes another picture.
Over 48 swaps (128 px model, development seeds 300 and 400) its 10th percentile is 26 dB and its worst 17. The second
pair has 29 and 20. At 4 and 8 steps the order is the same.

Nearer than all of them comes a single cell with dense steps in between, which find what changes outside the mask: 31
and 26 dB. One dense step alone is worse than none, as what it found no longer holds at the last steps. Two measures
were tried to tell which edits need dense steps, and neither did. They are the drift at a mask's rim, and the distance
between a dense step and a sparse one."""

DENSE_STEP_SHARE = 0.2
"""Share of the steps that run dense, where some do: of 25 steps 5. The first of all is one, as the early steps decide
what an edit makes of a place. With 4 of them, edits in our own masks come near to 28 dB in the tenth
percentile; 7 bring a decibel more for a tenth of the time."""

DENSE_STEP_EXPONENT = 1.4
"""The exponent by which dense steps lie closer early on. They are where the k-th of n equal parts begins, k / n to this
power."""

SHALLOW_FROM, SHALLOW_STEPS = 1 / 2, 1
"""The share of the steps after which some are shallow, and how many of them follow on a full one.

Measured on swaps of 256 px inside given masks (the demo model, development seeds). In 25 steps balanced edits have a
median of 30.4 dB and a tenth percentile of 23.4, and 30.7 and 24.3 without shallow steps. Fast ones have 29.5 and
22.6, and 29.3 and 23.3 without. Two of three shallow after the first third lose 1 dB of both, and after the middle of
20 steps 2.6 dB of the median. Between dense steps, shallow ones lose 1.2 and 2.6 dB (20 steps): so close edits have
none."""

FEWEST_STEPS = 15
"""Runs with fewer steps have no shallow ones: they lie too far from one another."""

FIRST_SCHEDULE = {Quality.FAST: 0, Quality.BALANCED: 1, Quality.CLOSE: -1}
"""Quality -> index of the schedule that is taken: one of the pairs, or behind them the one with dense steps."""

MAX_TIME_RATIO, MAX_DENSE_RATIO = 1.1, 1.23
"""The largest ratio of times at which a schedule nearer to the dense edit is taken instead.

The second is that of a balanced edit's with dense steps in between, over a pair without shallow ones, as it is far
nearer. In the swaps above it has 36.2 dB in the median and 28.1 in the tenth percentile, the pair (3, 2) 30.7 and 24.3.
On the demo model it takes 1.0 to 1.22 of that pair's time, on Stable Diffusion under a third of the picture more."""


def two_phase_dilation(first: int, then: int, steps: int, share: float = 0.5) -> tuple[int, ...]:
    """Dilations of two phases of a run.

    Args:
        first: latent cells computed beyond the mask in the first phase.
        then: latent cells in the second one.
        steps: N.
        share: The share of the steps in the first phase, rounded up; in [0, 1].
    """
    num_early = ceil(share * steps)
    return (first,) * num_early + (then,) * (steps - num_early)


def interleaved_dense_steps(steps: int, start: int = 0, share: float = DENSE_STEP_SHARE) -> tuple[Dilation, ...]:
    """Dilations of one cell with dense steps between them: (Step.DENSE, 1, 1, Step.DENSE, ...).

    Args:
        steps: N.
        start: the first step to run, which is dense.
        share: The share of the steps to run that are dense, rounded up; in [0, 1].
    """
    left = steps - start
    count = ceil(round(share * left, 6))  # 7 / 25 of 25 is 7
    dense = {start + round(left * (k / count) ** DENSE_STEP_EXPONENT) for k in range(count)}
    return tuple(Step.DENSE if i in dense else 1 for i in range(steps))


def find_shallow_steps(steps: int, full: Collection[int] = ()) -> tuple[int, ...]:
    """The steps that may be shallow, the same for all edits of a source and for edits over those.

    Args:
        steps: N.
        full: those that must not be.
    """
    first = int(SHALLOW_FROM * steps)
    if steps < FEWEST_STEPS:
        return ()
    return tuple(i for i in range(first + 1, steps) if (i - first) % (SHALLOW_STEPS + 1) and i not in full)
