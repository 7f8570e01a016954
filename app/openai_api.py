"""Routes of OpenAI's image API, for clients that speak it: generations and edits. An edit keeps every pixel outside the
mask. The clear pixels of the mask say where it may change. Without a mask those of the picture say, or else the changed
words.

A form of an edit may also have `source_prompt`, what the given picture shows. Knows the API's JSON and forms.
"""

# Annotations are read by FastAPI as they stand: no `from __future__ import annotations` here.
import base64
import json
import re
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from secrets import randbelow
from time import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import StreamingResponse
from PIL import Image, ImageOps
from starlette.datastructures import FormData, UploadFile

from app.openai_fields import EDITS, GENERATIONS
from app.request_fields import Obeyed
from app.validation import DRAWN_SEEDS, RegionSettings, SourceSettings
from fisedit.errors import InputError, as_text
from fisedit.metadata import image_metadata
from fisedit.storage import images
from fisedit.storage.mask_images import marks

if TYPE_CHECKING:
    from app.program_pictures import ProgramPicture, ProgramPictures

PREFIX = "/v1"
MAX_PICTURES = 8
"""Pictures of one request."""

MAX_ENLARGEMENT = 4
"""Limit of a picture's sides as a multiple of the model's: a larger one takes minutes, and shows things many times."""

_SIZE = re.compile(r"(\d{2,4})x(\d{2,4})")
_SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
_NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}


async def _form(request: Request) -> AsyncIterator[FormData]:
    """The form of a request, whose files are open until it is answered."""
    async with request.form() as form:
        yield form


def router(pictures: "ProgramPictures") -> APIRouter:
    """The routes.

    Args:
        pictures: makes what is asked for.
    """
    routes, api = APIRouter(prefix=PREFIX), OpenaiApi(pictures)
    routes.get("/models")(api.models)
    routes.post("/images/generations")(api.generations)
    routes.post("/images/edits")(api.edits)
    return routes


class OpenaiApi:
    """The functions behind the routes.

    Args:
        pictures: makes what is asked for.
    """

    def __init__(self, pictures: "ProgramPictures") -> None:
        self._pictures = pictures

    def models(self) -> dict[str, Any]:
        """The models that are offered."""
        offered = [
            {"id": one.label, "object": "model", "created": 0, "owned_by": "fisedit"}
            for one in self._pictures.state.pool.models
        ]
        return {"object": "list", "data": offered}

    def generations(self, asked: dict[str, Any] = Body()) -> Any:  # noqa: B008 (FastAPI's way)
        """Pictures of a prompt."""
        notes, given = GENERATIONS.notes_on(asked), GENERATIONS.obeyed(asked)
        answer = AnswerFormat(given, "image_generation")
        all_settings, more_notes = self._all_settings(given, given.get("size"))
        return answer.of(self._pictures.generate(given.get("prompt", ""), all_settings), (*notes, *more_notes))

    def edits(self, form: FormData = Depends(_form)) -> Any:  # noqa: B008
        """A picture changed to fit a prompt."""
        files = {name: "a file" for name, value in form.items() if isinstance(value, UploadFile)}
        asked = {**form, **files}
        notes, given = EDITS.notes_on(asked), EDITS.obeyed(asked)
        answer = AnswerFormat(given, "image_edit")
        pictures = [*form.getlist("image"), *form.getlist("image[]")]
        if len(pictures) != 1:
            raise InputError(f"image must be one picture, got {len(pictures)}; send a request for each")
        data, mask = _file(pictures[0], "image"), form.get("mask")
        clear = _clear_pixels(_file(mask, "mask"), "mask") if mask else _clear_pixels(data, "image")
        if mask and clear is None:
            raise InputError("mask must be clear where the picture may change, got no clear pixel")
        region = RegionSettings(add=clear, only=clear is not None)
        _check_own_size(given.get("size"), data)
        all_settings, more_notes = self._all_settings(given, None)
        made = self._pictures.edit(data, given.text("prompt"), all_settings, region, given.text("source_prompt"))
        return answer.of(made, (*notes, *more_notes, *_model_note(given, made[0].model)))

    def _all_settings(self, given: Obeyed, size: object) -> tuple[list[SourceSettings], tuple[str, ...]]:
        """The settings of every picture that is asked for, and notes; a model that is not offered is the first one."""
        count, seed = _number(given, "n", 1), _number(given, "seed", -1)
        if not 1 <= count <= MAX_PICTURES:
            raise InputError(f"n must be 1 to {MAX_PICTURES}, got {count!r:.40}")
        found = _SIZE.fullmatch(str(size)) if size not in (None, "", "auto") else None
        if size not in (None, "", "auto") and found is None:
            raise InputError(f"size must be such as 512x512, or auto, got {size!r:.40}")
        pool, model = self._pictures.state.pool, given.text("model")
        offered = {one.label: one for one in pool.models}
        width, height = (int(found[1]), int(found[2])) if found else (None, None)
        native = offered.get(model, pool.first).native_size
        if max(width or 0, height or 0) > MAX_ENLARGEMENT * native:
            most = f"at most {MAX_ENLARGEMENT} times the {native} pixels of the model"
            raise InputError(f"size must be {most}, got {size}; send {native}x{native} or auto")
        first = randbelow(DRAWN_SEEDS) if seed == -1 else seed
        chosen = model if model in offered else ""
        settings = [SourceSettings(width=width, height=height, seed=first + i, model=chosen) for i in range(count)]
        is_known = not model or bool(chosen)
        note = f"model {as_text(model)} is not offered: {pool.first.label} paints"
        return settings, () if is_known else (note,)


