"""Variations: several edits of one picture in one run, each with noise of its own, to choose from.

Knows sessions; not gradio.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from secrets import randbelow
from typing import TYPE_CHECKING

from PIL.Image import fromarray

from app.edit_arguments import condition_arguments, edit_prompt, region_arguments, region_of
from app.handlers import on_its_part
from app.runs import RunProgress, RunRequest, several, stream_run
from app.validation import COUNTS, DRAWN_SEEDS, NO_CONDITIONS, Conditions, RegionSettings, check_count, check_region
from fisedit import Region
from fisedit.errors import InputError

if TYPE_CHECKING:
    from app.session import Session
    from app.sessions import AppState
    from fisedit import Editor, EditResult
    from fisedit.values import OnStep


def vary(
    state: AppState,
    session: Session,
    prompt: str,
    region: RegionSettings | None = None,
    conditions: Conditions = NO_CONDITIONS,
    count: int = COUNTS[1],
) -> Iterator[RunProgress]:
    """Make several candidates, edits with noise of their own; the last progress has the first of them.

    Where the prompt is the current picture's and nothing is painted, that edit is varied: in its region, beside it.
    Stopped, those that are finished stay.

    Args:
        state: the app's state, whose worker runs it.
        session: the session whose current picture is edited.
        prompt: what the picture should show.
        region: where the edits may change the picture; None for the changed words' mask.
        conditions: what adapters read.
        count: number of edits, 1 to 4.

    Raises:
        SessionError, InputError, Busy, Cancelled: as in `edit`.
    """
    shown = parent = session.current
    check_count(count)
    text = prompt if prompt == shown.prompt else edit_prompt(state, session, prompt)  # which names nothing if all went
    region = check_region(region or RegionSettings())
    if text == shown.prompt and region.marked is None:
        if shown.parent is None:
            raise InputError("change a word or paint first; for another picture of the same words press New picture")
        parent, region = session.history.find(shown.parent), _region_again(shown, region)
    add_conditions = condition_arguments(state, conditions)
    erases = parent is not shown and shown.run.erases and shown.config.seed != parent.config.seed  # not by words

    def vary_once(editor: Editor, _: int, on_step: OnStep) -> EditResult:
        own = replace(region, seed=randbelow(DRAWN_SEEDS))
        if erases:
            return editor.erase(region_of(own), prompt=text, quality=own.quality, seed=own.seed, on_step=on_step)
        return editor.edit(text, **region_arguments(own), **add_conditions(editor), on_step=on_step)

    def begin(editor: Editor) -> str:
        return editor.current.id if parent is shown else parent.id  # the part that was opened, or the picture

    steps = count * session.current.config.num_timesteps
    job = on_its_part(region, several(vary_once, count, begin), count)
    return stream_run(state, session, RunRequest(job, steps, results=count))


def _region_again(shown: EditResult, region: RegionSettings) -> RegionSettings:
    """The region of an edit that is shown, with what else is chosen on the page. Raises InputError."""
    kept = RegionSettings(strength=region.strength, quality=region.quality)
    if shown.run.regional:
        if region.protect is not None:
            raise InputError("variations of regions read no Protect; clear it, or change a word")
        return replace(kept, regions=tuple((Region.mask(each.grid), each.prompt) for each in shown.run.regional))
    painted = fromarray(shown.mask.shares(shown.size, shown.config.crop))
    return replace(kept, add=painted, only=True, protect=region.protect, feather=region.feather)
