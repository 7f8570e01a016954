"""Files for download and upload: pictures that record how they were made, and whole sessions.

Knows sessions and files; neither gradio nor torch.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.archive import ARCHIVE, pack, unpack
from app.validation import SourceSettings, check_settings, clean_prompt, decode_picture, label
from fisedit.errors import FisEditError, SessionError
from fisedit.metadata import provenance
from fisedit.metadata.generation_parameters import parse_parameters
from fisedit.metadata.image_metadata import read_metadata
from fisedit.sessions.store import SessionStore
from fisedit.storage.canvas import MAX_UPSCALE, canvas_size
from fisedit.storage.files import write_bytes
from fisedit.storage.images import can_hold, encode

if TYPE_CHECKING:
    from app.model_pool import OfferedModel
    from app.session import Session
    from app.sessions import AppState
    from fisedit import EditResult
    from fisedit.values import GenerationConfig


_NAMES = {"num_inference_steps": "steps", "guidance_scale": "guidance"}
"""Arguments of `Editor.generate` -> the same in `SourceSettings`, where names differ."""


@dataclass(frozen=True)
class RestoredSettings:
    """The prompt and settings of an uploaded picture, as far as its file records them.

    Args:
        message: one line on what was found.
        prompt: the picture's prompt, or "".
        settings: how it was made; None where the file does not record it.
    """

    message: str
    prompt: str = ""
    settings: SourceSettings | None = None


def picture_bytes(session: Session, result: EditResult) -> bytes:
    """A result as a PNG with its origin in the metadata (a TIFF where a PNG cannot hold the pixels)."""
    return encode(result.image, _ending(result), session.metadata(result))[0]


def picture_file(session: Session) -> Path:
    """The current picture with its origin as a file in the session's own folder. Raises SessionError."""
    result = session.current
    return _write_out(session, f"{_slug(result.prompt)}-{result.id}{_ending(result)}", picture_bytes(session, result))


def export_session(session: Session) -> Path:
    """All pictures as a zip in the session's own folder, for `import_session`. Raises SessionError, Busy."""
    with session.work():
        if not len(session.history):
            raise SessionError("there is nothing to save yet; make a picture first")
        session.drop_live()
        session.save()
        return _write_out(session, f"{_slug(session.history[0].prompt)}-session.zip", pack(session.folder))


def import_session(state: AppState, session: Session, data: bytes) -> EditResult:
    """Replace a session's pictures by an archive's; returns its current result.

    Args:
        state: the app's state, whose models are offered.
        session: the session whose pictures are replaced.
        data: a zip that `export_session` made.

    Raises:
        InputError: no such file, or one too large. SessionError: a damaged one. Busy.
    """
    with session.work(), tempfile.TemporaryDirectory(prefix=".reopened-", dir=session.folder.parent) as name:
        folder = Path(name) / "session"
        unpack(data, folder, [model.name for model in state.pool.models])
        session.load(SessionStore(folder, ARCHIVE))
        return session.current


def restore_settings(state: AppState, data: bytes) -> RestoredSettings:
    """Read prompt and settings from a picture's metadata; the message names what is missing or damaged.

    Args:
        state: the app's state, whose models and LoRAs are offered.
        data: the picture's file.

    Raises:
        InputError: no picture, or one too large.
    """
    picture = decode_picture(data)
    made = read_metadata(picture)
    if not (made.parameters or made.origin):
        return RestoredSettings("The picture does not say how it was made.")
    try:
        if not made.origin:
            return _restore_from_web_ui(made.parameters)
        past = provenance.parse_origin(made)
        prompt = clean_prompt(past.prompt) if past.prompt else ""
        message, model = "Its prompt and settings were found in the picture.", state.pool.find(past.model)
        if model is None and past.model:
            message = f"{message} It was made with the model {label(past.model)}, which is not offered here."
        return RestoredSettings(message, prompt, _settings_from_config(state, past.config, model))
    except FisEditError as error:
        return RestoredSettings(f"What it says of its making cannot be used: {error}")


def canvas_note(state: AppState, data: bytes, model: str) -> str:
    """Return a note for a picture that is much larger than the model paints, or "".

    Args:
        state: the app's state, whose models are offered.
        data: the picture's file.
        model: label of the one that would open it, "" for the first.

    Raises:
        InputError: no picture, one too large, or a model that is not offered.
    """
    size, native = decode_picture(data).size, state.pool.select(model).native_size
    canvas = canvas_size(size, native)
    scale = max(a / b for a, b in zip(size, canvas, strict=True))
    if scale <= MAX_UPSCALE:
        return ""
    sizes = f"It has {size[0]}x{size[1]} pixels; the model paints {canvas[0]}x{canvas[1]}, enlarged {scale:.1f} times"
    return f"{sizes}. Paint what shall change then: the part around it is edited at full resolution."


def _restore_from_web_ui(parameters: str) -> RestoredSettings:
    """Return the settings that another program wrote of a picture; what is out of range is named and left out."""
    prompt, found = parse_parameters(parameters)
    settings, refused = SourceSettings(), []
    for name, value in found.items():
        try:
            settings = check_settings(replace(settings, **{_NAMES.get(name, name): value}))
        except FisEditError as error:
            refused.append(str(error))
    what = "prompt and settings were" if settings != SourceSettings() else "prompt was"
    message = " ".join([f"Its {what} found in the picture.", *(f"Not used: {line}." for line in refused)])
    text = clean_prompt(prompt) if prompt else ""
    return RestoredSettings(message, text, settings if settings != SourceSettings() else None)


def _settings_from_config(state: AppState, config: GenerationConfig, model: OfferedModel | None) -> SourceSettings:
    """A config as settings; the canvas of an opened picture follows from the picture."""
    settings = SourceSettings(
        config.num_inference_steps,
        config.guidance_scale,
        config.seed,
        None if config.opened else config.width,
        None if config.opened else config.height,
        config.scheduler,
        config.negative_prompt,
        model.label if model else "",
        state.pool.loras.scales_by_label(config.loras),
        config.clip_skip,
        config.negative_clip_skip,
        config.sizes,
    )
    return check_settings(settings)


def _write_out(session: Session, name: str, data: bytes) -> Path:
    """Write a file for the browser to fetch, in place of the one before it."""
    shutil.rmtree(session.out, ignore_errors=True)
    write_bytes(data, session.out / name)
    return session.out / name


def _ending(result: EditResult) -> str:
    return ".png" if can_hold(".png", result.image) else ".tif"


def _slug(prompt: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", prompt.lower()))[:60].strip("-") or "picture"