class AnswerFormat:
    """The form of an answer, checked before any work.

    Args:
        given: the request's fields.
        kind: kind of the events of a stream, without what follows the dot.

    Raises:
        InputError: a form that is not written.
    """

    def __init__(self, given: Obeyed, kind: str) -> None:
        if (name := given.get("response_format")) not in (None, "", "b64_json"):
            raise InputError(f"response_format must be b64_json, got {name!r:.40}; there are no addresses of pictures")
        self._kind, self._format = kind, given.text("output_format") or "png"
        if self._format not in _SUFFIXES:
            raise InputError(f"output_format must be png, jpeg or webp, got {self._format!r:.40}")
        self._compression = _number(given, "output_compression", 100)
        if not 0 <= self._compression <= 100 or (self._format == "png" and self._compression != 100):
            raise InputError(
                f"output_compression must be 0 to 100, of jpeg or webp, got {self._compression} for {self._format}"
            )
        stream = given.get("stream")
        if stream not in (None, "", True, False, "true", "false"):
            raise InputError(f"stream must be true or false, got {stream!r:.40}")
        self._streams = stream in (True, "true")

    def of(self, made: "list[ProgramPicture]", notes: tuple[str, ...]) -> Any:
        """The answer with these pictures: its JSON, or a stream of events.

        Args:
            made: the pictures.
            notes: on the request.
        """
        encoded = [self._encode(one.data) for one in made]
        told = [*notes, *(note for one in made for note in one.notes), *(note for _, more in encoded for note in more)]
        common: dict[str, Any] = {"background": "opaque", "output_format": self._format, "quality": "auto"}
        common |= {"notes": list(dict.fromkeys(told))} if told else {}
        data = [
            {"b64_json": base64.b64encode(file).decode(), "seed": one.config.seed}
            for one, (file, _) in zip(made, encoded, strict=True)
        ]
        sizes = [f"{one.size[0]}x{one.size[1]}" for one in made]
        if not self._streams:
            return {"created": int(time()), "data": data, "size": sizes[0], **common}
        events = [
            {
                "type": f"{self._kind}.completed",
                "created_at": int(time()),
                "size": size,
                "usage": _NO_USAGE,
                **one,
                **common,
            }
            for size, one in zip(sizes, data, strict=True)
        ]
        return StreamingResponse(_as_stream(events), media_type="text/event-stream")

    def _encode(self, data: bytes) -> tuple[bytes, tuple[str, ...]]:
        """A PNG in the format that was asked for, and notes on what was lost."""
        if self._format == "png":
            return data, ()
        picture = images.decode(data).image
        file, notes = images.encode(picture, _SUFFIXES[self._format], image_metadata.read_metadata(picture))
        if self._format == "jpeg":
            notes = (*notes, "a JPEG is not exact: pixels outside the mask are near the picture's, not the same")
        return (file if self._compression == 100 else _compressed(file, self._compression)), notes


def _compressed(file: bytes, quality: int) -> bytes:
    """A JPEG or WebP of another quality, with its metadata."""
    picture, smaller = Image.open(BytesIO(file)), BytesIO()
    kept = {name: picture.info[name] for name in ("exif", "icc_profile") if picture.info.get(name)}
    picture.save(smaller, picture.format, quality=quality, **kept)
    return smaller.getvalue()


def _as_stream(events: list[dict[str, Any]]) -> Iterator[str]:
    """Server-sent events."""
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _number(given: Obeyed, name: str, usual: int) -> int:
    """A whole number of JSON, or of a form as text. Raises InputError for something else."""
    value = given.get(name)
    if value in (None, ""):
        return usual
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} must be a whole number, got {as_text(value, 40)}")
    return value


def _file(given: UploadFile | str, name: str) -> bytes:
    """The bytes of a form's file. Raises InputError for text."""
    if isinstance(given, str):
        raise InputError(f"{name} must be a file, got text")
    return given.file.read()


def _check_own_size(size: object, data: bytes) -> None:
    """Raise InputError for another size than a picture has."""
    width, height = images.decode(data).image.size
    if size not in (None, "", "auto", f"{width}x{height}"):
        raise InputError(f"size must be auto or the picture's, {width}x{height}, got {size!r:.40}; an edit keeps it")


def _model_note(given: Obeyed, used: str) -> tuple[str, ...]:
    """A note if an edit was painted by another model than the one that was named."""
    model = given.text("model")
    return (f"model is {used}, not {as_text(model)}: an edit is painted by what made its picture",) * (
        bool(model) and model != used
    )


def _clear_pixels(data: bytes, what: str) -> Image.Image | None:
    """A mask that is white where a picture is clear, as it is seen; None where it nowhere is."""
    alpha = images.decode(data, what).image.convert("RGBA").getchannel("A")
    clear = ImageOps.invert(alpha)
    return clear if marks(clear) else None
