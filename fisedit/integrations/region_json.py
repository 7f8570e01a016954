"""Regions as JSON, as programs send them and as files for the command line hold them.

A region is an object with one of `words`, `mask`, `box`, `points`, `detected`, `border`, `everywhere`, `any`, `all` and
`minus`, and perhaps `grow` and `feather`. Knows regions; reads no file and looks at no picture itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_, or_, sub
from typing import TYPE_CHECKING, Any

from fisedit.errors import InputError, as_text
from fisedit.integrations.mask_providers import ALL, THRESHOLD
from fisedit.masking.region import Region
from fisedit.values import are_numbers

if TYPE_CHECKING:
    LoadMask = Callable[[str], object]
    Detect = Callable[[Sequence[str], float, str], Region]
    """A function that finds a region for labels, () for all, the score from which a thing counts, and an instance. The
    instance is "all", "largest" or a number."""

MAX_PARTS, MAX_WORDS = 64, 16
"""Regions in a region, and words of one."""

_OPTIONS: dict[str, tuple[str, ...]] = {
    "words": ("instance",),
    "mask": ("soft",),
    "box": (),
    "points": ("outside",),
    "detected": ("threshold", "instance"),
    "border": (),
    "everywhere": (),
    "any": (),
    "all": (),
    "minus": (),
}
"""Kinds of regions -> the fields that one of them may have."""

_JOINS: dict[str, Callable[[Region, Region], Region]] = {"any": or_, "all": and_, "minus": sub}
_EXAMPLE = '{"box": [0, 0, 64, 64]}'


def parse_region(value: object, load_mask: LoadMask, detect: Detect | None = None) -> Region:
    """A region from its JSON.

    Args:
        value: Decoded JSON. For the words of a prompt it is {"words": ["cat"], "instance": 0}, with [] for the changed
            words. A mask is {"mask": text, "soft": true}. Shapes are {"box": [left, top, right, bottom]}, {"points":
            [[x, y]], "outside": [[x, y]]}, and {"border": [left, top, right, bottom]}. Things that are found are
            {"detected": ["face"], "threshold": 0.5, "instance": "largest"}, with [] for things of any label. The whole
            picture is {"everywhere": true}. A list of regions, or {"any": [...]}, is their union. What they share is
            {"all": [...]}. The first without the others is {"minus": [...]}. Each may have "grow" and "feather" in
            latent cells.
        load_mask: from the text of a mask, such as a path.
        detect: what a detector finds in the picture; None where there is no detector.

    Raises:
        InputError: something else, or more than 64 regions; what `load_mask` and `detect` raise.
    """
    return _Parser(load_mask, detect).region(value)


def parse_regions(value: object, load_mask: LoadMask, detect: Detect | None = None) -> list[tuple[Region, str]]:
    """Regions with prompts of their own, as `Editor.edit` takes them.

    Args:
        value: Decoded JSON: [{"region": ..., "prompt": "a dog"}, ...].
        load_mask: The function that `parse_region` takes.
        detect: The function that `parse_region` takes, or None.

    Raises:
        InputError: something else; what `load_mask` and `detect` raise.
    """
    parser = _Parser(load_mask, detect)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InputError(f'regions must be a list of {{"region": ..., "prompt": ...}}, got {as_text(value, 60)}')
    return [parser.pair(each) for each in value]


class _Parser:
    """Regions that together have at most `MAX_PARTS`."""

    def __init__(self, load_mask: LoadMask, detect: Detect | None) -> None:
        self._load_mask, self._detect, self._left = load_mask, detect, MAX_PARTS

    def pair(self, value: object) -> tuple[Region, str]:
        if not isinstance(value, Mapping) or value.keys() != {"region", "prompt"} or type(value["prompt"]) is not str:
            raise InputError(f'each of regions must be {{"region": ..., "prompt": "text"}}, got {as_text(value, 60)}')
        return self.region(value["region"]), value["prompt"]

    def region(self, value: object) -> Region:
        self._left -= 1
        if self._left < 0:
            raise InputError(f"a region must be made of at most {MAX_PARTS} regions, got more; draw a mask")
        kinds = [kind for kind in _OPTIONS if isinstance(value, Mapping) and kind in value]
        if not isinstance(value, Mapping) or len(kinds) != 1:
            known = ", ".join(_OPTIONS)
            raise InputError(f"a region must have one of {known}, such as {_EXAMPLE}, got {as_text(value, 60)}")
        kind = kinds[0]
        allowed = {kind, "grow", "feather", *_OPTIONS[kind]}
        if unknown := value.keys() - allowed:
            raise InputError(f"a region of {kind} cannot have {min(map(str, unknown))}; it has {', '.join(allowed)}")
        found = getattr(self, f"_{kind}")(value) if kind not in _JOINS else self._joined(kind, value[kind])
        return found.grow(value.get("grow", 0)).feather(value.get("feather", 0))

    def _joined(self, kind: str, parts: object) -> Region:
        if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
            raise InputError(f"{kind} of a region must be a list of regions, got {as_text(parts, 60)}")
        return reduce(_JOINS[kind], map(self.region, parts))

    def _words(self, value: Mapping[str, Any]) -> Region:
        return Region.words(*_texts("words", value["words"], "words of a prompt"), instance=value.get("instance"))

    def _mask(self, value: Mapping[str, Any]) -> Region:
        mask, soft = value["mask"], value.get("soft", False)
        if type(mask) is not str or type(soft) is not bool:
            raise InputError(f"mask of a region must be text and soft true or false, got {as_text(value, 60)}")
        return Region.mask(self._load_mask(mask), soft=soft)

    def _box(self, value: Mapping[str, Any]) -> Region:
        return Region.box(*_sides("box", value["box"]))

    def _points(self, value: Mapping[str, Any]) -> Region:
        inside, outside = (
            [tuple(at) if isinstance(at, list) else at for at in points] if isinstance(points, list) else points
            for points in (value["points"], value.get("outside", []))
        )
        if not isinstance(inside, list):
            raise InputError(f"points of a region must be [[x, y], ...] in pixels, got {as_text(inside, 60)}")
        return Region.points(*inside, outside=outside)

    def _detected(self, value: Mapping[str, Any]) -> Region:
        labels = _texts("detected", value["detected"], "labels")
        if self._detect is None:
            how = "start the app with --detector, or use fisedit edit --detect"
            raise InputError(f"detected of a region needs a detector, got none; {how}")
        return self._detect(labels, value.get("threshold", THRESHOLD), str(value.get("instance", ALL)))

    def _border(self, value: Mapping[str, Any]) -> Region:
        return Region.border(*_sides("border", value["border"]))

    def _everywhere(self, value: Mapping[str, Any]) -> Region:
        if value["everywhere"] is not True:
            raise InputError(f"everywhere of a region must be true, got {as_text(value['everywhere'], 60)}")
        return Region.everywhere()


def _texts(kind: str, value: object, what: str) -> Sequence[str]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(text) is str for text in value):
        raise InputError(f"{kind} of a region must be a list of {what}, got {as_text(value, 60)}")
    if len(value) > MAX_WORDS:
        raise InputError(f"{kind} of a region must be at most {MAX_WORDS}, got {len(value)}")
    return value


def _sides(kind: str, value: object) -> tuple[Any, Any, Any, Any]:
    sides: list[Any] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not are_numbers(sides, 4):
        raise InputError(f"{kind} of a region must be [left, top, right, bottom] in pixels, got {as_text(value, 60)}")
    left, top, right, bottom = sides
    return left, top, right, bottom
