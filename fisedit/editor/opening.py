"""Opening pictures, and parts of large ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fisedit.adapters.control_pictures import CANNY, canny
from fisedit.errors import InputError, as_text
from fisedit.history import EditResult
from fisedit.masking.region import Region
from fisedit.masking.region_arguments import cells_on_picture
from fisedit.masking.region_values import check_border
from fisedit.storage.canvas import (
    CONTEXT,
    MAX_CONTEXT,
    canvas_size,
    crop_around,
    extended,
    needs_crop,
    to_canvas,
    to_editable,
)
from fisedit.values import (
    CONTROL,
    DRIVE,
    REFERENCE,
    OnStep,
    check_prompt,
    is_number,
    make_generation_config,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.values import Box
    from fisedit.values.drive import Drive
    from fisedit.values.sizes import Sizes


from fisedit.editor.base import EditorBase


class OpenMixin(EditorBase):
    """Opened pictures of an editor."""

    def open(
        self,
        picture: Image,
        prompt: str | None = None,
        *,
        region: Region | None = None,
        context: float = CONTEXT,
        extend: int | tuple[int, int, int, int] | None = None,
        inversion: str = "ddim",
        seed: int = 0,
        negative_prompt: str = "",
        num_inference_steps: int = 25,
        guidance_scale: float = 7.5,
        width: int | None = None,
        height: int | None = None,
        clip_skip: int = 0,
        negative_clip_skip: int = 0,
        sizes: Sizes | Mapping[str, Any] | Sequence[str] | None = None,
        reference: Image | None = None,
        control: Image | str | None = None,
        drive: Drive | None = None,
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Make a source of a picture that was not generated here: it is inverted, with everything recorded.

        Edits of it have its size, mode, alpha and colour profile, and every pixel outside their masks is its own.

        Args:
            picture: a picture of any size and mode; turned upright as its EXIF says.
            prompt: what it shows; None where it is unknown. Then the objects that the next prompt names localize the
                edit, and one that names a scene or style too runs dense.
            region: where it will be edited, by masks and boxes; None for the whole picture. Of a picture of more than
                1.5 times the model's pixels the part around it alone is on the canvas, at full resolution.
            context: what that part takes along on every side, as a ratio of the region's longer side, 0 to 8.
            extend: pixels added at the left, top, right and bottom, or one number for all four. They are for
                `Region.border` to be painted on; that is the region then, unless another is given.
            inversion: "ddim", or "ddpm" for edit-friendly noise maps (arXiv 2304.06140), with which the sampler leads
                back to the picture exactly, in one pass.
            seed: seed of the noise of "ddpm", 0 to 2^63 - 1.
            negative_prompt: negative prompt of later edits.
            num_inference_steps: 1 to 999.
            guidance_scale: scale of later edits, 0 to 100; DDIM's inversion has none.
            width: width of the canvas that the model paints on, in pixels, divisible by 8; None for what suits the
                model. The picture is resized to it as a whole, and paint is resized back: a model of 512x512 sees a
                photograph of 3000x2000 as 624x416. Crop what matters, or give more, for finer paint.
            height: height of the canvas in pixels, divisible by 8; None for what suits the model.
            clip_skip: layers of the text encoder to leave out, as in `generate`.
            negative_clip_skip: those to leave out for the negative prompt, as in `generate`.
            sizes: sizes that XL is told, as in `generate`; the canvas's own without it.
            reference: a picture whose look it takes, as in `generate`; edits then read what was recorded of it.
            control: a picture that says where things are, as in `generate`, or "canny" for the edges of what is on the
                canvas. One of the picture's size is cut as the picture is.
            drive: a head's pose and expression, as in `generate`.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Raises:
            PromptError, InputError: an argument out of range. NumericsError: the model produced NaN. AdapterError: no
            loaded adapter reads the reference, control or drive.
        """
        original = to_editable(picture)
        _check_context(context)
        if extend is not None:
            widths = check_border(extend)
            original, region = extended(original, widths), region or Region.border(*widths)
        return self._open(
            original,
            prompt,
            crop=None if region is None else self._crop(original.size, region, context),
            inversion=str(inversion),
            seed=seed,
            negative_prompt=negative_prompt,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            width=width,
            height=height,
            clip_skip=clip_skip,
            negative_clip_skip=negative_clip_skip,
            sizes=sizes,
            conditions={REFERENCE: reference, CONTROL: control, DRIVE: drive},
            on_step=on_step,
        )

    def _open(
        self,
        picture: Image,
        prompt: str | None,
        *,
        crop: Box | None,
        on_step: OnStep | None,
        conditions: Mapping[str, object] | None = None,
        **settings: Any,
    ) -> EditResult:
        """Open an upright picture, or a part of it."""
        left, top, right, bottom = crop or (0, 0, *picture.size)
        if right > picture.width or bottom > picture.height:
            raise InputError(f"the part {crop} must lie on the picture, got {picture.width}x{picture.height} pixels")
        for name, side in zip(
            ("width", "height"), canvas_size((right - left, bottom - top), self.native_size), strict=True
        ):
            settings[name] = side if settings[name] is None else settings[name]
        words = "" if prompt is None else check_prompt(prompt)
        config = make_generation_config(words, scheduler="ddim", crop=crop, **settings)
        read = dict(conditions or {})
        if read.get(CONTROL) == CANNY:
            part = picture if crop is None else picture.crop(crop)
            read[CONTROL] = canny(to_canvas(part, (config.width, config.height)))
        request = self._pipeline.requests.source(config, picture=picture, conditions=read, on_step=on_step)
        plan = self._pipeline.plan(request)
        return self._pipeline.run(request, plan)

    def _crop(self, size: tuple[int, int], region: Region, context: float) -> Box | None:
        """The part of an opened picture that is edited on the canvas; None for all of it."""
        grid = cells_on_picture(region, size)
        if not (grid.any() and needs_crop(size, self.native_size)):
            return None
        crop = crop_around(grid, size, self.native_size, context)
        return None if crop == (0, 0, *size) else crop


def _check_context(context: float) -> None:
    """Raise InputError for another ratio than a crop can take along."""
    if not is_number(context) or not 0 <= context <= MAX_CONTEXT:
        raise InputError(
            f"context must be in [0, {MAX_CONTEXT}], got {as_text(context)}; 0.5 is half of the region's side"
        )
