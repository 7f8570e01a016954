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

from app.thread_budget import apart
from app.validation import (
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

    from app.sessions import Choice, Studio
    from app.user_session import Session
    from fisedit import Editor, EditResult
    from fisedit.editor import Preview
    from fisedit.values import OnStep

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds that a preview waits for people who paint with other models or LoRAs."""


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
    text, choice = checked_prompt(prompt), studio.chosen(checked_settings(settings))
    arguments, like = _arguments(settings, choice) | {"scheduler": settings.scheduler}, _like(studio, look)
    return _run(
        studio,
        session,
        lambda editor, on_step: editor.generate(text, **arguments, **like(editor), on_step=on_step),
        choice,
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
    choice = studio.chosen(checked_settings(settings))
    arguments = _arguments(settings, choice)
    return _run(
        studio,
        session,
        lambda editor, on_step: editor.open(picture, text, **arguments, on_step=on_step),
        choice,
    )


def preview(
    studio: Studio, session: Session, prompt: str, region: Region | None = None, look: Look | None = None
) -> Outlook:
    """Where an edit would paint and what it would cost. No result is made.

    Raises:
        SessionError: there is no source, or what made it is not offered. InputError: an argument out of range.
        Busy: the session is at work, or others paint with other models or LoRAs.
    """
    text, wish, like = checked_prompt(prompt), checked_region(region or Region()), _like(studio, look)

    def job() -> Preview:
        with studio.painting(session, own, session.check, PATIENCE) as editor:
            where = _where(editor, text, wish) | like(editor)
            return editor.preview(text, **where, on_step=lambda *_: session.check())

    with session.work():
        own = studio.own(session, session.current)
        seen = apart(job)
    studio.make_room()
    dense = own.model.pace.dense(seen.macs_dense)
    seconds = dense if seen.fallback else own.model.pace.sparse(seen.macs, seen.macs_dense)
    session.seen = seen
    return Outlook(seen, 0.0 if seen.nothing else seconds, dense)


def edit(
    studio: Studio, session: Session, prompt: str, region: Region | None = None, look: Look | None = None
) -> Iterator[Progress]:
    """Change the current picture to fit a new prompt, or the look of another; the last progress has the result.

    Raises:
        SessionError: there is no source, or what made it is not offered. InputError: an argument out of range.
        Busy, Cancelled: as in `generate`.
    """
    text, wish, like = checked_prompt(prompt), checked_region(region or Region()), _like(studio, look)

    def job(editor: Editor, on_step: OnStep) -> EditResult:
        return editor.edit(text, **_where(editor, text, wish), **like(editor), on_step=on_step)

    return _run(studio, session, job)


def dense(studio: Studio, session: Session, result_id: str) -> Iterator[Progress]:
    """Run a result's config densely, to compare; the last progress has the seconds it took."""
    own = studio.own(session, session.history.find(result_id))

    def job(editor: Editor, on_step: OnStep) -> float:
        session.measured[result_id] = editor.dense(result_id, on_step)[1]
        return session.measured[result_id]

    return _run(studio, session, job, own)


def undo(session: Session) -> EditResult:
    """Go back to the parent. Raises SessionError at a source, Busy while the session is at work."""
    return _moved(session, session.history.undo)


def redo(session: Session) -> EditResult:
    """Go forward to the edit visited last. Raises SessionError where there is none, Busy."""
    return _moved(session, session.history.redo)


def checkout(session: Session, result_id: str) -> EditResult:
    """Stand on any result; the next edit branches there. Raises SessionError for an unknown id, Busy."""
    return _moved(session, lambda: session.history.checkout(result_id))


def delete(session: Session, result_id: str) -> tuple[str, ...]:
    """Remove a result and what was made from it; returns the ids that are gone. Raises SessionError, Busy."""
    return _moved(session, lambda: session.delete(result_id))


def delete_current(session: Session) -> tuple[str, ...]:
    """Remove the result one stands on; returns the ids that are gone. Raises SessionError where there is none, Busy."""
    return delete(session, session.current.id)


def followers(session: Session) -> int:
    """How many results were made from the current one, or from those."""
    history, line = session.history, [session.current.id]
    for result in history:  # parents come before their children
        if result.parent in line:
            line.append(result.id)
    return len(line) - 1


def compare(session: Session, other_id: str) -> tuple[EditResult, EditResult]:
    """Any other result and the current one. Raises SessionError: no such result, or one of another size."""
    current, other = session.current, session.history.find(other_id)
    if other.image.size != current.image.size:
        sizes = " and ".join(f"{r.image.width}x{r.image.height}" for r in (other, current))
        raise SessionError(f"pictures must be of one size to be compared, got {sizes}")
    return other, current


def _arguments(settings: Settings, choice: Choice) -> dict[str, Any]:
    """What generating and opening have in common, as the editor calls it."""
    return {
        "seed": settings.seed,
        "num_inference_steps": settings.steps,
        "guidance_scale": float(choice.model.guidance if settings.guidance is None else settings.guidance),
        "negative_prompt": settings.negative_prompt,
        "width": settings.width,
        "height": settings.height,
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
        if not studio.shelf.own(editor.model).reads_looks:
            raise InputError("the adapter does not fit the model; leave the look out, or choose another model")
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
    choice: Choice | None = None,
) -> Iterator[Progress]:
    """Work in a thread of its own, told step by step; who stops listening stops it.

    Args:
        choice: what to paint with; None for what made the current picture.
    """
    if len(session.history) >= MOST_RESULTS:
        raise SessionError(f"a session holds {MOST_RESULTS} pictures; delete some, or save it and begin another")
    session.take()
    told, began = SimpleQueue[Progress | BaseException](), perf_counter()

    def on_step(i: int, n: int, picture: Image | None) -> None:
        session.check()
        left = (perf_counter() - began) / i * (n - i) if i else None
        told.put(Progress(i, n, left, picture))

    def work() -> None:
        try:
            studio.make_room()
            own = choice or studio.own(session, session.current)
            session.models[session.history.next_id()] = own.model.name  # before anybody sees it
            with studio.painting(session, own, session.check) as editor:
                made = job(editor, on_step)
            last = Progress(1, 1, 0.0, seconds=made) if isinstance(made, float) else Progress(1, 1, 0.0, result=made)
            if last.result:
                own.model.pace.saw(last.result.stats)
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


def _moved(session: Session, move: Callable[[], T]) -> T:
    with session.work():
        moved = move()
        session.save()
        return moved
