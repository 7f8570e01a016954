"""The HTTP API beside the page: generate, open, edit, erase, extend, preview, history. Typed; gradio describes it at
/gradio_api/info.

A program's session is its connection's (`session_hash`). Runs send {"step", "steps", "seconds_left"} as they go. At the
end they send {"id", "parent", "prompt", "picture", ...}: the picture is a PNG, as base64, whose metadata hold its
origin.
"""

# Annotations are read by gradio as they stand: no `from __future__ import annotations` here.
import base64
from collections.abc import Callable, Iterator
from dataclasses import asdict
from inspect import getdoc
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.events import api

from app import export, handlers, history, views
from app.api_inputs import MaskLoader, detect_in, lazy_conditions, lazy_region
from app.validation import (
    RegionSettings,
    SourceSettings,
    decode_picture,
    label,
)
from fisedit import EditResult
from fisedit.errors import InputError, SessionError
from fisedit.integrations.region_json import parse_region

if TYPE_CHECKING:
    from app.runs import RunProgress
    from app.session import Session
    from app.sessions import AppState


def add(state: "AppState", runs: dict[str, Any]) -> None:
    """Add the endpoints to the page that is being built; `runs` names the queue that long ones wait in."""
    endpoints = Endpoints(state)
    for endpoint in (endpoints.generate, endpoints.edit, endpoints.erase, endpoints.extend):
        api(endpoint, api_name=endpoint.__name__, api_description=getdoc(endpoint), **runs)
    preview, history = endpoints.preview, endpoints.history
    quick: dict[str, Any] = {"concurrency_id": "preview", "concurrency_limit": 2}
    api(preview, api_name="preview", api_description=getdoc(preview), **quick)
    api(history, api_name="history", api_description=getdoc(history), concurrency_limit=4)
    _add_open(endpoints.open_picture, runs)


