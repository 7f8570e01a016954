"""The HTTP API beside the page: generate, open, edit, preview, history. Typed; gradio describes it at /gradio_api/info.

A program's session is its connection's (`session_hash`). Runs send {"step", "steps", "seconds_left"} as they go, and
at the end {"id", "parent", "prompt", "picture", ...}: the picture is a PNG, as base64, that tells how it was made.
"""

# Annotations are read by gradio as they stand: no `from __future__ import annotations` here.
import base64
from collections.abc import Callable, Iterator
from dataclasses import asdict
from io import BytesIO
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.events import api
from PIL import Image

from app import export, handlers, views
from app.validation import Look, Region, Settings, label
from fisedit import EditResult
from fisedit.errors import FisEditError, InputError
from fisedit.storage import images

if TYPE_CHECKING:
    from app.handlers import Progress
    from app.sessions import Studio
    from app.user_session import Session

MOST_MASK, MOST_REFERENCE = 1 << 20, 3 << 20
"""Letters of a mask, and of a picture whose look is taken."""


def add(studio: "Studio", runs: dict[str, Any]) -> None:
    """Add the endpoints to the page that is being built; `runs` names the queue that long ones wait in."""

    def session(request: gr.Request) -> "Session":
        if not request.session_hash:
            raise gr.Error("error[session]: a request must say its session: send session_hash")
        return studio.session(request.session_hash[:64])

    def generate(
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
    ) -> Iterator[dict[str, Any]]:
        """Make a picture of words, to be edited in the same session. guidance, width, height: null for the model's own.
        model: a name that is offered, "" for the first. loras: names that are offered, and their scales. reference: a
        picture whose look is taken, in base64."""
        settings = Settings(steps, guidance, seed, width, height, scheduler, negative_prompt, model, loras)
        look = _look(reference, reference_scale)
        yield from _told(studio, session, request, lambda own: handlers.generate(studio, own, prompt, settings, look()))

    def open_picture(
        request: gr.Request,
        picture: bytes | None,
        prompt: str,
        seed: float,
        steps: float,
        guidance: float | None = None,
        model: str = "",
        loras: dict[str, float] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Open a picture to edit it in the same session; the prompt says what it shows, "" where nobody knows. model,
        loras: as in generate."""
        settings = Settings(_whole(steps), guidance, _whole(seed), model=model, loras={} if loras is None else loras)
        given = picture or b"", prompt, settings
        yield from _told(studio, session, request, lambda own: handlers.open_picture(studio, own, *given))

    def edit(
        request: gr.Request,
        prompt: str,
        mask: str = "",
        protect: str = "",
        words: list[str] = [],  # noqa: B006 (as above)
        instance: int = -1,
        grow: int = 0,
        reference: str = "",
        reference_scale: float = 1.0,
    ) -> Iterator[dict[str, Any]]:
        """Change the session's current picture to fit another prompt, with the model and LoRAs that made it. mask,
        protect: base64 images, white inside; "" for what the words say. instance: a piece of the mask alone, from the
        left and 0; -1 for all. reference: a picture whose look what is painted takes, in base64."""
        wish, look = _wish(words, instance, grow, mask, protect), _look(reference, reference_scale)
        yield from _told(studio, session, request, lambda own: handlers.edit(studio, own, prompt, wish(), look()))

    def preview(
        request: gr.Request,
        prompt: str,
        mask: str = "",
        protect: str = "",
        words: list[str] = [],  # noqa: B006 (as above)
        instance: int = -1,
        grow: int = 0,
        reference: str = "",
        reference_scale: float = 1.0,
    ) -> dict[str, Any]:
        """Where an edit would paint and what it would cost, before it runs; arguments as in edit."""
        wish, look = _wish(words, instance, grow, mask, protect), _look(reference, reference_scale)
        with _errors():
            return _seen(handlers.preview(studio, session(request), prompt, wish(), look()))

    def history(request: gr.Request, checkout: str = "", pictures: bool = False) -> dict[str, Any]:
        """All results of the session, and the current one. checkout: the id of a result to go back to first."""
        with _errors():
            own = session(request)
            if checkout:
                handlers.checkout(own, str(checkout))
            results = list(own.history)
            current = own.current.id if results else None
            told = [_result(studio, own, result, pictures=pictures) for result in results]
            return {"current": current, "results": told}

    for endpoint in (generate, edit):
        api(endpoint, api_name=endpoint.__name__, **runs)
    api(preview, api_name="preview", concurrency_id="look", concurrency_limit=2)
    api(history, api_name="history", concurrency_limit=4)
    _open(open_picture, runs)


def _open(handler: Callable[..., Any], runs: dict[str, Any]) -> None:
    """The endpoint that takes a file, which gradio's own component checks to be an uploaded one."""
    with gr.Column(visible=False):
        picture = gr.File(label="picture", type="binary")
        prompt = gr.Textbox(label="prompt")
        seed, steps = gr.Number(0, label="seed", precision=0), gr.Number(25, label="steps", precision=0)
        guidance = gr.Number(None, label="guidance")
        model, loras = gr.Textbox("", label="model"), gr.JSON({}, label="loras")
        asked = [picture, prompt, seed, steps, guidance, model, loras]
        gr.Button().click(handler, asked, gr.JSON(label="result"), api_name="open", **runs)


class _errors:  # noqa: N801 (reads as a block)
    """Our errors as gradio's, of one line that begins with their code."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FisEditError):
            raise gr.Error(f"error[{error.code}]: {error}", print_exception=False) from error


def _told(
    studio: "Studio",
    session: "Callable[[gr.Request], Session]",
    request: gr.Request,
    start: "Callable[[Session], Iterator[Progress]]",
) -> Iterator[dict[str, Any]]:
    """A run as a program is told of it."""
    with _errors():
        own = session(request)
        for news in start(own):
            if news.result is None:
                yield {"step": news.step, "steps": news.steps, "seconds_left": news.left}
            else:
                yield _result(studio, own, news.result, pictures=True)


def _result(studio: "Studio", own: "Session", result: EditResult, *, pictures: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "id": result.id,
        "parent": result.parent,
        "prompt": result.prompt,
        "change": "" if result.parent is None else str(result.diff),
        "model": label(own.model(result)),
        "recipe": asdict(result.config),
        "mask_area": result.mask.area,
        "stats": result.stats.as_dict(),
    }
    if pictures:
        told["picture"] = base64.b64encode(export.picture_bytes(own, result)).decode()
        told["mask"] = _png(result.mask.image())
    return told


def _seen(outlook: handlers.Outlook) -> dict[str, Any]:
    plan = outlook.preview
    return {
        "change": str(plan.diff),
        "mask": _png(plan.mask.image()),
        "mask_area": plan.mask.area,
        "confidence": plan.confidence,
        "pieces": plan.pieces,
        "seconds": outlook.seconds,
        "seconds_dense": outlook.dense_seconds,
        "macs": plan.macs,
        "macs_dense": plan.macs_dense,
        "fallback": plan.fallback,
        "nothing": plan.nothing,
    }


def _wish(words: list[str], instance: int, grow: int, mask: str, protect: str) -> Callable[[], Region]:
    """A region from a program's arguments, read when the run begins, so that errors are told alike."""

    def region() -> Region:
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InputError("words must be a list of words of a prompt")
        add = _image(mask, "mask")
        piece = None if instance == -1 else instance
        return Region(tuple(words), piece, grow, add, _image(protect, "protect"), only=add is not None)

    return region


def _look(reference: str, scale: float) -> Callable[[], Look | None]:
    """A look from a program's arguments, likewise."""

    def look() -> Look | None:
        data = _bytes(reference, "reference", MOST_REFERENCE)
        return Look(data, scale) if data else None

    return look


def _image(text: str, what: str) -> Image.Image | None:
    data = _bytes(text, what, MOST_MASK)
    return images.decode(data, what).image if data else None


def _bytes(text: str, what: str, most: int) -> bytes:
    if not isinstance(text, str) or len(text) > most:
        raise InputError(f"{what} must be an image as base64 of at most {most} letters")
    return views.from_base64(text, what)


def _png(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _whole(number: float) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number
