"""Frozen values that cross module borders. Knows numpy and PIL, and neither torch nor any model.

Shape legend, used in every docstring of the package:

    B   batch: guidance branches times edits            h, w  latent grid (image / 8)
    C   channels                                        H, W  a feature map's grid, or image pixels
    R   active rows of a level                          T     text tokens
    G   halo rows of a level (read, not computed)       N     steps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import nextafter
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import numpy as np

from fisedit.drive import Drive
from fisedit.errors import InputError, PromptError

if TYPE_CHECKING:
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

DENSE_STEP = 64
"""In the dilations of an edit's steps: this step is dense. It computes the whole latent grid, and the sparse steps
after it read the recorded features shifted by what it found changed outside the mask."""


MAX_PROMPT_CHARS = 100_000
"""Letters of a prompt, of which 600 tokens are read."""

C = TypeVar("C", bound=type)


def copy_on_read(*names: str) -> Callable[[C], C]:
    """Let a frozen dataclass hand out some of its fields as copies, so that what a caller writes to them is not kept.

    Args:
        names: Of fields that have a method `copy`, or are None.
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


class SchedulerName(StrEnum):
    """Samplers, each run by diffusers' own class. Web UIs' names, such as "DPM++ 2M Karras", are understood as well."""

    DDIM = "ddim"
    DDIM_TRAILING = "ddim_trailing"
    DPM_SOLVER = "dpmsolver++"
    DPM_SOLVER_KARRAS = "dpmsolver++_karras"
    DPM_SOLVER_SDE = "dpmsolver++_sde"
    DPM_SOLVER_SDE_KARRAS = "dpmsolver++_sde_karras"
    DPM_SDE = "dpm_sde"
    DPM_SDE_KARRAS = "dpm_sde_karras"
    EULER = "euler"
    EULER_TRAILING = "euler_trailing"
    EULER_ANCESTRAL = "euler_a"
    HEUN = "heun"
    PNDM = "pndm"
    UNIPC = "unipc"
    LCM = "lcm"
    TCD = "tcd"

    @classmethod
    def _missing_(cls, value: object) -> SchedulerName | None:
        return _SCHEDULER_OF_LABEL.get(value.casefold()) if isinstance(value, str) else None

    @property
    def label(self) -> str:
        """Its name in web UIs."""
        return SCHEDULER_LABELS[self]


SCHEDULER_LABELS = {
    SchedulerName.DDIM: "DDIM",
    SchedulerName.DDIM_TRAILING: "DDIM trailing",
    SchedulerName.DPM_SOLVER: "DPM++ 2M",
    SchedulerName.DPM_SOLVER_KARRAS: "DPM++ 2M Karras",
    SchedulerName.DPM_SOLVER_SDE: "DPM++ 2M SDE",
    SchedulerName.DPM_SOLVER_SDE_KARRAS: "DPM++ 2M SDE Karras",
    SchedulerName.DPM_SDE: "DPM++ SDE",
    SchedulerName.DPM_SDE_KARRAS: "DPM++ SDE Karras",
    SchedulerName.EULER: "Euler",
    SchedulerName.EULER_TRAILING: "Euler trailing",
    SchedulerName.EULER_ANCESTRAL: "Euler a",
    SchedulerName.HEUN: "Heun",
    SchedulerName.PNDM: "PLMS",
    SchedulerName.UNIPC: "UniPC",
    SchedulerName.LCM: "LCM",
    SchedulerName.TCD: "TCD",
}
"""Names of the schedulers in web UIs."""

_SCHEDULER_OF_LABEL = {label.casefold(): name for name, label in SCHEDULER_LABELS.items()} | {
    "ddimscheduler": SchedulerName.DDIM,
    "dpmsolvermultistepscheduler": SchedulerName.DPM_SOLVER,
    "eulerdiscretescheduler": SchedulerName.EULER,
    "eulerancestraldiscretescheduler": SchedulerName.EULER_ANCESTRAL,
    "heundiscretescheduler": SchedulerName.HEUN,
    "pndmscheduler": SchedulerName.PNDM,
    "unipcmultistepscheduler": SchedulerName.UNIPC,
    "lcmscheduler": SchedulerName.LCM,
    "tcdscheduler": SchedulerName.TCD,
}
"""Names of web UIs and of diffusers' classes, without case -> the scheduler."""


