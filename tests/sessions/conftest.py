"""Sessions on disk."""

from __future__ import annotations

import pytest

from tests.support.sessions import NAMES, saved


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Sessions of this version by name."""
    place = tmp_path_factory.mktemp("whole")
    return {name: saved(place / name, name) for name in NAMES}
