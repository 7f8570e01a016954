"""The server's limits on every argument, of the page and of the HTTP API alike.

Knows plain values and files' headers; neither sessions nor models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fisedit.adapters.control_pictures import canny
from fisedit.errors import FisEditError, InputError, PromptError
from fisedit.masking.region import Region
from fisedit.prompts.syntax import take_loras
from fisedit.storage import images
from fisedit.values import CLIP_SKIPS, LATENT_FACTOR, SEEDS, Quality, SchedulerName, check_quality
from fisedit.values.drive import Drive
from fisedit.values.sizes import Sizes, make_sizes

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.values import Box

MAX_PROMPT_CHARACTERS, MAX_WORDS, MAX_LORAS = 2_000, 16, 8
STEPS, GUIDANCE, SIDES, GROW = (1, 150), (0.0, 30.0), (64, 1536), (-16, 16)
COUNTS = (1, 4)
"""Candidates of a run, at least and at most."""

MAX_CANVAS = 1024 * 1024
"""Pixels of a new picture: those of Stable Diffusion XL's squares and portraits."""

DRAWN_SEEDS, PAGE_SEEDS = 2**32, (0, 2**53 - 1)
"""Number of seeds that are drawn of, and the seeds that a browser's numbers hold exactly; others come by JSON."""

LORA_SCALE, REFERENCE_SCALE, STRENGTH = (-2.0, 2.0), (0.0, 2.0), (0.0, 1.0)
FEATHER, EXTENSION = (0, 16), (0, 1024)
MAX_BYTES, MAX_PIXELS, MAX_SIDE = 32 << 20, 32_000_000, 12_000
"""Limits of an uploaded picture: bytes, pixels, pixels of a side."""

MAX_RESULTS = 200
"""Pictures of a session."""

MAX_PICTURE_BYTES = 1 << 30
"""Decoded pictures in memory: of one session, and of all of them together, beyond which idle ones wait on disk."""


class PartNotOpened(InputError):
    """A region lies on a part of a large picture that is not open; an edit opens it.

    Args:
        part: The part, in pixels of the picture.
    """

    def __init__(self, part: Box) -> None:
        left, top, right, bottom = part
        super().__init__(
            f"Run first opens this part of the picture, {right - left}x{bottom - top} pixels, at full resolution"
        )
        self.part = part


class Busy(FisEditError):
    """The app or the session is at work: try again in a moment."""

    code = "busy"


@dataclass(frozen=True)
class SourceSettings:
    """The settings of a source.

    Args:
        steps: denoising steps, 1 to 150.
        guidance: scale of classifier-free guidance, 0 to 30; None for the model's own.
        seed: seed of the first noise, 0 to 2**63 - 1.
        width: in pixels, 64 to 1536, divisible by 8; None for the model's own, or what suits an opened picture.
        height: in pixels, 64 to 1536, divisible by 8; None for the model's own, or what suits an opened picture.
        scheduler: a `SchedulerName`.
        negative_prompt: what the picture should not show.
        model: the label of an offered one, "" for the first.
        loras: labels of offered ones -> their scales, -2 to 2.
        clip_skip: layers of the text encoder that are left out, 0 to 11.
        negative_clip_skip: those that are left out for the negative prompt.
        sizes: sizes that models such as XL are told, as `make_sizes` takes them; None for the picture's own.
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
    clip_skip: int = 0
    negative_clip_skip: int = 0
    sizes: Sizes | Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class RegionSettings:
    """The place where an edit may paint, and how much of it.

    Args:
        words: use only these words of either prompt; () for the changed ones.
        instance: index of one piece of the mask, counted from the left and 0; None for all.
        grow: latent cells (8 pixels) of dilation, -16 to 16; negative erodes.
        add: a picture of the current one's size, white where the edit may paint too; None for nowhere.
        protect: a picture of the current one's size, white where the edit never paints; None for nowhere.
        only: whether the edit paints what `add` and `inside` mark and nothing else.
        strength: share of the steps to run, above 0 to 1; less keeps more of what was there.
        quality: how near the edit comes to a dense one, for its time.
        seed: seed of other noise in the region, 0 to 2**63 - 1; None for the picture's.
        feather: latent cells of a soft border inside it, 0 to 16.
        region: what is meant as a whole, instead of words, instance and `add`; None for those.
        regions: each with a prompt of its own, at most 16, instead of all of those; () for one prompt.
        inside: points (x, y) in pixels of things that the edit may paint too.
        outside: points of things that belong to none of those.
        things: numbers of what a detector found in the picture; they are edited, and nothing but what is marked.
        found: where those are; None for nowhere.
    """

    words: tuple[str, ...] = ()
    instance: int | None = None
    grow: int = 0
    add: Image | None = None
    protect: Image | None = None
    only: bool = False
    strength: float = 1.0
    quality: str = Quality.BALANCED
    seed: int | None = None
    feather: int = 0
    region: Region | None = None
    regions: tuple[tuple[Region, str], ...] = ()
    inside: tuple[tuple[float, float], ...] = ()
    outside: tuple[tuple[float, float], ...] = ()
    things: tuple[int, ...] = ()
    found: Region | None = None

    @property
    def marked(self) -> Region | None:
        """The region that `add`, points and a detector mark; None for nothing.

        Strokes grow only where nothing else is edited.
        """
        marks = [] if self.add is None else [Region.mask(self.add).grow(self.grow if self.only else 0)]
        marks += [Region.points(*self.inside, outside=self.outside).grow(self.grow)] if self.inside else []
        marks += [] if self.found is None else [self.found.grow(self.grow)]
        return Region.union(marks) if marks else None


@dataclass(frozen=True)
class AdapterPicture:
    """A picture that adapters read.

    Args:
        picture: its file's bytes; b"" with `edges` for the picture that is edited.
        scale: scale of the adapters, 0 to 2.
        edges: adapters read the picture's edges.
    """

    picture: bytes
    scale: float = 1.0
    edges: bool = False


@dataclass(frozen=True)
class Conditions:
    """The pictures and the drive that adapters read.

    Args:
        reference: the picture whose appearance is taken, or None.
        control: the picture that says where things are, or None.
        drive: a head's pose and expression, or None.
    """

    reference: AdapterPicture | None = None
    control: AdapterPicture | None = None
    drive: Drive | None = None


NO_CONDITIONS = Conditions()


def label(model: str) -> str:
    """A model's name for users: the last part of its place. Nothing is looked up, as a picture may name anything."""
    last = model.rpartition("/")[2] if model.startswith(("/", "./")) else model
    return "".join(sign if sign.isprintable() else " " for sign in last[:80]).removesuffix(".safetensors")


