"""Tiers of recorded features: steps whose maps lie in memory, within a bound of bytes, and those whose maps are pages
on disk.

The step that an edit reads next is known, so its page is fetched while the step before runs. Memory is taken from the
step whose next use is farthest (Belady's rule). An edit reads all steps in order, so the first ones stay and the others
stream through. A damaged page is made again by one dense step where its inputs are known. Knows steps and pages; knows
nothing about prompts or samplers.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

from torch import Tensor

from fisedit.errors import PageError
from fisedit.features.cache import (
    CachedFeatures,
    FeatureOverlay,
    PagedMaps,
    ReadFeatures,
    ShiftedFeatures,
    StepFeatures,
    map_bytes,
)
from fisedit.features.codec import RecordedMap, from_tensors, to_tensors

if TYPE_CHECKING:
    from fisedit.features.pages import Page, PageFolder

BACKLOG = 2
"""Pages that may wait to be written before a run waits for the disk."""

TieredStep = StepFeatures | FeatureOverlay
Remake = Callable[[], StepFeatures]
"""Makes a step again; raises PageError where that cannot be done."""


@dataclass(eq=False)
class _Size:
    """Bytes of a step's maps in memory, and whether they are counted there: they are loaded, and no page is written."""

    nbytes: int
    counted: bool


@dataclass(eq=False)
class _Entry:
    """A step that may be paged out.

    Args:
        index: The index of the step in its trajectory.
        size: The size of its maps, and whether they are counted in memory.
        used: when its trajectory was last recorded or read.
        page: on disk, None where there is none yet.
        remake: makes it again; None where that cannot be done.
        disposable: making it again takes less than reading a page, which is read only where that cannot be done.
        incoming: the page that is being read.
    """

    index: int
    size: _Size
    used: int
    page: Page | None = None
    remake: Remake | None = None
    disposable: bool = False
    incoming: Future[dict[str, Tensor]] | None = None


