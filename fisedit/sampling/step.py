"""One step of denoising, for every picture on its way: a runner predicts, a sampler steps, and the result is blended.

Every run is a loop over `step`; runs differ in their runner and in what is watched between steps. Knows trajectories
and samplers; neither the UNet nor masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from fisedit.features.cache import CachedFeatures
    from fisedit.models.families.conditioning import Conditioning
    from fisedit.sampling.latent_blend import LatentBlend
    from fisedit.sampling.scheduler import Sampler
    from fisedit.sampling.trajectory import Trajectory

StepCallback = Callable[[int, int, Tensor], None]
"""Called before every step with (index, number of steps, estimate of the clean latents [1, 4, h, w])."""


@dataclass(frozen=True, eq=False)
class DenoisingState:
    """One picture on its way from noise.

    Args:
        trajectory: Its steps so far; the last latents are where it stands.
        sampler: The run of its scheduler.
        text: The conditions of its prompt.
        blend: Blends its latents into its source's; None for a source.
    """

    trajectory: Trajectory
    sampler: Sampler
    text: Conditioning
    blend: LatentBlend | None = None

    @property
    def i(self) -> int:
        """Index of the next step, 0 to N."""
        return len(self.trajectory.predictions)

    @property
    def latents(self) -> Tensor:
        """Latents [1, 4, h, w] before the next step."""
        return self.trajectory.latents[-1]

    def advance(self, prediction: Tensor, features: CachedFeatures | None) -> None:
        """Take the next step.

        Args:
            prediction: guided, [1, 4, h, w].
            features: The maps that the step recorded, or None.

        Raises:
            NumericsError: the prediction is NaN or infinite.
        """
        i = self.i
        latents = self.sampler.step(prediction, i, self.latents)
        if self.blend is not None:
            latents = self.blend(i + 1, latents, self.sampler)
        self.trajectory.append(prediction, features, latents)


Predicted = tuple[Tensor, "CachedFeatures | None"]
"""A guided prediction [1, 4, h, w], and what was recorded of the step."""


class Runner(Protocol):
    """Evaluates the UNet at the next step of pictures, which is the same one for all."""

    def __call__(self, states: Sequence[DenoisingState]) -> Sequence[Predicted]:
        """Return a prediction and a record for each of the pictures."""


def step(states: Sequence[DenoisingState], runner: Runner) -> None:
    """Take every picture one step on.

    Args:
        states: The pictures, in place; all at the same step of equal schedules.
        runner: Predicts for all of them.

    Raises:
        NumericsError: the model predicted NaN or infinity.
    """
    for state, predicted in zip(states, runner(states), strict=True):
        state.advance(*predicted)


def denoise(
    states: Sequence[DenoisingState],
    runner: Runner,
    callback: StepCallback,
    *,
    steps: int | None = None,
    watch: Callable[[DenoisingState], None] | None = None,
) -> None:
    """Step until pictures are done.

    Args:
        states: The pictures, in place, as in `step`.
        runner: Predicts for all of them.
        callback: Called before every step, for the first picture; may raise.
        steps: The step to stop before, 0 to N; None for all.
        watch: Called after every step with the first picture; may raise.

    Raises:
        NumericsError: the model predicted NaN or infinity.
    """
    first = states[0]
    end = len(first.sampler.timesteps) if steps is None else steps
    while first.i < end:
        callback(first.i, end, first.sampler.estimate)
        step(states, runner)
        if watch is not None:
            watch(first)
