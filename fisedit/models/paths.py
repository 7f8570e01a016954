"""Finds models and adapters: those that ship with fisedit, on this machine, or on the Hugging Face hub.

From the hub come small text files first, and weights only after the texts passed their checks. Knows paths, bytes and
huggingface_hub, no architecture; imports no torch, so that checks are fast.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from fisedit.errors import InputError, ModelError
from fisedit.models.validation import pickled
from fisedit.models.vocabulary import VOCABULARY_FILE
from fisedit.models.weight_files import is_safetensors, variants

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""Pattern of a hub id: owner/name."""

CONFIG_PATTERNS = ["model_index.json", VOCABULARY_FILE, "*/config.json", "scheduler/*.json", "tokenizer*/*"]
"""All files of a model's folder except its weights."""

DEMO_ADAPTERS = ("demo-look", "demo-pose")
"""Names of the demo model's adapters, which ship with fisedit."""

DEMO_LORAS = ("demo-fast",)
"""Names of the demo model's LoRAs, which ship with fisedit."""

_PACKAGE = Path(__file__).parents[1]
_WEIGHT_FOLDERS = (_PACKAGE / "_weights", _PACKAGE.parent / "weights")  # in an installed wheel; in a checkout
_DIGEST_SUFFIXES = {".json", ".txt", ".safetensors"}  # suffixes of all files that a loader reads


def demo_folder() -> Path:
    """The folder of the demo model, in an installed wheel or in a checkout.

    Raises:
        ModelError: This copy of fisedit has no demo model.
    """
    for folder in _WEIGHT_FOLDERS:
        if (folder / "demo" / "model_index.json").is_file():
            return folder / "demo"
    raise ModelError("the demo model is not in this copy of fisedit; reinstall it, or give another model")


def demo_adapter_folder(name: str) -> Path:
    """The folder of an adapter or a LoRA that ships for the demo model, in an installed wheel or in a checkout.

    Args:
        name: One of `DEMO_ADAPTERS` or `DEMO_LORAS`.

    Raises:
        ModelError: This copy of fisedit has none of that name.
    """
    for folder in _WEIGHT_FOLDERS:
        if any((folder / name).glob("*.safetensors")):
            return folder / name
    raise ModelError(f"{name} is not in this copy of fisedit; reinstall it, or give another one")


def expand_home(path: str | Path) -> Path:
    """A path whose `~` is the home folder; as given where no home folder is known.

    Raises:
        InputError: something else than text or a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a path must be text or a Path, got {type(path).__name__}")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def user_cache_folder(variable: str, name: str) -> Path | None:
    """A folder of fisedit's in the user's cache folder; among the temporary files where no home folder is known.

    Args:
        variable: Environment variable that names another one; 0 there means none.
        name: The name of the folder.
    """
    given = os.environ.get(variable, "")
    if given:
        return None if given == "0" else expand_home(given)
    cache = expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return (cache if cache.is_absolute() else Path(tempfile.gettempdir())) / "fisedit" / name


def locate(model: str | Path) -> Path | None:
    """The model's file or folder; None for a hub id.

    Args:
        model: "demo", a folder, a .safetensors file, or a hub id.

    Raises:
        ModelError: It is none of these.
    """
    if model == "demo":
        return demo_folder()
    path = expand_home(model)
    if path.is_dir() or path.is_file():
        return path
    problem = pickled(path)
    if isinstance(model, str) and HUB_ID.fullmatch(model) and not is_safetensors(path) and not problem:
        return None
    found = "no file or folder" if path.exists() else "nothing there"
    raise ModelError(
        f'model must be "demo", a folder, a .safetensors file or a hub id owner/name, got {model} ({found})'
    )


def absolute_name(model: str | Path) -> str:
    """The name of a model or an adapter in sessions: its absolute path if it is on this machine, else as given."""
    path = expand_home(model)
    return str(path.resolve()) if path.exists() and model not in ("demo", *DEMO_ADAPTERS) else str(model)


def model_digest(model: str | Path, *, local_files_only: bool = False) -> str:
    """Identify a model's contents: a SHA-256 of its files wherever they are, or a hub id with its commit.

    Args:
        model: The model that `locate` takes.
        local_files_only: Whether the network is never used.

    Raises:
        ModelError: There is no such model, or it cannot be read.
    """
    path = locate(model)
    if path is None:
        commit = download_files(str(model), ["model_index.json"], local_files_only=local_files_only).name
        return f"{model}@{commit}"
    files = [path] if path.is_file() else sorted(filter(_is_read_by_loaders, path.glob("**/*")))
    digest = hashlib.sha256()
    try:
        for file in files:
            name = str(file.relative_to(path)) if path.is_dir() else ""
            with file.open("rb") as content:
                digest.update(f"{name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\0".encode())
    except OSError as error:
        raise ModelError(f"the model's files must be readable, got {error.filename} ({error.strerror})") from error
    return digest.hexdigest()


def _is_read_by_loaders(file: Path) -> bool:
    """Return whether a model's pictures depend on a file of its folder: the list of its words makes none."""
    return file.suffix.lower() in _DIGEST_SUFFIXES and file.name != VOCABULARY_FILE


