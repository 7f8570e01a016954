"""The places of things in a picture, by something else than its prompt: a detector, a file of annotations, its alpha.

A `MaskProvider` is any function of that form; `find` checks what one says. Knows pictures and regions, no editor.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fisedit.errors import InputError, MaskError, ModelError, as_text
from fisedit.masking.region import Region
from fisedit.models.loader import quiet_loaders
from fisedit.models.weight_files import check_complete
from fisedit.storage.csv_tables import separated
from fisedit.values import are_numbers, is_number

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

THRESHOLD = 0.5
"""Score from which a detection counts."""

ALPHA = "alpha"

_SIDES = ("left", "top", "right", "bottom")

BACKGROUND = "background"
"""Label of models that segment, for what is no thing."""

_LEAST_PART = 0.05
"""Share of a class's largest part from which another part of its mask is a thing of its own."""
LARGEST, ALL = "largest", "all"


@dataclass(frozen=True, eq=False)
class Detection:
    """A thing in a picture.

    Args:
        box: left, top, right and bottom in pixels.
        label: what it is, or "".
        score: how sure that is, 0 to 1.
        mask: booleans [height, width] of the picture, or None for the box.
    """

    box: tuple[float, float, float, float]
    label: str = ""
    score: float = 1.0
    mask: NDArray[np.bool_] | None = None

    @property
    def region(self) -> Region:
        """The region that it covers: its mask, or its box without one."""
        return Region.box(*self.box) if self.mask is None else Region.mask(self.mask)

    @property
    def area(self) -> float:
        """Pixels that it covers."""
        left, top, right, bottom = self.box
        return (right - left) * (bottom - top) if self.mask is None else float(self.mask.sum())


class MaskProvider(Protocol):
    """A function that finds things in pictures."""

    def __call__(self, picture: Image, name: str) -> Sequence[Detection]:
        """The things in a picture.

        Args:
            picture: upright.
            name: The name of its file, or "".
        """


def open_provider(source: str, *, threshold: float = THRESHOLD, local_files_only: bool = False) -> MaskProvider:
    """The provider that a text names.

    Args:
        source: "alpha", a .json or .csv file, or a detector's folder or hub id.
        threshold: score below which a detector need not tell of a thing.
        local_files_only: never reach for the network.

    Raises:
        InputError: a file of another layout. ModelError: no such detector. OSError: a file cannot be read.
    """
    if source == ALPHA:
        return AlphaChannel()
    if source.lower().endswith((".json", ".csv")):
        return AnnotationFile(Path(source))
    return TransformersDetector(source, threshold=threshold, local_files_only=local_files_only)


def find(
    provider: MaskProvider,
    picture: Image,
    name: str = "",
    *,
    labels: Sequence[str] = (),
    threshold: float = THRESHOLD,
    instance: str = ALL,
) -> list[Detection]:
    """Return the detections of a provider, from left to right; boxes without a pixel of the picture are left out.

    Args:
        provider: The provider that is asked.
        picture: upright.
        name: The name of its file.
        labels: The labels that count, in any case; () for all.
        threshold: score from which one counts, 0 to 1.
        instance: "all", "largest", or a number counted from the left and from 0.

    Raises:
        InputError: an argument out of range. MaskError: the provider failed, or says what does not fit the picture.
    """
    check_choice(threshold, instance)
    try:
        found = list(provider(picture, name))
    except InputError:
        raise
    except Exception as error:  # anybody's code, which may raise anything
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MaskError(f"the detector failed on the picture: {why:.200}") from error
    wanted = {label.casefold() for label in labels}
    chosen = (each for each in map(_typed, found) if not wanted or each.label.casefold() in wanted)
    found = [each for one in chosen if one.score >= threshold and (each := _on_picture(one, picture.size))]
    found.sort(key=lambda each: (each.box[0], each.box[1]))
    if instance == LARGEST:
        return sorted(found, key=lambda each: -each.area)[:1]
    return found if instance == ALL else found[int(instance) : int(instance) + 1]


def union_of(found: Sequence[Detection], labels: Sequence[str] = ()) -> Region:
    """All detections as one region.

    Args:
        found: The detections that `find` gives.
        labels: The labels that were asked for; () for all.

    Raises:
        MaskError: nothing was found.
    """
    if not found:
        what = " or ".join(labels) or "anything"
        raise MaskError(f"the detector must find {what} in the picture, got nothing; lower threshold, or give a box")
    return Region.union(each.region for each in found)


