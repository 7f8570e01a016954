"""The prediction of an edit before it is run; and what a dense run would give instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fisedit.editor.base import EditorBase
from fisedit.edits.requests import Repaint
from fisedit.features.sites import project_text
from fisedit.machine.device import default_torch_state
from fisedit.machine.stopwatch import Stopwatch
from fisedit.masking.localize import change_heatmap
from fisedit.masking.mask_options import DEFAULT_METHOD, MaskOptions
from fisedit.masking.masks import count_components
from fisedit.masking.region import Region
from fisedit.masking.region_arguments import region_of
from fisedit.values import CONTROL, DRIVE, REFERENCE, EditMask, EditScript, OnStep, check_quality

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from fisedit.values.drive import Drive


@dataclass(frozen=True, eq=False)
class Preview:
    """The prediction of an edit, before it is run.

    Args:
        mask: where it would paint, with heatmap and confidence. One found by words is joined by cells beside it that
            show the edit once they are decoded.
        diff: what the words change.
        macs: multiply-accumulates that it would spend.
        macs_dense: those of a dense run.
        fallback: why it would run dense, or "".
        nothing: why it would do nothing, or "".
        seconds: the time that it would take, by this machine's cost table; None where there is none.
        seconds_dense: those of a dense run; None where there is no cost table.
        recorded_bytes: bytes of features that it would keep for later edits, about.
        notes: things the user should know, such as words that the model does not know.
    """

    mask: EditMask
    diff: EditScript
    macs: int
    macs_dense: int
    fallback: str = ""
    nothing: str = ""
    seconds: float | None = None
    seconds_dense: float | None = None
    recorded_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def confidence(self) -> float:
        """Confidence of the mask, 0 to 1; see `EditMask`."""
        return self.mask.confidence

    @property
    def pieces(self) -> int:
        """Connected pieces of the mask, which `instance` counts."""
        return count_components(self.mask.grid)


class PreviewMixin(EditorBase):
    """The methods of an editor that predict edits."""

    @default_torch_state()
    def preview(
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
        strength: float = 1.0,
        seed: int | None = None,
        quality: str = "balanced",
        growth: int | Sequence[int] | None = None,
        reference: Image | None = None,
        control: Image | None = None,
        drive: Drive | None = None,
        on_step: OnStep | None = None,
    ) -> Preview:
        """Predict where `edit` would paint and what it would cost. Nothing is kept; only what the mask needs is run.

        Args:
            prompt: the changed words, as in `edit`.
            region: where to edit, as in `edit`.
            regions: regions with prompts of their own, as in `edit`.
            mask: where to edit, as in `edit`; None for where the words say.
            protect: where never to edit, as in `edit`.
            grow: latent cells to dilate the mask by, -64 to 64; negative erodes it.
            words: words of either prompt that localize the edit, instead of the changed ones.
            instance: index of one component of the mask to edit alone, counted from the left and from 0.
            mask_method: one of `masking.mask_options.METHODS`.
            probe_steps: dense steps on the new prompt to spend on the mask; None for one where an object is inserted.
            strength: share of the steps to run, above 0 to 1, from the last.
            seed: seed of other noise inside the mask, as in `edit`.
            quality: "fast", "balanced" or "close", as in `edit`.
            growth: latent cells computed beyond the mask, 0 to 64, for all steps or each; None for what `quality` says.
            reference: a picture whose look the edited things take; None for that of the source, if it has one.
            control: a picture that says where things are; None for that of the source, if it has one.
            drive: a head's pose and expression; None for that of the picture, if it has one.
            on_step: called before every step of a source whose features are gone and rebuilt, with (i, n, preview); may
                raise `Cancelled`.

        Returns:
            Mask, diff of the words, multiply-accumulates and, where this machine is calibrated, seconds.

        Raises:
            SessionError, PromptError, MaskError, InputError, AdapterError, NumericsError: as in `edit`.
        """
        prompt, region = self._join_regions(prompt, regions, region, grow)
        request = self._pipeline.requests.edit(
            prompt,
            region_of(region, mask, protect, grow, MaskOptions(words, instance, mask_method, probe_steps)),
            growth=check_quality(quality) if growth is None else growth,
            repaint=Repaint(strength, seed=seed),
            conditions={REFERENCE: reference, CONTROL: control, DRIVE: drive},
            regional=regions,
            on_step=on_step,
        )
        plan, planner = self._pipeline.plan(request), self._pipeline.planner
        return Preview(
            mask=plan.mask,
            diff=request.script,
            macs=0 if plan.skip_reason else planner.macs(request, plan),
            macs_dense=plan.costs.dense(plan.mode.start),
            fallback=plan.fallback,
            nothing=plan.skip_reason,
            seconds=0.0 if plan.skip_reason else planner.seconds(request, plan),
            seconds_dense=plan.costs.seconds(None, (), plan.mode.start),
            recorded_bytes=planner.recorded_bytes(request, plan),
            notes=plan.notes,
        )

    def dense(self, result_id: str, on_step: OnStep | None = None) -> tuple[Image, float]:
        """Run a result's prompt, seed and settings densely, and measure how long it takes; nothing is kept.

        Args:
            result_id: id of the result.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Returns:
            A picture of the config's size, and seconds from prompt to picture.

        Raises:
            SessionError: no such result, or the model has other LoRAs now than it was made with. AdapterError: an
                adapter that it was made with is not loaded.
        """
        request = self._pipeline.requests.rebuild(self.history.find(result_id), on_step)
        self._pipeline.retry_on_page_error(request, lambda: self._pipeline.renderer.rebuild(request))
        request = replace(request, stopwatch=Stopwatch())
        return self._pipeline.renderer.render_dense(request), request.stopwatch.done()["total"]

    @default_torch_state()
    def attention(self, prompt: str) -> NDArray[np.float32]:
        """Heatmap of the words that would change in the current picture; no UNet call is spent.

        Args:
            prompt: the changed words, as in `edit`.

        Returns:
            Floats [h, w], 0 to 1.

        Raises:
            SessionError: there is no source yet. PromptError: an empty prompt.
        """
        request = self._pipeline.requests.edit(prompt)
        text = self._pipeline.renderer.encode(request)
        with torch.inference_mode():
            project_text(self._engine.executor.sites, text.embeddings.text, text.keys)

        def heatmap() -> NDArray[np.float32]:
            self._pipeline.renderer.rebuild(request)
            source = self._pipeline.renderer.source(request)[0]
            return change_heatmap(self._engine, source, request.config, text.keys, request.script)

        return self._pipeline.retry_on_page_error(request, heatmap)
