"""Requests for pictures, checked as a whole: what an edit of the current result is, by arguments of users.

Knows the model's words, LoRAs and adapters, and the history; plans and runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec
from weakref import WeakSet

from PIL.Image import new as new_image

from fisedit.adapters import textual_inversion
from fisedit.edits.state import EditState
from fisedit.errors import InputError, PromptError, SessionError, as_text
from fisedit.features.sites import lora_names
from fisedit.machine.stopwatch import Stopwatch
from fisedit.masking.localize import describe_source, restrict_to_words
from fisedit.masking.region import Region
from fisedit.masking.region_values import RegionCanvas
from fisedit.models.injection import exclusive
from fisedit.prompts.chunks import says_nothing
from fisedit.prompts.syntax import check_syntax
from fisedit.prompts.text_diff import diff, removes_objects
from fisedit.prompts.weighting import parse
from fisedit.values import (
    CONTROL,
    DENSE_GROWTH,
    DRIVE,
    LATENT_FACTOR,
    MAX_DILATION,
    REFERENCE,
    EditKind,
    GenerationConfig,
    Quality,
    SchedulerName,
    Step,
    as_dilations,
    as_growth,
    check_prompt,
    check_seed,
    check_structure,
    first_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from PIL.Image import Image

    from fisedit.history import EditResult
    from fisedit.prompts.text_diff import Tokenizer
    from fisedit.values import AdapterReference, Dilation, EditScript, OnStep

P = ParamSpec("P")

REMOVAL_MARGIN = 1 / 32
"""Share of a picture's shorter side by which the region of an object that words remove grows.

Decoded, an object reaches a cell or two beyond those that words point at (of 32)."""

ERASING_STRENGTH = 0.7
"""Share of the steps that erasing runs, from what continues the picture around the hole.

