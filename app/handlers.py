"""What a page or a program may ask for, as plain functions over a session.

Every argument is checked here, whoever sends it: limits are the server's, not the page's. Knows sessions and pictures;
neither gradio nor torch.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from app.archive import pack, unpack
from app.limits import MOST_RESULTS, Region, Settings, checked_picture, checked_prompt, checked_region, checked_settings
from fisedit import origin
from fisedit.errors import FisEditError, SessionError
from fisedit.files import holds, image_bytes, write_bytes
from fisedit.metadata import read

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.sessions import Session, Studio
    from fisedit import Editor, EditResult
    from fisedit.editor import Preview
    from fisedit.values import OnStep, Recipe

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Progress:
    """Where a run stands.

    Args:
        step, steps: steps done, and all. left: seconds to come, None where nobody knows yet.
        picture: a small preview of one pixel per latent cell, or None. result: at the end, what was made.
        seconds: at the end of a dense run to compare, what it took.
    """

    step: int
    steps: int
    left: float | None = None
    picture: Image | None = None
    result: EditResult | None = None
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Outlook:
    """What an edit would do: the editor's preview, its seconds and those of a dense run, None where nobody knows."""

    preview: Preview
    seconds: float | None
    dense_seconds: float | None


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


def generate(studio: Studio, session: Session, prompt: str, settings: Settings) -> Iterator[Progress]:
    """Make a source of words; the last progress has it.

    Raises:
        InputError: an argument out of range. Busy: the session is at work. Cancelled: it was stopped.
    """
    text, arguments = checked_prompt(prompt), _arguments(settings)
    arguments |= {"width": settings.width, "height": settings.height, "scheduler": settings.scheduler}
    return _run(studio, session, lambda editor, on_step: editor.generate(text, **arguments, on_step=on_step))


def open_picture(
    studio: Studio, session: Session, data: bytes, prompt: str = "", settings: Settings | None = None
) -> Iterator[Progress]:
    """Make a source of a picture's file, which is inverted; `prompt` says what it shows, "" where nobody knows.

    Raises:
        InputError: no picture, one too large, or an argument out of range. Busy, Cancelled: as in `generate`.
    """
    picture = checked_picture(data)
    text = None if isinstance(prompt, str) and not prompt.strip() else checked_prompt(prompt)
    arguments = _arguments(settings or Settings())
    arguments |= {"width": (settings or Settings()).width, "height": (settings or Settings()).height}
    return _run(studio, session, lambda editor, on_step: editor.open(picture, text, **arguments, on_step=on_step))


def preview(studio: Studio, session: Session, prompt: str, region: Region | None = None) -> Outlook:
    """Where an edit would paint and what it would cost. No result is made.

    Raises:
        SessionError: there is no source. InputError: an argument out of range. Busy: the session is at work.
    """
    text, wish = checked_prompt(prompt), checked_region(region or Region())
    with session.work() as editor:
        seen = editor.preview(text, **_where(editor, text, wish), on_step=lambda *_: session.check())
    studio.make_room()
    dense = studio.pace.dense(seen.macs_dense)
    seconds = dense if seen.fallback else studio.pace.sparse(seen.macs, seen.macs_dense)
    session.seen = seen
    return Outlook(seen, 0.0 if seen.nothing else seconds, dense)


def edit(studio: Studio, session: Session, prompt: str, region: Region | None = None) -> Iterator[Progress]:
    """Change the current picture to fit a new prompt; the last progress has the result.

    Raises:
        SessionError: there is no source. InputError: an argument out of range. Busy, Cancelled: as in `generate`.
    """
    text, wish = checked_prompt(prompt), checked_region(region or Region())
    return _run(
        studio, session, lambda editor, on_step: editor.edit(text, **_where(editor, text, wish), on_step=on_step)
    )


