"""Cost tables on disk: one JSON file a machine, version of torch, architecture and dtype, in the user's cache folder.

FISEDIT_COSTS names another folder; 0 switches tables off, so that estimates and choices come from built-in constants.
Where no home folder is known they lie among the temporary files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisedit.costs.table import NO_MAP, CostTable, from_dict
from fisedit.machine.hardware import this_machine
from fisedit.models.paths import user_cache_folder
from fisedit.storage import files

if TYPE_CHECKING:
    from fisedit.machine.model import Model

_SHAPE_KEYS = (
    "block_out_channels",
    "layers_per_block",
    "down_block_types",
    "up_block_types",
    "attention_head_dim",
    "num_attention_heads",
    "cross_attention_dim",
    "transformer_layers_per_block",
    "norm_num_groups",
    "time_cond_proj_dim",
)
"""The keys of a part's configuration that decide how long its layers take."""

_DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The errors that a file that holds no table raises."""


def folder() -> Path | None:
    """The folder of cost tables, or None where they are switched off."""
    return user_cache_folder("FISEDIT_COSTS", "costs")


def describe(pipe: Model) -> dict[str, Any]:
    """Describe the setting that a table holds for: machine, torch, architecture and dtype, ready for JSON.

    Args:
        pipe: the model.
    """
    parts = {"unet": pipe.unet, "vae": pipe.vae}
    shapes = {name: {key: part.config.get(key) for key in _SHAPE_KEYS} for name, part in parts.items()}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True, default=str).encode()).hexdigest()[:12]
    dtype = str(pipe.unet.dtype).removeprefix("torch.")
    return this_machine(pipe.unet.device).as_dict() | {"architecture": digest, "dtype": dtype}


def table_path(about: dict[str, Any]) -> Path | None:
    """The file of a table, or None where tables are switched off.

    Args:
        about: The description, from `describe`.
    """
    directory = folder()
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return None if directory is None else directory / f"{about['architecture']}-{about['dtype']}-{key}.json"


def load_table(pipe: Model, dtype: str | None = None) -> CostTable | None:
    """This machine's table of a model; None where there is none, or a damaged one, which is measured anew.

    Args:
        pipe: the model.
        dtype: torch's name of the precision; None for the model's own.
    """
    about = describe(pipe)
    about["dtype"] = dtype or about["dtype"]
    path = table_path(about)
    try:
        if path is None or not path.is_file():  # a pipe or a device would never end
            return None
        table = from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, *_DAMAGED):
        return None
    levels = len(pipe.unet.config.block_out_channels)
    own = all(table.about.get(key) == value for key, value in json.loads(json.dumps(about)).items())
    return table if own and all(NO_MAP <= level < levels for _, _, level in table.curves) else None


def table_version(pipe: Model) -> object:
    """Return what differs once a model's table was measured, or measured again.

    Args:
        pipe: the model.
    """
    path = table_path(describe(pipe))
    try:
        return path, None if path is None else path.stat().st_mtime_ns
    except OSError:
        return path, None


def check_table_path(pipe: Model) -> None:
    """Check, before any measuring, that a model's table can be written.

    Args:
        pipe: the model.

    Raises:
        InputError: it cannot.
    """
    files.check_file_path(table_path(describe(pipe)))


def save_table(pipe: Model, table: CostTable) -> Path | None:
    """Write this machine's table of a model, whole or not at all.

    Args:
        pipe: the model.
        table: to write.

    Returns:
        The file; None where tables are switched off.

    Raises:
        OSError: it cannot be written.
    """
    path = table_path(describe(pipe))
    if path is not None:
        files.write_json(table.as_dict(), path)
    return path
