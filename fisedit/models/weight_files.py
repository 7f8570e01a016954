"""Inspects model files on disk: their kind and the shapes of their tensors, before any weight is read.

Knows nothing of architectures. No function here executes or unpickles anything.
"""

from __future__ import annotations

import json
import mmap as memory_map
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisedit.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""

PICKLES = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
_SAFETENSORS = ".safetensors"
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.)")
_SPECIAL_TOKENS = 100  # upper bound of words without merges: start and end of text, added tokens
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Dtypes of safetensors -> torch's."""

MADV_DONTNEED = getattr(memory_map, "MADV_DONTNEED", None)
"""The advice that drops pages; None where the system has none."""

_LFS = b"version https://git-lfs"
_PICKLE_STARTS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(6)))


def is_safetensors(path: Path) -> bool:
    """Return whether a path has the suffix of safetensors, in any case."""
    return path.suffix.lower() == _SAFETENSORS


def read_shapes(*paths: Path) -> Shapes:
    """Read the names and shapes of the tensors of safetensors files from their headers.

    Args:
        paths: One file, or all parts of one.

    Raises:
        ModelError: One is no complete safetensors file, or two have a tensor of one name.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with _opened(path) as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
        if twice := next((name for name in shapes if name in found), None):
            raise ModelError(f"{path} has {twice} a second time; download its folder again")
        found |= shapes
    return found


class FileTensors(dict[str, "Tensor"]):
    """Tensors of safetensors files by name, which are mapped pages of the files.

    Args:
        paths: One file, or all parts of one, whose headers `read_shapes` has read.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__()
        self._mapped = [self._map(path) for path in paths]

    def _map(self, path: Path) -> mmap:
        """A file's pages, of which tensors are added."""
        import torch

        with path.open("rb") as file:
            mapped = mmap(file.fileno(), 0, access=ACCESS_COPY)  # torch warns of pages that cannot be written
        start = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8:start])
        header.pop("__metadata__", None)
        for name, told in header.items():
            if told["dtype"] not in _DTYPES:
                raise ModelError(f"{path} has {name} in {told['dtype']}; get a file in F32, F16 or BF16")
            dtype, shape, (begin, end) = getattr(torch, _DTYPES[told["dtype"]]), told["shape"], told["data_offsets"]
            count = (end - begin) // dtype.itemsize
            flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + begin) if count else torch.empty(0)
            self[name] = flat.to(dtype).view(shape)
        return mapped

    def drop_pages(self) -> None:
        """Release the memory of pages that were read; the files' other readers keep theirs."""
        if MADV_DONTNEED is not None:
            for mapped in self._mapped:
                mapped.madvise(MADV_DONTNEED)


def read_tensors(paths: Iterable[Path]) -> FileTensors:
    """Return the tensors of safetensors files whose headers `read_shapes` has read.

    Args:
        paths: One file, or all parts of one.

    Raises:
        ModelError: A tensor is of a dtype that no model of Stable Diffusion has.
    """
    return FileTensors(paths)


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
        raise ModelError(f"the model folder lacks {path.parent.name}/{path.name}; copy or download that file")
    _check_file_start(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is truncated or damaged (no JSON); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got a {type(value).__name__}; download it again")
    return value


def weights_file(folder: Path, stem: str) -> Path:
    """Find a component's weights that must be one file; arguments and errors as in `weight_files`."""
    first, *others = weight_files(folder, stem)
    if others:
        raise ModelError(f"the weights in {folder} must be one file, got {len(others) + 1} parts; join them")
    return first


def weight_files(folder: Path, stem: str, variant: str | None = None) -> tuple[Path, ...]:
    """Find a component's weights: one file, or all parts that an index names.

    Args:
        folder: The component's folder.
        stem: Stem of the file name.
        variant: Name of the variant to prefer, such as "fp16" for `stem.fp16.safetensors`. Without it those without a
            variant come first, then fp16, then the only one.

    Raises:
        ModelError: There are none, several variants of which none is asked for, or pickled or incomplete ones.
    """
    found = variants(folder, stem)
    if not found:
        raise _no_weights_error(folder, stem)
    chosen = next((name for name in (variant, "", "fp16") if name in found), None)
    if chosen is None and len(found) > 1:
        names = ", ".join(sorted(found))
        raise ModelError(f"variant must be one of {names} for the weights in {folder}, got {variant}; name one")
    file = found[next(iter(found)) if chosen is None else chosen]
    return _listed(file) if file.suffix.lower() == ".json" else (file,)


def variants(folder: Path, stem: str) -> dict[str, Path]:
    """Return the variants of a component's weights, "" for none, and the file or index of each.

    Args:
        folder: The component's folder.
        stem: Stem of the file name.
    """
    single = re.compile(rf"{re.escape(stem)}(?:\.([^.]+))?\.safetensors", re.IGNORECASE)
    index = re.compile(rf"{re.escape(stem)}\.safetensors\.index(?:\.([^.]+))?\.json", re.IGNORECASE)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    found: dict[str, Path] = {}
    for pattern in (single, index):
        for file in files:
            if (match := pattern.fullmatch(file.name)) and not _PART.search(file.name) and file.is_file():
                found.setdefault(match[1] or "", file)
    return found


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the files of what is given as one: itself, or all parts if it is one of them or their index.

    Args:
        path: A file.

    Raises:
        ModelError: It is a part, and no index beside it names the others.
    """
    if path.suffix.lower() == ".json" and f"{_SAFETENSORS}.index" in path.name.lower():
        return _listed(path)
    if not _PART.search(path.name):
        return (path,)
    index = path.with_name(f"{_PART.sub('', path.name)}.index.json")
    if not index.is_file():
        raise ModelError(f"{path.name} is one of several parts, got no {index.name} beside it that names them; copy it")
    return _listed(index)


def config_beside(path: Path, kind: str) -> dict[str, Any] | None:
    """Return the configuration of a file that lies in its folder of diffusers, or None.

    Args:
        path: The file.
        kind: Class that the configuration must name.

    Raises:
        ModelError: The configuration is damaged.
    """
    file = path.parent / "config.json"
    if not path.name.startswith("diffusion_pytorch_model") or not file.is_file():
        return None
    config = read_json(file)
    return config if config.get("_class_name") == kind else None


def _listed(index: Path) -> tuple[Path, ...]:
    """The parts that an index names."""
    listed = read_json(index).get("weight_map")
    names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
    if not names or any(Path(name).name != name or not is_safetensors(Path(name)) for name in names):
        raise ModelError(f"{index} must name .safetensors files beside it, got {names[:3]}; download it again")
    parts = tuple(index.parent / name for name in names)
    if missing := next((part for part in parts if not part.is_file()), None):
        raise ModelError(f"{index.name} names {missing.name}, which is not beside it; copy or download that file")
    return parts


def _no_weights_error(folder: Path, stem: str) -> ModelError:
    """The error for a folder without weights, by what it holds instead."""
    files = sorted(path for path in folder.glob("*") if path.is_file() and path.suffix.lower() != ".json")
    if pickled := next((path for path in files if path.suffix.lower() in PICKLES), None):
        return pickle_error(pickled)
    wanted = f"{folder.name}/{stem}.safetensors"
    if part := next((path for path in files if _PART.search(path.name)), None):
        return ModelError(f"{part.name} is one of several parts, got no {wanted}.index.json that names them; copy it")
    others = ", ".join(path.name for path in files[:3]) or "no weights"
    return ModelError(f"the model lacks its weights {wanted}, got {others} in {folder}; copy or download that file")


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
        raise ModelError("the model folder lacks tokenizer/merges.txt; copy or download that file")
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
