"""The rates at which this machine moves bytes: through memory, and from the disk that recorded features are kept on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from fisedit.costs import store as cost_store
from fisedit.features.pages import default_folder

_COPIED, _WRITTEN = 1 << 26, 1 << 25


def transfer_rates(place: Path | None = None) -> dict[str, float]:
    """Bytes a second of copies in memory, and of writing a file to disk and reading it back, warm.

    Args:
        place: folder of the file; None for that of recorded features on disk.
    """
    source = torch.ones(_COPIED // 4)
    target = torch.empty_like(source)
    rates = {"memory": _COPIED / min(_seconds(lambda: target.copy_(source)) for _ in range(4))}
    data = os.urandom(_WRITTEN)
    try:
        with tempfile.NamedTemporaryFile(dir=place or _page_disk()) as file:

            def write() -> None:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

            rates["disk write"] = _WRITTEN / _seconds(write)
            rates["disk read"] = _WRITTEN / _seconds(lambda: Path(file.name).read_bytes())
    except OSError:  # a full disk, or one that is read-only, has no rate
        return rates
    return rates


def _page_disk() -> Path | None:
    """A folder on the disk that recorded features go to, or cost tables where features stay in memory; None for the
    system's for temporary files."""
    folder = default_folder() or cost_store.folder()
    above = () if folder is None else (folder, *folder.parents)
    return next((place for place in above if place.is_dir()), None)


def _seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return max(perf_counter() - start, 1e-9)