In 24 deletions of drawn scenes (256 px, 20 steps, development seed 9300) it led to 30.4 dB in the tenth percentile.
All of the steps, from noise alone, led to 25.9; medians are equal."""


@dataclass(frozen=True)
class Repaint:
    """The share of a run that an edit repeats inside its mask, and its noise.

    Args:
        strength: share of the steps to run, above 0 to 1, from the last.
        structure: share of the steps that may inject the source's attention which do, 0 to 1.
        seed: seed of the noise; None for the picture's.
        erases: cells inside do not attend to one another, so that what is around them grows in.
    """

    strength: float = 1.0
    structure: float = 0.0
    seed: int | None = None
    erases: bool = False


@dataclass(frozen=True, eq=False)
class EditRequest:
    """A picture to be made: generated, opened or edited. Checked when it is built.

    Args:
        config: config of the picture; that of an edit is its parent's with the new prompt, and perhaps its own seed.
        script: what the prompt changes.
        parent: the result to edit; None for a source.
        picture: an opened picture, upright; None for a generated one.
        region: where to edit.
        growth: latent cells to compute beyond the mask, 0 to 64, for all steps or each; or the quality that decides it.
        strength: share of the steps to run, above 0 to 1, from the last.
        structure: share of the steps that may inject the source's attention which do, 0 to 1.
        on_step: called before every step with (i, n, preview).
        verify: check a predicted mask for drift.
        erases: whether cells inside the mask do not attend to one another, as in `Repaint`.
        regional: regions whose cells read a prompt of their own; the first that holds a cell counts.
        is_frame: it is computed with other frames of a clip, sparsely in every step.
        stopwatch: takes the seconds of every stage.

    Attributes:
        dilation: `growth` as one number per step; () where a quality decides.
        start: index of the first step to run, from `strength`.

    Raises:
        MaskError: a mask of another type, size or range of values.
        InputError: an argument out of range, or dense steps where structure is kept.
    """

    config: GenerationConfig
    script: EditScript
    parent: EditResult | None = None
    picture: Image | None = None
    region: Region = field(default_factory=Region.words)
    growth: int | Sequence[int] | Quality = Quality.BALANCED
    strength: float = 1.0
    structure: float = 0.0
    on_step: OnStep | None = None
    verify: bool = False
    erases: bool = False
    regional: tuple[tuple[Region, str], ...] = ()
    is_frame: bool = False
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    dilation: tuple[Dilation, ...] = field(init=False)
    start: int = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        size = (config.width, config.height) if self.parent is None else self.parent.size
        canvas = RegionCanvas(
            config.height, config.width, size, config.crop if self.parent else None, steps=config.num_timesteps
        )
        object.__setattr__(self, "region", self.region.bind(canvas))
        object.__setattr__(self, "regional", tuple((each.bind(canvas), prompt) for each, prompt in self.regional))
        object.__setattr__(self, "dilation", self._dilations())
        object.__setattr__(self, "start", self._first_step())
        check_structure(self.structure)
        if self.structure and Step.DENSE in self.dilation:
            growth = as_growth(self.dilation)
            got = growth[0] if len(set(growth)) == 1 else growth
            raise InputError(
                f"growth must be under {DENSE_GROWTH} where structure is kept, got {as_text(got)}; use structure=0"
            )
        if self.structure and self.regional:
            raise InputError("regions with prompts of their own keep no structure, got both; use structure=0")
        if Step.DENSE in self.dilation and (self.regional or self.erases):
            what = "regions with prompts are edited" if self.regional else "an area is erased"
            raise InputError(f"growth must be under {DENSE_GROWTH} where {what}, got {as_text(self.growth)}")

    def _first_step(self) -> int:
        """The first step to run. With noise of its own an edit begins without the sampler's memory of earlier steps."""
        start, scheduler = first_step(self.strength, self.config.num_timesteps), self.config.scheduler
        if self.new_noise and start and scheduler is SchedulerName.PNDM:
            raise InputError(
                "with another seed, PLMS begins at the first step alone, got strength under 1; use strength=1"
            )
        return self._begin_pair(start) if self.new_noise else start

    def _begin_pair(self, start: int) -> int:
        """Return a first step, or the one before it where Heun would begin with the second step of a pair."""
        return start - start % 2 if self.config.scheduler is SchedulerName.HEUN else start

    @property
    def erasing_start(self) -> int:
        """Index of the first step to run where an area is erased; the first of all for samplers with a memory."""
        if self.strength < 1 or self.config.scheduler is SchedulerName.PNDM:
            return self.start
        return self._begin_pair(first_step(ERASING_STRENGTH, self.config.num_timesteps))

    def _dilations(self) -> tuple[Dilation, ...]:
        """Latent cells beyond the mask for every step; () where the cost decides."""
        if isinstance(self.growth, Quality):
            return ()
        growth, steps = self.growth, self.config.num_timesteps
        cells = tuple(growth) if isinstance(growth, Sequence) else (growth,) * steps
        if len(cells) != steps or not all(type(c) is int and 0 <= c <= MAX_DILATION for c in cells):
            raise InputError(
                f"growth must be one number of latent cells in [0, {MAX_DILATION}], or {steps} of them, "
                f"got {as_text(growth)}"
            )
        return as_dilations(cells)

    @property
    def new_noise(self) -> bool:
        """Return whether the edit begins with the noise of another seed than its parent's inside the mask."""
        return self.parent is not None and self.config.seed != self.parent.config.seed

    @property
    def removes(self) -> bool:
        """Return whether the words take objects away and change nothing else, which is done as erasing is.

        With anything that erasing cannot heed, such as structure to keep, it is an edit like any other.
        """
        is_plain = isinstance(self.growth, Quality) and self.strength == 1 and not (self.structure or self.regional)
        return is_plain and not self.is_frame and not self.config.like and removes_objects(self.script)

    @property
    def unchanged_reason(self) -> str:
        """Return why the parent's picture is the answer, or ""."""
        assert self.parent is not None
        if self.regional or self.is_frame:
            return ""
        same_words_suffice = self.config.like != self.parent.config.like or self.new_noise
        is_localized = same_words_suffice and not self.region.is_default
        if self.script.kind is EditKind.IDENTICAL and not (self.erases or is_localized):
            return self.script.reason or "the prompt says the same as before"
        return "the mask is empty" if self.region.is_empty else ""


def removal_margin(height: int, width: int) -> int:
    """Return `REMOVAL_MARGIN` of a picture, in latent cells."""
    return max(1, round(REMOVAL_MARGIN * min(height, width) / LATENT_FACTOR))


_NO_CONDITIONS: Mapping[str, object] = MappingProxyType({})


def _naming_references(
    make: Callable[Concatenate[RequestBuilder, P], EditRequest],
) -> Callable[Concatenate[RequestBuilder, P], EditRequest]:
    """A method whose request names pictures that adapters read: they stay while it lives, and others go.

    Args:
        make: the method.
    """

    @wraps(make)
    def made(self: RequestBuilder, /, *args: P.args, **kwargs: P.kwargs) -> EditRequest:
        references, token = self.state.engine.references, object()
        with exclusive(references):
            self._requesting.add(token)
        try:
            request = make(self, *args, **kwargs)
            with exclusive(references):
                self._requests.add(request)
            return request
        finally:
            with exclusive(references):
                self._requesting.remove(token)
            self.release_references()

    return made


