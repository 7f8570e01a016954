"""Lists of Automatic1111's API, against the shapes that it publishes, and what a picture's file says of its making."""

from __future__ import annotations

from io import BytesIO
from typing import Any, get_args, get_origin

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from app import webui_lists
from fisedit.storage import images

TEXT, NUMBER = str | None, float | int | None
SHAPES = {  # the response models of the web UI's modules/api/models.py, and of Forge's sd-modules
    "upscalers": [{"name": str, "model_name": TEXT, "model_path": TEXT, "model_url": TEXT, "scale": NUMBER}],
    "latent-upscale-modes": [{"name": str}],
    "sd-vae": [{"model_name": str, "filename": str}],
    "sd-modules": [{"model_name": str, "filename": str}],
    "embeddings": {"loaded": dict, "skipped": dict},
    "hypernetworks": [{"name": str, "path": TEXT}],
    "face-restorers": [{"name": str, "cmd_dir": TEXT}],
    "realesrgan-models": [{"name": str, "path": TEXT, "scale": int | None}],
    "prompt-styles": [{"name": str, "prompt": TEXT, "negative_prompt": TEXT}],
    "scripts": {"txt2img": list, "img2img": list},
    "script-info": [{"name": TEXT, "is_alwayson": bool, "is_img2img": bool, "args": list}],
    "extensions": [{"name": str, "remote": str, "branch": str, "enabled": bool}],
    "cmd-flags": {"api": bool},
}
BYTES = {"free": int, "used": int, "total": int}
MOMENTS = {"current": int, "peak": int}


def has_shape(value: Any, shape: Any) -> bool:
    """Whether a value has the keys and types of a shape; a list those of its only item, each time."""
    if isinstance(shape, dict):
        return shape.keys() == value.keys() and all(has_shape(value[key], each) for key, each in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(has_shape(each, shape[0]) for each in value)
    return isinstance(value, get_args(shape) if get_origin(shape) else shape)


@pytest.mark.parametrize("name", SHAPES | webui_lists.LISTS)
def test_a_list_has_the_shape_that_clients_read(name):
    assert has_shape(webui_lists.LISTS[name], SHAPES[name])


def test_no_upscaler_comes_first_as_clients_expect():
    assert webui_lists.LISTS["upscalers"][0]["name"] == "None" and len(webui_lists.LISTS["upscalers"]) == 1


def test_memory_is_told_of_the_machine_and_of_a_gpu(monkeypatch):
    found = webui_lists.memory()
    assert has_shape(found["ram"], BYTES) and found["ram"]["free"] + found["ram"]["used"] == found["ram"]["total"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert webui_lists.memory()["cuda"] == {"error": "unavailable"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 10))
    stats = {"allocated_bytes.all.current": 5, "allocated_bytes.all.peak": 6, "num_ooms": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    cuda = webui_lists.memory()["cuda"]
    kinds = dict.fromkeys(("active", "allocated", "reserved", "inactive"), MOMENTS)
    assert has_shape(cuda, {"system": BYTES, **kinds, "events": {"retries": int, "oom": int}})
    assert cuda["system"] == {"free": 3, "used": 7, "total": 10}
    assert cuda["allocated"] == {"current": 5, "peak": 6} and cuda["events"] == {"retries": 0, "oom": 1}


def with_texts(**texts: str) -> Image.Image:
    chunks, file = PngInfo(), BytesIO()
    for key, text in texts.items():
        chunks.add_text(key, text)
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=chunks)
    return images.decode(file.getvalue()).image


WRITTEN = (
    'a cat, (red:1.2)\nNegative prompt: rain\nSteps: 20, Sampler: DDIM, Size: 512x768, Lora hashes: "ink: 1, oil: 2"'
)


def test_a_picture_says_how_it_was_made_by_web_uis_names():
    found = webui_lists.png_info(with_texts(parameters=WRITTEN, Author="me"))
    assert found["info"] == WRITTEN and found["items"] == {"Author": "me"}
    assert found["parameters"] == {
        "Prompt": "a cat, (red:1.2)",
        "Negative prompt": "rain",
        "Steps": "20",
        "Sampler": "DDIM",
        "Size-1": "512",
        "Size-2": "768",
        "Lora hashes": "ink: 1, oil: 2",
    }


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ({}, {}),
        ({"parameters": "a cat"}, {"Prompt": "a cat", "Negative prompt": ""}),
        ({"Comment": '{"prompt": "a cat", "steps": 5, "uc": "rain", "sampler": "k_euler"}'}, {}),
    ],
)
def test_a_picture_that_says_less_or_says_it_in_another_way_has_fewer_fields(texts, told):
    assert webui_lists.png_info(with_texts(**texts))["parameters"] == told
