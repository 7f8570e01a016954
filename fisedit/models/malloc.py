"""Freed memory stays in the process. Knows the C library and nothing of tensors."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of glibc's mallopt


def keep_freed_memory() -> None:
    """Have the allocator keep what is freed, for the next tensors; a program calls it once, before it makes any.

    glibc hands every large block back to the system and gets it again zeroed, page by page, at .1 to 2 s a GB. A source
    of SD 1.5 at 512x512 has 6 GB of features. And it gives every thread a heap of its own, which keeps what it freed to
    itself: so all have one, or an app whose models change among its threads grows. Other C libraries are left as they
    are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_ARENA_MAX, 1)