class RequestBuilder:
    """Builds requests of a history's next picture.

    Args:
        state: The model that reads words and pictures, and the history.
    """

    def __init__(self, state: EditState) -> None:
        self.state = state
        self._requests, self._requesting = WeakSet[EditRequest](), set[object]()

    def diff(self, old: str, new: str) -> EditScript:
        """Return the changes from one prompt to another."""
        return diff_prompts(old, new, self.state.engine.pipe.tokenizer)

    @_naming_references
    def source(
        self,
        config: GenerationConfig,
        *,
        picture: Image | None = None,
        conditions: Mapping[str, object] = _NO_CONDITIONS,
        on_step: OnStep | None = None,
    ) -> EditRequest:
        """The request for a source, with the model's LoRAs as they are now.

        Args:
            config: config of the source.
            picture: an opened picture, upright; None for a generated one.
            conditions: what adapters read, by `REFERENCE`, `CONTROL` and `DRIVE`, or None.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Raises:
            AdapterError: a condition, and no adapter that reads it.
            PromptError: a prompt has syntax of web UIs that is not read.
        """
        self._check_words(config.prompt)
        self._check_words(config.negative_prompt, "negative_prompt")
        self.state.refresh()
        size = None if picture is None else picture.size
        like = self._conditions(config, config, conditions, size)
        config = self._with_words(replace(config, like=like, loras=self.state.engine.loras))
        return EditRequest(config, self.diff(config.prompt, config.prompt), picture=picture, on_step=on_step)

    def _check_words(self, prompt: str, name: str = "prompt") -> None:
        """Raise PromptError for a prompt that is not read as it stands, or says nothing; a negative one may."""
        check_syntax(prompt, name)
        textual_inversion.check_named(self.state.engine.pipe, prompt, name)
        if prompt and name == "prompt" and says_nothing(parse(prompt)):
            raise PromptError(f"prompt must say something, got {prompt[:80]!r}; describe the picture")

    @_naming_references
    def edit(
        self,
        prompt: str,
        region: Region | None = None,
        *,
        growth: int | Sequence[int] | Quality = Quality.BALANCED,
        repaint: Repaint | None = None,
        verify: bool = False,
        conditions: Mapping[str, object] = _NO_CONDITIONS,
        regional: Sequence[tuple[Region, str]] = (),
        on_step: OnStep | None = None,
    ) -> EditRequest:
        """The request for an edit of the current result, checked as a whole.

        Args:
            prompt: prompt of the edit.
            region: where to edit; None for where the changed words say.
            growth: latent cells computed beyond the mask, as in `Editor.edit`, or the quality that decides it.
            repaint: how much of the run is repeated, and with which noise; None for all of it with the picture's.
            verify: check a predicted mask for drift.
            conditions: what adapters read, by `REFERENCE`, `CONTROL` and `DRIVE`; that of the edited picture, or of the
                source, where one is None or missing.
            regional: regions with prompts of their own, parts of `region`.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Raises:
            SessionError, PromptError, MaskError, InputError, AdapterError: as in `Editor.edit`.
        """
        region, repaint = region or Region.words(), repaint or Repaint()
        self.state.refresh()
        parent, loras = self.state.history.current, self.state.engine.loras
        self._check_loras_present(parent)
        textual_inversion.check_words(
            self.state.engine.pipe, parent.config, [each.prompt for each in parent.run.regional]
        )
        is_kept = prompt == parent.prompt and (repaint.erases or regional)  # of a picture opened without words
        names_nothing = prompt == "" and repaint.erases
        prompt = prompt if is_kept or names_nothing else check_prompt(prompt)
        regional = tuple((each, check_prompt(own)) for each, own in regional)
        for new in {prompt, *(own for _, own in regional)} - {parent.prompt, ""}:  # an old session's stays what it was
            self._check_words(new)
        like = self._conditions(self.state.history.lineage(parent.id)[0].config, parent.config, conditions, parent.size)
        changes: dict[str, Any] = {"prompt": prompt, "like": like}
        if repaint.seed is not None:
            changes["seed"] = check_seed(repaint.seed)
        config = self._with_words(replace(parent.config, loras=loras, **changes), [own for _, own in regional])
        script = self.diff(parent.prompt, prompt)
        if removes_objects(script) and region.reads_words:
            region = region.grow(removal_margin(config.height, config.width))
        restrict_to_words(script, region.named_words, self.state.engine)  # refuses words of neither prompt
        if conditions.get(CONTROL) is not None and region.reads_words and not repaint.erases:
            changed = self._changed_control(parent, config)
            alone = region.is_default and script.kind is EditKind.IDENTICAL
            region = region if changed is None else region.with_changed(changed, alone=alone)
        return EditRequest(
            config,
            script,
            parent,
            region=region,
            growth=growth,
            strength=repaint.strength,
            structure=repaint.structure,
            erases=repaint.erases,
            regional=regional,
            verify=verify,
            on_step=on_step,
        )

    @_naming_references
    def with_prompt(self, request: EditRequest, prompt: str) -> EditRequest:
        """The same edit to another prompt.

        Args:
            request: the edit, whose regions have no prompts of their own.
            prompt: the prompt of the picture then; "" where it names nothing.
        """
        assert request.parent is not None
        config = self._with_words(replace(request.config, prompt=prompt))
        return replace(request, config=config, script=self.diff(request.parent.prompt, prompt))

    def rebuild(self, result: EditResult, on_step: OnStep | None = None) -> EditRequest:
        """The request for what a dense run makes of a result's config.

        Args:
            result: a result of the history.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Raises:
            SessionError: the model has other LoRAs now, or other scales.
        """
        self.state.refresh()
        self.state.check_own_loras(result)
        return EditRequest(result.config, result.diff, result, on_step=on_step)

    def _changed_control(self, parent: EditResult, config: GenerationConfig) -> Region | None:
        """Return where a config's control pictures differ from the edited picture's, a cell around it too."""
        left, top, right, bottom = config.crop or (0, 0, *parent.size)
        changed = self.state.engine.references.changed_control(
            parent.config.like, config.like, (right - left, bottom - top)
        )
        if changed is None:
            return None
        whole = new_image("L", parent.size)
        whole.paste(changed, (left, top))
        return Region.mask(whole).grow(1)

    def _with_words(self, config: GenerationConfig, prompts: Sequence[str] = ()) -> GenerationConfig:
        """A config with the textual inversions that its prompts and further ones name."""
        return replace(config, textual_inversions=textual_inversion.used(self.state.engine.pipe, config, prompts))

    def _conditions(
        self,
        source: GenerationConfig,
        parent: GenerationConfig,
        given: Mapping[str, object],
        size: tuple[int, int] | None,
    ) -> tuple[AdapterReference, ...]:
        """Return what adapters read: what is given, or else the source's look and the parent's control and drive.

        A control of the picture's size is cut as the picture is.

        Args:
            source: the chain's.
            parent: config of the edited picture.
            given: by `REFERENCE`, `CONTROL` and `DRIVE`.
            size: width and height of the picture; None where it is generated.
        """
        references, found = self.state.engine.references, list["AdapterReference"]()
        for argument, kept in ((REFERENCE, source), (CONTROL, parent), (DRIVE, parent)):
            if (condition := given.get(argument)) is None:
                found += [entry for entry in kept.like if references.reads(entry, argument)]
            else:
                crop = parent.crop if argument == CONTROL else None
                found += references.entries(condition, argument, crop, size)
        return tuple(found)

    def release_references(self) -> None:
        """Let pictures go that adapters read and that neither a result nor a request names."""
        with exclusive(self.state.engine.references):
            if not self._requesting:
                configs = [each.config for each in (*self.state.history, *self._requests)]
                self.state.engine.references.keep({entry.reference for config in configs for entry in config.like})

    def _check_loras_present(self, result: EditResult) -> None:
        """Raise SessionError where a LoRA that a result was made with is loaded no more; its scale may be another."""
        made_with, pipe = dict(result.config.loras), self.state.engine.pipe
        if missing := ", ".join(sorted(made_with.keys() - lora_names(pipe.unet, pipe.text_encoder))):
            raise SessionError(
                f"result {result.id} must be edited or rebuilt with {', '.join(made_with)}, as it was made, got "
                f"a model without {missing}; load that with load_lora"
            )


def diff_prompts(old: str, new: str, tokenizer: Tokenizer) -> EditScript:
    """Return the changes from one prompt to another.

    Args:
        old: the source's prompt; "" for a source without one.
        new: the edit's prompt.
        tokenizer: the model's.
    """
    with exclusive(tokenizer):
        script = diff(old, new, tokenizer)
    return describe_source(script) if script.hunks and not old else script
