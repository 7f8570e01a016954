"""Where models lie, and which is which. Knows paths and bytes; imports no torch, so that it answers at once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fisedit.errors import ModelError
from fisedit.models import hub
from fisedit.models.validation import pickled

_PACKAGE = Path(__file__).parents[1]
_HOMES = (_PACKAGE / "_weights", _PACKAGE.parent / "weights")  # of what ships: an installed wheel; a checkout
LOOK = "demo-look"
"""The name of the reference adapter that ships, for the demo model."""

_READ = {".json", ".txt", ".safetensors"}  # endings of all that a loader reads


def demo_folder() -> Path:
    """Find the model that ships with fisedit, in an installed wheel or in a checkout.

    Raises:
        ModelError: this copy of fisedit came without it.
    """
    for home in _HOMES:
        if (home / "demo" / "model_index.json").is_file():
            return home / "demo"
    raise ModelError("the demo model is not in this copy of fisedit; reinstall it, or give another model")


def look_folder() -> Path:
    """Find the demo model's reference adapter likewise. Raises ModelError: this copy of fisedit came without it."""
    for home in _HOMES:
        if (home / LOOK / "config.json").is_file():
            return home / LOOK
    raise ModelError(f"{LOOK} is not in this copy of fisedit; reinstall it, or give another adapter")


def locate(model: str | Path) -> Path | None:
    """The model's file or folder; None stands for a hub id.

    Raises:
        ModelError: it is neither.
    """
    if model == "demo":
        return demo_folder()
    path = Path(model).expanduser()
    if path.is_dir() or path.is_file():
        return path
    refusal = pickled(path)
    if isinstance(model, str) and hub.HUB_ID.fullmatch(model) and path.suffix != ".safetensors" and not refusal:
        return None
    found = "no file or folder" if path.exists() else "nothing there"
    raise ModelError(
        f'model must be "demo", a folder, a .safetensors file or a hub id owner/name, got {model} ({found})'
    )


def full_name(model: str | Path) -> str:
    """What sessions call a model or an adapter: "demo", "demo-look", its place in full where it is on this machine, or
    its hub id."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() and model not in ("demo", LOOK) else str(model)


def identity(model: str | Path, *, local_files_only: bool = False) -> str:
    """What tells a model from every other: a SHA-256 of its files wherever they lie, or a hub id's commit.

    Args:
        model, local_files_only: as of `fisedit.models.loader.load`.

    Raises:
        ModelError: there is no such model, or it cannot be read.
    """
    path = locate(model)
    if path is None:
        return f"{model}@{hub.commit(str(model), local_files_only=local_files_only)}"
    files = [path] if path.is_file() else sorted(file for file in path.glob("**/*") if file.suffix in _READ)
    whole = hashlib.sha256()
    try:
        for file in files:
            name = str(file.relative_to(path)) if path.is_dir() else ""
            with file.open("rb") as content:
                whole.update(f"{name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\0".encode())
    except OSError as error:
        raise ModelError(f"the model's files must be readable, got {error.filename} ({error.strerror})") from error
    return whole.hexdigest()