def check_choice(threshold: object, instance: str) -> None:
    """Raise InputError unless a threshold is in [0, 1], and an instance "all", "largest" or a number from 0."""
    if not (is_number(threshold) and 0 <= threshold <= 1):
        raise InputError(f"threshold must be in [0, 1], got {as_text(threshold)}")
    is_index = isinstance(instance, str) and instance.isdecimal() and len(instance) < 10
    if instance not in (ALL, LARGEST) and not is_index:
        raise InputError(f"instance must be {LARGEST}, {ALL} or a number from 0, got {as_text(instance, 40)}")


def _typed(found: object) -> Detection:
    if not isinstance(found, Detection):
        raise MaskError(f"a detector must give Detections, got {type(found).__name__}")
    if not are_numbers(found.box, 4) or not are_numbers((found.score,), 1):
        got = as_text((found.box, found.score))
        raise MaskError(f"a detector's box must be four numbers and its score one, got {got}")
    return replace(found, label=str(found.label))


def _on_picture(found: Detection, size: tuple[int, int]) -> Detection | None:
    """A detection, its box cut to its picture; None where nothing is left of it."""
    if found.mask is not None and (shape := np.shape(found.mask)) != size[::-1]:
        raise MaskError(f"a detector's mask must have the picture's {size[0]}x{size[1]} pixels, got {shape}")
    left, top, right, bottom = (float(side) for side in found.box)
    box = max(left, 0.0), max(top, 0.0), min(right, float(size[0])), min(bottom, float(size[1]))
    if box[0] >= box[2] or box[1] >= box[3]:
        return None
    return Detection(box, found.label, float(found.score), found.mask)


class AlphaChannel:
    """The transparent part of a picture, as one thing."""

    def __call__(self, picture: Image, name: str) -> Sequence[Detection]:
        """See `MaskProvider`."""
        if not picture.has_transparency_data:
            return ()
        clear = np.asarray(picture.convert("RGBA").getchannel("A")) < 128
        return (_of_mask(clear),) if clear.any() else ()