class Inversion(StrEnum):
    """Ways from an opened picture to the latents of a source."""

    DDIM = "ddim"
    DDPM = "ddpm"


class Quality(StrEnum):
    """How near an edit comes to the dense blended one, against its time (`sparse.cost_model.FIRST_SCHEDULE`)."""

    FAST = "fast"
    BALANCED = "balanced"
    CLOSE = "close"


class EditKind(StrEnum):
    """What a prompt edit is; GLOBAL edits have no region and run dense."""

    IDENTICAL = "identical"
    REPLACE = "replace"
    INSERT = "insert"
    DELETE = "delete"
    REWEIGHT = "reweight"
    GLOBAL = "global"
    MIXED = "mixed"


class MaskSource(StrEnum):
    """Where a mask came from."""

    GIVEN = "given"
    ATTENTION = "attention"
    EVERYWHERE = "everywhere"
    NOWHERE = "nowhere"


@dataclass(frozen=True)
class Word:
    """One word of a prompt: its text, character span [start, end), the positions of its tokens in CLIP's sequence (the
    start token is position 0, so a prompt's first word begins at 1), and how much it counts. Truncated words have no
    tokens."""

    text: str
    start: int
    end: int
    tokens: tuple[int, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class Hunk:
    """One changed place: `old` words of the source prompt become `new` words. `focus_old` and `focus_new` are the words
    whose attention shows where (the noun for a changed adjective)."""

    kind: EditKind
    old: tuple[Word, ...]
    new: tuple[Word, ...]
    focus_old: tuple[Word, ...]
    focus_new: tuple[Word, ...]


@dataclass(frozen=True)
class EditScript:
    """What turns `source_prompt` into `prompt`; empty `hunks` means that nothing changed."""

    source_prompt: str
    prompt: str
    kind: EditKind
    hunks: tuple[Hunk, ...]
    reason: str = ""

    def __str__(self) -> str:
        """One line for people: `cat -> dog; + a hat; cake -> (cake:1.4)`."""
        return "; ".join(_hunk_text(h) for h in self.hunks) or self.kind.value


def _hunk_text(hunk: Hunk) -> str:
    old, new = (" ".join(map(_word_text, words)) for words in (hunk.old, hunk.new))
    if old and new:
        return f"{old} -> {new}"
    return f"+ {new}" if new else f"- {old}"


def _word_text(word: Word) -> str:
    return word.text if word.weight == 1 else f"({word.text}:{word.weight:.3g})"


def cell_pixels(grid: BoolGrid, size: tuple[int, int], crop: Box | None = None) -> BoolGrid:
    """The pixels of a picture that a grid of cells covers: those whose centre lies in a cell of the grid.

    Compositing, and every check of what an edit left unchanged, use this function.

    Args:
        grid: Booleans [h, w].
        size: Width and height of the picture in pixels, of any ratio to the grid.
        crop: The part of the picture that the grid lies over; None for all of it.

    Returns:
        Booleans [height, width].
    """
    left, top, right, bottom = crop or (0, 0, *size)
    columns, rows = (
        (2 * np.arange(n) + 1) * cells // (2 * n)
        for n, cells in zip((right - left, bottom - top), grid.shape[::-1], strict=True)
    )
    pixels = np.zeros(size[::-1], bool)
    pixels[top:bottom, left:right] = grid[np.ix_(rows, columns)]
    return pixels


@dataclass(frozen=True, eq=False)
class ActiveCells:
    """The latent cells that an edit changes, by step: all of a mask at once, or of a soft mask those that have joined.

    Differential Diffusion (arXiv 2306.00950) defines when: a cell that may change by a share of the steps joins where
    an edit of that strength would begin, and is the source's until then.

    Args:
        grid: booleans [h, w], the cells that join at any step.
        entry: index of the first step of every cell [h, w], N where it has none; None where all begin together.
    """

    grid: BoolGrid
    entry: NDArray[np.int64] | None = None

    @property
    def start(self) -> int:
        """Index of the first step with a cell."""
        return 0 if self.entry is None else int(self.entry.min())

    def at(self, step: int) -> BoolGrid:
        """The cells that have joined at a step: booleans [h, w]."""
        return self.grid if self.entry is None else self.entry <= step

    def joining(self, step: int, start: int) -> BoolGrid:
        """The cells that join at a step: booleans [h, w]; all of them at `start` where they begin together."""
        return self.grid & (step == start) if self.entry is None else self.entry == step

    def stage(self, step: int) -> int:
        """A number that is equal for steps with the same cells."""
        return 0 if self.entry is None else int((self.entry <= step).sum())


MAX_REGIONS = 16
"""Regions of one edit that may have prompts of their own."""


@dataclass(frozen=True, eq=False)
class RegionalPrompt:
    """Words of their own for a part of an edit's mask.

    Args:
        prompt: text, with weights as in `models.prompt_weighting`.
        grid: booleans [h, w], the latent cells that attend to it.
    """

    prompt: str
    grid: BoolGrid = field(repr=False)


@dataclass(frozen=True, eq=False)
class EditRun:
    """How an edit was computed: beside its config and its mask, what it takes to compute it again.

    Args:
        growth: latent cells computed beyond the mask at each step, or `DENSE_STEP`; () where the run was dense.
        structure: share of the steps that may inject the source's attention which did, 0 to 1.
        start: so many first steps are the parent's.
        checked: whether it was checked for drift, which moves roundings.
        erased: whether cells inside the mask did not attend to one another.
        regional: cells that attended to prompts of their own.
    """

    growth: tuple[int, ...] = ()
    structure: float = 0.0
    start: int = 0
    checked: bool = False
    erased: bool = False
    regional: tuple[RegionalPrompt, ...] = ()

    @property
    def needs_mask(self) -> bool:
        """Whether every step ran inside the mask, since nothing else would have been the same picture."""
        return self.erased or bool(self.regional)


def entry_steps(levels: NDArray[np.uint8], steps: int) -> NDArray[np.int64]:
    """Index of the step at which every cell of a soft mask joins, as `first_step` has it for one strength.

    Args:
        levels: uint8 [h, w], 255 for the first step.
        steps: N.

    Returns:
        [h, w], 0 to N; N for cells that never join.
    """
    return steps - (steps * levels.astype(np.int64)) // 255


def soft_levels(levels: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Levels uint8 [h, w] as an `EditMask` has them: None for those of a hard mask, 0 and 255 alone."""
    return None if ((levels == 0) | (levels == 255)).all() else levels


@dataclass(frozen=True, eq=False)
class EditMask:
    """Latent cells that may change. Its arrays cannot be written to.

    Args:
        grid: booleans [h, w], one per latent cell (8x8 pixels).
        source: where it came from.
        confidence: 0 to 1; the share of regions that were right where attention separated inside from outside as well,
            on the demo model (`masking.masks.confidence`); 1 for a given mask.
        heatmap: the map behind it, floats [h, w] in 0 to 1, or None.
        other_objects: cells [h, w] of things that stay, where words tell, or None.
        levels: of a soft mask how much every cell may change, uint8 [h, w]: 255 as much as a hard mask's, 0 outside
            `grid`; None for a hard one.
    """

    grid: BoolGrid = field(repr=False)
    source: MaskSource
    confidence: float = 1.0
    heatmap: NDArray[np.float32] | None = field(default=None, repr=False)
    other_objects: BoolGrid | None = field(default=None, repr=False)
    levels: NDArray[np.uint8] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Copy the arrays to memory that nothing can write to."""
        for name in ("grid", "heatmap", "other_objects", "levels"):
            array = getattr(self, name)
            if array is not None:
                frozen = np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
                object.__setattr__(self, name, frozen)

    @property
    def area(self) -> float:
        """Share of latent cells inside, 0 to 1."""
        return float(self.grid.mean())

    @property
    def raster(self) -> NDArray[Any]:
        """One pixel a cell [h, w], for a file: booleans, or the levels of a soft mask."""
        return self.grid if self.levels is None else self.levels

    def cells(self, steps: int) -> ActiveCells:
        """The cells that an edit of so many steps computes at each of them.

        Args:
            steps: N, 1 or more.
        """
        return ActiveCells(self.grid, None if self.levels is None else entry_steps(self.levels, steps))

    @property
    def heat(self) -> NDArray[np.float32] | None:
        """`heatmap`, by the name that it had in 0.1.0."""
        return self.heatmap

    @property
    def others(self) -> BoolGrid | None:
        """`other_objects`, by the name that it had in 0.1.0."""
        return self.other_objects

    def image(self) -> Image:
        """The mask at canvas size: mode "L", 255 inside (of a soft mask its levels), 0 outside, [8h, 8w] pixels."""
        from PIL import Image as PIL

        levels = self.grid.astype(np.uint8) * 255 if self.levels is None else self.levels
        return PIL.fromarray(np.kron(levels, np.ones((LATENT_FACTOR, LATENT_FACTOR), np.uint8)), mode="L")


REFERENCE, CONTROL, DRIVE = "reference", "control", "drive"
"""Arguments of `Editor.edit` that an adapter reads: the picture whose look is taken, the one that says where things
are, and a `Drive`."""


@dataclass(frozen=True)
class AdapterUse:
    """How a loaded adapter takes part, with diffusers' names.

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
        """Whether it takes part in the i-th of so many steps, as diffusers decides."""
        return not (i / steps < self.control_guidance_start or (i + 1) / steps > self.control_guidance_end)

    def covered_steps(self, steps: int) -> list[int]:
        """Indices of the steps that it takes part in."""
        return [i for i in range(steps) if self.covers(i, steps)]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; what is as usual is left out, but the scale."""
        usual = AdapterUse()
        return {name: value for name, value in asdict(self).items() if name == "scale" or value != getattr(usual, name)}


@dataclass(frozen=True)
class AdapterReference:
    """What an adapter reads for a picture: another picture, or a drive.

    Args:
        adapter: identity of the adapter.
        use: how the adapter takes part.
        reference: a digest of what it reads.
        drive: that, if it is one; pictures are kept elsewhere.
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
        prompt: text, with weights as in `models.prompt_weighting`; 600 tokens of it are read, 75 in a chunk.
        negative_prompt: text with the same syntax, for the unconditional branch.
        seed: of the CPU generator that draws the first latents and every later noise.
        num_inference_steps: 1 to 999.
        guidance_scale: classifier-free guidance; 1 or less switches it off.
        width: pixels, 64 to 2048, divisible by 8.
        height: pixels, 64 to 2048, divisible by 8.
        scheduler: the sampler.
        inversion: how the latents of a source that was opened were found; None for a generated one.
        like: the references whose look it takes; () for none.
        loras: names and scales of the LoRAs in the model.
        clip_skip: layers of the text encoder that are left out at its end for the prompt, 0 to 11; as in diffusers not
            for the negative one. What web UIs call clip skip is one more.
        textual_inversions: words of the prompts whose embeddings come from files, each as "word:digest of the file".
        crop: left, top, right and bottom in pixels of the part of an opened picture that is painted on; None for all.
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

    @property
    def opened(self) -> bool:
        """Whether the source is a picture that was opened."""
        return self.inversion is not None

    @property
    def num_timesteps(self) -> int:
        """Evaluations of the UNet, one for each of the sampler's timesteps. Heun and PNDM have more than steps."""
        return num_timesteps(self.scheduler, self.num_inference_steps)

    @property
    def guided(self) -> bool:
        """Whether the UNet runs both branches of classifier-free guidance."""
        return self.guidance_scale > 1.0


def num_timesteps(scheduler: SchedulerName, steps: int) -> int:
    """Evaluations of the UNet in so many steps of a sampler.

    Args:
        scheduler: the sampler.
        steps: 1 or more.
    """
    if scheduler is SchedulerName.HEUN:
        return 2 * steps - 1
    return steps + (scheduler is SchedulerName.PNDM and steps > 1)


def level_grids(config: GenerationConfig, num_levels: int) -> list[tuple[int, int]]:
    """Sizes of a config's maps.

    Args:
        config: of the picture.
        num_levels: of the UNet.

    Returns:
        (height, width) of every level, finest first.
    """
    grids = [(config.height // LATENT_FACTOR, config.width // LATENT_FACTOR)]
    while len(grids) < num_levels:
        height, width = grids[-1]
        grids.append((-(-height // 2), -(-width // 2)))
    return grids


@copy_on_read("seconds")
@dataclass(frozen=True)
class EditStats:
    """What an edit (or a generation) cost and why.

    Args:
        mask_area: share of latent cells inside the mask.
        mask_source: where the mask came from.
        mask_confidence: of the mask, 0 to 1.
        active_rows: active rows of each level at the widest growth, finest level first.
        growth: latent cells by which the active set exceeds the mask, one number per step; DENSE_STEP for a dense one.
        unet_evaluations_dense: dense calls of the UNet (both guidance branches count as one).
        unet_evaluations_sparse: sparse calls of the UNet (both guidance branches count as one).
        macs: multiply-accumulates of the UNet and decoder that were spent.
        macs_dense: those that a dense run would have spent.
        seconds: wall seconds by stage: encode (of an opened picture), text, reference, mask, plan, denoise, decode,
            total; a copy each time.
        recorded_bytes: bytes of features this result holds for later edits (its parents' not counted).
        fallback: why the edit ran dense, or "".
        steps_shared: first steps that were taken over from the parent, without a call.
        notes: things the user should know, such as a truncated prompt.
        unet_evaluations_captured: of the sparse calls, those replayed from captured graphs.
        uncaptured: why the others were not, or "" where no graphs were wanted.
    """

    mask_area: float
    mask_source: MaskSource
    mask_confidence: float
    active_rows: tuple[int, ...]
    growth: tuple[int, ...]
    unet_evaluations_dense: int
    unet_evaluations_sparse: int
    macs: int
    macs_dense: int
    seconds: dict[str, float]
    recorded_bytes: int
    fallback: str = ""
    notes: tuple[str, ...] = field(default=())
    steps_shared: int = 0
    unet_evaluations_captured: int = 0
    uncaptured: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        return asdict(self)


E = TypeVar("E", bound=StrEnum)

STEPS = (1, 999)
SIDE = (64, 2048)
SEEDS = (0, 2**63 - 1)
CLIP_SKIPS = (0, 11)
MAX_CROP = 2**24
_OPTIONAL = ("like", "loras", "clip_skip", "textual_inversions", "crop")


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
    """The arguments of `make_generation_config`, JSON-ready; fields that older versions lack are left out if empty."""
    entries = asdict(config) | {"like": [reference.as_dict() for reference in config.like]}
    return {name: value for name, value in entries.items() if value or name not in _OPTIONAL}


def first_step(strength: float, steps: int) -> int:
    """The index of the first timestep that an edit of this strength runs: that share of them, from the last.

    Raises:
        InputError: a strength out of range, or one that leaves no step to run.
    """
    if not isinstance(strength, int | float) or not 0 < strength <= 1:
        raise InputError(f"strength must be in (0, 1], got {strength!r}; 1 repaints, less keeps more")
    if int(steps * strength) < 1:
        raise InputError(f"strength must leave a step of {steps} to run, got {strength!r}; use {1 / steps:.3g} or more")
    return steps - int(steps * strength)


def strength_for_start(start: int, steps: int) -> float:
    """The strength of an edit whose first step has this index, so that `first_step` gives `start` again.

    Args:
        start: index of the first step, 0 to steps - 1.
        steps: number of steps, 1 to 999.

    Returns:
        Above 0 to 1.
    """
    strength = (steps - start) / steps
    return strength if int(steps * strength) == steps - start else nextafter(strength, 1.0)


def check_seed(seed: int) -> int:
    """The seed of a CPU generator, 0 to 2^63 - 1. Raises InputError for another value."""
    return _integer("seed", seed, SEEDS)


def check_quality(quality: str) -> Quality:
    """The quality of that name. Raises InputError for another one."""
    if not isinstance(quality, str) or quality not in tuple(Quality):
        raise InputError(f"quality must be one of {', '.join(Quality)}, got {quality!r:.40}")
    return Quality(quality)


def check_prompt(prompt: str) -> str:
    """The prompt, if it says anything. Raises PromptError otherwise."""
    if not isinstance(prompt, str):
        raise PromptError(f"prompt must be text, got {type(prompt).__name__}")
    if not prompt.strip():
        raise PromptError(f"prompt must say something, got {prompt[:80]!r}; describe the picture")
    return _check_text("prompt", prompt)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode a text: lone surrogates, such as undecodable bytes of an argument become, it cannot."""
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
        raise InputError(f"a likeness must name its adapter and reference, got {adapter!r} and {reference!r}")
    made = None if drive is None else Drive.from_dict(drive)
    if made is not None and made.digest != reference:
        raise InputError(f"a drive's digest must be {made.digest}, got {reference!r:.40}")
    return AdapterReference(adapter, make_adapter_use(scale=scale, **use), reference, made)


def make_adapter_use(
    scale: Any = 1.0, control_guidance_start: Any = 0.0, control_guidance_end: Any = 1.0, guess_mode: Any = False
) -> AdapterUse:
    """How an adapter takes part, checked. Raises InputError for a value out of range."""
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
        raise InputError(f"guess_mode must be True or False, got {guess_mode!r:.40}")
    return AdapterUse(check_scale(scale), start, end, guess_mode)


def _share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{name} must be a share of the steps, 0 to 1, got {value!r:.40}")
    return float(value)


def _lora(name: str, scale: float) -> tuple[str, float]:
    if not isinstance(name, str):
        raise InputError(f"a LoRA must have a name, got {name!r}")
    return name, check_scale(scale)


def _textual_inversion(name: str) -> str:
    if not isinstance(name, str):
        raise InputError(f"a textual inversion must have a name, got {name!r}")
    return name


def _crop(value: Any) -> Box:
    if len(value) != 4:
        raise InputError(f"crop must be left, top, right and bottom, got {value!r:.80}")
    left, top, right, bottom = (_integer("crop", side, (0, MAX_CROP)) for side in value)
    if left >= right or top >= bottom:
        raise InputError(f"crop must have left < right and top < bottom, got {value!r:.80}")
    return left, top, right, bottom


def check_scale(scale: Any) -> float:
    """An adapter's scale, if it is a number in range. Raises InputError otherwise."""
    is_number = isinstance(scale, Real) and not isinstance(scale, bool)
    if not is_number or not -10 <= scale <= 10:
        raise InputError(f"scale must be a number in [-10, 10], got {scale!r}; 1 is what an adapter was trained for")
    return float(scale)


def _integer(name: str, value: int, bounds: tuple[int, int]) -> int:
    low, high = bounds
    is_integer = isinstance(value, SupportsIndex) and not isinstance(value, bool)  # numpy's integers are
    if not is_integer or not low <= index(value) <= high:
        raise InputError(f"{name} must be a whole number in [{low}, {high}], got {value!r}")
    return index(value)


def _guidance(value: Any) -> float:
    is_number = isinstance(value, Real)  # numpy's are
    if not is_number or not 0 <= value <= 100:
        raise InputError(f"guidance_scale must be in [0, 100], got {value!r}; 7.5 is usual, 1 switches it off")
    return float(value)


def _side(name: str, value: int) -> int:
    side = _integer(name, value, SIDE)
    if side % LATENT_FACTOR:
        nearest = round(side / LATENT_FACTOR) * LATENT_FACTOR
        raise InputError(f"{name} must be divisible by {LATENT_FACTOR}, got {side}; use {nearest}")
    return side


def _enum_value(name: str, value: str, kind: type[E]) -> E:
    try:
        return kind(value)
    except ValueError as error:
        raise InputError(f"{name} must be one of {', '.join(kind)}, got {value!r}") from error


def _negative_prompt(value: Any) -> str:
    if not isinstance(value, str):
        raise PromptError(f"negative_prompt must be text, got {type(value).__name__}; leave it out for none")
    return _check_text("negative_prompt", value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "negative_prompt": _negative_prompt,
    "seed": check_seed,
    "num_inference_steps": lambda value: _integer("num_inference_steps", value, STEPS),
    "guidance_scale": _guidance,
    "width": lambda value: _side("width", value),
    "height": lambda value: _side("height", value),
    "clip_skip": lambda value: _integer("clip_skip", value, CLIP_SKIPS),
    "scheduler": lambda value: _enum_value("scheduler", value, SchedulerName),
    "inversion": lambda value: None if value is None else _enum_value("inversion", value, Inversion),
    "like": parse_adapter_references,
    "loras": lambda value: tuple(_lora(*entry) for entry in value),
    "textual_inversions": lambda value: tuple(_textual_inversion(entry) for entry in value),
    "crop": lambda value: None if value is None else _crop(value),
}
"""Field of a `GenerationConfig` -> what checks and converts it."""
