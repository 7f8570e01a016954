"""Checks of a JSON file's fields: each returns the value, converted, or raises ValueError."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from fisedit.values import (
    is_unicode,
)

Check = Callable[[Any], Any]
"""Checks a value and returns it, converted."""


def require(condition: object) -> None:
    """Refuse what does not hold.

    Raises:
        ValueError: it does not.
    """
    if not condition:
        raise ValueError("the value is not allowed here")


def refuse_constant(name: str) -> None:
    """Refuse NaN and infinities; `parse_constant` of `json.loads`."""
    raise ValueError(f"{name} is no number of a session")


def checked_fields(value: Any, checks: Mapping[str, Check], optional: Collection[str] = ()) -> dict[str, Any]:
    """The checked fields of a JSON object, of which none but optional ones may be missing, and no others be there."""
    require(isinstance(value, dict) and checks.keys() - set(optional) <= value.keys() <= checks.keys())
    return {name: checks[name](field) for name, field in value.items()}


def one_of(*allowed: Check) -> Check:
    """Accepts a value that one of the checks accepts."""

    def check(value: Any) -> Any:
        for one in allowed[:-1]:
            try:
                return one(value)
            except ValueError:
                continue
        return allowed[-1](value)

    return check


def none(value: Any) -> None:
    """Accepts null."""
    require(value is None)


def whole(low: int, high: int) -> Check:
    """Accepts whole numbers from low to high."""

    def check(value: Any) -> int:
        require(type(value) is int and low <= value <= high)
        return int(value)

    return check


def number(low: float, high: float) -> Check:
    """Accepts finite numbers from low to high."""

    def check(value: Any) -> float:
        require(type(value) in (int, float) and math.isfinite(value) and low <= value <= high)
        return float(value)

    return check


def text(letters: int, pattern: str = "") -> Check:
    """Accepts text that can be written as UTF-8; all of it must match a pattern, if there is one."""
    compiled = re.compile(pattern, re.ASCII) if pattern else None

    def check(value: Any) -> str:
        require(isinstance(value, str) and len(value) <= letters and is_unicode(value))
        require(not compiled or compiled.fullmatch(value))
        return str(value)

    return check


def tuple_of(item: Check, most: int) -> Check:
    """Accepts lists of so many items at most, each of which passes a check."""

    def check(value: Any) -> tuple[Any, ...]:
        require(isinstance(value, list) and len(value) <= most)
        return tuple(item(one) for one in value)

    return check


def mapping(key: Check, item: Check, most: int) -> Check:
    """Accepts objects of so many fields at most, whose names and values pass checks."""

    def check(value: Any) -> Mapping[Any, Any]:
        require(isinstance(value, dict) and len(value) <= most)
        return MappingProxyType({key(name): item(one) for name, one in value.items()})

    return check


def flag(value: Any) -> bool:
    """Accepts true and false."""
    require(isinstance(value, bool))
    return bool(value)
