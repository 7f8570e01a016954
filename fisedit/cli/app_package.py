"""Finds the `app` package of this copy of fisedit: in the repository beside `fisedit`, in a wheel within it.

A current folder often holds an `app.py` of its own, which `python -m` puts first among what can be imported.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_FISEDIT = Path(__file__).resolve().parents[1]
_PLACES = (_FISEDIT / "app", _FISEDIT.parent / "app")  # in an installed wheel; in a checkout or an editable install


def load_app() -> None:
    """Make `app` the package of this copy of fisedit, for imports of its modules."""
    folder = next(place for place in _PLACES if (place / "__init__.py").is_file())
    loaded = sys.modules.get("app")
    if loaded is not None and list(getattr(loaded, "__path__", ())) == [str(folder)]:
        return
    spec = spec_from_file_location("app", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["app"] = module_from_spec(spec)
    spec.loader.exec_module(package)
