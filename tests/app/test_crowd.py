"""More people than may wait: who is let in gets the right picture, and the rest is told so."""

from __future__ import annotations

import pytest

from app.server import MAX_WAITING
from tests.support.app import crowd

PEOPLE = 30


@pytest.mark.slow
def test_everybody_gets_their_own_or_is_told(site):
    wanted = crowd.expected(site.state.pool.first.loaded.editor, PEOPLE)
    got = crowd.ask(site.url, PEOPLE)
    assert crowd.served(got, wanted) >= MAX_WAITING
