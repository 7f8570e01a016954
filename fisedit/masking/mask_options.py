"""The methods that predict the mask of words, and their options. Knows no features, and loads no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fisedit.errors import InputError, as_text
from fisedit.masking import heatmaps

OBJECT_MASKS = DEFAULT_METHOD = "things"
"""The method of `object_masks`, which `python -m benchmarks.masks` compares with the others."""

LATENTS = "latents"
"""FISEdit's difference of latents (arXiv 2305.17423); it needs dense steps."""

METHODS = (OBJECT_MASKS, *heatmaps.METHODS, LATENTS)


@dataclass(frozen=True)
class MaskOptions:
    """The options of the prediction of a mask.

    Args:
        words: localize by these instead of the diff's words; () for the diff's. Any collection is kept as a tuple.
        instance: The component of the mask to keep, counted from the left and from 0; None for all.
        method: one of `METHODS`.
        probe_steps: dense steps on the new prompt to spend, 0 or more; None for one where "things" localizes an
            inserted object. "latents" needs some, the others need none.
    """

    words: Collection[str] = ()
    instance: int | None = None
    method: str = DEFAULT_METHOD
    probe_steps: int | None = None

    def __post_init__(self) -> None:
        is_list = isinstance(self.words, Collection) and not isinstance(self.words, str)
        if not is_list or not all(isinstance(word, str) for word in self.words):
            raise InputError(
                f"words must be a list of words of the prompts, got {as_text(self.words)}; put it into a list"
            )
        object.__setattr__(self, "words", tuple(self.words))
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise InputError(f"mask_method must be one of {', '.join(METHODS)}, got {as_text(self.method)}")
        if self.probe_steps is not None and (type(self.probe_steps) is not int or self.probe_steps < 0):
            raise InputError(f"probe_steps must be a whole number from 0, got {as_text(self.probe_steps)}")
        if self.method == LATENTS and not self.probe_steps:
            raise InputError("mask_method latents compares dense steps; give probe_steps, for example 10")
        if self.instance is not None and (type(self.instance) is not int or self.instance < 0):
            raise InputError(
                f"instance must be a whole number from 0, counted from the left, got {as_text(self.instance)}"
            )
