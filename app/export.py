"""What a browser takes home and brings back: pictures that tell how they were made, and whole sessions.

Knows sessions and files; neither gradio nor torch.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.archive import pack, unpack
from app.validation import Settings, checked_picture, checked_prompt, checked_settings, label
from fisedit.errors import FisEditError, SessionError
from fisedit.storage import provenance
from fisedit.storage.files import write_bytes
from fisedit.storage.image_metadata import read_metadata
from fisedit.storage.images import can_hold, encode

if TYPE_CHECKING:
    from app.model_pool import Model
    from app.sessions import Studio
    from app.user_session import Session
    from fisedit import EditResult
    from fisedit.values import GenerationConfig


@dataclass(frozen=True)
class Found:
    """What a dropped picture tells of its making.

    Args:
        prompt: of the picture, or "". settings: how it was made; None where another program made it, or nobody tells.
        words: one line on what was found.
    """

    words: str
    prompt: str = ""
    settings: Settings | None = None


def picture_bytes(session: Session, result: EditResult) -> bytes:
    """A result as a PNG that tells how it was made (a TIFF where a PNG cannot hold it)."""
    return encode(result.image, _ending(result), session.metadata(result))[0]


def picture_file(session: Session) -> Path:
    """The current picture as a file in the session's own folder, which tells how it was made. Raises SessionError."""
    result = session.current
    return _out(session, f"{_slug(result.prompt)}-{result.id}{_ending(result)}", picture_bytes(session, result))


def archive(session: Session) -> Path:
    """All pictures as a zip in the session's own folder, which `reopen` takes up again. Raises SessionError, Busy."""
    with session.work():
        if not len(session.history):
            raise SessionError("there is nothing to save yet; make a picture first")
        session.save()
        return _out(session, f"{_slug(session.history[0].prompt)}-session.zip", pack(session.folder))


def reopen(studio: Studio, session: Session, data: bytes) -> EditResult:
    """Take up a session from what `archive` made of it, instead of what is here; where it stood then.

    Raises:
        InputError: no such file, or one too large. SessionError: a damaged one. Busy.
    """
    with session.work(), tempfile.TemporaryDirectory(prefix=".reopened-", dir=session.folder.parent) as name:
        folder = Path(name) / "session"
        unpack(data, folder, [model.name for model in studio.shelf.models])
        session.load(folder)
        if session.folder.exists():
            shutil.rmtree(session.folder)
        session.save()
        return session.current


def restore(studio: Studio, data: bytes) -> Found:
    """Prompt and settings that a picture's file tells; of one that tells nothing, or damaged things, that.

    Raises:
        InputError: no picture, or one too large.
    """
    picture = checked_picture(data)
    made = read_metadata(picture)
    if not (made.parameters or made.origin):
        return Found("The picture does not say how it was made.")
    try:
        past = provenance.parse_origin(made)
        prompt = checked_prompt(past.prompt)
        if not made.origin:
            return Found("Its prompt was found in the picture.", prompt)
        words, model = "Its prompt and settings were found in the picture.", studio.shelf.known(past.model)
        if model is None and past.model:
            words = f"{words} It was made with the model {label(past.model)}, which is not offered here."
        return Found(words, prompt, _settings(studio, past.config, model))
    except FisEditError as error:
        return Found(f"What it says of its making cannot be used: {error}")


def _settings(studio: Studio, config: GenerationConfig, model: Model | None) -> Settings:
    """A config as settings; the canvas of an opened picture follows from the picture."""
    settings = Settings(
        config.num_inference_steps,
        config.guidance_scale,
        config.seed,
        None if config.opened else config.width,
        None if config.opened else config.height,
        config.scheduler,
        config.negative_prompt,
        model.label if model else "",
        studio.wardrobe.choice(config.loras),
    )
    return checked_settings(settings)


def _out(session: Session, name: str, data: bytes) -> Path:
    """A file for the browser to fetch; the one before it goes."""
    shutil.rmtree(session.out, ignore_errors=True)
    write_bytes(data, session.out / name)
    return session.out / name


def _ending(result: EditResult) -> str:
    return ".png" if can_hold(".png", result.image) else ".tif"


def _slug(prompt: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", prompt.lower()))[:60].strip("-") or "picture"
