"""Trajectories and decoder caches by result, within a budget of bytes. What does not fit goes to disk step by step, and
where that cannot be done it is dropped: it can be rebuilt from its config.

A sparse edit's overlay lies over its parent's trajectory, so that one goes only after all over it. Knows nothing of
how a trajectory is made.
"""

from __future__ import annotations

from collections.abc import Iterable

from fisedit.decoder.decode import DecoderCache
from fisedit.features.tiers import FeatureTiers
from fisedit.sampling.trajectory import Trajectory


class TrajectoryCache:
    """The recorded trajectories, least recently used first out.

    Args:
        max_bytes: in memory.
        tiers: where the steps lie; None for memory alone.
    """

    def __init__(self, max_bytes: int, tiers: FeatureTiers | None = None) -> None:
        self.max_bytes = max_bytes
        self.tiers = FeatureTiers() if tiers is None else tiers
        self._entries: dict[str, tuple[Trajectory, DecoderCache]] = {}
        self._parents: dict[str, str | None] = {}  # result -> the result whose trajectory its own is an overlay of
        self._sizes: dict[str, int] = {}  # counted once: a trajectory has thousands of tensors

    def put(self, key: str, trajectory: Trajectory, decoder: DecoderCache, *, base: str | None) -> None:
        """Add a result's trajectory; the least recently used ones are dropped to make room.

        Args:
            key: the result.
            trajectory: The trajectory of the result.
            decoder: The cache of the result's decode.
            base: the result that the trajectory is an overlay of, None for a dense one.
        """
        self._sizes[key] = trajectory.own_bytes + decoder.own_bytes
        self._entries[key], self._parents[key] = (trajectory, decoder), base
        self.make_room(0, keep=key)

    def share(self, key: str, other: str) -> None:
        """Give another result the same trajectory, if it is here."""
        if key in self._entries:
            self._sizes[other] = self._sizes[key]
            self._entries[other], self._parents[other] = self._entries[key], self._parents[key]

    def get(self, key: str) -> tuple[Trajectory, DecoderCache]:
        """A kept trajectory; KeyError if it is gone (see `in`)."""
        ancestor: str | None = key
        while ancestor is not None:
            self._entries[ancestor] = self._entries.pop(ancestor)  # most recently used last
            ancestor = self._parents[ancestor]
        return self._entries[key]

    def __contains__(self, key: str) -> bool:
        """Return whether a result's trajectory is here."""
        return key in self._entries

    @property
    def bytes(self) -> int:
        """Bytes of all that is kept in memory."""
        entries = tuple(self._entries.items())  # others may be adding
        sizes = {id(each[0]): self._sizes[key] - self._paged_bytes(*each) for key, each in entries}
        return sum(sizes.values())

    def emptied(self) -> TrajectoryCache:
        """Another one with the same bounds, and nothing in it."""
        return TrajectoryCache(self.max_bytes, self.tiers)

    def drop(self, keys: Iterable[str]) -> None:
        """Drop results; those whose trajectories lie over theirs must be among them."""
        for key in keys:
            self._entries.pop(key, None)
            self._parents.pop(key, None)

    def make_room(self, size: int, keep: str) -> None:
        """Page steps out until so many bytes more fit.

        Where they cannot be, drop what was used least, but for `keep` and what it lies over.
        """
        self.tiers.make_room(size + max(0, self.bytes - self.tiers.bytes))
        size = 0 if self.tiers.can_page else size  # of what comes, steps go to disk as they come
        while self.bytes + size > self.max_bytes:
            in_use = {self._parents[key] for key in self._entries}
            oldest = next((key for key in self._entries if key not in in_use and key != keep), None)
            if oldest is None:
                return
            del self._entries[oldest]

    def _paged_bytes(self, trajectory: Trajectory, decoder: DecoderCache) -> int:
        """Return the bytes on disk of what a trajectory and its decode recorded."""
        return self.tiers.paged_bytes((*trajectory.features[trajectory.start :], decoder.features))
