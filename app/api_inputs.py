"""Regions, masks and adapters' pictures of a program's request, read when its run begins. Knows no gradio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from app import views
from app.validation import MAX_PIXELS, AdapterPicture, Conditions, RegionSettings
from fisedit import Drive, Region
from fisedit.errors import InputError
from fisedit.integrations.mask_providers import find, union_of
from fisedit.integrations.region_json import parse_region, parse_regions
from fisedit.storage import images

if TYPE_CHECKING:
    from PIL import Image

    from app.session import Session
    from app.sessions import AppState
    from fisedit.integrations.mask_providers import Detection
    from fisedit.integrations.region_json import Detect

MAX_MASK_CHARACTERS, MAX_REFERENCE_CHARACTERS = 1 << 20, 3 << 20
"""Characters of base64 of a mask, and of a reference picture."""


def lazy_region(
    words: list[str],
    instance: int,
    grow: int,
    mask: str,
    protect: str,
    repaint: tuple[float, str, int],
    region: dict[str, Any],
    regions: Sequence[dict[str, Any]] = (),
) -> Callable[[AppState, Session], RegionSettings]:
    """A region from a program's arguments, read when the run begins, so that errors are reported alike."""

    def get_region(state: AppState, session: Session) -> RegionSettings:
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InputError("words must be a list of words of a prompt")
        add = _decode_image(mask, "mask")
        piece = None if instance == -1 else instance
        keep = _decode_image(protect, "protect")
        strength, quality, seed = repaint
        noise = None if seed == -1 else seed
        if add is not None and (words or piece is not None):
            raise InputError("mask and words (or instance) both say where: give one, or region={'all': [...]}")
        settings = RegionSettings(tuple(words), piece, grow, add, keep, add is not None, strength, quality, noise)
        load_mask = MaskLoader()
        detect = detect_in(state, lambda: session.current.image)
        whole = parse_region(region, load_mask, detect) if region else None
        several = parse_regions(regions, load_mask, detect) if regions else ()
        return replace(settings, region=whole, regions=tuple(several))

    return get_region


def detect_in(state: AppState, get_picture: Callable[[], Image.Image]) -> Detect | None:
    """Return a `Detect` of the app's detector for `parse_region`; it looks once. None without a detector."""
    detector, worker = state.pool.detector, state.worker
    if detector is None:
        return None

    @cache
    def look() -> tuple[Image.Image, list[Detection]]:
        picture = get_picture()
        return picture, worker.call(lambda: list(detector(picture, "")), brief=True)

    def detect(labels: Sequence[str], threshold: float, instance: str) -> Region:
        picture, found = look()
        chosen = find(lambda *_: found, picture, labels=labels, threshold=threshold, instance=instance)
        return union_of(chosen, labels)

    return detect


def lazy_conditions(
    reference: str, reference_scale: float, control: str, control_scale: float, drive: Any, *, edges: bool
) -> Callable[[], Conditions]:
    """Return a function that decodes what adapters read of a program's arguments, called when the run begins."""

    def get_conditions() -> Conditions:
        if not isinstance(edges, bool):
            raise InputError(f"edges must be true or false, got {edges!r:.40}")
        look, where = (
            _decode_bytes(text, name, MAX_REFERENCE_CHARACTERS)
            for text, name in ((reference, "reference"), (control, "control"))
        )
        return Conditions(
            AdapterPicture(look, reference_scale) if look else None,
            AdapterPicture(where, control_scale, edges) if where or edges else None,
            Drive.from_dict(drive) if drive else None,
        )

    return get_conditions


def _decode_image(text: str, what: str) -> Image.Image | None:
    data = _decode_bytes(text, what, MAX_MASK_CHARACTERS)
    return images.decode(data, what).image if data else None


class MaskLoader:
    """Decodes the masks of a request, which together have at most `MAX_PIXELS`."""

    def __init__(self) -> None:
        self._left = MAX_PIXELS

    def __call__(self, text: str) -> Image.Image:
        """The mask of a text of base64. Raises InputError."""
        data = _decode_bytes(text, "mask", MAX_MASK_CHARACTERS)
        if not data:
            raise InputError("mask of a region must be an image as base64, got an empty text")
        mask = images.decode(data, "mask", max_pixels=self._left).image
        self._left = max(1, self._left - mask.width * mask.height)
        return mask


def _decode_bytes(text: str, what: str, most: int) -> bytes:
    if not isinstance(text, str) or len(text) > most:
        raise InputError(f"{what} must be an image as base64 of at most {most} letters")
    return views.decode_base64(text, what)
