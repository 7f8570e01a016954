"""What a page or a program may ask for, as plain functions over a session.

Every argument is checked here, whoever sends it: limits are the server's, not the page's. Knows sessions and pictures;
neither gradio nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from app.limits import (
    MOST_RESULTS,
    Look,
    Region,
    Settings,
    checked_look,
    checked_picture,
    checked_prompt,
    checked_region,
    checked_settings,
)
from fisedit.errors import InputError, SessionError

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.sessions import Session, Studio
    from app.wardrobe import Scales
    from fisedit import Editor, EditResult
    from fisedit.editor import Preview
    from fisedit.values import OnStep

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds that a preview waits for people who paint with other LoRAs."""


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


def generate(
    studio: Studio, session: Session, prompt: str, settings: Settings, look: Look | None = None
) -> Iterator[Progress]:
    """Make a source of words, with the look of a picture if there is one; the last progress has it.

    Raises:
        InputError: an argument out of range. Busy: the session is at work. Cancelled: it was stopped.
    """
    text, arguments = checked_prompt(prompt), _arguments(settings)
    arguments |= {"width": settings.width, "height": settings.height, "scheduler": settings.scheduler}
    like, chosen = _like(studio, look), studio.wardrobe.chosen(settings.lora, settings.lora_scale)
    return _run(
        studio,
        session,
        lambda editor, on_step: editor.generate(text, **arguments, **like(editor), on_step=on_step),
        lambda _: chosen,
    )


def open_picture(
    studio: Studio, session: Session, data: bytes, prompt: str = "", settings: Settings | None = None
) -> Iterator[Progress]:
    """Make a source of a picture's file, which is inverted; `prompt` says what it shows, "" where nobody knows.

    Raises:
        InputError: no picture, one too large, or an argument out of range. Busy, Cancelled: as in `generate`.
    """
    picture, settings = checked_picture(data), settings or Settings()
    text = None if isinstance(prompt, str) and not prompt.strip() else checked_prompt(prompt)
    arguments = _arguments(settings) | {"width": settings.width, "height": settings.height}
    chosen = studio.wardrobe.chosen(settings.lora, settings.lora_scale)
    return _run(
        studio,
        session,
        lambda editor, on_step: editor.open(picture, text, **arguments, on_step=on_step),
        lambda _: chosen,
    )


def preview(
    studio: Studio, session: Session, prompt: str, region: Region | None = None, look: Look | None = None
) -> Outlook:
    """Where an edit would paint and what it would cost. No result is made.

    Raises:
        SessionError: there is no source. InputError: an argument out of range.
        Busy: the session is at work, or others paint with other LoRAs.
    """
    text, wish, like = checked_prompt(prompt), checked_region(region or Region()), _like(studio, look)
    with session.work() as editor:
        own = studio.wardrobe.told(editor.current.recipe.loras)
        with studio.wardrobe.worn(own, session.check, PATIENCE):
            where = _where(editor, text, wish) | like(editor)
            seen = editor.preview(text, **where, on_step=lambda *_: session.check())
    studio.make_room()
    dense = studio.pace.dense(seen.macs_dense)
    seconds = dense if seen.fallback else studio.pace.sparse(seen.macs, seen.macs_dense)
    session.seen = seen
    return Outlook(seen, 0.0 if seen.nothing else seconds, dense)


def edit(
    studio: Studio, session: Session, prompt: str, region: Region | None = None, look: Look | None = None
) -> Iterator[Progress]:
    """Change the current picture to fit a new prompt, or the look of another; the last progress has the result.

    Raises:
        SessionError: there is no source. InputError: an argument out of range. Busy, Cancelled: as in `generate`.
    """
    text, wish, like = checked_prompt(prompt), checked_region(region or Region()), _like(studio, look)

    def job(editor: Editor, on_step: OnStep) -> EditResult:
        return editor.edit(text, **_where(editor, text, wish), **like(editor), on_step=on_step)

    return _run(studio, session, job, lambda editor: studio.wardrobe.told(editor.current.recipe.loras))


def dense(studio: Studio, session: Session, result_id: str) -> Iterator[Progress]:
    """Run a result's recipe densely, to compare; the last progress has the seconds it took."""
    recipe = session.editor.history.find(result_id).recipe

    def job(editor: Editor, on_step: OnStep) -> float:
        session.measured[result_id] = editor.dense(result_id, on_step)[1]
        return session.measured[result_id]

    return _run(studio, session, job, lambda _: studio.wardrobe.told(recipe.loras))


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


def _arguments(settings: Settings) -> dict[str, Any]:
    """What generating and opening have in common, as the editor calls it."""
    checked_settings(settings)
    return {
        "seed": settings.seed,
        "num_inference_steps": settings.steps,
        "guidance_scale": float(settings.guidance),
        "negative_prompt": settings.negative_prompt,
    }


def _like(studio: Studio, look: Look | None) -> Callable[[Editor], dict[str, Any]]:
    """A look as an editor's arguments, for when its turn has come. Raises InputError."""
    reference = checked_look(look)
    if look is None:
        return lambda _: {}
    if not studio.reads_looks:
        raise InputError("a look needs an adapter that reads it; start the app with --adapter")
    scale = look.scale

    def like(editor: Editor) -> dict[str, Any]:
        editor.scale_adapter(scale)
        return {"reference": reference}

    return like


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


def _run(
    studio: Studio,
    session: Session,
    job: Callable[[Editor, OnStep], EditResult | float],
    wears: Callable[[Editor], Scales],
) -> Iterator[Progress]:
    """Work in a thread of its own, with the LoRAs that it wears, told step by step; who stops listening stops it."""
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
            with studio.wardrobe.worn(wears(editor), session.check):
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
