"""Tiers of recorded features: steps whose maps lie in memory, within a bound of bytes, and those whose maps are pages
on disk.

Which step an edit reads next is known: so the page of the one after is fetched while a step runs, and memory is taken
from the step whose next use is farthest (Belady's rule; an edit reads all steps in order, so the first ones stay and
the others stream through). A damaged page is made again by one dense step where its inputs are known. Knows steps and
pages; knows nothing about prompts or samplers.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

from torch import Tensor

from fisedit.errors import PageError
from fisedit.sparse.feature_cache import (
    CachedFeatures,
    FeatureOverlay,
    PagedMaps,
    ShiftedFeatures,
    StepFeatures,
    map_bytes,
)
from fisedit.sparse.feature_codec import RecordedMap, from_tensors, to_tensors

if TYPE_CHECKING:
    from fisedit.storage.pages import Page, PageFolder

BACKLOG = 2
"""Pages that may wait to be written before a run waits for the disk."""

TieredStep = StepFeatures | FeatureOverlay
Remake = Callable[[], StepFeatures]
"""Makes a step again; raises PageError where that cannot be done."""


@dataclass(eq=False)
class _Entry:
    """A step that may be paged out.

    Args:
        index: of the step in its trajectory.
        nbytes: of its maps in memory.
        used: when its trajectory was last recorded or read.
        page: on disk, None where there is none yet.
        remake: makes it again; None where that cannot be done.
        disposable: making it again takes less than reading a page, so that none is written.
        incoming: the page that is being read.
        counted: its maps are in memory, and no page of them is being written.
    """

    index: int
    nbytes: int
    used: int
    page: Page | None = None
    remake: Remake | None = None
    disposable: bool = False
    incoming: Future[dict[str, Tensor]] | None = None
    counted: bool = True


class FeatureTiers:
    """Recorded steps in memory within a bound, the others on disk; editors of one model may share it.

    Args:
        max_bytes: of the maps in memory. What does not fit and cannot be paged out stays.
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
            index: of the step in its trajectory.
            remake: makes it again; None where that cannot be done. It must not hold the step.
            disposable: making it again takes less than reading a page.
            page: of the step, if it is on disk.
        """
        with self._lock:
            entry = _Entry(index, map_bytes(step.maps), self._now, page, remake, disposable, counted=_is_loaded(step))
            self._entries[step] = entry
            if entry.counted:
                self._bytes += entry.nbytes
            else:
                self._paged += entry.nbytes
            finalize(step, _forget, ref(self), entry).atexit = False
        self.make_room(0)

    @property
    def bytes(self) -> int:
        """Bytes of the maps in memory, those that are being written not counted."""
        return self._bytes

    def paged_bytes(self, steps: Iterable[CachedFeatures]) -> int:
        """Bytes of steps' own maps that are on disk instead of in memory, or are being written."""
        if not self._paged:
            return 0
        with self._lock:
            entries = (self._entries.get(step) for step in steps if not isinstance(step, ShiftedFeatures))
            return sum(entry.nbytes for entry in entries if entry is not None and not entry.counted)

    def make_room(self, size: int) -> None:
        """Page steps out until so many bytes more fit; waits only if the disk lags behind."""
        while self.bytes + size > self.max_bytes and self._page_out_farthest():
            pass
        while len(self._writes) > BACKLOG:
            self._writes.popleft().result()

    @contextmanager
    def reads(self, steps: Sequence[CachedFeatures], start: int = 0) -> Iterator[StepReads]:
        """Tell that an edit reads steps in order during the block, and likely will again.

        Args:
            steps: of a trajectory.
            start: index of the first that is read.
        """
        with self._lock:
            self._now = next(self._clock)
            found = StepReads(self, [list(_tiered(step)) for step in steps], start)
            for step in found.distances:
                if step in self._entries:
                    self._entries[step].used = self._now
            self._reads.append(found)
        try:
            yield found
        finally:
            with self._lock:
                self._reads.remove(found)
                self._now = next(self._clock)

    def load(self, step: TieredStep) -> dict[str, RecordedMap]:
        """A step's maps, brought into memory.

        Raises:
            PageError: the page is gone or damaged, and the step cannot be made again.
        """
        with self._lock:
            if isinstance(step.maps, dict):
                return step.maps
            entry = self._entries[step]
            incoming = self._fetch(entry)
        self.make_room(entry.nbytes)
        maps = self._remade(step, entry) if incoming is None else None
        if incoming is not None:
            try:
                maps = from_tensors(incoming.result())
            except PageError:
                entry.page = None
                maps = self._remade(step, entry)
        assert maps is not None
        with self._lock:
            entry.incoming, step.maps = None, maps
            self._count(entry, counted=True)
        return maps

    def prefetch(self, step: TieredStep) -> None:
        """Begin to read a step's page, if it is on disk."""
        with self._lock:
            entry = self._entries.get(step)
            if entry is None or _is_loaded(step) or entry.page is None or entry.incoming is not None:
                return
            self._fetch(entry)
        self.make_room(entry.nbytes)

    def paged(self, step: TieredStep, names: Iterable[str], nbytes: int) -> PagedMaps:
        """What stands for a step's maps while they are on disk."""
        return PagedMaps(self.load, step, names, nbytes)

    def _fetch(self, entry: _Entry) -> Future[dict[str, Tensor]] | None:
        if entry.incoming is None and entry.page is not None:
            entry.incoming = self._thread.submit(entry.page.read)
        return entry.incoming

    def _remade(self, step: TieredStep, entry: _Entry) -> dict[str, RecordedMap]:
        if entry.remake is None:
            raise PageError("recorded features are gone or damaged; they are made again")
        maps = dict(entry.remake().maps)
        assert maps.keys() == set(step.maps)
        return maps

    def _page_out_farthest(self) -> bool:
        """Page out the step whose next use is farthest; whether there was one."""
        with self._lock:
            movable = [
                (self._distance(step), -entry.used, entry.index, step)
                for step, entry in self._entries.items()
                if entry.counted and (entry.page or entry.disposable or self.pages)
            ]
            farthest = max(movable, key=lambda one: one[:3], default=None)
            if farthest is None or farthest[0] <= 1:  # it is read now, or next
                return False
            step = farthest[3]
            entry = self._entries[step]
            self._count(entry, counted=False)
            if entry.page or entry.disposable:
                step.maps = self.paged(step, step.maps, entry.nbytes)
            else:
                self._writes.append(self._thread.submit(self._write, ref(step), entry))
            return True

    def _write(self, weak: ReferenceType[TieredStep], entry: _Entry) -> None:
        """Write a step's page; where that fails its maps stay, and those of all others from then on."""
        step, pages = weak(), self.pages
        if step is None:
            return
        try:
            if pages is not None:
                entry.page = pages.write(to_tensors(step.maps))
        except OSError as error:
            self.pages = None
            logging.getLogger(__name__).warning("recorded features stay in memory: %s", error)
        finally:
            with self._lock:
                if entry.page is None:
                    self._count(entry, counted=True)
                else:
                    step.maps = self.paged(step, step.maps, entry.nbytes)

    def _count(self, entry: _Entry, *, counted: bool) -> None:
        """Count a step's maps as in memory, or not; the lock must be held."""
        if entry.counted != counted:
            entry.counted = counted
            change = entry.nbytes if counted else -entry.nbytes
            self._bytes, self._paged = self._bytes + change, self._paged - change

    def forget(self, entry: _Entry) -> None:
        """Count a step no more, which nobody has."""
        with self._lock:
            self._count(entry, counted=True)
            self._bytes -= entry.nbytes

    def _distance(self, step: TieredStep) -> float:
        """Steps until one is read again, infinity where nobody reads it."""
        return min((reads.distance(step) for reads in self._reads), default=float("inf"))

    @property
    def _thread(self) -> ThreadPoolExecutor:
        self._io = self._io or ThreadPoolExecutor(1, thread_name_prefix="fisedit-pages")
        return self._io


class StepReads:
    """The steps that an edit reads, in order.

    Args:
        tiers: of the steps.
        steps: of a trajectory; of an edit's step its own overlay and what it lies over.
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
        """Steps until one is read again, by this edit or by the next one like it."""
        if step not in self.distances:
            return float("inf")
        ahead = self.distances[step] - self._now
        return ahead if ahead >= 0 else ahead + len(self._steps) - self._start


def _forget(tiers: ReferenceType[FeatureTiers], entry: _Entry) -> None:
    if (found := tiers()) is not None:
        found.forget(entry)


def _is_loaded(step: TieredStep) -> bool:
    return not isinstance(step.maps, PagedMaps)


def _tiered(step: CachedFeatures) -> Iterator[TieredStep]:
    """A step and all that it lies over."""
    while not isinstance(step, StepFeatures):
        if isinstance(step, FeatureOverlay):
            yield step
        step = step.parent
    yield step
