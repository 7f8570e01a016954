"""A head's pose and expression: what drives HelloMeme's control networks (arXiv 2410.22901).

A value of numbers, with a digest. Knows neither pictures nor networks.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from fisedit.errors import InputError, as_text

_EYE = ("Blink", "LookDown", "LookIn", "LookOut", "LookUp", "Squint", "Wide")
_MOUTH = (
    *("Smile", "Frown", "Dimple", "Stretch"),
    *("RollLower", "RollUpper", "ShrugLower", "ShrugUpper"),
    *("Press", "LowerDown", "UpperUp"),
)

EXPRESSIONS = (
    *(f"eye{what}{side}" for side in ("Left", "Right") for what in _EYE),
    *("jawForward", "jawLeft", "jawRight", "jawOpen"),
    *("mouthClose", "mouthFunnel", "mouthPucker", "mouthLeft", "mouthRight"),
    *(
        f"mouth{what}{side}"
        for what in _MOUTH
        for side in (("",) if what.startswith(("Roll", "Shrug")) else ("Left", "Right"))
    ),
    *("browDownLeft", "browDownRight", "browInnerUp", "browOuterUpLeft", "browOuterUpRight"),
    *("cheekPuff", "cheekSquintLeft", "cheekSquintRight", "noseSneerLeft", "noseSneerRight"),
)
"""ARKit's coefficients in the order of Apple's list. It ends with tongueOut, which the networks do not read."""

POSE = ("pitch", "yaw", "roll", "x", "y", "scale")
"""Numbers of a pose."""

EMOTION, FACE = 548, (3, 1024)
"""Numbers of PD-FGC's vector, and of CLIP-H's embeddings of three patches of a face."""

_UNREAD = frozenset({"tongueout", "_neutral"})
"""The coefficients that trackers give beside them, which are not read."""

_RANGES = {
    "pitch": (-180, 180),
    "yaw": (-180, 180),
    "roll": (-180, 180),
    "x": (-2, 2),
    "y": (-2, 2),
    "scale": (0.02, 0.65),
}
_MAX = 100.0
"""The limit in either direction of every number but a pose's: trackers give a little beyond 0 to 1."""


@dataclass(frozen=True)
class Drive:
    """A head's pose and expression.

    Args:
        pose: The head's pitch, yaw and roll in degrees, 0 for a head that faces the viewer, then x, y and scale. Pitch
            lowers the forehead towards the viewer, yaw turns the nose to the picture's right. Roll turns the head
            counterclockwise. x and y of its middle are measured from the picture's middle, right and down. Their units
            are halves of the picture's sides. The scale is the side of a square before the face as a share of the
            picture's.
        expression: ARKit's 51 coefficients, 0 to 1, in the order of `EXPRESSIONS`, or some of them by name; none is a
            face at rest.
        emotion: PD-FGC's vector of 548 numbers, for networks that read that instead.
        face: CLIP-H's embeddings of the two eyes and the mouth of the face that gave the expression, 3 * 1024 numbers;
            zeros without them.

    Raises:
        InputError: a number out of range, not as many as that, or a name of no coefficient.
    """

    pose: Sequence[float] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.4)
    expression: Sequence[float] | Mapping[str, float] = ()
    emotion: Sequence[float] = ()
    face: Sequence[float] = ()

    def __post_init__(self) -> None:
        pose = _numbers("pose", self.pose, len(POSE), needed=True)
        for name, value in zip(POSE, pose, strict=True):
            low, high = _RANGES[name]
            if not low <= value <= high:
                raise InputError(f"a pose's {name} must be in [{low:g}, {high:g}], got {value:g}")
        given = self.expression
        named = _named(given) if isinstance(given, Mapping) else given
        object.__setattr__(self, "pose", pose)
        object.__setattr__(self, "expression", _numbers("expression", named, len(EXPRESSIONS)))
        object.__setattr__(self, "emotion", _numbers("emotion", self.emotion, EMOTION))
        face = np.array(_numbers("face", self.face, FACE[0] * FACE[1]), np.float16)  # as sessions keep it
        object.__setattr__(self, "face", tuple(map(float, face)))

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that tell it from all others."""
        return hashlib.sha256(json.dumps(self.as_dict()).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; what is not given is left out, and a face is base64 of 16-bit floats."""
        found: dict[str, Any] = {each.name: list(getattr(self, each.name)) for each in fields(self)}
        if found["face"]:
            found["face"] = b64encode(np.array(found["face"], np.float16).tobytes()).decode()
        return {name: value for name, value in found.items() if value}

    @classmethod
    def from_dict(cls, value: object) -> Self:
        """A drive from its JSON. Raises InputError for anything else."""
        names = [each.name for each in fields(cls)]
        if not isinstance(value, Mapping) or not value or value.keys() - set(names):
            raise InputError(f"a drive must be a JSON object of {', '.join(names)}, got {as_text(value)}")
        given = dict(value)
        if isinstance(given.get("face"), str):
            given["face"] = _decode_face(given["face"])
        for name, each in given.items():
            plain = list(each.values()) if isinstance(each, Mapping) and name == "expression" else each
            if not isinstance(plain, list | tuple) or any(type(one) not in (int, float) for one in plain):
                raise InputError(f"a drive's {name} must be a list of numbers, got {as_text(each)}")
        return cls(**given)


def _numbers(name: str, given: Any, count: int, *, needed: bool = False) -> tuple[float, ...]:
    try:
        found = tuple(float(value) for value in given)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"a drive's {name} must be {count} numbers, got {as_text(given)}") from error
    if (found or needed) and len(found) != count:
        raise InputError(f"a drive's {name} must be {count} numbers, got {len(found)}")
    for value in found:
        if not math.isfinite(value) or (not needed and abs(value) > _MAX):
            limits = "finite numbers" if needed else f"numbers in [-{_MAX:g}, {_MAX:g}]"
            raise InputError(f"a drive's {name} must have {limits}, got {value:g}")
    return found


def _decode_face(text: str) -> list[float]:
    try:
        levels = np.frombuffer(b64decode(text, validate=True), np.float16)
    except ValueError as error:
        raise InputError(f"a drive's face must be base64 of 16-bit floats, got {as_text(text, 40)}") from error
    return [float(level) for level in levels]


def _named(given: Mapping[str, Any]) -> list[Any]:
    """The coefficients in their order, 0 for those that are not given."""
    known = {name.lower(): i for i, name in enumerate(EXPRESSIONS)}
    found: list[Any] = [0.0] * len(EXPRESSIONS)
    seen = set[str]()
    for name, value in given.items():
        spelled = name if isinstance(name, str) else as_text(name)
        plain = re.sub(r"_([lr])$", lambda end: {"l": "left", "r": "right"}[end[1]], spelled.lower())
        if plain in known and plain in seen:
            raise InputError(f"the coefficient {as_text(name, 40)} of an expression is given twice; leave one out")
        if plain in known:
            seen.add(plain)
            found[known[plain]] = value
        elif plain not in _UNREAD:
            close = difflib.get_close_matches(plain, known, 1)
            meant = f"did you mean {EXPRESSIONS[known[close[0]]]}?" if close else "see fisedit.values.drive.EXPRESSIONS"
            raise InputError(f"no coefficient of an expression is named {as_text(name, 40)}; {meant}")
    return found
