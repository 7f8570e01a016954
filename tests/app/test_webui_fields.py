"""The table of Automatic1111's fields, against what clients of it send."""

from __future__ import annotations

import pytest
import webuiapi
from PIL import Image

from app.webui_fields import IMG2IMG, OVERRIDES, TXT2IMG
from fisedit.errors import InputError

SILLY_TAVERN = {  # generateAutoImage of its extension stable-diffusion, with its usual settings
    "url": "http://localhost:7860",
    "auth": "name:secret",
    "sampler_name": "DDIM",
    "scheduler": "normal",
    "steps": 20,
    "cfg_scale": 7,
    "width": 512,
    "height": 512,
    "restore_faces": False,
    "enable_hr": False,
    "hr_upscaler": "Latent",
    "hr_scale": 1,
    "hr_additional_modules": [],
    "denoising_strength": 0.7,
    "hr_second_pass_steps": 0,
    "override_settings": {"CLIP_stop_at_last_layers": 1},
    "override_settings_restore_afterwards": True,
    "clip_skip": 1,
    "send_images": True,
    "do_not_save_grid": False,
    "do_not_save_samples": False,
}
CYANIC = {  # the Krita plugin's inpainting
    "mask_blur": 4,
    "inpainting_mask_invert": 0,
    "inpainting_fill": 1,
    "inpaint_full_res": 1,
    "inpaint_full_res_padding": 32,
    "seed": -1,
    "subseed": -1,
    "subseed_strength": 0,
    "seed_resize_from_h": -1,
    "seed_resize_from_w": -1,
    "refiner_switch_at": 0.8,
}


class Recorder(webuiapi.WebUIApi):
    """A client whose requests are kept, and reach nobody."""

    def check_extensions(self) -> None:
        """Ask nobody."""

    def post_and_get_api_result(self, url: str, json: dict, use_async: bool) -> dict:
        return json


def sent(**asked: object) -> tuple[dict, dict]:
    client = Recorder()
    return client.txt2img(prompt="a cat", **asked), client.img2img(images=[Image.new("L", (8, 8))], **asked)


def test_what_webuiapi_sends_by_itself_asks_for_nothing_more():
    for table, request in zip((TXT2IMG, IMG2IMG), sent(), strict=True):
        assert request.keys() <= table.fields.keys() and table.notes_on(request) == ()


def test_what_other_clients_send_by_themselves():
    assert TXT2IMG.notes_on(SILLY_TAVERN) == OVERRIDES.notes_on(SILLY_TAVERN["override_settings"]) == ()
    (note,) = TXT2IMG.notes_on(SILLY_TAVERN | {"save_images": True})
    assert note.startswith("save_images is not read, got True: no files are kept")
    assert IMG2IMG.notes_on(CYANIC | {"mask": "aGk="}) == ()


ON = [
    {"controlnet_units": [webuiapi.ControlNetUnit()]},
    {"adetailer": [webuiapi.ADetailer(ad_model="face_yolov8n.pt")]},
    {"script_name": "X/Y/Z plot"},
    {"styles": ["ink"]},
    {"subseed_strength": 0.1},
    {"seed_resize_from_w": 512},
    {"restore_faces": True},
    {"tiling": True},
    {"s_churn": 0.5},
    {"s_noise": 1.1},
]


@pytest.mark.parametrize("asked", ON, ids=lambda asked: next(iter(asked)))
def test_what_asks_for_another_picture_is_refused_by_name(asked):
    for table, request in zip((TXT2IMG, IMG2IMG), sent(**asked), strict=True):
        with pytest.raises(InputError, match=r"is not supported, got .*; ") as refused:
            table.notes_on(request)
        assert str(refused.value).partition(" ")[0] in {*asked, "alwayson_scripts"}


def test_scripts_that_are_off_ask_for_nothing():
    off = {"ControlNet": {"args": []}, "ADetailer": {"args": [False]}, "animatediff": {"args": [{"enabled": False}]}}
    assert TXT2IMG.notes_on({"alwayson_scripts": off}) == ()
    with pytest.raises(InputError, match="alwayson_scripts is not supported"):
        TXT2IMG.notes_on({"alwayson_scripts": off | {"Never OOM": {"args": [True]}}})


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [("sd_vae", "Automatic", False), ("sd_vae", "other.pt", True), ("img2img_color_correction", True, None)],
)
def test_settings_of_a_request(name, value, is_refused):
    if is_refused:
        with pytest.raises(InputError, match=rf"override_settings\.{name} is not supported"):
            OVERRIDES.notes_on({name: value})
    else:
        assert bool(OVERRIDES.notes_on({name: value})) is (is_refused is None)