class FeatureTiers:
    """Recorded steps in memory within a bound, the others on disk; editors of one model may share it.

    Args:
        max_bytes: The largest size of the maps in memory. What does not fit and cannot be paged out stays.
        pages: on disk; None for none.
    """

    def __init__(self, max_bytes: int = sys.maxsize, pages: PageFolder | None = None) -> None:
        self.max_bytes, self.pages = max_bytes, pages
        self._entries: WeakKeyDictionary[TieredStep, _Entry] = WeakKeyDictionary()
        self._reads: list[StepReads] = []
        self._clock, self._lock = count(), RLock()
        self._now = next(self._clock)
        self._bytes, self._paged = 0, 0  # of entries that are counted, and of those that are not
        self._writes: deque[Future[None]] = deque()
        self._lost: deque[_Size] = deque()  # of freed steps; finalizers run in any thread, so they take no lock
        self._refused: int | None = None  # bytes on disk when a page could not be written
        self._io: ThreadPoolExecutor | None = None

    def add(
        self,
        step: TieredStep,
        index: int,
        remake: Remake | None = None,
        *,
        disposable: bool = False,
        page: Page | None = None,
    ) -> None:
        """Count a recorded step's maps, and page out what is needed last if they do not fit.

        Args:
            step: with all its maps; or without any, if its page is given.
            index: The index of the step in its trajectory.
            remake: makes it again; None where that cannot be done. It must not hold the step.
            disposable: making it again takes less than reading a page.
            page: The page of the step, if it is on disk.
        """
        with self._lock:
            size = _Size(map_bytes(step.maps), _is_loaded(step))
            self._entries[step] = _Entry(index, size, self._now, page, remake, disposable)
            self._bytes += size.nbytes if size.counted else 0
            self._paged += 0 if size.counted else size.nbytes
            finalize(step, self._lost.append, size).atexit = False
        self.make_room(0)

    @property
    def bytes(self) -> int:
        """Bytes of the maps in memory, those that are being written not counted."""
        with self._lock:
            while self._lost:
                lost = self._lost.popleft()
                self._count(lost, counted=True)
                self._bytes -= lost.nbytes
            return self._bytes

    @property
    def can_page(self) -> bool:
        """Return whether steps may go to disk: there is one, and it has taken all pages since some of it was freed."""
        return self.pages is not None and (self._refused is None or self.pages.bytes < self._refused)

    def paged_bytes(self, steps: Iterable[CachedFeatures]) -> int:
        """Bytes of steps' own maps that are on disk instead of in memory, or are being written."""
        if not self._paged:
            return 0
        with self._lock:
            entries = (self._entries.get(step) for step in steps if not isinstance(step, ShiftedFeatures))
            return sum(entry.size.nbytes for entry in entries if entry is not None and not entry.size.counted)

    def make_room(self, size: int) -> None:
        """Page steps out until so many bytes more fit; waits only if the disk lags behind."""
        while self.bytes + size > self.max_bytes and self._page_out_farthest():
            pass
        while len(self._writes) > BACKLOG:
            with suppress(IndexError):  # another thread waits too
                self._writes.popleft().result()

    @contextmanager
    def reads(self, steps: Sequence[CachedFeatures], start: int = 0) -> Iterator[StepReads]:
        """Tell that an edit reads steps in order during the block, and likely will again.

        Args:
            steps: The steps of a trajectory.
            start: index of the first that is read.
        """
        with self._reading(StepReads(self, [list(_tiered(step)) for step in steps], start)) as reads:
            yield reads

    @contextmanager
    def hold(self, steps: Sequence[CachedFeatures]) -> Iterator[None]:
        """Keep steps in memory during the block, which reads them in any order.

        Args:
            steps: and what they lie over.

        Raises:
            PageError: one is gone or damaged and cannot be made again.
        """
        with self._reading(StepReads(self, [[found for step in steps for found in _tiered(step)]], 0)) as reads:
            reads.at(0)
            yield

    @contextmanager
    def _reading(self, reads: StepReads) -> Iterator[StepReads]:
        with self._lock:
            self._now = next(self._clock)
            for entry in self._entries_of(reads):
                entry.used = self._now
            self._reads.append(reads)
        try:
            yield reads
        finally:
            with self._lock:
                self._reads.remove(reads)
                self._now = next(self._clock)
                for entry in self._entries_of(reads):
                    entry.incoming = None  # fetched ahead of a run that did not come to it

    def _entries_of(self, reads: StepReads) -> list[_Entry]:
        found = (self._entries.get(step) for step in reads.distances)
        return [entry for entry in found if entry is not None]

    def load(self, step: TieredStep) -> dict[str, RecordedMap]:
        """A step's maps, brought into memory.

        Raises:
            PageError: the page is gone or damaged, and the step cannot be made again.
        """
        with self._lock:
            if isinstance(step.maps, dict):
                return step.maps
            entry = self._entries[step]
            incoming = None if entry.disposable else self._fetch(entry)
            entry.incoming = None
        self.make_room(entry.size.nbytes)
        maps = _read(incoming) or self._remade(step, entry)
        if maps is None and entry.disposable:
            maps = _read(self._fetch(entry))
        with self._lock:
            if maps is None or (incoming is not None and incoming.exception() is not None):
                entry.page = None
            entry.incoming = None
            if maps is None:
                raise PageError("recorded features are gone or damaged; make them again")
            step.maps = maps
            self._count(entry.size, counted=True)
        return maps

    def prefetch(self, step: TieredStep) -> None:
        """Begin to read a step's page, if it is on disk."""
        with self._lock:
            entry = self._entries.get(step)
            if entry is None or entry.disposable or _is_loaded(step) or entry.incoming is not None:
                return
            self._fetch(entry)
        self.make_room(entry.size.nbytes)

    def paged(self, step: TieredStep, names: Iterable[str], nbytes: int) -> PagedMaps:
        """Return the mapping that stands for a step's maps while they are on disk."""
        return PagedMaps(self.load, step, names, nbytes)

    def _fetch(self, entry: _Entry) -> Future[dict[str, Tensor]] | None:
        if entry.incoming is None and entry.page is not None:
            entry.incoming = self._thread.submit(entry.page.read)
        return entry.incoming

    def _remade(self, step: TieredStep, entry: _Entry) -> dict[str, RecordedMap] | None:
        """A step's maps made again; None where that cannot be done."""
        try:
            maps = dict(entry.remake().maps) if entry.remake else None
        except PageError:
            return None
        return maps if maps is not None and maps.keys() == set(step.maps) else None

    def _page_out_farthest(self) -> bool:
        """Page out the step whose next use is farthest; whether there was one."""
        with self._lock:
            movable = [
                (self._distance(step), -entry.used, entry.index, step)
                for step, entry in self._entries.items()
                if entry.size.counted and (entry.page or self.can_page)
            ]
            farthest = max(movable, key=lambda one: one[:3], default=None)
            if farthest is None or farthest[0] <= 1:  # it is read now, or next
                return False
            step = farthest[3]
            entry = self._entries[step]
            self._count(entry.size, counted=False)
            if entry.page:
                step.maps = self.paged(step, step.maps, entry.size.nbytes)
            else:
                self._writes.append(self._thread.submit(self._write, ref(step), entry))
            return True

    def _write(self, weak: ReferenceType[TieredStep], entry: _Entry) -> None:
        """Write a step's page; where that fails its maps stay."""
        step, pages = weak(), self.pages
        if step is None or pages is None:
            return
        try:
            entry.page = pages.write(to_tensors(step.maps))
        except Exception as error:  # noqa: BLE001 (a failed write loses nothing: the maps stay in memory, and a warning says so)
            if self._refused is None:
                logging.getLogger(__name__).warning("recorded features stay in memory: %s", str(error))
            self._refused = pages.bytes
        with self._lock:
            if entry.page is None or self._distance(step) <= 1:  # it is read now, or next
                self._count(entry.size, counted=True)
            else:
                step.maps = self.paged(step, step.maps, entry.size.nbytes)

    def _count(self, size: _Size, *, counted: bool) -> None:
        """Count a step's maps as in memory, or not; the lock must be held."""
        if size.counted != counted:
            size.counted = counted
            change = size.nbytes if counted else -size.nbytes
            self._bytes, self._paged = self._bytes + change, self._paged - change

    def _distance(self, step: TieredStep) -> float:
        """Steps until one is read again; infinity if no active `StepReads` has it."""
        return min((reads.distance(step) for reads in self._reads), default=float("inf"))

    @property
    def _thread(self) -> ThreadPoolExecutor:
        self._io = self._io or ThreadPoolExecutor(1, thread_name_prefix="fisedit-pages")
        return self._io