class AnnotationFile:
    """Boxes and masks from a file.

    JSON has the layout of COCO, with lists `images`, `annotations` and `categories`. An image has `id` and `file_name`.
    An annotation has `image_id`, `bbox` (left, top, width, height) and perhaps `segmentation` (polygons), `category_id`
    and `score`. A category has `id` and `name`. CSV has the columns `file`, `left`, `top`, `right`, `bottom`, and
    perhaps `label` and `score`.

    Args:
        path: The path of the file.

    Raises:
        InputError: another layout. OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            raise InputError(f"annotations must be a file, got {path}: no such file")
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        try:
            self._found = _read_coco(text) if path.suffix.lower() == ".json" else _read_csv(text)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            layout = "COCO's layout" if path.suffix.lower() == ".json" else "columns file, left, top, right, bottom"
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"annotations in {path.name} must have {layout} ({why:.120})") from error

    def __call__(self, picture: Image, name: str) -> Sequence[Detection]:
        """See `MaskProvider`."""
        base = PurePath(name).name
        told = name if name in self._found else base
        if told not in self._found:  # COCO's own folders, which are others here
            same = [one for one in self._found if PurePath(one).name == base]
            told = same[0] if len(same) == 1 else ""
        if not told:
            raise InputError(
                f"{self._path.name} says nothing of {name or 'this picture'}; leave the picture out, or add it"
            )
        return [_of_annotation(each, picture.size) for each in self._found[told]]


def _read_coco(text: str) -> dict[str, list[dict[str, Any]]]:
    data = json.loads(text)
    names = {image["id"]: str(image["file_name"]) for image in data["images"]}
    labels = {category["id"]: str(category["name"]) for category in data.get("categories", ())}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for each in data["annotations"]:
        left, top, width, height = map(float, each["bbox"])
        polygons = each.get("segmentation") or []
        found[names[each["image_id"]]].append(
            {
                "box": (left, top, left + width, top + height),
                "label": labels.get(each.get("category_id"), ""),
                "score": float(each.get("score", 1)),
                "polygons": [list(map(float, polygon)) for polygon in polygons] if isinstance(polygons, list) else [],
            }
        )
    return found


def _read_csv(text: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    table = separated(text, ("file", *_SIDES))
    for row in csv.DictReader(io.StringIO(table.text), delimiter=table.separator):
        sides = [row[side] for side in _SIDES]
        things = found.setdefault(row["file"], [])
        if any(sides):  # a file without things has a row without numbers
            box = tuple(float(side) for side in sides)
            things.append({"box": box, "label": row.get("label") or "", "score": float(row.get("score") or 1)})
    return found


def _of_annotation(entry: Mapping[str, Any], size: tuple[int, int]) -> Detection:
    found = Detection(entry["box"], entry["label"], entry["score"])
    if not (polygons := entry.get("polygons")):
        return found
    from PIL import Image as PIL
    from PIL import ImageDraw

    mask = PIL.new("1", size)
    for polygon in polygons:
        ImageDraw.Draw(mask).polygon(polygon, fill=1)
    pixels = np.asarray(mask)
    return Detection(found.box, found.label, found.score, pixels) if pixels.any() else found


def _of_mask(mask: NDArray[np.bool_], label: str = "", score: float = 1.0) -> Detection:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return Detection((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1), label, score, mask)


def _parts(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """The things of a class: parts of its mask that do not touch, but for specks."""
    from scipy.ndimage import label

    numbers, count = label(mask)
    sizes = np.bincount(numbers.flat, minlength=count + 1)[1:]
    return [numbers == 1 + i for i in range(count) if sizes[i] >= _LEAST_PART * sizes.max()]


class TransformersDetector:
    """A detector or a segmentation model of transformers.

    A model of classes alone (semantic segmentation) tells of each part of a class's mask as a thing of its own.

    Args:
        model: folder or hub id, with safetensors. No code of it is run.
        threshold: score from which the model tells of a thing, 0 to 1.
        local_files_only: never reach for the network.

    Raises:
        ModelError: no such model, or one of another kind.
    """

    def __init__(self, model: str, *, threshold: float = THRESHOLD, local_files_only: bool = False) -> None:
        import transformers
        from safetensors import SafetensorError

        options = {"local_files_only": local_files_only, "trust_remote_code": False}
        try:
            with quiet_loaders():
                names = transformers.AutoConfig.from_pretrained(model, **options).architectures or ["unknown"]
                kind = next((end for end in _TASKS if names[0].endswith(end)), None)
                if kind is None:
                    raise ModelError(f"a detector must detect or segment objects, got {names[0]} in {model}")
                processor = transformers.AutoImageProcessor.from_pretrained(model, **options)
                loader = getattr(transformers, f"AutoModel{kind}")
                detector, report = loader.from_pretrained(
                    model, use_safetensors=True, output_loading_info=True, attn_implementation="eager", **options
                )
                check_complete(report, model)
                detector.eval().float()
                self._by_class = kind == "ForSemanticSegmentation"
                self._options = {} if self._by_class else {"threshold": threshold}
                self._run: Any = transformers.pipeline(_TASKS[kind], detector, image_processor=processor, device="cpu")
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            wanted = "an object detection or segmentation model that transformers knows, with safetensors"
            raise ModelError(f"a detector must be {wanted}, got {model} ({why:.200})") from error

    def __call__(self, picture: Image, name: str) -> Sequence[Detection]:
        """See `MaskProvider`."""
        found = []
        for each in self._run(picture.convert("RGB"), **self._options):
            score = 1.0 if each.get("score") is None else float(each["score"])
            if "mask" in each:
                mask, label = np.asarray(each["mask"].convert("L")) > 127, str(each["label"])
                if mask.any() and label.casefold() != BACKGROUND:
                    found += [_of_mask(part, label, score) for part in (_parts(mask) if self._by_class else [mask])]
            else:
                box = each["box"]
                sides = box["xmin"], box["ymin"], box["xmax"], box["ymax"]
                found.append(Detection(sides, str(each["label"]), score))
        return found


_TASKS: Mapping[str, Any] = {
    "ForObjectDetection": "object-detection",
    "ForInstanceSegmentation": "image-segmentation",
    "ForUniversalSegmentation": "image-segmentation",
    "ForSemanticSegmentation": "image-segmentation",
}
"""End of an architecture's name -> transformers' task."""
