"""Pictures for programs that keep no session: each is made in a session, and edited in the one that made or opened it.

What a program sends back is known by its pixels, so that a further edit of the same picture reads what was recorded.
Knows sessions and handlers; neither routes nor their formats.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from app import export, handlers, history
from app.runs import RunProgress
from app.validation import (
    MAX_PICTURE_BYTES,
    MAX_RESULTS,
    Busy,
    RegionSettings,
    SourceSettings,
    apply_lora_tags,
    check_region,
    check_settings,
    clean_prompt,
    decode_picture,
    label,
)
from fisedit import Region
from fisedit.errors import Cancelled, as_text
from fisedit.prompts.syntax import check_syntax, without_loras
from fisedit.values.sizes import Sizes

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.session import Session
    from app.sessions import AppState
    from fisedit import EditResult
    from fisedit.values import GenerationConfig

MAX_WAITING = 20
"""Requests of programs that run or wait; further ones are refused as busy."""

MAX_KNOWN = 2048
"""Pictures that are known when a program sends them back.

Beyond it the one that came longest ago is forgotten, and its session removed where no other one is of it.
"""


@dataclass(frozen=True)
class ProgramPicture:
    """A finished picture.

    Args:
        data: a PNG that records how it was made.
        config: how it was made.
        model: label of the model that made it.
        size: width and height in pixels.
        notes: remarks for the user.
    """

    data: bytes
    config: GenerationConfig
    model: str
    size: tuple[int, int]
    notes: tuple[str, ...] = ()


class _ProgramRequest:
    """A request that runs or waits, which may be for several pictures."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.is_stopped = False

    def stop(self) -> None:
        """End it before its next step."""
        self.is_stopped = True
        if self.session is not None:
            self.session.stop()

    def raise_if_stopped(self) -> None:
        """Raise Cancelled once it was stopped."""
        if self.is_stopped:
            raise Cancelled("stopped; nothing was changed")

    def collect(
        self, make: Callable[[SourceSettings], ProgramPicture], all_settings: Sequence[SourceSettings]
    ) -> list[ProgramPicture]:
        """The pictures of all settings; where it is stopped those that are finished. Raises Cancelled without any."""
        made: list[ProgramPicture] = []
        try:
            for settings in all_settings:
                self.raise_if_stopped()
                made.append(make(settings))
        except Cancelled:
            if not made:
                raise
        return made