def download_model(
    model_id: str,
    check: Callable[[Path], Mapping[str, str]],
    *,
    variant: str | None = None,
    local_files_only: bool,
) -> Path:
    """Download a model's folder to this machine's cache.

    Args:
        model_id: Hub id.
        check: Returns for a folder of texts the stem of the file name of every part's weights, of which only one
            variant is downloaded. It raises ModelError where none should be.
        variant: Name of the variant to download; None for weights without one, or else for fp16.
        local_files_only: Whether only the cache is used.

    Returns:
        The folder.

    Raises:
        ModelError: The model is not available, or does not pass `check`.
    """
    folder = download_files(model_id, CONFIG_PATTERNS, local_files_only=local_files_only)
    stems = check(folder)
    wanted: list[str] = []
    for name in ("", "fp16") if variant is None else (variant, ""):
        wanted = [*(wanted if variant else ()), *_weight_patterns(stems, name)]
        folder = download_files(model_id, [*CONFIG_PATTERNS, *wanted], local_files_only=local_files_only)
        if all(name in variants(folder / part, stem) for part, stem in stems.items()):
            return folder
    if variant and all(variants(folder / part, stem) for part, stem in stems.items()):
        return folder  # parts without the variant are read without it, as diffusers reads them
    raise ModelError(
        f"model {model_id} on the hub must have .safetensors weights of {', '.join(stems)}, got none of some; pickled "
        "ones are not read: choose another model, or convert it where you trust it"
    )


def _weight_patterns(stems: Mapping[str, str], variant: str) -> list[str]:
    """Patterns of the files of one variant of weights, in one file or in parts with an index."""
    end = f".{variant}" if variant else ""
    names = (f"{end}.safetensors", f".safetensors.index{end}.json", f"{end}-*-of-*.safetensors")
    later = (f"-*-of-*{end}.safetensors",) if variant else ()
    return [f"{part}/{stem}{name}" for part, stem in stems.items() for name in (*names, *later)]


def adapter_path(
    source: str | Path, *, local_files_only: bool, is_wanted: Callable[[Path], bool] = lambda _: True
) -> Path:
    """Return the path of an adapter: one that ships, a file or folder, or what is downloaded of a hub id.

    Args:
        source: a name of `DEMO_ADAPTERS`, a path, or a hub id.
        local_files_only: Whether only the cache is used.
        is_wanted: Whether the weights are downloaded, by the folder with the hub's config.json; may raise.

    Returns:
        A path, which need not exist; of what is not wanted it is `source`.

    Raises:
        ModelError: The hub's files are not available.
    """
    if source in DEMO_ADAPTERS:
        return demo_adapter_folder(str(source))
    path = expand_home(source)
    if path.exists() or is_safetensors(path) or not HUB_ID.fullmatch(str(source)):
        return path
    folder = download_files(str(source), ["config.json"], local_files_only=local_files_only)
    if not is_wanted(folder):
        return path
    return download_files(str(source), ["config.json", "*.safetensors"], local_files_only=local_files_only)


def download_files(model_id: str, patterns: list[str], *, local_files_only: bool) -> Path:
    """Download the files of a hub id that match patterns.

    Args:
        model_id: Hub id.
        patterns: File name patterns.
        local_files_only: Whether only the cache is used.

    Returns:
        The folder.

    Raises:
        ModelError: They are not available.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns, local_files_only=local_files_only))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {model_id} is not on this machine, and the hub was not asked or did not answer; "
            "check the name and the network, or give a folder or file"
        ) from error
    except RuntimeError as error:
        if os.path.expanduser("~") != "~":  # noqa: PTH111 (pathlib's raises)
            raise
        raise ModelError(
            f"model {model_id} needs a folder for downloads, got no home folder; set HF_HOME to a folder"
        ) from error
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"the hub does not give model {model_id} ({reason}); check the name and your access"
        ) from error
