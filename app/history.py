"""Moves in a session's history: undo, redo, checkout, delete, compare. Knows sessions; neither gradio nor torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fisedit.errors import SessionError

if TYPE_CHECKING:
    from app.session import Session
    from fisedit import EditResult

T = TypeVar("T")


def undo(session: Session) -> EditResult:
    """Go back to the step before. Raises SessionError at a source, Busy while the session is at work."""
    return _move(session, session.history.undo)


def redo(session: Session) -> EditResult:
    """Go forward to the edit visited last. Raises SessionError where there is none, Busy."""
    return _move(session, session.history.redo)


def checkout(session: Session, result_id: str) -> EditResult:
    """Make any result the current one; the next edit branches there. Raises SessionError for an unknown id, Busy."""
    return _move(session, lambda: session.history.checkout(result_id))


def keep(session: Session) -> EditResult:
    """Keep the candidate that is shown; the others go. Raises SessionError where none is shown, Busy."""

    def choose() -> EditResult:
        if session.current not in session.candidates:
            raise SessionError("no candidate is shown; choose one to keep, by its number")
        session.set_candidates(kept=session.current)
        return session.current

    return _move(session, choose)


def discard(session: Session) -> None:
    """Remove all candidates. Raises SessionError where something runs from one of them, Busy."""
    _move(session, session.set_candidates)


def delete(session: Session, result_id: str) -> tuple[str, ...]:
    """Remove a result and what was made from it; returns the ids that are gone. Raises SessionError, Busy."""
    return _move(session, lambda: session.delete(result_id))


def delete_current(session: Session) -> tuple[str, ...]:
    """Remove the current result; returns the ids that are gone. Raises SessionError where there is none, Busy."""
    return delete(session, session.current.id)


def count_descendants(session: Session) -> int:
    """Return the number of results that were made from the current one, or from those."""
    made = session.history.made_from(session.current.id)
    return sum(result.id in made for result in session.history.steps) - 1


def compare(session: Session, other_id: str) -> tuple[EditResult, EditResult]:
    """Any other result and the current one. Raises SessionError: no such result, or one of another size."""
    current, other = session.current, session.history.find(other_id)
    if other.size != current.size:
        sizes = " and ".join(f"{r.size[0]}x{r.size[1]}" for r in (other, current))
        raise SessionError(f"pictures must be of one size to be compared, got {sizes}")
    return other, current


def _move(session: Session, move: Callable[[], T]) -> T:
    with session.work():
        session.drop_live()
        session.live_request = None
        result = move()
        session.save_or_say()
        return result