def dense(studio: Studio, session: Session, result_id: str) -> Iterator[Progress]:
    """Run a result's recipe densely, to compare; the last progress has the seconds it took."""
    session.editor.history.find(result_id)

    def job(editor: Editor, on_step: OnStep) -> float:
        session.measured[result_id] = editor.dense(result_id, on_step)[1]
        return session.measured[result_id]

    return _run(studio, session, job)


def undo(session: Session) -> EditResult:
    """Go back to the parent. Raises SessionError at a source, Busy while the session is at work."""
    return _moved(session, lambda editor: editor.undo())


def redo(session: Session) -> EditResult:
    """Go forward to the edit visited last. Raises SessionError where there is none, Busy."""
    return _moved(session, lambda editor: editor.redo())


def checkout(session: Session, result_id: str) -> EditResult:
    """Stand on any result; the next edit branches there. Raises SessionError for an unknown id, Busy."""
    return _moved(session, lambda editor: editor.checkout(result_id))


def delete(session: Session, result_id: str) -> tuple[str, ...]:
    """Remove a result and what was made from it; returns the ids that are gone. Raises SessionError, Busy."""
    return _moved(session, lambda editor: editor.delete(result_id))


def delete_current(session: Session) -> tuple[str, ...]:
    """Remove the result one stands on; returns the ids that are gone. Raises SessionError where there is none, Busy."""
    return delete(session, session.editor.current.id)


def followers(session: Session) -> int:
    """How many results were made from the current one, or from those."""
    history, line = session.editor.history, [session.editor.current.id]
    for result in history:  # parents come before their children
        if result.parent in line:
            line.append(result.id)
    return len(line) - 1


def compare(session: Session, other_id: str) -> tuple[EditResult, EditResult]:
    """Any other result and the current one. Raises SessionError: no such result, or one of another size."""
    current, other = session.editor.current, session.editor.history.find(other_id)
    if other.image.size != current.image.size:
        sizes = " and ".join(f"{r.image.width}x{r.image.height}" for r in (other, current))
        raise SessionError(f"pictures must be of one size to be compared, got {sizes}")
    return other, current


def picture_bytes(session: Session, result: EditResult) -> bytes:
    """A result as a PNG that tells how it was made (a TIFF where a PNG cannot hold it)."""
    return image_bytes(result.image, _ending(result), session.editor.metadata(result))[0]


def picture_file(session: Session) -> Path:
    """The current picture as a file in the session's own folder, which tells how it was made. Raises SessionError."""
    result = session.editor.current
    return _out(session, f"{_slug(result.prompt)}-{result.id}{_ending(result)}", picture_bytes(session, result))


def archive(session: Session) -> Path:
    """All pictures as a zip in the session's own folder, which `reopen` takes up again. Raises SessionError, Busy."""
    with session.work() as editor:
        if not len(editor.history):
            raise SessionError("there is nothing to save yet; make a picture first")
        session.save()
        return _out(session, f"{_slug(editor.history[0].prompt)}-session.zip", pack(session.folder))


def reopen(session: Session, data: bytes) -> EditResult:
    """Take up a session from what `archive` made of it, instead of what is here; where it stood then.

    Raises:
        InputError: no such file, or one too large. SessionError: a damaged one, or of another model. Busy.
    """
    with session.work() as editor, tempfile.TemporaryDirectory(prefix=".reopened-", dir=session.folder.parent) as name:
        folder = Path(name) / "session"
        unpack(data, folder, editor.model)
        editor.load(folder)
        if session.folder.exists():
            shutil.rmtree(session.folder)
        session.save()
        session.seen = None
        return editor.current


def restore(data: bytes) -> Found:
    """Prompt and settings that a picture's file tells; of one that tells nothing, or damaged things, that.

    Raises:
        InputError: no picture, or one too large.
    """
    picture = checked_picture(data)
    made = read(picture)
    if not (made.parameters or made.origin):
        return Found("The picture does not say how it was made.")
    try:
        past = origin.of(made)
        prompt = checked_prompt(past.prompt)
        if not made.origin:
            return Found("Its prompt was found in the picture.", prompt)
        return Found("Its prompt and settings were found in the picture.", prompt, _settings(past.recipe))
    except FisEditError as error:
        return Found(f"What it says of its making cannot be used: {error}")


