"""Routes of Automatic1111's API, for clients that speak it: txt2img, img2img, options, samplers, sd-models, progress
and interrupt. An img2img with a mask is an edit, which keeps every pixel outside the mask.

A request may also say `source_prompt`, what the given picture shows, and `quality`. Knows the API's JSON.
"""

# Annotations are read by FastAPI as they stand: no `from __future__ import annotations` here.
import base64
import json
from dataclasses import replace
from math import prod
from secrets import randbelow
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Body
from PIL import Image, ImageOps

from app import views
from app.validation import SEEDS, RegionSettings, SourceSettings
from fisedit.errors import InputError
from fisedit.storage import images
from fisedit.storage.canvas import upright_size
from fisedit.storage.mask_images import decode_mask, marks
from fisedit.values import Quality, SchedulerName

if TYPE_CHECKING:
    from app.program_pictures import ProgramPicture, ProgramPictures

PREFIX = "/sdapi/v1"
MAX_PICTURES = 8
"""Pictures of one request."""

_PLAIN = {"automatic", "normal", "default", ""}
"""Noise schedules that name no other sampler."""


def router(pictures: "ProgramPictures") -> APIRouter:
    """The routes.

    Args:
        pictures: makes what is asked for.
    """
    routes, api = APIRouter(prefix=PREFIX), WebuiApi(pictures)
    routes.post("/txt2img")(api.txt2img)
    routes.post("/img2img")(api.img2img)
    routes.post("/interrupt")(api.interrupt)
    routes.get("/progress")(api.progress)
    routes.get("/options")(api.options)
    routes.post("/options")(api.set_options)
    routes.get("/samplers")(api.samplers)
    routes.get("/sd-models")(api.models)
    routes.get("/scripts")(api.scripts)
    return routes


