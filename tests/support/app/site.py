"""The app served in this process, and the browser that looks at it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from app.sessions import AppState

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")


@dataclass(frozen=True)
class LayerSite:
    """The app as it runs: where, in which folder its uploads lie, and what stands behind the page."""

    url: str
    uploads: Path
    state: AppState


@contextmanager
def served(*models: str | Path, **state: Any) -> Iterator[LayerSite]:
    """Serves an app while the block runs; arguments as of `AppState`."""
    from app import server

    address = server.listen(port=0)
    with server.environment(offline=True) as uploads:
        from app import main
        from app.sessions import AppState

        with closing(AppState.open(*models, **state)) as behind:
            page = server.ServedPage(main.build(behind), main.theme(), uploads)
            running = server.make_server(behind, address, page)
            thread = Thread(target=running.run, args=([address.listener],))
            thread.start()
            try:
                yield LayerSite(address.url, uploads, behind)
            finally:
                running.should_exit = True
                thread.join()