class ProgramPictures:
    """Generates and edits for programs.

    Args:
        state: the app's state, whose sessions and worker are used.

    Attributes:
        progress: progress of the run that told of itself last; None while none runs.
    """

    def __init__(self, state: AppState) -> None:
        self.state = state
        self.progress: RunProgress | None = None
        self._places = BoundedSemaphore(MAX_WAITING)
        self._requests: list[_ProgramRequest] = []
        self._lock = Lock()
        self._keys: OrderedDict[str, str] = OrderedDict()  # digest of a picture -> key of its session
        self._edits: WeakKeyDictionary[Session, Lock] = WeakKeyDictionary()  # one edit of a session at a time

    def generate(self, prompt: str, all_settings: Sequence[SourceSettings]) -> list[ProgramPicture]:
        """Pictures of a prompt.

        Args:
            prompt: what they show.
            all_settings: how each is made.

        Raises:
            FisEditError: an argument out of range, or the machine is busy.
        """
        for settings in all_settings:
            check_settings(settings)
        with self._request() as request:

            def make(settings: SourceSettings) -> ProgramPicture:
                request.session = session = self.state.program_session()
                return self._finished(session, self._last(handlers.generate(self.state, session, prompt, settings)))

            return request.collect(make, all_settings)

    def edit(
        self,
        data: bytes,
        prompt: str,
        all_settings: Sequence[SourceSettings],
        region: RegionSettings | None = None,
        source_prompt: str = "",
        *,
        keeps_noise: bool = True,
    ) -> list[ProgramPicture]:
        """A picture changed to fit a prompt, once for each settings; every pixel outside the region keeps its bytes.

        Args:
            data: the picture's file.
            prompt: what it should show.
            all_settings: how it is opened, if it is not known already; and the seeds.
            region: where it may change; None for where the words say.
            source_prompt: what it shows; "" where that is not known.
            keeps_noise: whether the first one keeps the picture's noise, unless the prompt is the picture's own; all
                others have that of their settings' seeds.

        Raises:
            FisEditError: an argument out of range, no picture, or the machine is busy.
        """
        text, _ = apply_lora_tags(prompt, SourceSettings())
        text, region = clean_prompt(text), check_region(region or RegionSettings())
        check_syntax(text)
        all_settings = [apply_lora_tags(prompt, settings)[1] for settings in all_settings]
        for settings in all_settings:
            self.state.select(check_settings(settings))
        digest = _digest(decode_picture(data))
        with self._request() as request:

            def make(settings: SourceSettings) -> ProgramPicture:
                keeps = keeps_noise and settings is all_settings[0]
                request.session = session = self.state.program_session(self._key(digest))
                with self._edit_lock(session):
                    request.raise_if_stopped()
                    known = next((each for each in reversed(session.history[:]) if _digest(each.image) == digest), None)
                    notes: tuple[str, ...] = ()
                    is_like_it = known is None or self._has_loras(known, settings)
                    if known is not None and is_like_it and _make_room(session, known):
                        history.checkout(session, known.id)
                        notes = self._notes_on_known(known, source_prompt, settings)
                    else:
                        if len(session.history):
                            request.session = session = self.state.program_session()
                        shown = source_prompt or ("" if known is None else known.prompt)
                        part = None if region.add is None else Region.mask(region.add)
                        opening = handlers.open_picture(self.state, session, data, shown, settings, part)
                        notes = self._last(opening).stats.notes
                        if is_like_it:
                            self._remember(digest, session)
                    own_noise = not keeps or text == session.current.prompt
                    chosen = replace(region, seed=settings.seed) if own_noise else region
                    result = self._last(handlers.edit(self.state, session, text, chosen))
                    return self._finished(session, result, notes)

            return request.collect(make, all_settings)

    def interrupt(self) -> None:
        """Stop all requests of programs before their next step; what they finished is answered."""
        for request in list(self._requests):
            request.stop()

    def _last(self, run: Iterator[RunProgress]) -> EditResult:
        result: EditResult | None = None
        try:
            for progress in run:
                self.progress, result = progress, progress.result
        finally:
            self.progress = None
        assert result is not None, "a run ends with a result or an error"
        return result

    def _has_loras(self, result: EditResult, settings: SourceSettings) -> bool:
        """Return whether a result was made with the LoRAs of settings, or these name none."""
        offered = self.state.pool.loras
        return not settings.loras or offered.select(settings.loras) == offered.select_recorded(result.config.loras)

    def _notes_on_known(self, known: EditResult, source_prompt: str, settings: SourceSettings) -> tuple[str, ...]:
        """Notes on what a picture that is known says itself: what it shows, and its LoRAs."""
        notes, loras = list[str](), self.state.pool.loras.as_text(known.config.loras)
        if source_prompt.strip() and without_loras(source_prompt) != known.prompt:
            got, shown = as_text(source_prompt), as_text(known.prompt)
            notes.append(f"source_prompt is not read, got {got}: the picture is known, and shows {shown}")
        if loras and not settings.loras:
            notes.append(f"painted with {loras}, as the picture was made")
        return tuple(notes)

    def _finished(self, session: Session, result: EditResult, notes: tuple[str, ...] = ()) -> ProgramPicture:
        """The result, whose pixels name the session from now on.

        Args:
            session: the session that has it.
            result: what was made.
            notes: on what it was made of.
        """
        self._remember(_digest(result.image), session)
        data, model = export.picture_bytes(session, result), label(session.model_name(result))
        return ProgramPicture(data, result.config, model, result.size, (*notes, *result.stats.notes))

    def _edit_lock(self, session: Session) -> Lock:
        """Return the lock that one edit of a session holds from looking for its picture until it is finished."""
        with self._lock:
            return self._edits.setdefault(session, Lock())

    def _key(self, digest: str) -> str:
        """The key of the session that a picture is of, or ""."""
        with self._lock:
            return self._keys.get(digest, "")

    def _remember(self, digest: str, session: Session) -> None:
        with self._lock:
            self._keys[digest] = session.key
            self._keys.move_to_end(digest)
            forgotten = [self._keys.popitem(last=False)[1] for _ in range(len(self._keys) - MAX_KNOWN)]
            unknown = set(forgotten) - set(self._keys.values())
        for key in unknown:
            self.state.remove_session(key)

    @contextmanager
    def _request(self) -> Iterator[_ProgramRequest]:
        if not self._places.acquire(blocking=False):
            raise Busy(f"{MAX_WAITING} requests run or wait; try again in a moment")
        request = _ProgramRequest()
        self._requests.append(request)
        try:
            yield request
        finally:
            self._requests.remove(request)
            self._places.release()


def kept_notes(picture: ProgramPicture, asked: Mapping[str, object]) -> tuple[str, ...]:
    """Notes on what an edit has from its picture and was asked for otherwise.

    Args:
        picture: the edit.
        asked: names in Automatic1111's API -> what was asked for; None for nothing.
    """
    config = picture.config
    top, left = (config.sizes or Sizes()).crops_coords_top_left
    used = {
        "steps": config.num_inference_steps,
        "cfg_scale": config.guidance_scale,
        "negative_prompt": config.negative_prompt,
        "sampler_name": config.scheduler.label,
        "clip_skip": config.clip_skip,
        "sdxl_crop_top": top,
        "sdxl_crop_left": left,
        "model": picture.model,
        "width": picture.size[0],
        "height": picture.size[1],
    }
    why = "an edit has what its picture was made or opened with"
    other = {name: value for name, value in asked.items() if value is not None and value != used[name]}
    return tuple(f"{name} is {as_text(used[name])}, not {as_text(value)}: {why}" for name, value in other.items())


def _make_room(session: Session, kept: EditResult) -> bool:
    """Delete a session's oldest results of which nothing was made, until there is room for another.

    `kept` and what it was made of stay. Returns whether there is room.
    """
    lineage = {result.id for result in session.history.lineage(kept.id)}

    def is_full() -> bool:
        return len(session.history) >= MAX_RESULTS or session.picture_bytes >= MAX_PICTURE_BYTES

    while is_full():
        parents = {each for result in session.history for each in (result.parent, result.extends)}
        leaf = next((each.id for each in session.history if each.id not in parents | lineage), None)
        if leaf is None:
            return False
        history.delete(session, leaf)
    return True


def _digest(image: Image) -> str:
    return sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()
