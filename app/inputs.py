"""The settings that handlers take, read from the page's components. Knows components; starts no work."""

from __future__ import annotations

from collections.abc import Sequence
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from app import views
from app.components import ALL_PIECES, DRIVE_EXPRESSIONS, DRIVE_RANGES, SCHEDULERS, SIZES
from app.validation import (
    DRAWN_SEEDS,
    NO_CONDITIONS,
    AdapterPicture,
    Conditions,
    RegionSettings,
    SourceSettings,
    printable,
)
from fisedit import Drive, Region
from fisedit.errors import InputError
from fisedit.values import Quality
from fisedit.values.sizes import Sizes, make_sizes

if TYPE_CHECKING:
    from app.components import PageComponents
    from app.session import Session


def settings(page: PageComponents, *values: Any) -> SourceSettings:
    """Return the settings that `PageComponents.settings_inputs` hold; sliders give floats.

    Args:
        page: the page that has the components.
        values: theirs, in that order.

    Raises:
        InputError: a model that is not offered, or half of a size.
    """
    is_random, steps, guidance, seed, width, height, scheduler, clip_skip, negative, model, chosen, *rest = values
    scales, told = rest[: len(page.lora_scales)], rest[len(page.lora_scales) :]
    seed = _random_seed() if is_random else seed
    steps, seed, width, height, clip_skip = (
        int(value) if isinstance(value, float) and value.is_integer() else value
        for value in (steps, seed, width, height, clip_skip)
    )
    scale = dict(zip(page.lora_scales, scales, strict=True))
    loras = {str(name): scale.get(name, 1.0) for name in chosen or ()}
    known, negative, model = SCHEDULERS.get(scheduler, str(scheduler)), str(negative or ""), str(model or "")
    sizes = _sizes(told) if page.pool.select(model).reads_sizes else None
    return SourceSettings(steps, guidance, seed, width, height, known, negative, model, loras, clip_skip, sizes=sizes)


def _sizes(numbers: Sequence[int | None]) -> Sizes | None:
    """Return the sizes of `PageComponents.sizes`, in which 0 is the picture's own. Raises InputError."""
    filled = [number or 0 for number in numbers]  # a field may be emptied
    pairs = dict(zip(SIZES, zip(filled[::2], filled[1::2], strict=True), strict=True))
    return make_sizes({name: pair for name, pair in pairs.items() if any(pair)})


def conditions_of(*values: Any) -> tuple[Conditions, tuple[Any, ...]]:
    """Return the conditions that `PageComponents.condition_inputs` hold.

    Args:
        values: values of those components, and of others after them.

    Returns:
        What adapters read, and the other values.

    Raises:
        InputError: a number of the drive out of range.
    """
    reference, reference_scale, control, control_scale, edges, driven, *rest = values
    pose, expression = rest[: len(DRIVE_RANGES)], rest[len(DRIVE_RANGES) :][: len(DRIVE_EXPRESSIONS)]
    read = Conditions(
        AdapterPicture(reference, reference_scale) if reference else None,
        AdapterPicture(control or b"", control_scale, bool(edges)) if control or edges else None,
        Drive(pose, dict(zip(DRIVE_EXPRESSIONS.values(), expression, strict=True))) if driven else None,
    )
    return read, tuple(rest[len(pose) + len(expression) :])


def region(session: Session, prompt: str, conditions: Conditions, *values: Any, soft: bool = True) -> RegionSettings:
    """Return the region settings of `PageComponents.edit_inputs`.

    Where neither words nor pictures change what is there, what is painted gets other noise. What is marked is edited
    alone in a picture that was opened without a description.

    Args:
        session: the session whose current picture is edited.
        prompt: what it should show.
        conditions: what adapters read.
        values: values of the stage and the region's controls, in that order.
        soft: whether what is painted has a soft border.

    Raises:
        InputError: strokes or a piece that the page does not send.
    """
    strokes, words, instance, grow, only, feather, strength, quality, *chosen = values
    marked = views.decode_strokes(strokes, session.current.size, soft=soft)
    if not isinstance(instance, str) or not (instance == ALL_PIECES[1] or instance.isdecimal()):
        raise InputError(f"piece must be a number or {ALL_PIECES[1]!r}, got {instance!r:.40}")
    things, found = _things(session, chosen[0] if chosen else ())
    is_marked = marked.add is not None or bool(marked.inside) or found is not None
    is_described = bool(session.history.lineage(session.current.id)[0].prompt)  # else words do not say where
    anew = is_marked and conditions == NO_CONDITIONS and printable(prompt) == session.current.prompt
    return RegionSettings(
        words=tuple(str(word) for word in words or ()),
        instance=None if instance == ALL_PIECES[1] else int(instance),
        grow=int(grow or 0),
        add=marked.add,
        protect=marked.protect,
        inside=marked.inside,
        outside=marked.outside,
        only=(bool(only) or found is not None or not is_described) and is_marked,
        strength=1.0 if strength is None else strength,
        quality=quality or Quality.BALANCED,
        seed=_random_seed() if anew else None,
        feather=int(feather or 0),
        things=things,
        found=found,
    )


def _things(session: Session, chosen: object) -> tuple[tuple[int, ...], Region | None]:
    """Numbers of things that a detector found in the current picture, and where these are.

    Raises:
        InputError: the page does not send such ones.
    """
    numbers = tuple(int(text) for text in chosen if str(text).isdecimal()) if isinstance(chosen, list) else ()
    result, found = session.detections
    if not numbers:
        return (), None
    if result != session.current.id or max(numbers) >= len(found):
        raise InputError("things must be what was found in the picture on the stage; find them again")
    return numbers, Region.union(found[number].region for number in numbers)


def _random_seed() -> int:
    return SystemRandom().randrange(DRAWN_SEEDS)
