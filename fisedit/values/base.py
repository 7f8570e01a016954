"""The parts that all values share: the grid of latent cells, limits, and copies on read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from math import nan
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    BoolGrid = NDArray[np.bool_]
    Box = tuple[int, int, int, int]


OnStep = Callable[[int, int, "Image | None"], None]
"""Called before every step with (index, number of steps, small preview or None); may raise `Cancelled`."""


LATENT_FACTOR = 8
"""Image pixels along one side of a latent cell, for every Stable Diffusion 1.x / 2.x autoencoder."""


MAX_DILATION = 64
"""Latent cells by which a mask may be dilated or eroded, and the active cells of a step may exceed it, at most."""


class Step(Enum):
    """A step of an edit that is not sparse with some dilation."""

    DENSE = "dense"
    """Computes the whole latent grid. The sparse steps after it read the recorded features shifted by the change that
    it found outside the mask."""


class Shallow(int):
    """Latent cells that a shallow step computes beyond the mask: one that reuses a UNet's deep features."""


Dilation = int | Step
"""Latent cells that a step computes beyond the mask, perhaps `Shallow`; or the kind of another step."""


DENSE_GROWTH = MAX_DILATION
"""The number by which requests, files and statistics name a dense step."""


def as_dilations(growth: Sequence[int]) -> tuple[Dilation, ...]:
    """Return growth, as requests and files name it, as dilations of steps."""
    return tuple(Step.DENSE if cells == DENSE_GROWTH else cells for cells in growth)


def as_growth(dilations: Sequence[Dilation]) -> tuple[int, ...]:
    """Invert `as_dilations`."""
    return tuple(int(cells) if isinstance(cells, int) else DENSE_GROWTH for cells in dilations)


def with_shallow(dilations: Sequence[Dilation], shallow: Collection[int]) -> tuple[Dilation, ...]:
    """Return dilations with some of the sparse steps shallow.

    Args:
        dilations: by step.
        shallow: indices of the shallow ones.
    """
    return tuple(Shallow(d) if i in shallow and isinstance(d, int) else d for i, d in enumerate(dilations))


def shallow_steps(dilations: Sequence[Dilation]) -> tuple[int, ...]:
    """Return the indices of the shallow steps."""
    return tuple(i for i, dilation in enumerate(dilations) if isinstance(dilation, Shallow))


MAX_PROMPT_CHARS = 100_000
"""Letters of a prompt, of which 600 tokens are read."""


_MAX_NUMBER = 2**53
"""Up to which floats hold every whole number."""


def are_numbers(values: object, count: int) -> bool:
    """Return whether a value is a sequence of so many finite numbers of usual size; booleans are none.

    Args:
        values: A value of any type.
        count: The number of elements.
    """
    return isinstance(values, Sequence) and len(values) == count and all(map(is_number, values))


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number of usual size; a boolean is none.

    Args:
        value: an object of any type.
    """
    number: Any = value if not isinstance(value, bool) and isinstance(value, Real) else nan
    return bool(abs(number) <= _MAX_NUMBER)


C = TypeVar("C", bound=type)


def copy_on_read(*names: str) -> Callable[[C], C]:
    """Let a frozen dataclass hand out some of its fields as copies, so that what a caller writes to them is not kept.

    Args:
        names: Fields that have a method `copy`, or are None.
    """

    def decorate(cls: C) -> C:
        for name in names:
            setattr(cls, name, _copying_property(name))
        return cls

    return decorate


def _copying_property(name: str) -> property:
    def read(value: object) -> Any:
        field_value = vars(value)[name]
        return None if field_value is None else field_value.copy()

    def write(value: object, field_value: object) -> None:  # called by the dataclass, which then refuses
        vars(value)[name] = field_value

    return property(read, write)
