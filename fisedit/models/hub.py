"""Brings models from the hub: small texts first, weights only once the texts passed their checks.

Knows huggingface_hub and no architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from fisedit.errors import ModelError

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""What a hub id looks like: owner/name."""

TEXTS = ["model_index.json", "*/config.json", "scheduler/*.json", "tokenizer/*"]
"""All of a model's folder but its weights."""


def fetch(model_id: str, stems: Mapping[str, str], check: Callable[[Path], object], *, local_files_only: bool) -> Path:
    """Bring a model's folder to this machine's cache.

    Args:
        model_id: owner/name.
        stems: component -> its weights' file name without ending; of two variants only one is brought.
        check: raises for a folder of texts whose weights are not worth bringing.
        local_files_only: take what is in the cache, and never reach for the network.

    Raises:
        ModelError: the model cannot be had, or does not pass `check`.
    """
    folder = _snapshot(model_id, TEXTS, local_files_only)
    check(folder)
    for variant in ("", ".fp16"):
        names = [f"{part}/{stem}{variant}.safetensors" for part, stem in stems.items()]
        folder = _snapshot(model_id, [*TEXTS, *names], local_files_only)
        if all((folder / name).is_file() for name in names):
            return folder
    raise ModelError(
        f"model {model_id} on the hub must have .safetensors weights of {', '.join(stems)}, got none of some; pickled "
        "ones are not read: choose another model, or convert it where you trust it"
    )


def commit(model_id: str, *, local_files_only: bool) -> str:
    """The commit that a hub id stands for now. Raises ModelError as `fetch` does."""
    return _snapshot(model_id, ["model_index.json"], local_files_only).name


def bring(model_id: str, patterns: list[str], *, local_files_only: bool) -> Path:
    """The folder with a hub id's files that match patterns. Raises ModelError as `fetch` does."""
    return _snapshot(model_id, patterns, local_files_only)


def _snapshot(model_id: str, patterns: list[str], local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns, local_files_only=local_files_only))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {model_id} is not on this machine, and the hub was not asked or did not answer; "
            "check the name and the network, or give a folder or file"
        ) from error
    except (OSError, HFValidationError) as error:
        why = str(error).strip().splitlines()[0]
        raise ModelError(f"the hub does not give model {model_id} ({why}); check the name and your access") from error
