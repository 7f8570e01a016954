"""Stories and decoder records by result, within a budget of bytes. What is dropped can be rebuilt from its recipe.

A sparse edit's overlay lives on the dense story beneath it, so the unit of dropping is a dense story with everything
laid over it. Knows nothing of how a story is made.
"""

from __future__ import annotations

import os

from fisedit.decode import DecoderRecord
from fisedit.source import Story


class Memory:
    """What was recorded, least recently used first out."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = _half_of_memory() if max_bytes is None else max_bytes
        self._kept: dict[str, tuple[Story, DecoderRecord]] = {}
        self._base: dict[str, str] = {}

    def put(self, key: str, story: Story, decoder: DecoderRecord, *, base: str | None) -> None:
        """Keep a result's story; `base` is the result it lies over, None for a dense one."""
        self._kept[key] = story, decoder
        self._base[key] = key if base is None else self._base[base]
        self._evict(keep=self._base[key])

    def share(self, key: str, other: str) -> None:
        """Let another result stand on the same story, if it is here."""
        if key in self._kept:
            self._kept[other], self._base[other] = self._kept[key], self._base[key]

    def get(self, key: str) -> tuple[Story, DecoderRecord]:
        """A kept story; KeyError if it is gone (see `in`)."""
        base = self._base[key]
        for member in [k for k in self._kept if self._base[k] == base]:
            self._kept[member] = self._kept.pop(member)  # most recently used last
        return self._kept[key]

    def __contains__(self, key: str) -> bool:
        """Whether a result's story is here."""
        return key in self._kept

    @property
    def bytes(self) -> int:
        """Bytes of all that is kept."""
        stories = {id(story): (story, decoder) for story, decoder in self._kept.values()}
        return sum(story.own_bytes + decoder.own_bytes for story, decoder in stories.values())

    def _evict(self, keep: str) -> None:
        while self.bytes > self._max_bytes:
            oldest = next((self._base[k] for k in self._kept if self._base[k] != keep), None)
            if oldest is None:
                return
            self._kept = {k: v for k, v in self._kept.items() if self._base[k] != oldest}


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
