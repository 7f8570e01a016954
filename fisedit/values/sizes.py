"""Sizes that Stable Diffusion XL reads beside a prompt (micro-conditioning), by diffusers' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fisedit.errors import InputError, as_text
from fisedit.values.base import are_numbers

Pair = tuple[int, int]
"""Height and width, or top and left."""

_MAX = 2**24


@dataclass(frozen=True)
class Sizes:
    """The sizes that are told to the UNet in place of the picture's own.

    Args:
        original_size: Height and width of the picture before it was resized and cropped; None for the picture's own.
        crops_coords_top_left: Top and left of the part that was cropped out.
        target_size: Height and width of the result; None for the picture's own.
        negative_original_size: The same for the negative prompt; None for those of the prompt.
        negative_crops_coords_top_left: The same for the negative prompt.
        negative_target_size: The same for the negative prompt; both or none are given.
    """

    original_size: Pair | None = None
    crops_coords_top_left: Pair = (0, 0)
    target_size: Pair | None = None
    negative_original_size: Pair | None = None
    negative_crops_coords_top_left: Pair = (0, 0)
    negative_target_size: Pair | None = None

    def numbers(self, own: Pair) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers for the negative prompt and for the prompt.

        Args:
            own: Height and width of the picture.
        """
        positive = (*(self.original_size or own), *self.crops_coords_top_left, *(self.target_size or own))
        if self.negative_original_size is None or self.negative_target_size is None:
            return positive, positive
        crop = self.negative_crops_coords_top_left
        return (*self.negative_original_size, *crop, *self.negative_target_size), positive

    def as_dict(self) -> dict[str, Pair]:
        """Ready for JSON, as `make_sizes` takes it; what is as usual is left out."""
        usual = type(self)()
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value != getattr(usual, name)}


def make_sizes(given: Sizes | Mapping[str, Any] | Sequence[str] | None) -> Sizes | None:
    """Return sizes after a check; None where nothing is told.

    Args:
        given: Names of fields of `Sizes` -> two numbers, or texts such as "original_size=512,768"; None counts as none.

    Raises:
        InputError: A name that there is not, no two numbers, or half of the negative prompt's sizes.
    """
    if given is None or isinstance(given, Sizes):
        return given
    if not isinstance(given, Mapping | Sequence):
        raise InputError(f"sizes must map names to two numbers, got {as_text(given)}; give {{'original_size': (h, w)}}")
    if not isinstance(given, Mapping):
        given = dict(map(_parsed, given))
    known = {field.name for field in fields(Sizes)}
    if unknown := next((name for name in given if name not in known), None):
        raise InputError(f"sizes must be of {', '.join(sorted(known))}, got {as_text(unknown)}")
    made = Sizes(**{name: _pair(name, value) for name, value in given.items() if value is not None})
    told = made.as_dict()
    negative = [name for name in told if name.startswith("negative_")]
    if negative and not {"negative_original_size", "negative_target_size"} <= set(negative):
        raise InputError(
            f"negative_original_size and negative_target_size must be given together, got {negative[0]}; give both"
        )
    return made if told else None


def _parsed(text: Any) -> tuple[str, tuple[int, ...]]:
    """A name and numbers of a text such as "original_size=512,768"."""
    name, _, numbers = str(text).partition("=")
    try:
        return name.strip().replace("-", "_"), tuple(map(int, numbers.split(",")))
    except ValueError as error:
        raise InputError(f"sizes must be as original_size=512,768, got {as_text(text)}") from error


def _pair(name: str, value: Any) -> Pair:
    low = 0 if "crops" in name else 1
    if not are_numbers(value, 2) or not all(isinstance(each, int) and low <= each <= _MAX for each in value):
        what = "top and left" if "crops" in name else "height and width"
        raise InputError(f"{name} must be {what}, two whole numbers from {low} to {_MAX}, got {as_text(value)}")
    first, second = value
    return first, second
