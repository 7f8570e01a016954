"""Lists of Automatic1111's API beside models, samplers and LoRAs, as they are here: mostly empty. Knows shapes alone.

Shapes are those of `modules/api/models.py` of the web UI; `sd-modules` is Forge's. Clients ask for these lists when
they connect, and some give up where one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fisedit.machine.device import memory_bytes
from fisedit.machine.hardware import available_bytes
from fisedit.metadata.generation_parameters import parse_fields
from fisedit.metadata.image_metadata import read_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL.Image import Image

LISTS: Mapping[str, Any] = {
    "upscalers": [{"name": "None", "model_name": None, "model_path": None, "model_url": None, "scale": 1}],
    "latent-upscale-modes": [],
    "sd-vae": [],
    "sd-modules": [],
    "embeddings": {"loaded": {}, "skipped": {}},
    "hypernetworks": [],
    "face-restorers": [],
    "realesrgan-models": [],
    "prompt-styles": [],
    "scripts": {"txt2img": [], "img2img": []},
    "script-info": [],
    "extensions": [],
    "cmd-flags": {"api": True},
}
"""Name of a route -> its answer. `None` is the web UI's own name of no upscaler, which clients expect to come first."""

REFRESHES = ("refresh-checkpoints", "refresh-vae", "refresh-loras", "refresh-embeddings")
"""Routes that look for files again; what is offered here stays what the server was started with."""

_CUDA = {
    "active": "active_bytes.all",
    "allocated": "allocated_bytes.all",
    "reserved": "reserved_bytes.all",
    "inactive": "inactive_split_bytes.all",
}
"""Names of kinds of a GPU's memory in the API -> in torch."""


def memory() -> dict[str, Any]:
    """Bytes of memory: of the machine, or of its container, and of the GPU if there is one."""
    total, free = memory_bytes(torch.device("cpu")), available_bytes()
    return {"ram": {"free": free, "used": total - free, "total": total}, "cuda": _cuda_memory()}


def _cuda_memory() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"error": "unavailable"}
    (free, total), stats = torch.cuda.mem_get_info(), torch.cuda.memory_stats()
    kinds = {
        name: {moment: stats.get(f"{key}.{moment}", 0) for moment in ("current", "peak")} for name, key in _CUDA.items()
    }
    events = {"retries": stats.get("num_alloc_retries", 0), "oom": stats.get("num_ooms", 0)}
    return {"system": {"free": free, "used": total - free, "total": total}, **kinds, "events": events}


def png_info(picture: Image) -> dict[str, Any]:
    """Return what a picture's file says of its making: the text, its other texts, and the settings by their names.

    Args:
        picture: a picture with what Pillow read beside its pixels.
    """
    info = read_metadata(picture).parameters
    texts = {key: value for key, value in picture.info.items() if isinstance(key, str) and isinstance(value, str)}
    texts.pop("parameters", None)
    return {"info": info, "items": texts, "parameters": parse_fields(info)}
