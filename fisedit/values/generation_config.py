"""Everything that determines a source, checked: prompt, sampler, size, seed, and how adapters take part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

from fisedit.errors import InputError, PromptError, as_text
from fisedit.values.base import LATENT_FACTOR, MAX_PROMPT_CHARS, are_numbers, is_number
from fisedit.values.drive import Drive
from fisedit.values.schedulers import SchedulerName, num_timesteps
from fisedit.values.sizes import Sizes, make_sizes

if TYPE_CHECKING:
    from fisedit.values.base import Box


class Inversion(StrEnum):
    """Ways from an opened picture to the latents of a source."""

    DDIM = "ddim"
    DDPM = "ddpm"


REFERENCE, CONTROL, DRIVE, MOTION = "reference", "control", "drive", "motion"
"""The inputs that an adapter can read. The first three are arguments of `Editor.edit`: the picture whose look is taken,
the one that says where things are, and a `Drive`. Motion modules read the last one, in clips alone."""


@dataclass(frozen=True)
class AdapterUse:
    """The settings by which a loaded adapter takes part, with diffusers' names.

    Args:
        scale: factor of its effect, -10 to 10.
        control_guidance_start: share of the steps before which the adapter does nothing, 0 to 1.
        control_guidance_end: share of the steps after which it does nothing.
        guess_mode: a ControlNet takes part in the branch with the prompt alone, and its finer maps are fainter.
    """

    scale: float = 1.0
    control_guidance_start: float = 0.0
    control_guidance_end: float = 1.0
    guess_mode: bool = False

    def covers(self, i: int, steps: int) -> bool:
        """Return whether it takes part in the i-th of so many steps, as diffusers decides."""
        return not (i / steps < self.control_guidance_start or (i + 1) / steps > self.control_guidance_end)

    def covered_steps(self, steps: int) -> list[int]:
        """Indices of the steps that it takes part in."""
        return [i for i in range(steps) if self.covers(i, steps)]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; what is as usual is left out, but the scale."""
        usual = type(self)()
        return {name: value for name, value in asdict(self).items() if name == "scale" or value != getattr(usual, name)}


@dataclass(frozen=True)
class SavedAdapter(AdapterUse):
    """An adapter of a session: how it takes part, and what it is loaded with beside its file.

    Args:
        image_encoder: folder of an IP-Adapter's image encoder; "" for the one beside its file.
    """

    image_encoder: str = ""


@dataclass(frozen=True)
class AdapterReference:
    """The input that an adapter reads for a picture: another picture, or a drive.

    Args:
        adapter: identity of the adapter.
        use: how the adapter takes part.
        reference: a digest of what it reads.
        drive: The drive, if it reads one; pictures are kept elsewhere.
    """

    adapter: str
    use: AdapterUse
    reference: str
    drive: Drive | None = None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, as `parse_adapter_references` takes it."""
        drive = {} if self.drive is None else {"drive": self.drive.as_dict()}
        return {"adapter": self.adapter, **self.use.as_dict(), "reference": self.reference, **drive}


@dataclass(frozen=True)
class GenerationConfig:
    """Everything that determines a generated source.

    Args:
        prompt: text, with weights as in `prompts.weighting`; 600 tokens of it are read, 75 in a chunk.
        negative_prompt: text with the same syntax, for the unconditional branch.
        seed: The seed of the CPU generator that draws the first latents and every later noise.
        num_inference_steps: 1 to 999.
        guidance_scale: classifier-free guidance; 1 or less switches it off.
        width: pixels, 64 to 2048, divisible by 8.
        height: pixels, 64 to 2048, divisible by 8.
        scheduler: the sampler.
        inversion: how the latents of a source that was opened were found; None for a generated one.
        like: the references whose look it takes; () for none.
        loras: names and scales of the LoRAs in the model.
        clip_skip: layers of the text encoder that are left out at its end for the prompt, 0 to 11. As in diffusers, it
            does not hold for the negative one. What web UIs call clip skip is one more.
        textual_inversions: words of the prompts whose embeddings come from files, each as "word:digest of the file".
        crop: left, top, right and bottom in pixels of the part of an opened picture that is painted on; None for all.
        negative_clip_skip: layers that are left out for the negative prompt; in web UIs as many as clip_skip.
        sizes: The sizes that Stable Diffusion XL is told in place of the picture's own; None for these.
    """

    prompt: str
    seed: int
    negative_prompt: str
    num_inference_steps: int
    guidance_scale: float
    width: int
    height: int
    scheduler: SchedulerName
    inversion: Inversion | None = None
    like: tuple[AdapterReference, ...] = ()
    loras: tuple[tuple[str, float], ...] = ()
    clip_skip: int = 0
    textual_inversions: tuple[str, ...] = ()
    crop: Box | None = None
    negative_clip_skip: int = 0
    sizes: Sizes | None = None

    @property
    def opened(self) -> bool:
        """Return whether the source is a picture that was opened."""
        return self.inversion is not None

    @property
    def num_timesteps(self) -> int:
        """Evaluations of the UNet, one for each of the sampler's timesteps. Heun and PNDM have more than steps."""
        return num_timesteps(self.scheduler, self.num_inference_steps)

    @property
    def guided(self) -> bool:
        """Return whether the UNet runs both branches of classifier-free guidance."""
        return self.guidance_scale > 1.0


