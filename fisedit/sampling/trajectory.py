"""A picture's trajectory: latents before every step, predictions, recorded features; and what an edit keeps of it.

Knows generation configs and cached steps; runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fisedit.features.cache import CachedFeatures, FeatureDelta
    from fisedit.models.families.conditioning import Conditioning
    from fisedit.sampling.scheduler import Sampler
    from fisedit.values import ActiveCells, BoolGrid, EditMode, GenerationConfig

MAX_INJECTION_RATIO = 0.4
"""Share of the steps whose queries are recorded, so that edits may keep their structure."""


@dataclass(eq=False)
class Trajectory:
    """Everything that was recorded while a picture was made.

    Args:
        config: how it was made; of an edit, its source's with the new prompt.
        latents: x_0 to x_N, [1, 4, h, w] each.
        predictions: the guided prediction of every step, [1, 4, h, w].
        features: what every step recorded.
        text_keys: keys and values of the prompt for every cross-attention.
        start: number of first steps that were taken over from another trajectory.
        noises: [1, 4, h, w] of every step, where inversion found them; edits step with the same ones.
        captured: number of its steps that were replayed from captured graphs.
        uncaptured: why others were not, or "".
        feature_deltas: what its dense steps found changed outside its mask, where others are sparse.
        unconditional: The key of the conditions and the prediction [1, 4, h, w] of the unconditional branch at the
            first step, if that was recorded: an edit begins with the same.
        inpaint_inputs: [1, 5, h, w] that an inpainting UNet reads after the latents, a mask and the latents of the
            picture without what it marks; None for other UNets.
    """

    config: GenerationConfig
    latents: list[Tensor] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)
    features: list[CachedFeatures] = field(default_factory=list)
    text_keys: dict[str, Tensor] = field(default_factory=dict)
    start: int = 0
    noises: list[Tensor] = field(default_factory=list)
    captured: int = 0
    uncaptured: str = ""
    feature_deltas: list[FeatureDelta] = field(default_factory=list)
    unconditional: tuple[Tensor, Tensor] | None = None
    inpaint_inputs: Tensor | None = None

    @property
    def own_bytes(self) -> int:
        """Bytes of recorded features and latents held by this trajectory alone."""
        tensors = (*self.latents[self.start :], *self.predictions[self.start :], *self.text_keys.values(), *self.noises)
        tensors += () if self.inpaint_inputs is None else (self.inpaint_inputs,)
        own_features = (*self.features[self.start :], *self.feature_deltas)
        return sum(step.own_bytes for step in own_features) + sum(t.nbytes for t in tensors)

    def append(self, prediction: Tensor, features: CachedFeatures | None, latents: Tensor) -> None:
        """Add a step.

        Args:
            prediction: guided, [1, 4, h, w].
            features: what the step recorded, or None.
            latents: [1, 4, h, w] after it.
        """
        self.predictions.append(prediction)
        if features is not None:
            self.features.append(features)
        self.latents.append(latents)

    def unconditional_for(self, config: GenerationConfig) -> tuple[Tensor, Tensor] | None:
        """`unconditional` for a trajectory whose config is this one's with another prompt, and no adapter at work.

        None of an opened picture: its path must be followed to the bit, and half a batch is rounded otherwise. None of
        an inpainting UNet, which reads another mask in the edit.
        """
        same_settings = replace(config, prompt=self.config.prompt) == self.config and not (config.like or config.opened)
        return self.unconditional if same_settings and self.inpaint_inputs is None else None

    def copy_first_steps(self, source: Trajectory, steps: int, sampler: Sampler) -> None:
        """Begin with the first steps of another trajectory, up to the latents before the next one.

        Args:
            source: the other one.
            steps: how many, 0 to N.
            sampler: is stepped through them, so that a multistep scheduler has their history, unless the noise is of
                another seed from here on.
        """
        self.start, self.noises = steps, source.noises
        self.unconditional = source.unconditional_for(self.config)
        self.latents += source.latents[:steps]
        self.predictions += source.predictions[:steps]
        self.features += source.features[:steps]
        for i in range(steps if self.config.seed == source.config.seed else 0):
            sampler.step(self.predictions[i], i, self.latents[i])


@dataclass(frozen=True)
class AttentionInjection:
    """The part of its source's structure that an edit keeps, as in prompt-to-prompt (arXiv 2208.01626).

    Args:
        steps: first steps in which, inside the mask, self-attention is the source's and so are the keys of kept words.
        tokens: (old, new) positions of the words that both prompts have.
    """

    steps: int
    tokens: tuple[tuple[int, int], ...]


class StepCheck(Protocol):
    """Compares an edit with its source at one step, where some more cells are computed."""

    @property
    def step(self) -> int:
        """Index of the step."""

    @property
    def cells(self) -> BoolGrid:
        """Booleans [h, w], extra cells to compute in the step."""

    def compare(self, difference: NDArray[np.float32]) -> None:
        """Check the distance [h, w] of the edit's prediction from the source's; may raise."""


@dataclass(frozen=True, eq=False)
class LatentEdit:
    """An edit as the sparse denoising loop knows it.

    Args:
        config: the source's with the new prompt.
        text: The conditions of its prompt.
        text_keys: keys and values of the text by projection, filled as they are needed.
        cells: The cells that it changes, by step.
        mode: The way it is computed.
        injection: what is kept of the source's attention, or None.
        check: compares the edit with its source at one step, or None.
        read_text: The conditions that are read instead of `text`, of which later masks are made; None for those.
        regional_text: The conditions of the prompts of the mode's regions.
        inpaint_inputs: The inputs of an inpainting UNet, see `Trajectory`.
    """

    config: GenerationConfig
    text: Conditioning
    text_keys: dict[str, Tensor]
    cells: ActiveCells
    mode: EditMode
    injection: AttentionInjection | None = None
    check: StepCheck | None = None
    read_text: Conditioning | None = None
    regional_text: Sequence[Conditioning] = ()
    inpaint_inputs: Tensor | None = None


def max_injection_steps(config: GenerationConfig) -> int:
    """The first steps, of which an edit may keep the structure."""
    return round(MAX_INJECTION_RATIO * config.num_timesteps)
