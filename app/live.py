"""Live edits: drawn beside the current picture while a prompt is typed, each in place of the one before.

An edit of the same arguments keeps it (`handlers.edit`), any other work removes it. Knows sessions; not gradio.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from app.edit_arguments import edit_prompt
from app.handlers import edit_key, edit_request, part_to_open
from app.runs import RunProgress, stream_run
from app.session import LiveEdit, LiveRequest, WorkKind
from app.validation import NO_CONDITIONS, Conditions, PartNotOpened, RegionSettings, check_region
from fisedit.errors import Cancelled
from fisedit.history import EditResult

if TYPE_CHECKING:
    from app.session import Session
    from app.sessions import AppState
    from fisedit import Editor
    from fisedit.values import OnStep


def edit_live(
    state: AppState,
    session: Session,
    prompt: str,
    region: RegionSettings | None = None,
    conditions: Conditions = NO_CONDITIONS,
) -> Iterator[RunProgress]:
    """Edit beside the current picture, which stays the current one, in place of the live edit before it.

    An `edit` of the same arguments keeps the result; any other work removes it. A live edit that is being drawn is
    stopped first.

    Args:
        state: the app's state, whose worker runs it.
        session: the session whose current picture is edited.
        prompt: what the picture should show.
        region: where the edit may change the picture; None for the changed words' mask.
        conditions: what adapters read.

    Raises:
        SessionError, InputError, Busy, Cancelled: as in `edit`.
    """
    text, region = edit_prompt(state, session, prompt), check_region(region or RegionSettings())
    session.live_request = asked = LiveRequest(text)
    request, parent = edit_request(state, session, text, region, conditions), session.current
    key = edit_key(session, text, region, conditions)

    def job(editor: Editor, on_step: OnStep) -> EditResult | float:
        if session.live_request is not asked:
            raise Cancelled("a newer live edit was asked for")
        session.drop_live()
        if part := part_to_open(editor, region):
            raise PartNotOpened(part)
        redo_ids = editor.history.redo_ids()
        result = request.job(editor, on_step)
        assert isinstance(result, EditResult), "an edit gives a result"
        editor.checkout(parent.id)
        editor.history.restore_redo(redo_ids)
        session.live = LiveEdit(result.id, key)
        return result

    yield from stream_run(state, session, replace(request, job=job, kind=WorkKind.LIVE))