def level_grids(config: GenerationConfig, num_levels: int) -> list[tuple[int, int]]:
    """Sizes of a config's maps.

    Args:
        config: The picture's settings.
        num_levels: The number of the UNet's levels.

    Returns:
        (height, width) of every level, finest first.
    """
    grids = [(config.height // LATENT_FACTOR, config.width // LATENT_FACTOR)]
    while len(grids) < num_levels:
        height, width = grids[-1]
        grids.append((-(-height // 2), -(-width // 2)))
    return grids


E = TypeVar("E", bound=StrEnum)


STEPS = (1, 999)


SIDE = (64, 2048)


SEEDS = (0, 2**63 - 1)


def next_seed(seed: int) -> int:
    """The seed after one, for noise that shall be another."""
    return (seed + 1) % (SEEDS[1] + 1)


CLIP_SKIPS = (0, 11)


MAX_CROP = 2**24


_LARGEST_FACTOR = 1e9
_OPTIONAL = ("like", "loras", "clip_skip", "textual_inversions", "crop", "negative_clip_skip", "sizes")


def make_generation_config(prompt: str, **settings: Any) -> GenerationConfig:
    """A config whose every value is in range.

    Args:
        prompt: text; "" is allowed for an opened picture alone.
        settings: the other fields of `GenerationConfig`, as JSON or the public face has them.

    Raises:
        PromptError: an empty or all-space prompt, or no text at all.
        InputError: steps, guidance, size, seed, scheduler or inversion out of range.
        TypeError: a field that is missing, or that there is not.
    """
    checked = {name: _CHECKS[name](value) if name in _CHECKS else value for name, value in settings.items()}
    return GenerationConfig(prompt if settings.get("inversion") and prompt == "" else check_prompt(prompt), **checked)


def config_to_dict(config: GenerationConfig) -> dict[str, Any]:
    """The arguments of `make_generation_config`, JSON-ready; most fields are left out if empty."""
    entries = asdict(config) | {"like": [reference.as_dict() for reference in config.like]}
    entries["sizes"] = config.sizes.as_dict() if config.sizes else None
    return {name: value for name, value in entries.items() if value or name not in _OPTIONAL}


def check_seed(seed: int) -> int:
    """The seed of a CPU generator, 0 to 2^63 - 1. Raises InputError for another value."""
    return check_integer("seed", seed, SEEDS)


def check_prompt(prompt: str) -> str:
    """The prompt, if it says anything. Raises PromptError otherwise."""
    if not isinstance(prompt, str):
        raise PromptError(f"prompt must be text, got {type(prompt).__name__}")
    if not prompt.strip():
        raise PromptError(f"prompt must say something, got {prompt[:80]!r}; describe the picture")
    return _check_text("prompt", prompt)


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text. It cannot encode lone surrogates, such as undecodable bytes of an
    argument become."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _check_text(name: str, text: str) -> str:
    if len(text) > MAX_PROMPT_CHARS:
        raise PromptError(f"{name} must have at most {MAX_PROMPT_CHARS} letters, got {len(text)}; 600 tokens are read")
    if not is_unicode(text):
        raise PromptError(f"{name} must be Unicode text, got {text!a}; remove its undecodable bytes")
    return text


def parse_adapter_references(like: Sequence[Mapping[str, Any]]) -> tuple[AdapterReference, ...]:
    """Adapter references from their JSON. Raises InputError for a value out of range, TypeError for a missing one."""
    return tuple(_adapter_reference(**entry) for entry in like)


def _adapter_reference(
    adapter: str, scale: float, reference: str, drive: object = None, **use: Any
) -> AdapterReference:
    if not (isinstance(adapter, str) and isinstance(reference, str)):
        raise InputError(f"a likeness must name its adapter and reference, got {as_text((adapter, reference))}")
    made = None if drive is None else Drive.from_dict(drive)
    if made is not None and made.digest != reference:
        raise InputError(f"a drive's digest must be {made.digest}, got {as_text(reference, 40)}")
    return AdapterReference(adapter, make_adapter_use(scale=scale, **use), reference, made)


def make_adapter_use(
    scale: Any = 1.0, control_guidance_start: Any = 0.0, control_guidance_end: Any = 1.0, guess_mode: Any = False
) -> AdapterUse:
    """Return an adapter's settings after a check. Raises InputError for a value out of range."""
    start, end = (
        _share(name, value)
        for name, value in (
            ("control_guidance_start", control_guidance_start),
            ("control_guidance_end", control_guidance_end),
        )
    )
    if start >= end:
        raise InputError(f"control_guidance_start must be less than control_guidance_end, got {start:g} and {end:g}")
    if not isinstance(guess_mode, bool):
        raise InputError(f"guess_mode must be True or False, got {as_text(guess_mode, 40)}")
    return AdapterUse(check_scale(scale), start, end, guess_mode)


def _share(name: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value <= 1:
        raise InputError(f"{name} must be a share of the steps, 0 to 1, got {as_text(value, 40)}")
    return float(value)


def make_lora_entry(name: object, scale: object) -> tuple[str, float]:
    """Return what a config records of a LoRA, checked.

    Args:
        name: The LoRA's name.
        scale: The LoRA's scale in a layer, alpha / rank of its file included.

    Raises:
        InputError: no name, or no such number.
    """
    if not isinstance(name, str):
        raise InputError(f"a LoRA must have a name, got {as_text(name)}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= _LARGEST_FACTOR:
        raise InputError(f"a LoRA's scale must be a number up to 1e9, got {as_text(scale)}")
    return name, float(scale)


def _textual_inversion(name: str) -> str:
    if not isinstance(name, str):
        raise InputError(f"a textual inversion must have a name, got {as_text(name)}")
    return name


def _crop(value: Any) -> Box:
    if not are_numbers(value, 4):
        raise InputError(f"crop must be left, top, right and bottom, got {as_text(value)}")
    left, top, right, bottom = (check_integer("crop", side, (0, MAX_CROP)) for side in value)
    if left >= right or top >= bottom:
        raise InputError(f"crop must have left < right and top < bottom, got {as_text(value)}")
    return left, top, right, bottom


def check_scale(scale: Any) -> float:
    """An adapter's scale, if it is a number in range. Raises InputError otherwise."""
    if not is_number(scale) or not -10 <= scale <= 10:
        raise InputError(
            f"scale must be a number in [-10, 10], got {as_text(scale)}; 1 is what an adapter was trained for"
        )
    return float(scale)


def check_integer(name: str, value: Any, bounds: tuple[int, int]) -> int:
    """A whole number, if it is one in range. Raises InputError otherwise.

    Args:
        name: for the message.
        value: an int, or one of numpy's.
        bounds: least and greatest.
    """
    low, high = bounds
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise InputError(f"{name} must be a whole number in [{low}, {high}], got {as_text(value)}")
    return number


def _guidance(value: Any) -> float:
    if not is_number(value) or not 0 <= value <= 100:
        raise InputError(f"guidance_scale must be in [0, 100], got {as_text(value)}; 7.5 is usual, 1 switches it off")
    return float(value)


def _side(name: str, value: int) -> int:
    side = check_integer(name, value, SIDE)
    if side % LATENT_FACTOR:
        nearest = round(side / LATENT_FACTOR) * LATENT_FACTOR
        raise InputError(f"{name} must be divisible by {LATENT_FACTOR}, got {side}; use {nearest}")
    return side


def _enum_value(name: str, value: str, kind: type[E]) -> E:
    try:
        return kind(value)
    except ValueError as error:
        raise InputError(f"{name} must be one of {', '.join(kind)}, got {as_text(value)}") from error


def _negative_prompt(value: Any) -> str:
    if not isinstance(value, str):
        raise PromptError(f"negative_prompt must be text, got {type(value).__name__}; leave it out for none")
    return _check_text("negative_prompt", value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "negative_prompt": _negative_prompt,
    "seed": check_seed,
    "num_inference_steps": lambda value: check_integer("num_inference_steps", value, STEPS),
    "guidance_scale": _guidance,
    "width": lambda value: _side("width", value),
    "height": lambda value: _side("height", value),
    "clip_skip": lambda value: check_integer("clip_skip", value, CLIP_SKIPS),
    "negative_clip_skip": lambda value: check_integer("negative_clip_skip", value, CLIP_SKIPS),
    "sizes": make_sizes,
    "scheduler": lambda value: _enum_value("scheduler", value, SchedulerName),
    "inversion": lambda value: None if value is None else _enum_value("inversion", value, Inversion),
    "like": parse_adapter_references,
    "loras": lambda value: tuple(make_lora_entry(*entry) for entry in value),
    "textual_inversions": lambda value: tuple(_textual_inversion(entry) for entry in value),
    "crop": lambda value: None if value is None else _crop(value),
}
"""Field of a `GenerationConfig` -> what checks and converts it."""