def _settings(recipe: Recipe) -> Settings:
    """A recipe as settings; the canvas of an opened picture follows from the picture."""
    settings = Settings(
        recipe.num_inference_steps,
        recipe.guidance_scale,
        recipe.seed,
        None if recipe.opened else recipe.width,
        None if recipe.opened else recipe.height,
        recipe.scheduler,
        recipe.negative_prompt,
    )
    return checked_settings(settings)


def _arguments(settings: Settings) -> dict[str, Any]:
    """What generating and opening have in common, as the editor calls it."""
    checked_settings(settings)
    return {
        "seed": settings.seed,
        "num_inference_steps": settings.steps,
        "guidance_scale": float(settings.guidance),
        "negative_prompt": settings.negative_prompt,
    }


def _where(editor: Editor, prompt: str, region: Region) -> dict[str, Any]:
    """A region as the editor's arguments: what is painted joins what the words find, where they find something."""
    found: dict[str, Any] = {
        "words": region.words,
        "instance": region.instance,
        "grow": region.grow,
        "protect": region.protect,
    }
    if region.add is None:
        return found
    given: dict[str, Any] = {"mask": region.add, "protect": region.protect, "grow": region.grow}
    if region.only:
        return given
    seen = editor.preview(prompt, **found)
    if seen.nothing or seen.fallback:
        return given
    words = np.asarray(seen.mask.image().resize(editor.current.image.size, 0)) > 0
    painted = np.asarray(region.add.convert("L").resize(editor.current.image.size, 0)) > 127
    return {"mask": words | painted, "protect": region.protect}


def _run(studio: Studio, session: Session, job: Callable[[Editor, OnStep], EditResult | float]) -> Iterator[Progress]:
    """Work in a thread of its own, told step by step; whoever stops listening stops it."""
    if len(session.editor.history) >= MOST_RESULTS:
        raise SessionError(f"a session holds {MOST_RESULTS} pictures; delete some, or save it and begin another")
    editor, told, began = session.take(), SimpleQueue[Progress | BaseException](), perf_counter()

    def on_step(i: int, n: int, picture: Image | None) -> None:
        session.check()
        left = (perf_counter() - began) / i * (n - i) if i else None
        told.put(Progress(i, n, left, picture))

    def work() -> None:
        try:
            studio.make_room()
            made = job(editor, on_step)
            last = Progress(1, 1, 0.0, seconds=made) if isinstance(made, float) else Progress(1, 1, 0.0, result=made)
            if last.result:
                studio.pace.saw(last.result.stats)
                session.save()
            studio.make_room()
            end: Progress | BaseException = last
        except BaseException as error:  # noqa: BLE001 (it is raised where it is listened for)
            end = error
        session.release()
        told.put(end)

    Thread(target=work, daemon=True).start()
    over = False
    try:
        while not over:
            news = told.get()
            over = isinstance(news, BaseException) or news.result is not None or news.seconds is not None
            if isinstance(news, BaseException):
                raise news
            yield news
    finally:
        if not over:  # else the session may be at somebody's next work by now
            session.stop()


def _moved(session: Session, move: Callable[[Editor], T]) -> T:
    with session.work() as editor:
        moved = move(editor)
        session.save()
        return moved


def _out(session: Session, name: str, data: bytes) -> Path:
    """A file for the browser to fetch; the one before it goes."""
    shutil.rmtree(session.out, ignore_errors=True)
    write_bytes(data, session.out / name)
    return session.out / name


def _ending(result: EditResult) -> str:
    return ".png" if holds(".png", result.image) else ".tif"


def _slug(prompt: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", prompt.lower()))[:60].strip("-") or "picture"
