"""Seconds by stage of an edit, and by span within stages: layers, blocks and steps that nest in one another.

A stage is always timed; a span only while a `SpanRecorder` is active in this thread, else it costs one read of a
context variable. Knows a clock, and nothing of what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import ParamSpec, TypeVar

from fisedit.machine.contention import waited_seconds

P = ParamSpec("P")
T = TypeVar("T")

NO_LEVEL = -1
"""Level of what belongs to no feature map."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of an evaluation of the UNet.

    Args:
        rows: number of computed rows of one item by level, finest first.
        sizes: number of positions by level, finest first.
        items: batch size B.
    """

    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    items: int


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span of a run.

    Args:
        kind: The kind of layer, block or stage, such as "conv" or "step dense".
        level: The level of the feature map that it works on, 0 for the finest; `NO_LEVEL` for none.
        name: The name of the layer, or "".
        start: seconds since the recorder began.
        seconds: duration.
        own: seconds outside of inner spans, 0 to `seconds`.
        step: number of the enclosing step span, from 0; -1 outside of all.
        work: The rows that a step computes.
    """

    kind: str
    level: int
    name: str
    start: float
    seconds: float
    own: float
    step: int
    work: StepWork | None = None


class SpanRecorder:
    """Records spans of one thread.

    Args:
        levels: name of a layer or block -> its level; a name that is not here has the level of what it lies in.
        clock: returns seconds.
        wait: called before the clock is read, for devices that work on after a call returns.

    Attributes:
        spans: those that are over, inner ones first.
    """

    def __init__(
        self,
        levels: Mapping[str, int] | None = None,
        clock: Callable[[], float] = perf_counter,
        wait: Callable[[], object] = lambda: None,
    ) -> None:
        self.levels, self._clock, self._wait = levels or {}, clock, wait
        self.spans: list[Span] = []
        self._open: list[_OpenSpan] = []
        self._start_time, self._steps = clock(), 0

    def begin(self, kind: str, name: str = "", *, leaf: bool = True, work: StepWork | None = None) -> None:
        """Open a span; one within a leaf belongs to that leaf.

        Args:
            kind: The kind of layer, block or stage.
            name: The name of the layer, or "".
            leaf: whether what lies within it counts as its own time.
            work: The rows that a step computes.
        """
        self._wait()
        parent = self._open[-1] if self._open else None
        if parent is not None and parent.leaf:
            parent.num_nested += 1
            return
        level = self.levels.get(name, parent.level if parent else NO_LEVEL)
        step = parent.step if parent else -1
        if kind.startswith(STEP):
            step, self._steps = self._steps, self._steps + 1
        self._open.append(_OpenSpan(kind, level, name, leaf, step, self._clock(), work))

    def end(self) -> None:
        """Close the span that was opened last."""
        self._wait()
        last = self._open[-1]
        if last.num_nested:
            last.num_nested -= 1
            return
        self._open.pop()
        seconds = self._clock() - last.start
        if self._open:
            self._open[-1].child_seconds += seconds
        start, own = last.start - self._start_time, seconds - last.child_seconds
        self.spans.append(Span(last.kind, last.level, last.name, start, seconds, own, last.step, last.work))


STEP = "step "
"""The beginning of the kind of a step's span."""

STEP_DENSE, STEP_SPARSE = "step dense", "step sparse"
"""Kinds of evaluations of the UNet."""


@dataclass(slots=True)
class _OpenSpan:
    kind: str
    level: int
    name: str
    leaf: bool
    step: int
    start: float
    work: StepWork | None
    child_seconds: float = 0.0
    num_nested: int = 0


_recorder: ContextVar[SpanRecorder | None] = ContextVar("span_recorder", default=None)
_NO_SPAN: AbstractContextManager[None] = nullcontext()


def current_recorder() -> SpanRecorder | None:
    """The active recorder of this thread, or None."""
    return _recorder.get()


@contextmanager
def recording_spans(recorder: SpanRecorder) -> Iterator[SpanRecorder]:
    """Record the spans of the enclosed calls, in this thread.

    Args:
        recorder: The recorder that gets them.
    """
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def span(
    kind: str, name: str = "", *, leaf: bool = False, work: Callable[[], StepWork] | None = None
) -> AbstractContextManager[None]:
    """Time a block as a span if a recorder is active in this thread.

    Args:
        kind: The kind of layer, block or stage.
        name: The name of the layer, or "".
        leaf: whether what lies within it counts as its own time.
        work: A function that returns what a step computes; called only if a recorder is active.
    """
    recorder = _recorder.get()
    if recorder is None:
        return _NO_SPAN
    return _spanning(recorder, kind, name, leaf=leaf, work=work() if work else None)


@contextmanager
def _spanning(
    recorder: SpanRecorder, kind: str, name: str, *, leaf: bool, work: StepWork | None = None
) -> Iterator[None]:
    recorder.begin(kind, name, leaf=leaf, work=work)
    try:
        yield
    finally:
        recorder.end()


def layer(kind: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that each of its calls is a leaf span, at the level of the block that it lies in.

    Args:
        kind: The kind of the span.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            recorder = _recorder.get()
            if recorder is None:
                return function(*args, **kwargs)
            with _spanning(recorder, kind, "", leaf=True):
                return function(*args, **kwargs)

        return call

    return decorate


def block(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a block's forward, whose second argument is its name, so that layers within get the block's level."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        recorder = _recorder.get()
        if recorder is None:
            return function(*args, **kwargs)
        with _spanning(recorder, OTHER, str(args[1]), leaf=False):
            return function(*args, **kwargs)

    return call


OTHER = "other"
"""Kind of what is done between layers: activations, sums, copies, and the calls themselves."""


class Stopwatch:
    """Wall seconds by stage, and for how much of them the calling thread waited for a core.

    Args:
        clock: returns seconds.
        waited: returns the seconds in which this thread had no core so far.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter, waited: Callable[[], float] = waited_seconds) -> None:
        self.seconds: dict[str, float] = {}
        self._clock, self._waited, self._waits = clock, waited, dict[str, float]()
        self._start = clock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the enclosed time to a stage."""
        before, waited_before = self._clock(), self._waited()
        try:
            with span(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - before
            self._waits[name] = self._waits.get(name, 0.0) + self._waited() - waited_before

    def waited_share(self, name: str) -> float:
        """Share of a stage's time in which its thread waited for a core, 0 to 1; 0 for a stage that took no time."""
        seconds = self.seconds.get(name, 0.0)
        return min(1.0, self._waits[name] / seconds) if seconds > 0 else 0.0

    def done(self) -> dict[str, float]:
        """Seconds of every stage, and the total since the start."""
        return self.seconds | {"total": self._clock() - self._start}