class WebuiApi:
    """The functions behind the routes.

    Args:
        pictures: makes what is asked for.
    """

    def __init__(self, pictures: "ProgramPictures") -> None:
        self._pictures, self._pool = pictures, pictures.state.pool
        self._model = ""  # that `options` chose; "" for the first

    def txt2img(self, asked: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008 (FastAPI's way)
        """Pictures of a prompt."""
        all_settings = self._all_settings(asked, own_size=False)
        return _answer(asked, self._pictures.generate(_text(asked, "prompt"), all_settings))

    def img2img(self, asked: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008
        """A picture changed to fit a prompt: where its mask is white, or everywhere without one."""
        given = asked.get("init_images") or []
        if not (isinstance(given, list) and given):
            raise InputError("init_images must hold a picture in base64, got none")
        data = _decode(given[0], "init_images")
        size = upright_size(images.decode(data).image)
        region = RegionSettings(
            add=_mask(asked, size),
            only=True,
            strength=asked.get("denoising_strength", 0.75),
            quality=asked.get("quality", Quality.BALANCED),
        )
        source_prompt, prompt = _text(asked, "source_prompt"), _text(asked, "prompt")
        all_settings = self._all_settings(asked, own_size=True)
        is_random = asked.get("seed", -1) == -1  # then the first picture keeps the noise of what it is made of
        made = self._pictures.edit(data, prompt, all_settings, region, source_prompt, keeps_noise=is_random)
        return _answer(asked, made)

    def interrupt(self) -> dict[str, Any]:
        """Stop what runs for programs."""
        self._pictures.interrupt()
        return {}

    def progress(self) -> dict[str, Any]:
        """How far the run is that told of itself last."""
        now = self._pictures.progress
        step, steps = (now.step, now.steps) if now else (0, 0)
        picture = now.picture if now else None
        return {
            "progress": step / steps if steps else 0.0,
            "eta_relative": (now.seconds_left or 0.0) if now else 0.0,
            "state": {"job_count": int(now is not None), "sampling_step": step, "sampling_steps": steps},
            "current_image": None if picture is None else views.png_base64(picture),
            "textinfo": None,
        }

    def options(self) -> dict[str, Any]:
        """The model that requests are made with."""
        return {"sd_model_checkpoint": self._model or self._pool.first.label}

    def set_options(self, asked: dict[str, Any] = Body()) -> None:  # noqa: B008
        """Choose the model of later requests; other options are not known, and left alone."""
        if "sd_model_checkpoint" in asked:
            name = _text(asked, "sd_model_checkpoint")
            self._pool.select(name)
            self._model = name

    def samplers(self) -> list[dict[str, Any]]:
        """The samplers, by web UIs' names."""
        return [{"name": name.label, "aliases": [name.value], "options": {}} for name in SchedulerName]

    def models(self) -> list[dict[str, Any]]:
        """The models that are offered."""
        names = [model.label for model in self._pool.models]
        return [
            {"title": name, "model_name": name, "hash": None, "sha256": None, "filename": name, "config": None}
            for name in names
        ]

    def scripts(self) -> dict[str, Any]:
        """The scripts that are installed, which are none."""
        return {"txt2img": [], "img2img": []}

    def _all_settings(self, asked: dict[str, Any], *, own_size: bool) -> list[SourceSettings]:
        """The settings of every picture that is asked for."""
        counts = asked.get("batch_size", 1), asked.get("n_iter", 1)
        if not all(type(each) is int and 1 <= each <= MAX_PICTURES for each in counts) or prod(counts) > MAX_PICTURES:
            raise InputError(f"batch_size times n_iter must be 1 to {MAX_PICTURES}, got {counts!r:.40}")
        count = prod(counts)
        seed = asked.get("seed", -1)
        first = randbelow(SEEDS[1] - MAX_PICTURES) if seed == -1 else seed
        overridden = asked.get("override_settings") or {}
        if not isinstance(overridden, dict):
            raise InputError(f"override_settings must be an object, got {type(overridden).__name__}")
        clip_skip = overridden.get("CLIP_stop_at_last_layers", 1)
        settings = SourceSettings(
            steps=asked.get("steps", 25),
            guidance=asked.get("cfg_scale"),
            width=None if own_size else asked.get("width"),
            height=None if own_size else asked.get("height"),
            scheduler=_scheduler(asked),
            negative_prompt=_text(asked, "negative_prompt"),
            model=_text(overridden, "sd_model_checkpoint") or self._model,
            clip_skip=max(0, clip_skip - 1) if isinstance(clip_skip, int) else clip_skip,
        )
        return [replace(settings, seed=first + i if isinstance(first, int) else first) for i in range(count)]


def _scheduler(asked: dict[str, Any]) -> str:
    """The sampler of `sampler_name` and `scheduler`, which web UIs name apart since 1.9."""
    name, noise = _text(asked, "sampler_name") or _text(asked, "sampler_index"), _text(asked, "scheduler")
    named = noise.casefold() in _PLAIN or name.casefold().endswith(noise.casefold())
    return (name if named else f"{name} {noise}") or "ddim"


def _text(asked: dict[str, Any], name: str) -> str:
    value = asked.get(name)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{name} must be text, got {type(value).__name__}")
    return value or ""


def _decode(text: object, what: str) -> bytes:
    """A picture's file in base64, with or without a data URL's head."""
    if not isinstance(text, str):
        raise InputError(f"{what} must be a picture in base64, got {type(text).__name__}")
    return views.decode_base64(text.rpartition(",")[2], what)


def _mask(asked: dict[str, Any], size: tuple[int, int]) -> Image.Image:
    """Where an img2img may change the picture: its mask, of the picture's size, or everywhere.

    Raises:
        InputError: no picture, or one that marks nothing.
    """
    if not asked.get("mask"):
        return Image.new("L", size, 255)
    mask = decode_mask(_decode(asked["mask"], "mask"), size=size)
    mask = ImageOps.invert(mask) if asked.get("inpainting_mask_invert") else mask
    if not marks(mask):
        raise InputError("mask must be white, or painted on clear, where the picture may change, got nothing marked")
    return mask


def _answer(asked: dict[str, Any], made: "list[ProgramPicture]") -> dict[str, Any]:
    """The pictures, what was asked for, and as `info` what the first one was made with."""
    heavy = {"init_images", "mask"}
    told = {name: value for name, value in asked.items() if name not in heavy}
    config, seeds = made[0].config, [one.config.seed for one in made]
    info = {
        "prompt": config.prompt,
        "negative_prompt": config.negative_prompt,
        "seed": seeds[0],
        "all_seeds": seeds,
        "steps": config.num_inference_steps,
        "cfg_scale": config.guidance_scale,
        "sampler_name": config.scheduler.label,
        "width": config.width,
        "height": config.height,
        "index_of_first_image": 0,
    }
    return {
        "images": [base64.b64encode(one.data).decode() for one in made],
        "parameters": told | dict.fromkeys(heavy & asked.keys()),
        "info": json.dumps(info),
    }
