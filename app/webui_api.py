"""Routes of Automatic1111's API, for clients that speak it: txt2img, img2img, options, progress, interrupt, png-info,
models in memory, and all its lists. An img2img with a mask is an edit, which keeps every pixel outside the mask.

A request may also say `source_prompt`, what the given picture shows, and `quality`. Knows the API's JSON.
"""

# Annotations are read by FastAPI as they stand: no `from __future__ import annotations` here.
import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from secrets import randbelow
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body
from PIL import Image, ImageOps

from app import views, webui_lists
from app.program_pictures import kept_notes
from app.request_fields import Obeyed
from app.validation import DRAWN_SEEDS, RegionSettings, SourceSettings, decode_picture
from app.webui_fields import IMG2IMG, OPTIONS, OVERRIDES, TXT2IMG
from fisedit.errors import InputError
from fisedit.prompts.syntax import without_loras
from fisedit.storage import images
from fisedit.storage.mask_images import decode_mask, marks
from fisedit.values import Quality, SchedulerName, web_ui_scheduler
from fisedit.values.sizes import Sizes, make_sizes

if TYPE_CHECKING:
    from app.program_pictures import ProgramPicture, ProgramPictures
    from fisedit.values import GenerationConfig

PREFIX = "/sdapi/v1"
MAX_PICTURES = 8
"""Pictures of one request."""

_CROP = "sdxl_crop_top", "sdxl_crop_left"


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
    routes.get("/schedulers")(api.schedulers)
    routes.get("/loras")(api.loras)
    routes.get("/memory")(webui_lists.memory)
    routes.post("/png-info")(api.png_info)
    routes.post("/unload-checkpoint")(api.unload)
    routes.post("/reload-checkpoint")(api.reload)
    for name, answer in webui_lists.LISTS.items():
        routes.get(f"/{name}")(_always(answer))
    for name in webui_lists.REFRESHES:
        routes.post(f"/{name}")(_always(None))
    return routes


def _always(answer: object) -> Callable[[], object]:
    """A function that returns the same each time."""
    return lambda: answer


