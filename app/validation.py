"""What may be asked for, at most: the server's limits on every argument, whoever sends it.

Knows plain values and files' headers; neither sessions nor models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fisedit.errors import FisEditError, InputError, PromptError
from fisedit.storage import images
from fisedit.values import SchedulerName

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_LETTERS, MOST_WORDS, MOST_LORAS = 2_000, 16, 8
STEPS, GUIDANCE, SEEDS, SIDES, GROW = (1, 150), (0.0, 30.0), (0, 2**32 - 1), (64, 1024), (-16, 16)
LORA_SCALE, LOOK_SCALE = (-2.0, 2.0), (0.0, 2.0)
MOST_BYTES, MOST_PIXELS, MOST_SIDE = 32 << 20, 32_000_000, 12_000
"""Of an uploaded picture."""

MOST_RESULTS = 200
"""Pictures of a session."""


class Busy(FisEditError):
    """Everybody is at work, or the session is: try again in a moment."""

    code = "busy"


@dataclass(frozen=True)
class Settings:
    """How a source is made. None for guidance, width and height: the model's own, or what suits an opened picture.

    model: the label of one that the studio offers, "" for the first. loras: labels -> how much they count.
    """

    steps: int = 25
    guidance: float | None = None
    seed: int = 0
    width: int | None = None
    height: int | None = None
    scheduler: str = "ddim"
    negative_prompt: str = ""
    model: str = ""
    loras: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Region:
    """Where an edit may paint.

    Args:
        words: use only these words of either prompt; () for the changed ones. instance: one piece, from the left and 0.
        grow: latent cells; negative shrinks. add: painted over what the words find; where `only` is set, instead of it.
        protect: never to be painted. Both are pictures or boolean grids of the current picture's size, or None.
    """

    words: tuple[str, ...] = ()
    instance: int | None = None
    grow: int = 0
    add: Image | None = None
    protect: Image | None = None
    only: bool = False


@dataclass(frozen=True)
class Look:
    """A picture whose look is taken, as its file's bytes, and how much of it."""

    picture: bytes
    scale: float = 1.0


def label(model: str) -> str:
    """What people call a model that sessions call by its place, and pictures by the last part of that; nothing is
    looked up, as a picture may say anything."""
    last = model.rpartition("/")[2] if model.startswith(("/", "./")) else model
    return "".join(sign if sign.isprintable() else " " for sign in last[:80]).removesuffix(".safetensors")


def checked_prompt(prompt: str) -> str:
    """A prompt without control characters. Raises PromptError for an empty or far too long one."""
    if not isinstance(prompt, str):
        raise PromptError(f"prompt must be text, got {type(prompt).__name__}")
    if len(prompt) > MOST_LETTERS:
        raise PromptError(
            f"prompt must have at most {MOST_LETTERS} letters, got {len(prompt)}; the model reads 75 words"
        )
    plain = "".join(letter if letter.isprintable() else " " for letter in prompt).strip()
    if not plain:
        raise PromptError("prompt must say something; describe the picture")
    return plain


def checked_settings(settings: Settings) -> Settings:
    """Settings within the server's limits. Raises InputError."""
    if not isinstance(settings.negative_prompt, str):
        raise PromptError(f"negative prompt must be text, got {type(settings.negative_prompt).__name__}")
    if len(settings.negative_prompt) > MOST_LETTERS:
        raise PromptError(
            f"negative prompt must have at most {MOST_LETTERS} letters, got {len(settings.negative_prompt)}"
        )
    _within("steps", settings.steps, STEPS, whole=True)
    if settings.guidance is not None:
        _within("guidance", settings.guidance, GUIDANCE)
    _within("seed", settings.seed, SEEDS, whole=True)
    for name, side in (("width", settings.width), ("height", settings.height)):
        if side is not None and _within(name, side, SIDES, whole=True) % 8:
            raise InputError(f"{name} must be divisible by 8, got {side}; use {round(side / 8) * 8}")
    _checked_names(settings)
    if settings.scheduler not in tuple(SchedulerName):
        raise InputError(f"scheduler must be one of {', '.join(SchedulerName)}, got {settings.scheduler!r:.40}")
    return settings


def _checked_names(settings: Settings) -> None:
    """What is chosen by name; whether it is offered, the studio knows."""
    if not isinstance(settings.model, str):
        raise InputError(f"model must be the name of one that is offered, got {settings.model!r:.40}")
    named = isinstance(settings.loras, Mapping) and all(isinstance(label, str) for label in settings.loras)
    if not named or len(settings.loras) > MOST_LORAS:
        raise InputError(f"loras must be at most {MOST_LORAS} names with their scales, got {settings.loras!r:.40}")
    for scale in settings.loras.values():
        _within("lora scale", scale, LORA_SCALE)


def checked_region(region: Region) -> Region:
    """A region within the server's limits. Raises InputError."""
    if len(region.words) > MOST_WORDS or any(len(word) > MOST_LETTERS for word in region.words):
        raise InputError(f"words must be at most {MOST_WORDS} words of a prompt, got {len(region.words)}")
    _within("grow", region.grow, GROW, whole=True)
    if region.instance is not None:
        _within("instance", region.instance, (0, 999), whole=True)
    return region


def checked_look(look: Look | None) -> Image | None:
    """A look's picture. Raises InputError as `checked_picture`, and for a scale out of range."""
    if look is None:
        return None
    _within("scale of the look", look.scale, LOOK_SCALE)
    return checked_picture(look.picture)


def checked_picture(data: bytes) -> Image:
    """The first picture in a file's bytes, whole. Raises InputError for another file, or one too large."""
    if len(data) > MOST_BYTES:
        raise InputError(
            f"picture must have at most {MOST_BYTES >> 20} MiB, got {len(data) / 2**20:.0f}; make it smaller"
        )
    picture = images.decode(data).image
    if picture.width * picture.height > MOST_PIXELS or max(picture.size) > MOST_SIDE:
        limit = f"{MOST_PIXELS // 10**6} million pixels and sides of {MOST_SIDE}"
        raise InputError(f"picture must have at most {limit}, got {picture.width}x{picture.height}; make it smaller")
    return picture


def _within(name: str, value: Any, bounds: tuple[float, float], *, whole: bool = False) -> Any:
    low, high = bounds
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        raise InputError(f"{name} must be a {'whole ' * whole}number in [{low:g}, {high:g}], got {value!r:.40}")
    return value