class Endpoints:
    """The endpoints; gradio reads names, arguments, defaults and docstrings.

    Args:
        state: the app's state, whose sessions are meant.
    """

    def __init__(self, state: "AppState") -> None:
        self._state = state

    def generate(
        self,
        request: gr.Request,
        prompt: str,
        seed: int = 0,
        steps: int = 25,
        guidance: float | None = None,
        width: int | None = None,
        height: int | None = None,
        scheduler: str = "ddim",
        negative_prompt: str = "",
        model: str = "",
        loras: dict[str, float] = {},  # noqa: B006 (gradio shows the default)
        reference: str = "",
        reference_scale: float = 1.0,
        clip_skip: int = 0,
        control: str = "",
        control_scale: float = 1.0,
        edges: bool = False,
        drive: dict[str, Any] = {},  # noqa: B006 (gradio shows the default)
        sizes: dict[str, Any] = {},  # noqa: B006 (gradio shows the default)
    ) -> Iterator[dict[str, Any]]:
        """Generate a picture from a prompt, to be edited in the same session.

        Args:
            request: filled in by the server from the connection.
            prompt: what the picture shows; at most 2,000 characters.
            seed: seed of the first noise, 0 to 2**63 - 1.
            steps: denoising steps, 1 to 150.
            guidance: scale of classifier-free guidance, 0 to 30; null for the model's own.
            width: in pixels, 64 to 1536, divisible by 8; null for the model's own.
            height: in pixels, 64 to 1536, divisible by 8; null for the model's own.
            scheduler: such as ddim or euler_a, or as web UIs say, such as "DPM++ 2M Karras".
            negative_prompt: what the picture should not show; "" for nothing.
            model: a name that is offered; "" for the first.
            loras: names that are offered -> their scales, -2 to 2.
            reference: a picture whose appearance is taken, in base64; "" for none.
            reference_scale: how much of its appearance, 0 to 2.
            clip_skip: layers of the text encoder that are left out, 0 to 11.
            control: a picture that says where things are, in base64; "" for none.
            control_scale: how much it says so, 0 to 2.
            edges: the control is the edges of that picture, without one of the picture that is edited.
            drive: a head's pose and expression, {"pose": [pitch, yaw, roll, x, y, scale], "expression": {"jawOpen": 1}}
                or as fisedit.Drive has them; {} for none.
            sizes: sizes that models such as XL are told, height first, {"original_size": [512, 768],
                "crops_coords_top_left": [0, 64], "target_size": [1024, 1024]}; {} for the picture's own.

        Yields:
            The progress of every step; at the end the result.
        """
        settings = SourceSettings(
            steps, guidance, seed, width, height, scheduler, negative_prompt, model, loras, clip_skip, sizes=sizes
        )
        get_conditions = lazy_conditions(reference, reference_scale, control, control_scale, drive, edges=edges)
        yield from self._stream(
            request, lambda session: handlers.generate(self._state, session, prompt, settings, get_conditions())
        )

    def open_picture(
        self,
        request: gr.Request,
        picture: bytes | None,
        prompt: str,
        seed: float,
        steps: float,
        guidance: float | None = None,
        model: str = "",
        loras: dict[str, float] | None = None,
        region: dict[str, Any] | None = None,
        sizes: dict[str, Any] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Open a picture to edit it in the same session.

        Args:
            request: filled in by the server from the connection.
            picture: an uploaded file; at most 32 MiB and 32 million pixels.
            prompt: what the picture shows; "" where that is not known.
            seed: seed of the later noise, 0 to 2**63 - 1.
            steps: denoising steps, 1 to 150.
            guidance: scale of classifier-free guidance, 0 to 30; null for the model's own.
            model: a name that is offered; "" for the first.
            loras: names that are offered -> their scales, -2 to 2.
            region: where it will be edited, of masks and boxes as in `edit`; {} for all of it. Of a large picture the
                part around it alone is opened, at full resolution.
            sizes: sizes that models such as XL are told, as in `generate`.

        Yields:
            The progress of every step; at the end the result.
        """
        settings = SourceSettings(
            _to_int(steps), guidance, _to_int(seed), model=model, loras={} if loras is None else loras, sizes=sizes
        )
        detect = detect_in(self._state, lambda: decode_picture(picture or b""))
        part = parse_region(region, MaskLoader(), detect) if region else None
        given = picture or b"", prompt, settings, part
        yield from self._stream(request, lambda session: handlers.open_picture(self._state, session, *given))

    def edit(
        self,
        request: gr.Request,
        prompt: str,
        mask: str = "",
        protect: str = "",
        words: list[str] = [],  # noqa: B006 (gradio shows the default)
        instance: int = -1,
        grow: int = 0,
        reference: str = "",
        reference_scale: float = 1.0,
        strength: float = 1.0,
        quality: str = "balanced",
        seed: int = -1,
        region: dict[str, Any] = {},  # noqa: B006 (gradio shows the default)
        regions: list[dict[str, Any]] = [],  # noqa: B006 (gradio shows the default)
        control: str = "",
        control_scale: float = 1.0,
        edges: bool = False,
        drive: dict[str, Any] = {},  # noqa: B006 (gradio shows the default)
    ) -> Iterator[dict[str, Any]]:
        """Change the session's current picture to fit another prompt, with the model and LoRAs that made it.

        Args:
            request: filled in by the server from the connection.
            prompt: what the picture should show; at most 2,000 characters. "" for the current one beside regions.
            mask: an image in base64, white where the edit may change the picture; "" to find it by the words.
            protect: an image in base64, white where the picture must not change; "" for nowhere.
            words: at most 16 words of either prompt to find the mask by; [] for the changed ones.
            instance: the one piece of the mask to edit, counted from the left and 0; -1 for all.
            grow: latent cells (8 pixels) to dilate the mask by, -16 to 16; negative erodes.
            reference: a picture whose appearance the edited area takes, in base64; "" for none.
            reference_scale: how much of its appearance, 0 to 2.
            strength: share of the steps to run, above 0 to 1; less keeps more of what was there.
            quality: "fast", "balanced" or "close": how near the edit comes to a dense one, for its time.
            seed: seed of other noise in the mask, 0 to 2**63 - 1, with which the prompt may stay; -1 for the picture's.
            region: where the edit may change the picture, instead of mask, words and instance; {} for those. An object
                with one of words, mask (base64, perhaps with soft), points (perhaps with outside), box, border,
                detected, everywhere, any, all and minus. It may also have grow and feather.
            regions: at most 16 objects of a region and its own prompt, edited in one run; [] for one prompt.
            control: a picture that says where things are, in base64; "" for none.
            control_scale: how much it says so, 0 to 2.
            edges: the control is the edges of that picture, without one of the picture that is edited.
            drive: a head's pose and expression, {"pose": [pitch, yaw, roll, x, y, scale], "expression": {"jawOpen": 1}}
                or as fisedit.Drive has them; {} for none.

        Yields:
            The progress of every step; at the end the result.
        """
        repaint = strength, quality, seed
        get_region = lazy_region(words, instance, grow, mask, protect, repaint, region, regions)
        get_conditions = lazy_conditions(reference, reference_scale, control, control_scale, drive, edges=edges)
        yield from self._stream(
            request,
            lambda session: handlers.edit(
                self._state, session, prompt, get_region(self._state, session), get_conditions()
            ),
        )

    def preview(
        self,
        request: gr.Request,
        prompt: str,
        mask: str = "",
        protect: str = "",
        words: list[str] = [],  # noqa: B006 (gradio shows the default)
        instance: int = -1,
        grow: int = 0,
        reference: str = "",
        reference_scale: float = 1.0,
        strength: float = 1.0,
        quality: str = "balanced",
        seed: int = -1,
        region: dict[str, Any] = {},  # noqa: B006 (gradio shows the default)
        regions: list[dict[str, Any]] = [],  # noqa: B006 (gradio shows the default)
        control: str = "",
        control_scale: float = 1.0,
        edges: bool = False,
        drive: dict[str, Any] = {},  # noqa: B006 (gradio shows the default)
    ) -> dict[str, Any]:
        """Predict where an edit would change the picture, and its cost. No result is made.

        Args:
            request: filled in by the server from the connection.
            prompt: what the picture should show; at most 2,000 characters.
            mask: an image in base64, white where the edit may change the picture; "" to find it by the words.
            protect: an image in base64, white where the picture must not change; "" for nowhere.
            words: at most 16 words of either prompt to find the mask by; [] for the changed ones.
            instance: the one piece of the mask to edit, counted from the left and 0; -1 for all.
            grow: latent cells (8 pixels) to dilate the mask by, -16 to 16; negative erodes.
            reference: a picture whose appearance the edited area takes, in base64; "" for none.
            reference_scale: how much of its appearance, 0 to 2.
            strength: share of the steps to run, above 0 to 1; less keeps more of what was there.
            quality: "fast", "balanced" or "close", as in `edit`.
            seed: seed of other noise in the mask, as in `edit`.
            region: where the edit may change the picture, as in `edit`.
            regions: regions with prompts of their own, as in `edit`.
            control: a picture that says where things are, in base64; "" for none.
            control_scale: how much it says so, 0 to 2.
            edges: the control is the edges of that picture, without one of the picture that is edited.
            drive: a head's pose and expression, {"pose": [pitch, yaw, roll, x, y, scale], "expression": {"jawOpen": 1}}
                or as fisedit.Drive has them; {} for none.

        Returns:
            The mask, its share of the picture, the predicted seconds and multiply-accumulates, beside a dense run's.
        """
        repaint = strength, quality, seed
        get_region = lazy_region(words, instance, grow, mask, protect, repaint, region, regions)
        get_conditions = lazy_conditions(reference, reference_scale, control, control_scale, drive, edges=edges)
        state, session = self._state, self._session(request)
        return _estimate_to_dict(handlers.preview(state, session, prompt, get_region(state, session), get_conditions()))

    def erase(
        self,
        request: gr.Request,
        region: dict[str, Any],
        quality: str = "balanced",
        seed: int = -1,
    ) -> Iterator[dict[str, Any]]:
        """Remove an object by inpainting from its surroundings; no words are needed.

        Args:
            request: filled in by the server from the connection.
            region: what goes, as in `edit`.
            quality: "fast", "balanced" or "close", as in `edit`.
            seed: seed of other noise in the region, as in `edit`.

        Yields:
            The progress of every step; at the end the result.
        """
        if not region:
            raise InputError('region must say what goes, got none; send such as {"box": [0, 0, 64, 64]}')
        get_region = lazy_region([], -1, 0, "", "", (1.0, quality, seed), region)
        yield from self._stream(
            request, lambda session: handlers.erase(self._state, session, get_region(self._state, session))
        )

    def extend(
        self,
        request: gr.Request,
        left: int = 0,
        top: int = 0,
        right: int = 0,
        bottom: int = 0,
        prompt: str = "",
        quality: str = "balanced",
        seed: int = -1,
    ) -> Iterator[dict[str, Any]]:
        """Make the session's current picture larger and paint what is added; the pixels that it had stay.

        Args:
            request: filled in by the server from the connection.
            left: pixels to add, 0 to 1024, as many as the picture has at most.
            top: pixels to add.
            right: pixels to add.
            bottom: pixels to add.
            prompt: what the larger picture shows; "" for the current prompt.
            quality: "fast", "balanced" or "close", as in `edit`.
            seed: seed of the noise of what is added, 0 to 2**63 - 1; -1 for the usual one.

        Yields:
            The progress of every step; at the end the result.
        """
        widths, noise = (left, top, right, bottom), None if seed == -1 else seed
        yield from self._stream(
            request,
            lambda session: handlers.extend(
                self._state,
                session,
                widths,
                prompt or session.current.prompt,
                RegionSettings(quality=quality, seed=noise),
            ),
        )

    def history(self, request: gr.Request, checkout: str = "", pictures: bool = False) -> dict[str, Any]:
        """List all results of the session, and the current one.

        Args:
            request: filled in by the server from the connection.
            checkout: the id of a result to make the current one first; "" for none.
            pictures: whether the results hold their pictures and masks.

        Returns:
            The id of the current result, null if there is none, and the results, oldest first.
        """
        session = self._session(request)
        if checkout:
            history.checkout(session, str(checkout))
        results = session.history.steps
        current = session.current.id if results else None
        shown = [_result_to_dict(session, result, pictures=pictures) for result in results]
        return {"current": current, "results": shown}

    def _session(self, request: gr.Request) -> "Session":
        if not request.session_hash:
            raise SessionError("a request must say its session: send session_hash")
        return self._state.session(request.session_hash[:64])

    def _stream(
        self, request: gr.Request, start: "Callable[[Session], Iterator[RunProgress]]"
    ) -> Iterator[dict[str, Any]]:
        """A run's progress, and at the end its result."""
        session = self._session(request)
        for progress in start(session):
            if progress.result is None:
                yield {"step": progress.step, "steps": progress.steps, "seconds_left": progress.seconds_left}
            else:
                yield _result_to_dict(session, progress.result, pictures=True)


def _add_open(handler: Callable[..., Any], runs: dict[str, Any]) -> None:
    """The endpoint that takes a file, which gradio's own component checks to be an uploaded one."""
    with gr.Column(visible=False):
        picture = gr.File(label="picture", type="binary")
        prompt = gr.Textbox(label="prompt")
        seed, steps = gr.Number(0, label="seed", precision=0), gr.Number(25, label="steps", precision=0)
        guidance = gr.Number(None, label="guidance")
        model, loras = gr.Textbox("", label="model"), gr.JSON({}, label="loras")
        region, sizes, result = gr.JSON({}, label="region"), gr.JSON({}, label="sizes"), gr.JSON(label="result")
        inputs = [picture, prompt, seed, steps, guidance, model, loras, region, sizes]
        gr.Button().click(handler, inputs, result, api_name="open", api_description=getdoc(handler), **runs)


def _result_to_dict(session: "Session", result: EditResult, *, pictures: bool) -> dict[str, Any]:
    before = session.history.step_before(result)
    values: dict[str, Any] = {
        "id": result.id,
        "parent": None if before is None else before.id,
        "prompt": result.prompt,
        "change": "" if result.parent is None else str(result.diff),
        "model": label(session.model_name(result)),
        "recipe": asdict(result.config) | {"like": [one.as_dict() for one in result.config.like]},
        "mask_area": views.area_of(result.mask, result.size, result.config.crop),
        "stats": result.stats.as_dict(),
    }
    if pictures:
        values["picture"] = base64.b64encode(export.picture_bytes(session, result)).decode()
        values["mask"] = views.png_base64(views.mask_image(result.mask, result.size, result.config.crop))
    return values


def _estimate_to_dict(estimate: handlers.EditEstimate) -> dict[str, Any]:
    plan = estimate.preview
    return {
        "change": str(plan.diff),
        "mask": views.png_base64(views.mask_image(plan.mask, estimate.size, estimate.crop)),
        "mask_area": views.area_of(plan.mask, estimate.size, estimate.crop),
        "confidence": plan.confidence,
        "pieces": plan.pieces,
        "seconds": estimate.seconds,
        "seconds_dense": estimate.dense_seconds,
        "macs": plan.macs,
        "macs_dense": plan.macs_dense,
        "fallback": plan.fallback,
        "nothing": plan.nothing,
        "notes": plan.notes,
    }


def _to_int(number: float) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number
