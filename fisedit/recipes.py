"""Checks what a user asks of a generation before any work is done. Knows ranges, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from numbers import Real
from operator import index
from typing import Any, SupportsIndex, TypeVar

from fisedit.errors import InputError, PromptError
from fisedit.values import LATENT_FACTOR, Inversion, Likeness, Recipe, SchedulerName

E = TypeVar("E", bound=StrEnum)

STEPS = (1, 999)
SIDE = (64, 2048)
SEEDS = (0, 2**63 - 1)


def make_recipe(
    prompt: str,
    *,
    seed: int,
    negative_prompt: str,
    num_inference_steps: int,
    guidance_scale: float,
    width: int,
    height: int,
    scheduler: str,
    inversion: str | None = None,
    like: Sequence[Mapping[str, Any]] = (),
    loras: Sequence[tuple[str, float]] = (),
) -> Recipe:
    """A recipe whose every value is in range; an opened picture may have an empty prompt, where nobody knows it.

    Raises:
        PromptError: an empty or all-space prompt, or no text at all.
        InputError: steps, guidance, size, seed, scheduler or inversion out of range.
    """
    if not isinstance(negative_prompt, str):
        raise PromptError(f"negative_prompt must be text, got {type(negative_prompt).__name__}; leave it out for none")
    return Recipe(
        "" if inversion and prompt == "" else check_prompt(prompt),
        _integer("seed", seed, SEEDS),
        negative_prompt,
        _integer("num_inference_steps", num_inference_steps, STEPS),
        _guidance(guidance_scale),
        _side("width", width),
        _side("height", height),
        _one_of("scheduler", scheduler, SchedulerName),
        None if inversion is None else _one_of("inversion", inversion, Inversion),
        likenesses(like),
        tuple((str(name), float(scale)) for name, scale in loras),
    )


def first_step(strength: float, steps: int) -> int:
    """The index of the first step that an edit of this strength runs, as in diffusers' image-to-image.

    Raises:
        InputError: a strength out of range, or one that leaves no step to run.
    """
    if not isinstance(strength, int | float) or not 0 < strength <= 1:
        raise InputError(f"strength must be in (0, 1], got {strength!r}; 1 repaints, less keeps more")
    if int(steps * strength) < 1:
        raise InputError(f"strength must leave a step of {steps} to run, got {strength!r}; use {1 / steps:.3g} or more")
    return steps - int(steps * strength)


def check_prompt(prompt: str) -> str:
    """The prompt, if it says anything. Raises PromptError otherwise."""
    if not isinstance(prompt, str):
        raise PromptError(f"prompt must be text, got {type(prompt).__name__}")
    if not prompt.strip():
        raise PromptError(f"prompt must say something, got {prompt!r}; describe the picture")
    return prompt


def likenesses(like: Sequence[Mapping[str, Any]]) -> tuple[Likeness, ...]:
    """Likenesses as JSON tells them. Raises InputError for a value out of range, TypeError for a missing one."""
    return tuple(_likeness(**one) for one in like)


def _likeness(adapter: str, scale: float, reference: str) -> Likeness:
    if not (isinstance(adapter, str) and isinstance(reference, str)):
        raise InputError(f"a likeness must name its adapter and reference, got {adapter!r} and {reference!r}")
    return Likeness(adapter, check_scale(scale), reference)


def check_scale(scale: Any) -> float:
    """An adapter's scale, if it is a number in range. Raises InputError otherwise."""
    number = isinstance(scale, Real) and not isinstance(scale, bool)
    if not number or not -10 <= scale <= 10:
        raise InputError(f"scale must be a number in [-10, 10], got {scale!r}; 1 is what an adapter was trained for")
    return float(scale)


def _integer(name: str, value: int, bounds: tuple[int, int]) -> int:
    low, high = bounds
    whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)  # numpy's integers are
    if not whole or not low <= index(value) <= high:
        raise InputError(f"{name} must be a whole number in [{low}, {high}], got {value!r}")
    return index(value)


def _guidance(value: Any) -> float:
    number = isinstance(value, Real)  # numpy's are
    if not number or not 0 <= value <= 100:
        raise InputError(f"guidance_scale must be in [0, 100], got {value!r}; 7.5 is usual, 1 switches it off")
    return float(value)


def _side(name: str, value: int) -> int:
    side = _integer(name, value, SIDE)
    if side % LATENT_FACTOR:
        nearest = round(side / LATENT_FACTOR) * LATENT_FACTOR
        raise InputError(f"{name} must be divisible by {LATENT_FACTOR}, got {side}; use {nearest}")
    return side


def _one_of(name: str, value: str, kind: type[E]) -> E:
    if value not in tuple(kind):
        raise InputError(f"{name} must be one of {', '.join(kind)}, got {value!r}")
    return kind(value)
