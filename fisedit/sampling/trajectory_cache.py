"""Trajectories and decoder caches by result, within a budget of bytes. What is dropped can be rebuilt from its config.

A sparse edit's overlay lies over its parent's trajectory, so that one goes only after all over it. Knows nothing of
how a trajectory is made.
"""

from __future__ import annotations

from collections.abc import Iterable

from fisedit.sampling.trajectory import Trajectory
from fisedit.sparse.vae_decode import DecoderCache


class TrajectoryCache:
    """What was recorded, least recently used first out."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: dict[str, tuple[Trajectory, DecoderCache]] = {}
        self._parents: dict[str, str | None] = {}  # result -> the result whose trajectory its own is an overlay of
        self._sizes: dict[str, int] = {}  # counted once: a trajectory has thousands of tensors

    def put(self, key: str, trajectory: Trajectory, decoder: DecoderCache, *, base: str | None) -> None:
        """Add a result's trajectory; the least recently used ones are dropped to make room.

        Args:
            key: the result.
            trajectory: of the result.
            decoder: of the result's decode.
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
        """Whether a result's trajectory is here."""
        return key in self._entries

    @property
    def bytes(self) -> int:
        """Bytes of all that is kept."""
        entries = tuple(self._entries.items())  # others may be adding
        return sum({id(trajectory): self._sizes[key] for key, (trajectory, _) in entries}.values())

    def drop(self, keys: Iterable[str]) -> None:
        """Drop results and what lies over them: a trajectory goes with all that needs it."""
        for key in keys:
            self._entries.pop(key, None)
            self._parents.pop(key, None)

    def make_room(self, size: int, keep: str) -> None:
        """Drop what was used least until so many bytes more fit; `keep` and what it lies over stay."""
        while self.bytes + size > self.max_bytes:
            in_use = {self._parents[key] for key in self._entries}
            oldest = next((key for key in self._entries if key not in in_use and key != keep), None)
            if oldest is None:
                return
            del self._entries[oldest]
