"""The models in ComfyUI's folders, and the one that is loaded. Knows paths and sessions, no node."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fisedit.errors import ModelError

from .sessions import NodeSession

_loaded: dict[tuple[str, str, str], NodeSession] = {}
"""The session that was loaded last, by path, state of the files, and device."""


def names() -> list[str]:
    """The models to choose from: the demo model, checkpoints in safetensors, and folders of diffusers."""
    import folder_paths

    checkpoints = [name for name in folder_paths.get_filename_list("checkpoints") if name.endswith(".safetensors")]
    return ["demo", *checkpoints, *dict(_diffusers_folders())]


def path_and_state(name: str) -> tuple[str, str]:
    """The path of a model, and the time and size of its file or index. Raises ModelError where it is gone."""
    import folder_paths

    if name == "demo":
        return name, ""
    found = folder_paths.get_full_path("checkpoints", name) or dict(_diffusers_folders()).get(name)
    if found is None:
        raise ModelError(f"model must be one of ComfyUI's checkpoints or diffusers folders, got {name!r}; refresh them")
    stat = (Path(found, "model_index.json") if Path(found).is_dir() else Path(found)).stat()
    return found, f"{stat.st_mtime_ns} {stat.st_size}"


def load(name: str, device: str) -> NodeSession:
    """The session of a model, loaded anew if it is not the one that was loaded last; `device` is "default" or "cpu"."""
    from comfy.model_management import get_torch_device, unload_all_models

    from fisedit import Editor

    asked = (*path_and_state(name), device)
    if asked not in _loaded:
        for session in _loaded.values():
            session.kept.clear()
        _loaded.clear()
        unload_all_models()  # ComfyUI loads its own again when they are needed
        own = torch.device("cpu") if device == "cpu" else get_torch_device()
        chosen = own if own.type in {"cpu", "cuda"} else None
        _loaded[asked] = NodeSession(Editor.from_pretrained(asked[0], device=chosen, local_files_only=True))
    return _loaded[asked]


def _diffusers_folders() -> Iterator[tuple[str, str]]:
    """Yield the name and the path of every folder with a model of diffusers."""
    import folder_paths

    for top in folder_paths.get_folder_paths("diffusers"):
        for folder, _, files in os.walk(top, followlinks=True):
            if "model_index.json" in files:
                yield os.path.relpath(folder, top), folder
