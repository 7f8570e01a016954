"""The arguments of an editor's methods that a request asks for. Knows the app's state; neither gradio nor torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from app.validation import Conditions, RegionSettings, SourceSettings, clean_prompt, decode_adapter_picture
from fisedit import Region
from fisedit.adapters.control_pictures import canny
from fisedit.errors import InputError
from fisedit.prompts.syntax import take_loras
from fisedit.values import CONTROL, DRIVE, REFERENCE

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.session import Session
    from app.sessions import AppState, ModelChoice
    from fisedit import Editor

Arguments = dict[str, Any]
"""Keyword arguments of an editor's methods."""


def source_arguments(settings: SourceSettings, choice: ModelChoice) -> Arguments:
    """Arguments that `Editor.generate` and `Editor.open` share."""
    return {
        "seed": settings.seed,
        "num_inference_steps": settings.steps,
        "guidance_scale": float(choice.model.guidance if settings.guidance is None else settings.guidance),
        "negative_prompt": settings.negative_prompt,
        "width": settings.width,
        "height": settings.height,
        "clip_skip": settings.clip_skip,
        "negative_clip_skip": settings.negative_clip_skip,
        "sizes": settings.sizes,
    }


def condition_arguments(state: AppState, conditions: Conditions) -> Callable[[Editor], Arguments]:
    """Return what makes arguments for adapters, once there is an editor. Raises InputError."""
    given = {name: each for name in (REFERENCE, CONTROL, DRIVE) if (each := getattr(conditions, name)) is not None}
    decoded = {name: decode_adapter_picture(each, name) for name, each in given.items() if name != DRIVE}
    if missing := given.keys() - state.pool.reads:
        raise InputError(f"a {min(missing)} needs an adapter that reads it; start the app with --adapter")

    def add(editor: Editor) -> Arguments:
        loaded = {each.source: each.adapter.argument for each in editor.adapters}
        for source, argument in loaded.items():
            if argument in decoded:
                editor.scale_adapter(given[argument].scale, source)
        if missing := given.keys() - set(loaded.values()):
            raise InputError(f"no adapter for a {min(missing)} fits the model; leave it out, or choose another model")
        pictures = {name: _own_edges(editor) if each is None else each for name, each in decoded.items()}
        return pictures if conditions.drive is None else pictures | {DRIVE: conditions.drive}

    return add


def _own_edges(editor: Editor) -> Image:
    """Return the edges of the source of the current picture, so that they stay the same from edit to edit."""
    return canny(editor.history.lineage(editor.current.id)[0].canvas)


def edit_prompt(state: AppState, session: Session, prompt: str) -> str:
    """The prompt of an edit of the current picture, without tags of the LoRAs that the picture was made with.

    Raises:
        PromptError: a prompt that cannot be used. InputError: tags of other LoRAs, or of other scales.
    """
    text, tagged = take_loras(prompt) if isinstance(prompt, str) else (prompt, {})
    if tagged:
        recorded, offered = session.current.config.loras, state.pool.loras
        if offered.select(tagged) != offered.select_recorded(recorded):
            own, got = offered.as_text(recorded) or "no LoRA", ", ".join(tagged)[:80]
            raise InputError(f"an edit has its picture's LoRAs, {own}, got tags of {got}; leave them out")
    return clean_prompt(text)


def region_arguments(region: RegionSettings) -> Arguments:
    """A region as arguments of `Editor.edit`: where it is, and how much of it changes."""
    where: Arguments = {"regions": region.regions} if region.regions else {"region": region_of(region)}
    return where | {
        "strength": float(region.strength),
        "quality": region.quality,
        "seed": region.seed,
    }


def region_of(settings: RegionSettings) -> Region:
    """Return the region of the settings: as a whole, or where words attend or what is painted, or both."""
    found = settings.region or Region.words(*settings.words, instance=settings.instance)
    found = found.grow(settings.grow)
    if (marked := settings.marked) is not None:  # words that point nowhere leave it to what is marked
        found = marked if settings.only else found.unless_unsure() | marked
    if settings.outside:
        found = found - Region.points(*settings.outside, outside=settings.inside)
    found = found.feather(settings.feather)
    return found if settings.protect is None else found - Region.mask(settings.protect)
