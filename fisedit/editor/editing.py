"""Making sources and edits.

`EditMixin.edit` reads in the order the data travels: text diff, mask, plan, sparse denoising, sparse decoding, result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fisedit.edits.requests import Repaint
from fisedit.errors import AdapterError, InputError
from fisedit.history import EditResult
from fisedit.masking.mask_options import DEFAULT_METHOD, MaskOptions
from fisedit.masking.region import Region
from fisedit.masking.region_arguments import region_of
from fisedit.values import (
    CONTROL,
    DRIVE,
    REFERENCE,
    OnStep,
    check_quality,
    make_generation_config,
    next_seed,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.values.drive import Drive
    from fisedit.values.sizes import Sizes


from fisedit.editor.base import EditorBase


class EditMixin(EditorBase):
    """Sources and edits of an editor."""

    def generate(
        self,
        prompt: str,
        *,
        seed: int = 0,
        negative_prompt: str = "",
        num_inference_steps: int = 25,
        guidance_scale: float = 7.5,
        width: int | None = None,
        height: int | None = None,
        scheduler: str = "ddim",
        clip_skip: int = 0,
        negative_clip_skip: int = 0,
        sizes: Sizes | Mapping[str, Any] | Sequence[str] | None = None,
        reference: Image | None = None,
        control: Image | None = None,
        drive: Drive | None = None,
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Make a source: what diffusers' pipeline makes of the same arguments, with everything recorded.

        Args:
            prompt: text, of which 600 tokens are read, 75 in a chunk; brackets weigh words, as `(cat:1.4)` or `[cat]`.
            negative_prompt: text with the same syntax, for the unconditional branch.
            seed: seed of a CPU generator, 0 to 2^63 - 1.
            num_inference_steps: 1 to 999.
            guidance_scale: 0 to 100; 1 or less runs one branch.
            width: pixels, 64 to 2048 and divisible by 8; None for the model's own size.
            height: pixels, 64 to 2048 and divisible by 8; None for the model's own size.
            scheduler: a `SchedulerName`, or its name in web UIs or diffusers, such as "DPM++ 2M Karras".
            clip_skip: layers of the text encoder to leave out at its end, 0 to 11; one less than web UIs' clip skip.
            negative_clip_skip: those of the negative prompt; in diffusers 0, in web UIs as many as of the other.
            sizes: sizes that XL is told: `original_size`, `target_size` (height, width), `crops_coords_top_left`, and
                these with `negative_`, as diffusers' pipeline takes them; None for the picture's own, uncropped.
            reference: a picture whose look it takes, and all edits of it that name no other; see `load_adapter`.
            control: a picture that says where things are, for it and all edits that name no other; see `load_adapter`.
            drive: a head's pose and expression, for it and all edits that name no other; see `load_adapter`.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Returns:
            The result, which is the current one from now on: image, config and stats.

        Raises:
            PromptError, InputError: an argument out of range. AdapterError: a reference, and no adapter that reads it.
            NumericsError: the model produced NaN.
        """
        own = self.native_size
        config = make_generation_config(
            prompt,
            seed=seed,
            negative_prompt=negative_prompt,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            width=own if width is None else width,
            height=own if height is None else height,
            scheduler=scheduler,
            clip_skip=clip_skip,
            negative_clip_skip=negative_clip_skip,
            sizes=sizes,
        )
        conditions = {REFERENCE: reference, CONTROL: control, DRIVE: drive}
        request = self._pipeline.requests.source(config, conditions=conditions, on_step=on_step)
        plan = self._pipeline.plan(request)
        return self._pipeline.run(request, plan)

    def edit(
        self,
        prompt: str | None = None,
        *,
        region: Region | None = None,
        regions: Sequence[tuple[Region, str]] = (),
        mask: object = None,
        protect: object = None,
        grow: int = 0,
        words: Sequence[str] = (),
        instance: int | None = None,
        mask_method: str = DEFAULT_METHOD,
        probe_steps: int | None = None,
        structure: float = 0.0,
        strength: float = 1.0,
        seed: int | None = None,
        verify: bool = True,
        quality: str = "balanced",
        growth: int | Sequence[int] | None = None,
        reference: Image | None = None,
        control: Image | None = None,
        drive: Drive | None = None,
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Change the current picture to fit a new prompt, where the words changed and nowhere else.

        Whatever is raised, the editor is as it was.

        Args:
            prompt: the changed words, as in `generate`; settings are the source's.
            region: where to edit, as a whole: words, masks and boxes, joined. Else these say it:
            regions: several regions, each with a prompt of its own, edited in one run; at most 16, and the first that
                holds a cell counts. The prompt is what the whole picture shows then, without it the current one.
            mask: where to edit, instead of what the words say. A PIL image or numpy array of the picture's size, or a
                boolean latent grid [h, w].
            protect: where never to edit, of the same forms as `mask`; None for nowhere.
            grow: latent cells to dilate the mask by, given or predicted, -64 to 64; negative erodes it.
            words: words of either prompt that localize the edit, instead of the changed ones.
            instance: index of one component of the mask to edit alone, counted from the left and from 0.
            mask_method: one of `masking.mask_options.METHODS`, for comparison.
            probe_steps: dense steps on the new prompt to spend on the mask; None for one where an object is inserted.
            structure: share of the first 40 % of the steps, 0 to 1; 0 for none. In these, inside the mask, the words
                that stay attend as they did in the picture, and self-attention is the picture's.
            strength: share of the steps to run, above 0 to 1, from the last. The first ones are the picture's own, so
                that less keeps more of its layout and colours.
            seed: seed of other noise inside the mask, for a variation: with it, and with `mask` or `words`, the prompt
                may stay the same. None for the picture's noise.
            verify: check once, early on, whether the change leaves a predicted mask; dilate it then.
            quality: "fast", "balanced" or "close": how near the edit comes to a dense one, against its time.
            growth: latent cells computed beyond the mask, for all steps or each; None for what `quality` says. A step
                with 64 computes the whole picture, and what it finds changed outside the mask is carried on.
            reference: a picture whose look the edited things take (see `load_adapter`); with it, and with `mask` or
                `words`, the prompt may stay the same. None for that of the source, if it has one.
            control: a picture that says where things are (see `load_adapter`), as `reference`.
            drive: a head's pose and expression (see `load_adapter`), as `reference`; None for that of the picture.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Returns:
            The result, which is the current one from now on: image, mask, diff of the words, config and stats.

        Raises:
            SessionError: there is no source yet. PromptError, MaskError, InputError: an argument out of range.
            AdapterError: a reference, and no adapter that reads it. NumericsError: the model produced NaN.
        """
        prompt, region = self._join_regions(prompt, regions, region, grow)
        request = self._pipeline.requests.edit(
            prompt,
            region_of(region, mask, protect, grow, MaskOptions(words, instance, mask_method, probe_steps)),
            growth=check_quality(quality) if growth is None else growth,
            repaint=Repaint(strength, structure, seed),
            verify=verify,
            conditions={REFERENCE: reference, CONTROL: control, DRIVE: drive},
            regional=regions,
            on_step=on_step,
        )
        plan = self._pipeline.plan(request)
        return self._pipeline.run(request, plan)

    def erase(
        self,
        region: Region,
        *,
        prompt: str | None = None,
        seed: int | None = None,
        quality: str = "balanced",
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Remove an object by inpainting from its surroundings, without words for what is to be seen there.

        Inside the region nothing attends to the region itself (Attentive Eraser, arXiv 2412.12974). Read is what the
        prompt says of the whole picture, with a guidance of 1.5 at most. The last 70 % of the steps run, from what
        continues the picture around the region.

        Args:
            region: what goes, with what it casts, such as a shadow.
            prompt: what the picture shows then; None for the current prompt without what goes, where its words point at
                that. Words that the current one has too are not read.
            seed: seed of the noise inside; None for another one than the picture's.
            quality: "fast", "balanced" or "close", as in `edit`.
            on_step: called before every step, as in `edit`.

        Raises:
            SessionError: there is no picture yet. MaskError: nothing would be left. InputError: no region.
        """
        if not isinstance(region, Region):
            raise InputError(f"region must be a Region, got {type(region).__name__}; use Region.mask or Region.words")
        now = self.current
        request = self._pipeline.requests.edit(
            now.prompt if prompt is None else prompt,
            region,
            growth=check_quality(quality),
            repaint=Repaint(seed=next_seed(now.config.seed) if seed is None else seed, erases=True),
            on_step=on_step,
        )
        if prompt is None:
            return self._pipeline.run(*self._pipeline.plan_erasing(request))
        return self._pipeline.run(request, self._pipeline.plan(request))

    def edit_many(
        self,
        prompts: Sequence[str],
        masks: Sequence[object],
        *,
        seeds: Sequence[int] | None = None,
        quality: str = "balanced",
        growth: int | Sequence[int] | None = None,
        on_step: OnStep | None = None,
    ) -> tuple[EditResult, ...]:
        """Several edits of the current picture, each with a prompt and a mask of its own; it stays the current one.

        Where there are captured graphs those that run sparse share one batch; else they run one after another.

        Args:
            prompts: one an edit, as in `edit`.
            masks: one an edit, as in `edit`.
            seeds: one an edit, as in `edit`; None for the picture's noise in all of them.
            quality: "fast", "balanced" or "close", as in `edit`, for all of them.
            growth: latent cells computed beyond the mask, as in `edit`, for all of them.
            on_step: called before every step, as in `edit`; a batch calls it once a step.

        Returns:
            The results, in that order.

        Raises:
            InputError: not as many masks or seeds as prompts; the other errors as in `edit`. Results made before stay.
        """
        lists: dict[str, Any] = {"prompts": prompts, "masks": masks} | ({} if seeds is None else {"seeds": seeds})
        for name, given in lists.items():
            if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
                raise InputError(f"{name} must be a list, got {type(given).__name__} {given!r:.80}; put it into a list")
            if len(given) != len(prompts):
                raise InputError(f"{name} must be as many as prompts, {len(prompts)}, got {len(given)}")
        chosen = check_quality(quality) if growth is None else growth
        own_seeds: Sequence[int | None] = [None] * len(prompts) if seeds is None else seeds
        return self._pipeline.run_many(
            [
                self._pipeline.requests.edit(
                    prompt, Region.mask(mask), growth=chosen, repaint=Repaint(seed=seed), on_step=on_step
                )
                for prompt, mask, seed in zip(prompts, masks, own_seeds, strict=True)
            ]
        )

    def edit_frames(
        self,
        prompt: str,
        drives: Sequence[Drive],
        region: Region,
        *,
        reference: Image | None = None,
        pads: Sequence[Image] = (),
        quality: str = "balanced",
        on_step: OnStep | None = None,
    ) -> list[Image]:
        """The frames of a clip, denoised together so that loaded motion modules let them attend to one another.

        They are not kept in the history. See `fisedit.clips.render` for whole clips.

        Args:
            prompt: what all frames show.
            drives: one a frame.
            region: where the frames may change.
            reference: a picture whose look the frames take, as in `edit`.
            pads: pictures before the first frame and after the last, which HelloMeme's modules read; () for none.
            quality: "fast", "balanced" or "close", as in `edit`; all steps are sparse.
            on_step: called before every step, as in `edit`.

        Raises:
            SessionError, PromptError, MaskError, InputError, AdapterError, NumericsError: as in `edit`; MaskError also
                where the region marks nothing, or the words concern the whole picture.
        """
        if not drives:
            raise InputError("drives must be one for every frame, got none; give at least one")
        if not self._engine.references.motion:
            raise AdapterError("frames attend to one another by motion modules, got none; call load_adapter first")
        requests = [
            self._pipeline.requests.edit(
                prompt,
                region,
                growth=check_quality(quality),
                conditions={REFERENCE: reference, DRIVE: drive},
                on_step=on_step,
            )
            for drive in drives
        ]
        return self._pipeline.render_clip(requests, pads)

    @contextmanager
    def transaction(self, *, keep: bool = True) -> Iterator[None]:
        """Keep what is made in a block if it comes to its end; whatever it raises, the editor is then as it was.

        Args:
            keep: False leaves the editor as it was in any case.
        """
        before, redo_ids = {result.id for result in self.history}, self.history.redo_ids()
        current = self.current.id if before else None
        try:
            yield
        except BaseException:
            keep = False
            raise
        finally:
            if not keep:
                if current is not None:
                    self.checkout(current)
                for result in [result for result in self.history if result.id not in before]:
                    if result.parent is None or result.parent in before:  # what was made of it goes with it
                        self.delete(result.id)
                self.history.restore_redo(redo_ids)
