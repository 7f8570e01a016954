"""The app's package is the one beside this copy of fisedit, whatever else is named `app`."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from fisedit.cli.app_package import load_app
from tests.support.documents import ROOT


@pytest.fixture(autouse=True)
def _modules(monkeypatch):
    """Restore `app` at the end: other tests hold its modules."""
    for name in [name for name in sys.modules if name == "app"]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])


def test_another_package_of_that_name_is_replaced(monkeypatch):
    other = ModuleType("app")
    other.__path__ = ["/somewhere/app"]
    monkeypatch.setitem(sys.modules, "app", other)
    load_app()
    assert sys.modules["app"] is not other and list(sys.modules["app"].__path__) == [str(ROOT / "app")]
    loaded = sys.modules["app"]
    load_app()
    assert sys.modules["app"] is loaded, "what is loaded stays"


def test_it_is_loaded_where_nothing_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "app", ModuleType("app"))
    monkeypatch.delitem(sys.modules, "app")
    load_app()
    assert sys.modules["app"].__spec__.origin == str(ROOT / "app/__init__.py")