class WebuiApi:
    """The functions behind the routes.

    Args:
        pictures: makes what is asked for.
    """

    def __init__(self, pictures: "ProgramPictures") -> None:
        self._pictures, self._pool = pictures, pictures.state.pool
        self._model = ""  # that `options` chose; "" for the first

    def txt2img(self, asked: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        """Pictures of a prompt."""
        notes, given = TXT2IMG.notes_on(asked), TXT2IMG.obeyed(asked)
        all_settings, more_notes = self._all_settings(given, (given.get("width"), given.get("height")))
        made = self._pictures.generate(_prompt(given), all_settings)
        return _answer(asked, given, made, (*notes, *more_notes))

    def img2img(self, asked: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        """A picture changed to fit a prompt: where its mask is white, or everywhere without one."""
        notes, given = IMG2IMG.notes_on(asked), IMG2IMG.obeyed(asked)
        pictures = given.get("init_images") or []
        if not (isinstance(pictures, list) and len(pictures) == 1):
            got = len(pictures) if isinstance(pictures, list) else type(pictures).__name__
            raise InputError(f"init_images must hold a picture in base64, got {got}; send a request for each")
        data = _decode(pictures[0], "init_images")
        size = images.decode(data).image.size
        region = RegionSettings(
            add=_mask(given, size),
            only=True,
            strength=given.get("denoising_strength", 0.75),
            quality=given.get("quality", Quality.BALANCED),
        )
        all_settings, more_notes = self._all_settings(given, (None, None))
        is_random = _is_random(given.get("seed"))  # then the first picture keeps the noise of what it is made of
        made = self._pictures.edit(
            data, _prompt(given), all_settings, region, given.text("source_prompt"), keeps_noise=is_random
        )
        kept = kept_notes(made[0], _asked_of_edit(given, all_settings[0]))
        return _answer(asked, given, made, (*notes, *more_notes, *kept))

    def interrupt(self) -> dict[str, Any]:
        """Stop what runs for programs."""
        self._pictures.interrupt()
        return {}

    def progress(self, skip_current_image: bool = False) -> dict[str, Any]:
        """Return the progress of the run that told of itself last."""
        now = self._pictures.progress
        step, steps = (now.step, now.steps) if now else (0, 0)
        picture = now.picture if now and not skip_current_image else None
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

    def set_options(self, asked: Annotated[dict[str, Any], Body()]) -> None:
        """Choose the model of later requests. Raises InputError for other options that ask for something."""
        if unread := OPTIONS.notes_on(asked):
            raise InputError(f"{unread[0]}; options are sd_model_checkpoint, all else is of a request")
        if name := OPTIONS.obeyed(asked).text("sd_model_checkpoint"):
            self._pool.select(name)
            self._model = name

    def samplers(self) -> list[dict[str, Any]]:
        """The samplers, by web UIs' names."""
        return [{"name": name.label, "aliases": [name.value], "options": {}} for name in SchedulerName]

    def schedulers(self) -> list[dict[str, Any]]:
        """The noise schedules, by web UIs' names."""
        rest = {"aliases": None, "default_rho": None, "need_inner_model": False}
        names = "Automatic", "Uniform", "Karras", "Exponential"
        return [{"name": name.casefold(), "label": name, **rest} for name in names]

    def loras(self) -> list[dict[str, Any]]:
        """The LoRAs that tags in a prompt may name."""
        return [{"name": each, "alias": each, "path": each, "metadata": {}} for each in self._pool.loras.labels]

    def models(self) -> list[dict[str, Any]]:
        """The models that are offered."""
        names = [model.label for model in self._pool.models]
        return [
            {"title": name, "model_name": name, "hash": None, "sha256": None, "filename": name, "config": None}
            for name in names
        ]

    def png_info(self, asked: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        """Tell how a picture was made, by its file."""
        return webui_lists.png_info(decode_picture(_decode(asked.get("image"), "image")))

    def unload(self) -> dict[str, Any]:
        """Drop the chosen model from memory once no run uses it; the next request loads it again."""
        model = self._pool.select(self._model)
        self._pictures.state.worker.call(lambda: self._pool.unload(model))
        return {}

    def reload(self) -> dict[str, Any]:
        """Load the chosen model if it is not in memory."""
        model = self._pool.select(self._model)
        self._pictures.state.worker.call(lambda: self._pool.load(model))
        return {}

    def _all_settings(
        self, given: Obeyed, size: tuple[int | None, int | None]
    ) -> tuple[list[SourceSettings], tuple[str, ...]]:
        """The settings of every picture that is asked for, and notes.

        Args:
            given: the request's fields.
            size: width and height; None for the model's own, or the picture's.
        """
        counts = given.get("batch_size", 1), given.get("n_iter", 1)
        if not all(type(each) is int and 1 <= each <= MAX_PICTURES for each in counts) or prod(counts) > MAX_PICTURES:
            raise InputError(f"batch_size times n_iter must be 1 to {MAX_PICTURES}, got {counts!r:.40}")
        count, seed = prod(counts), given.get("seed")
        first = randbelow(DRAWN_SEEDS) if _is_random(seed) else seed
        overridden = given.get("override_settings") or {}
        if not isinstance(overridden, dict):
            raise InputError(f"override_settings must be an object, got {type(overridden).__name__}")
        notes, override = OVERRIDES.notes_on(overridden), OVERRIDES.obeyed(overridden)
        clip_skip = _clip_skip(given.get("clip_skip"), override.get("CLIP_stop_at_last_layers"))
        settings = SourceSettings(
            steps=given.get("steps", 25),
            guidance=given.get("cfg_scale"),
            width=size[0],
            height=size[1],
            scheduler=_scheduler(given),
            negative_prompt=given.text("negative_prompt"),
            model=override.text("sd_model_checkpoint") or self._model,
            clip_skip=clip_skip,
            negative_clip_skip=clip_skip,
            sizes=make_sizes({"crops_coords_top_left": [override.get(name) or 0 for name in _CROP]}),
        )
        return [replace(settings, seed=first + i if type(first) is int else first) for i in range(count)], notes


def _is_random(seed: object) -> bool:
    """Return whether a seed asks for a new one."""
    return seed in (None, "", -1)


def _clip_skip(own: object, override: object) -> Any:
    """Layers to leave out, of the two fields that say so: the number of the last layer that is used, from the end."""
    told = {each for each in (own, override) if type(each) is int and each}
    if len(told) > 1:
        raise InputError(f"clip_skip and CLIP_stop_at_last_layers must be equal, got {own!r:.40} and {override!r:.40}")
    other = next((each for each in (own, override) if each is not None and type(each) is not int), None)
    return other if other is not None else max(0, max(told, default=1) - 1)


def _prompt(given: Obeyed) -> str:
    """The prompt, without tags of LoRAs where they are switched off."""
    prompt = given.text("prompt")
    return without_loras(prompt) if given.get("disable_extra_networks") else prompt


def _scheduler(given: Obeyed) -> str:
    """The sampler of `sampler_name` and `scheduler`, which web UIs name apart since 1.9."""
    name = given.text("sampler_name") or given.text("sampler_index")
    return web_ui_scheduler(name, given.text("scheduler")) or "ddim"


def _asked_of_edit(given: Obeyed, settings: SourceSettings) -> dict[str, object]:
    """The fields of a request that an edit takes from its picture, as far as they are given."""
    asked = {name: given.get(name) for name in ("steps", "cfg_scale", "negative_prompt", "width", "height")}
    if given.text("sampler_name") or given.text("sampler_index"):
        asked["sampler_name"] = SchedulerName(settings.scheduler).label
    if isinstance(settings.sizes, Sizes):
        asked |= dict(zip(_CROP, settings.sizes.crops_coords_top_left, strict=True))
    return asked | {"model": settings.model or None, "clip_skip": settings.clip_skip or None}


def _other_arithmetic(config: "GenerationConfig") -> Iterator[str]:
    """Notes on numbers that a web UI reads otherwise; those between 0 and 1 of guidance are told on every face."""
    if config.guidance_scale == 0:
        yield "cfg_scale 0 is no guidance, as 1 is; web UIs draw the negative prompt alone"
    if config.clip_skip != config.negative_clip_skip and config.guided:
        yield f"clip_skip {config.clip_skip + 1} is of the prompt alone, as the picture was made"


def _decode(text: object, what: str) -> bytes:
    """A picture's file in base64, with or without a data URL's head."""
    if not isinstance(text, str):
        raise InputError(f"{what} must be a picture in base64, got {type(text).__name__}")
    return views.decode_base64(text, what)


def _mask(given: Obeyed, size: tuple[int, int]) -> Image.Image:
    """Return where an img2img may change the picture: its mask, of the picture's size, or everywhere.

    Raises:
        InputError: no picture, or one that marks nothing.
    """
    if not given.get("mask"):
        return Image.new("L", size, 255)
    mask = decode_mask(_decode(given.get("mask"), "mask"), size=size)
    mask = ImageOps.invert(mask) if given.get("inpainting_mask_invert") else mask
    if not marks(mask):
        raise InputError("mask must be white, or painted on clear, where the picture may change, got nothing marked")
    return mask


def _answer(
    asked: dict[str, Any], given: Obeyed, made: "list[ProgramPicture]", notes: tuple[str, ...]
) -> dict[str, Any]:
    """The pictures, what was asked for, and as `info` what the first one was made with."""
    heavy = set() if asked.get("include_init_images") else {"init_images", "mask"}
    told = {name: value for name, value in asked.items() if name not in {*heavy, "auth", "url"}}
    config, seeds = made[0].config, [one.config.seed for one in made]
    info: dict[str, Any] = {
        "prompt": config.prompt,
        "negative_prompt": config.negative_prompt,
        "seed": seeds[0],
        "all_seeds": seeds,
        "steps": config.num_inference_steps,
        "cfg_scale": config.guidance_scale,
        "sampler_name": config.scheduler.label,
        "width": made[0].size[0],
        "height": made[0].size[1],
        "index_of_first_image": 0,
        "sd_model_name": made[0].model,
        "clip_skip": config.clip_skip + 1,
    }
    info["notes"] = list(
        dict.fromkeys([*notes, *_other_arithmetic(config), *(each for one in made for each in one.notes)])
    )
    sends = given.get("send_images") is not False
    return {
        "images": [base64.b64encode(one.data).decode() for one in made] if sends else [],
        "parameters": told | dict.fromkeys(heavy & asked.keys()),
        "info": json.dumps(info),
    }
