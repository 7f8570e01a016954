"""The files of a training folder, checked. Knows files and Pillow; no torch.

- target/NAME.png: the picture to learn; any picture format
- target/NAME.txt: its prompt
- reference/NAME.png: the picture whose look it takes
- region/NAME.png: optional: white where errors have more weight
- control/NAME.safetensors: optional: insertion point of the UNet -> [C, h, w], added to the map there
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fisedit.errors import InputError
from fisedit.storage.files import IMAGE_FORMATS
from fisedit.storage.images import decode, read_bytes

_LAYOUT = "a folder to train on holds target/NAME.png, target/NAME.txt and reference/NAME.png"


@dataclass(frozen=True)
class Triple:
    """One example.

    Args:
        name: The name of its files.
        target: picture file.
        reference: picture file.
        prompt: The prompt of the target.
        region: picture file, or None.
        control: .safetensors file, or None.
    """

    name: str
    target: Path
    reference: Path
    prompt: str
    region: Path | None = None
    control: Path | None = None


def read_triples(folder: Path, held_out: int = 0) -> tuple[Triple, ...]:
    """Read all triples of a folder in the order of their names; every picture is decoded once to check it.

    Args:
        folder: laid out as above.
        held_out: there must be more than this many.

    Raises:
        InputError: there are too few, or a file is missing, empty or no picture.
    """
    pictures = {kind: _pictures(folder / kind) for kind in ("target", "reference", "region")}
    if not pictures["target"]:
        raise InputError(f"no pictures in {folder / 'target'}; {_LAYOUT}")
    triples = tuple(_triple(folder, name, pictures) for name in sorted(pictures["target"]))
    for triple in triples:
        for path in (triple.target, triple.reference, triple.region):
            if path is not None:
                decode(read_bytes(path), f"picture {path}")
    if len(triples) <= held_out:
        raise InputError(f"held_out must leave triples to train on, got {held_out} of {len(triples)}")
    return triples


def _triple(folder: Path, name: str, pictures: dict[str, dict[str, Path]]) -> Triple:
    if name not in pictures["reference"]:
        raise InputError(f"{pictures['target'][name]} has no {folder / 'reference' / name}.png; {_LAYOUT}")
    control = folder / "control" / f"{name}.safetensors"
    return Triple(
        name,
        pictures["target"][name],
        pictures["reference"][name],
        _prompt(folder / "target" / f"{name}.txt"),
        pictures["region"].get(name),
        control if control.is_file() else None,
    )


def _prompt(path: Path) -> str:
    try:
        prompt = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise InputError(f"a target's prompt must be a text file beside it, got no {path}; {_LAYOUT}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} must be UTF-8 text, got other bytes; save it as UTF-8") from error
    if not prompt:
        raise InputError(f"{path} must say what the target shows, got an empty file")
    return prompt


def _pictures(folder: Path) -> dict[str, Path]:
    """Picture files by name without suffix."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix.lower() in IMAGE_FORMATS and not path.name.startswith("."):
            if path.stem in found:
                raise InputError(
                    f"{folder} must hold one picture of a name, got {found[path.stem].name} and {path.name}"
                )
            found[path.stem] = path
    return found
