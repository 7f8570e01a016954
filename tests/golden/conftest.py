"""Nothing here depends on what the environment chooses."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    """No choice of the environment's."""
    for name in ("FISEDIT_GRAPHS", "FISEDIT_KERNELS"):
        monkeypatch.delenv(name, raising=False)
