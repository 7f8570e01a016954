"""Edit a generated picture by changing words, and compute only what changes.

Importing this package loads nothing heavy: the names below are fetched on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0.dev0"
__all__ = ["Cancelled", "Drive", "EditResult", "Editor", "FisEditError", "FisEditPipeline", "Region", "__version__"]

if TYPE_CHECKING:
    from fisedit.editor import Editor
    from fisedit.errors import Cancelled, FisEditError
    from fisedit.history import EditResult
    from fisedit.integrations.diffusers_pipeline import FisEditPipeline
    from fisedit.masking.region import Region
    from fisedit.values.drive import Drive

_HOMES = {
    "Editor": "fisedit.editor",
    "EditResult": "fisedit.history",
    "FisEditError": "fisedit.errors",
    "FisEditPipeline": "fisedit.integrations.diffusers_pipeline",
    "Cancelled": "fisedit.errors",
    "Drive": "fisedit.values.drive",
    "Region": "fisedit.masking.region",
}


def __getattr__(name: str) -> object:
    """Import a public name's module when the name is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fisedit' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return __all__