def clean_prompt(prompt: str) -> str:
    """A prompt without control characters. Raises PromptError for an empty or far too long one."""
    if not isinstance(prompt, str):
        raise PromptError(f"prompt must be text, got {type(prompt).__name__}")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise PromptError(
            f"prompt must have at most {MAX_PROMPT_CHARACTERS} letters, got {len(prompt)}; 600 tokens are read"
        )
    text = printable(prompt)
    if not text:
        raise PromptError("prompt must say something; describe the picture")
    return text


def apply_lora_tags(prompt: str, settings: SourceSettings) -> tuple[str, SourceSettings]:
    """A prompt without its tags of LoRAs, `<lora:label:0.8>`, and settings that apply them.

    Args:
        prompt: the prompt as it was given.
        settings: the others.

    Raises:
        PromptError: a tag that cannot be read. InputError: a LoRA that the settings name with another scale.
    """
    text, tagged = take_loras(prompt) if isinstance(prompt, str) else (prompt, {})
    for label, scale in tagged.items():
        if (chosen := settings.loras.get(label, scale)) != scale:
            raise InputError(f"the LoRA {label[:80]} must have one scale, got {scale:g} and {chosen!r:.40}")
    return text, replace(settings, loras={**settings.loras, **tagged}) if tagged else settings


def printable(prompt: str) -> str:
    """The text that `clean_prompt` makes of a prompt, without its checks: to compare it with the prompt of a result."""
    return "".join(character if character.isprintable() else " " for character in prompt).strip()


def check_settings(settings: SourceSettings) -> SourceSettings:
    """SourceSettings within the server's limits. Raises InputError."""
    if not isinstance(settings.negative_prompt, str):
        raise PromptError(f"negative prompt must be text, got {type(settings.negative_prompt).__name__}")
    if len(settings.negative_prompt) > MAX_PROMPT_CHARACTERS:
        raise PromptError(
            f"negative prompt must have at most {MAX_PROMPT_CHARACTERS} letters, got {len(settings.negative_prompt)}"
        )
    _within("steps", settings.steps, STEPS, whole=True)
    if settings.guidance is not None:
        _within("guidance", settings.guidance, GUIDANCE)
    _within("seed", settings.seed, SEEDS, whole=True)
    _within("clip_skip", settings.clip_skip, CLIP_SKIPS, whole=True)
    _within("negative_clip_skip", settings.negative_clip_skip, CLIP_SKIPS, whole=True)
    make_sizes(settings.sizes)
    for name, side in (("width", settings.width), ("height", settings.height)):
        if side is not None and _within(name, side, SIDES, whole=True) % 8:
            raise InputError(f"{name} must be divisible by 8, got {side}; use {round(side / 8) * 8}")
    if (settings.width or 0) * (settings.height or 0) > MAX_CANVAS:
        got = f"{settings.width}x{settings.height}"
        raise InputError(f"a new picture must have at most {MAX_CANVAS} pixels, got {got}; use 1024x1024, or 1536x680")
    _check_names(settings)
    try:
        SchedulerName(settings.scheduler)
    except ValueError as error:
        names = ", ".join(SchedulerName)
        raise InputError(f"scheduler must be one of {names}, got {settings.scheduler!r:.40}") from error
    return settings


