"""Routes of OpenAI's image API, for clients that speak it: generations and edits. An edit keeps every pixel outside the
mask, whose clear pixels say where it may change; without a mask those of the picture say, or else the changed words.

A form of an edit may also have `source_prompt`, what the given picture shows. Knows the API's JSON and forms.
"""

# Annotations are read by FastAPI as they stand: no `from __future__ import annotations` here.
import base64
import re
from secrets import randbelow
from time import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Body, File, Form, UploadFile
from PIL import Image, ImageOps

from app.validation import SEEDS, RegionSettings, SourceSettings
from fisedit.errors import InputError
from fisedit.storage import images
from fisedit.storage.canvas import upright
from fisedit.storage.mask_images import marks

if TYPE_CHECKING:
    from app.program_pictures import ProgramPicture, ProgramPictures

PREFIX = "/v1"
MAX_PICTURES = 8
"""Pictures of one request."""

MAX_ENLARGEMENT = 4
"""Of the model's own size: a larger picture takes minutes, and shows things many times."""

_SIZE = re.compile(r"(\d{2,4})x(\d{2,4})")


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

    def generations(self, asked: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008 (FastAPI's way)
        """Pictures of a prompt."""
        prompt, count = asked.get("prompt", ""), asked.get("n") or 1
        _check_format(asked.get("response_format"))
        all_settings = self._all_settings(str(asked.get("model") or ""), asked.get("size"), count)
        return _answer(self._pictures.generate(prompt, all_settings))

    def edits(
        self,
        image: list[UploadFile] = File(default=[]),  # noqa: B008
        images_: list[UploadFile] = File(default=[], alias="image[]"),  # noqa: B008
        prompt: str = Form(),
        mask: UploadFile | None = File(default=None),  # noqa: B008
        n: int = Form(default=1),
        model: str = Form(default=""),
        response_format: str | None = Form(default=None),
        source_prompt: str = Form(default=""),
    ) -> dict[str, Any]:
        """A picture changed to fit a prompt."""
        _check_format(response_format)
        given = [*image, *images_]
        if len(given) != 1:
            raise InputError(f"image must be one picture, got {len(given)}")
        data = given[0].file.read()
        clear = _clear_pixels(data, "image") if mask is None else _clear_pixels(mask.file.read(), "mask")
        if mask is not None and clear is None:
            raise InputError("mask must be clear where the picture may change, got no clear pixel")
        region = RegionSettings(add=clear, only=clear is not None)
        all_settings = self._all_settings(model, None, n)
        return _answer(self._pictures.edit(data, prompt, all_settings, region, source_prompt))

    def _all_settings(self, model: str, size: object, count: object) -> list[SourceSettings]:
        """The settings of every picture that is asked for; a model that is not offered is the first one."""
        if not isinstance(count, int) or not 1 <= count <= MAX_PICTURES:
            raise InputError(f"n must be 1 to {MAX_PICTURES}, got {count!r:.40}")
        found = _SIZE.fullmatch(str(size)) if size not in (None, "auto") else None
        if size not in (None, "auto") and found is None:
            raise InputError(f"size must be such as 512x512, or auto, got {size!r:.40}")
        offered = {one.label: one for one in self._pictures.state.pool.models}
        width, height = (int(found[1]), int(found[2])) if found else (None, None)
        native = offered.get(model, self._pictures.state.pool.first).native_size
        if max(width or 0, height or 0) > MAX_ENLARGEMENT * native:
            most = f"at most {MAX_ENLARGEMENT} times the {native} pixels of the model"
            raise InputError(f"size must be {most}, got {size}; send {native}x{native} or auto")
        first = randbelow(SEEDS[1] - MAX_PICTURES)
        return [
            SourceSettings(width=width, height=height, seed=first + i, model=model if model in offered else "")
            for i in range(count)
        ]


def _check_format(name: object) -> None:
    """Refuse another way to answer than in base64. Raises InputError."""
    if name not in (None, "", "b64_json"):
        raise InputError(f"response_format must be b64_json, got {name!r:.40}; there are no addresses of pictures")


def _clear_pixels(data: bytes, what: str) -> Image.Image | None:
    """A mask that is white where a picture is clear, as it is seen; None where it nowhere is."""
    alpha = upright(images.decode(data, what).image).convert("RGBA").getchannel("A")
    clear = ImageOps.invert(alpha)
    return clear if marks(clear) else None


def _answer(made: "list[ProgramPicture]") -> dict[str, Any]:
    return {"created": int(time()), "data": [{"b64_json": base64.b64encode(one.data).decode()} for one in made]}
