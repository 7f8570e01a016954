"""Inspects model files on disk: their kind and the shapes of their tensors, before any weight is read.

Knows nothing of architectures. No function here executes or unpickles anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fisedit.errors import ModelError

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""

PICKLES = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
_SPECIAL_TOKENS = 100  # upper bound of words without merges: start and end of text, added tokens
_LFS = b"version https://git-lfs"
_PICKLE_STARTS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(6)))


def read_shapes(path: Path) -> Shapes:
    """Read the names and shapes of a safetensors file's tensors from its header.

    Args:
        path: The file.

    Raises:
        ModelError: It is no complete safetensors file.
    """
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)


def read_metadata(path: Path) -> Mapping[str, str]:
    """Read what a safetensors file's header says beside its tensors.

    Args:
        path: The file.

    Raises:
        ModelError: It is no complete safetensors file.
    """
    with _opened(path) as file:
        return file.metadata() or {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    _check_file_start(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or damaged ({error}); download it again") from error


def check_complete(report: Mapping[str, Any], model: str | Path) -> None:
    """Check that a model's files hold all of its weights; its library draws the others at random.

    Args:
        report: `output_loading_info` of diffusers or transformers.
        model: its folder or hub id.

    Raises:
        ModelError: some are missing.
    """
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{model} lacks {len(missing)} of its weights, such as {missing[0]}; download it again")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: The file.

    Raises:
        ModelError: The file is missing, or no JSON object.
    """
    if not path.is_file():
        raise ModelError(f"the model folder lacks {path.parent.name}/{path.name}; copy or download the whole folder")
    _check_file_start(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is truncated or damaged (no JSON); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got a {type(value).__name__}; download it again")
    return value


def weights_file(folder: Path, stem: str) -> Path:
    """Find a component's weights: `stem.safetensors`, or its fp16 variant if only that one exists.

    Args:
        folder: The component's folder.
        stem: Stem of the file name.

    Raises:
        ModelError: Neither exists, or the weights are pickled or sharded.
    """
    for name in (f"{stem}.safetensors", f"{stem}.fp16.safetensors"):
        if (folder / name).is_file():
            return folder / name
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
    if pickled:
        raise pickle_error(folder / pickled[0])
    raise ModelError(f"the model lacks its weights {folder.name}/{stem}.safetensors; copy or download the whole folder")


def check_vocabulary(folder: Path) -> None:
    """Check that a CLIP tokenizer's merges produce its whole vocabulary; a truncated file would split words.

    Args:
        folder: The tokenizer's folder.

    Raises:
        ModelError: A file is missing or truncated.
    """
    vocabulary = read_json(folder / "vocab.json")
    merges = folder / "merges.txt"
    if not merges.is_file():
        raise ModelError("the model folder lacks tokenizer/merges.txt; copy or download the whole folder")
    merged = {"".join(line.split()) for line in merges.read_text(encoding="utf-8", errors="replace").splitlines()}
    missing = [word for word in vocabulary if len(word.removesuffix("</w>")) > 1 and word not in merged]
    if len(missing) > _SPECIAL_TOKENS:
        raise ModelError(f"{merges} is truncated: nothing makes {missing[0]!r}; download it again")


def pickle_error(path: Path) -> ModelError:
    """The error for a pickled file, whose loading could run any code."""
    return ModelError(
        f"weights must be .safetensors, got {path.name}: a pickled file can run code when it is read; "
        "get the .safetensors file or convert it where you trust it"
    )


def _check_file_start(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(_LFS))
    if start == _LFS:
        raise ModelError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository")
    if start.startswith(_PICKLE_STARTS) and start[8:9] != b"{":  # a safetensors header may be 640 = b"\x80\x02" long
        raise pickle_error(path)