def _check_names(settings: SourceSettings) -> None:
    """Check the types of the names; the model pool checks whether they are offered."""
    if not isinstance(settings.model, str):
        raise InputError(f"model must be the name of one that is offered, got {settings.model!r:.40}")
    named = isinstance(settings.loras, Mapping) and all(isinstance(label, str) for label in settings.loras)
    if not named or len(settings.loras) > MAX_LORAS:
        raise InputError(f"loras must be at most {MAX_LORAS} names with their scales, got {settings.loras!r:.40}")
    for scale in settings.loras.values():
        _within("lora scale", scale, LORA_SCALE)


def check_count(count: int) -> int:
    """Return a batch count within the server's limits. Raises InputError."""
    return int(_within("batch count", count, COUNTS, whole=True))


def check_region(region: RegionSettings) -> RegionSettings:
    """A region within the server's limits. Raises InputError."""
    if len(region.words) > MAX_WORDS or any(len(word) > MAX_PROMPT_CHARACTERS for word in region.words):
        raise InputError(f"words must be at most {MAX_WORDS} words of a prompt, got {len(region.words)}")
    _within("grow", region.grow, GROW, whole=True)
    _within("feather", region.feather, FEATHER, whole=True)
    _within("strength", region.strength, STRENGTH)
    check_quality(region.quality)
    if region.seed is not None:
        _within("seed", region.seed, SEEDS, whole=True)
    if region.instance is not None:
        _within("instance", region.instance, (0, 999), whole=True)
    whole = (region.region is not None) + bool(region.regions)
    if whole + bool(region.words or region.instance is not None or region.marked is not None) > 1:
        raise InputError("give one of region, regions, and a mask with words, got several; a region joins them")
    if region.regions and (region.grow or region.feather or region.protect is not None):
        raise InputError("regions have grow and feather of their own, got others; say them inside each region")
    return replace(region, regions=tuple((each, clean_prompt(prompt)) for each, prompt in region.regions))


def grow_bound(canvas: tuple[int, int]) -> int:
    """Latent cells that the page lets a region grow or shrink by: a quarter of the canvas's shorter side.

    Args:
        canvas: width and height in pixels.
    """
    return min(GROW[1], max(1, min(canvas) // LATENT_FACTOR // 4))


def check_extension(widths: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Pixels to add at the left, top, right and bottom of a picture of a size. Raises InputError."""
    for width in widths:
        _within("extension", width, EXTENSION, whole=True)
    if not any(widths):
        raise InputError("extend the picture at one side at least, got none; give pixels")
    width, height = size[0] + widths[0] + widths[2], size[1] + widths[1] + widths[3]
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        most = f"at most {MAX_SIDE} pixels at a side and {MAX_PIXELS // 10**6} million in all"
        raise InputError(f"a picture must have {most}, got {width}x{height}; extend it by less")
    return widths


def decode_adapter_picture(picture: AdapterPicture, name: str) -> Image | None:
    """A picture that adapters read, or its edges; None for the edges of the picture that is edited.

    Args:
        picture: the picture as it was given.
        name: "reference" or "control".

    Raises:
        InputError: as `decode_picture`, and for a scale out of range.
    """
    _within(f"scale of the {name}", picture.scale, REFERENCE_SCALE)
    if picture.edges and not picture.picture:
        return None
    decoded = decode_picture(picture.picture)
    return canny(decoded) if picture.edges else decoded


def decode_picture(data: bytes) -> Image:
    """The first picture in a file's bytes, whole. Raises InputError for another file, or one too large."""
    if len(data) > MAX_BYTES:
        raise InputError(
            f"picture must have at most {MAX_BYTES >> 20} MiB, got {len(data) / 2**20:.0f}; make it smaller"
        )
    picture = images.decode(data, max_pixels=MAX_PIXELS).image
    if max(picture.size) > MAX_SIDE:
        limit = f"sides of at most {MAX_SIDE} pixels"
        raise InputError(f"picture must have {limit}, got {picture.width}x{picture.height}; make it smaller")
    return picture


def _within(name: str, value: Any, bounds: tuple[float, float], *, whole: bool = False) -> Any:
    low, high = bounds
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        raise InputError(
            f"{name} must be a {'whole ' * whole}number in [{_plain(low)}, {_plain(high)}], got {value!r:.40}"
        )
    return value


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"