class StepReads:
    """The steps that an edit reads, in order.

    Args:
        tiers: The tiers of the steps.
        steps: The steps of a trajectory; of an edit's step its own overlay and what it lies over.
        start: index of the first that is read.
    """

    def __init__(self, tiers: FeatureTiers, steps: Sequence[Sequence[TieredStep]], start: int) -> None:
        self._tiers, self._steps, self._start, self._now = tiers, steps, start, start
        self.distances = {step: i for i, chain in enumerate(steps) for step in chain}

    def at(self, i: int) -> None:
        """Have a step in memory, which is read now, and begin to fetch the next.

        Raises:
            PageError: it is gone or damaged and cannot be made again.
        """
        self._now = i
        for step in self._steps[i]:
            if not _is_loaded(step):
                self._tiers.load(step)
        for step in self._steps[i + 1] if i + 1 < len(self._steps) else ():
            self._tiers.prefetch(step)

    def distance(self, step: TieredStep) -> float:
        """Steps until one is read again, by this edit or by the next over the same trajectory."""
        if step not in self.distances:
            return float("inf")
        ahead = self.distances[step] - self._now
        return ahead if ahead >= 0 else ahead + len(self._steps) - self._start


def _read(incoming: Future[dict[str, Tensor]] | None) -> dict[str, RecordedMap] | None:
    """The maps of a page that is being read; None where there is none, or it is gone or damaged."""
    if incoming is None or incoming.exception() is not None:  # not raised: its traceback would keep the step
        return None
    try:
        return from_tensors(incoming.result())
    except LookupError:
        return None


def _is_loaded(step: TieredStep) -> bool:
    return not isinstance(step.maps, PagedMaps)


def _tiered(step: ReadFeatures) -> Iterator[TieredStep]:
    """A step and all that it lies over."""
    while not isinstance(step, StepFeatures):
        if isinstance(step, FeatureOverlay):
            yield step
        step = step.parent
    yield step
