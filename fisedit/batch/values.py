"""Frozen values of a batch; some of them cross process borders. Knows paths and texts, no image and no model."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from fisedit.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.values import AdapterUse


class OutputFormat(StrEnum):
    """File format of the outputs; KEEP is the input's own format where it can be written, else PNG."""

    KEEP = "keep"
    PNG = "png"
    JPG = "jpg"
    WEBP = "webp"


class OnError(StrEnum):
    """The course of a run after an item failed."""

    SKIP = "skip"
    STOP = "stop"


class ExecutorKind(StrEnum):
    """The kind of executor: the place where workers run."""

    LOCAL = "local"
    RAY = "ray"


class ItemStatus(StrEnum):
    """The status of an item at the end of a run."""

    DONE = "done"
    BEFORE = "done before"
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True)
class BatchJob:
    """The inputs and outputs of a batch.

    Args:
        folder: Folder of the input images.
        output: Folder of the outputs.
        prompt: Prompt of every edit, in which "{source}" stands for the source prompt; None where `edits` has prompts.
        source_prompt: Source prompt of every image. Without it and `captions`, a .txt file beside an image has it.
        captions: Table with a source prompt for each image.
        masks: Folder of masks named as the images are.
        edits: Table of edits, any number per image.
        recursive: Whether images in subfolders are edited as well.
        format: File format of the outputs.
        overwrite: Whether files in `output` that no batch wrote are replaced.
    """

    folder: Path
    output: Path
    prompt: str | None = None
    source_prompt: str | None = None
    captions: Path | None = None
    masks: Path | None = None
    edits: Path | None = None
    recursive: bool = False
    format: OutputFormat = OutputFormat.KEEP
    overwrite: bool = False


@dataclass(frozen=True)
class BatchAdapters:
    """Adapters of every edit, and the pictures that they read.

    Args:
        sources: Sources of the adapters, as `Editor.load_adapter` takes them.
        uses: How each takes part.
        image_encoder: Folder of an IP-Adapter's image encoder, "" for the one beside its file.
        reference: File of the picture whose look is taken, or "".
        control: File of the picture that says where things are, "canny" for the edges of each input, or "".
    """

    sources: tuple[str, ...]
    uses: tuple[AdapterUse, ...]
    image_encoder: str = ""
    reference: str = ""
    control: str = ""

    def read_pictures(self) -> dict[str, Image]:
        """The pictures by name; edges are made of each input.

        Raises:
            InputError: a file that is none, or no picture.
        """
        from fisedit.adapters.control_pictures import is_canny
        from fisedit.storage.files import why_no_file
        from fisedit.storage.images import decode, read_bytes

        paths = {"reference": self.reference, "control": "" if is_canny(self.control) else self.control}
        pictures = {}
        for name, path in paths.items():
            if path and not Path(path).is_file():
                raise InputError(f"{name} must be an image file, got {path}: {why_no_file(Path(path))}")
            if path:
                pictures[name] = decode(read_bytes(Path(path)), f"{name} {path}").image
        return pictures


@dataclass(frozen=True)
class BatchSettings:
    """The model and the options of every edit, as `Editor.from_pretrained` and `Editor.open` take them.

    Args:
        model: Name, folder or file of the model.
        device: Torch device, None for the best of the machine.
        dtype: Precision, None for the best of the device.
        local_files_only: Whether the network is never used.
        negative_prompt: Negative prompt of every edit.
        num_inference_steps: Denoising steps.
        guidance_scale: Scale of classifier-free guidance; 1 switches it off.
        timeout: Time limit of one item in seconds, above 0.
        metadata: Whether outputs say how they were made.
        quality: How near edits come to dense ones, one of `fisedit.values.Quality`.
        detect: What finds the things to edit, as `mask_providers.open_provider` takes it; "" for masks and words.
        labels: Labels of the things to edit; () for all.
        threshold: Score from which a thing counts, 0 to 1.
        instance: "all", "largest", or the number of one thing, counted from the left and from 0.
        adapters: Adapters that condition every edit by pictures, or None.
        loras: LoRAs that change what is painted, as `Editor.load_lora` takes them, each with its scale.
    """

    model: str = "demo"
    device: str | None = None
    dtype: str | None = None
    local_files_only: bool = False
    negative_prompt: str = ""
    num_inference_steps: int = 25
    guidance_scale: float = 7.5
    timeout: float = 3600.0
    metadata: bool = True
    quality: str = "balanced"
    detect: str = ""
    labels: tuple[str, ...] = ()
    threshold: float = 0.5
    instance: str = "all"
    adapters: BatchAdapters | None = None
    loras: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class BatchItem:
    """One output to make.

    Args:
        picture: The input file.
        name: The input's name within the input folder.
        source_prompt: Prompt of the input; None if it has none.
        prompt: Prompt of the output.
        mask: Image that is white where the edit may change pixels; None to localize the changed words.
        output: The output's name within the output folder.
        target: The output file.
        problem: Why the item cannot be edited, or "".
    """

    picture: Path
    name: str
    source_prompt: str | None
    prompt: str
    mask: Path | None
    output: str
    target: Path
    problem: str = ""

    @property
    def source(self) -> tuple[Path, str | None]:
        """The key of the opened source, which items of one image and source prompt share."""
        return self.picture, self.source_prompt


@dataclass(frozen=True)
class ItemOutput:
    """The result of an item that was edited.

    Args:
        data: Bytes of the output file.
        picture: SHA-256 of the input file.
        mask: SHA-256 of the mask file, or "".
        area: The edit's mask as a PNG over the whole picture; b"" if nothing was edited.
        change: The changed words as text.
        seconds: Duration, with the time to open the input.
        notes: Remarks for the user.
    """

    data: bytes
    picture: str
    mask: str
    area: bytes
    change: str
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ItemFailure:
    """The result of an item that was not edited.

    Args:
        reason: The error on one line.
        seconds: Duration until the failure.
        broken: Whether the worker has to be replaced before its next item.
        memory: Whether memory ran out, so that the item may succeed when one worker runs alone.
    """

    reason: str
    seconds: float = 0.0
    broken: bool = False
    memory: bool = False


@dataclass(frozen=True)
class ItemRecord:
    """An item's status and result for the summary and the report.

    Args:
        item: The item.
        status: Its status.
        reason: The error, or "".
        change: The changed words as text.
        seconds: Duration.
        area: The mask, as in `ItemOutput`.
        notes: Remarks for the user.
    """

    item: BatchItem
    status: ItemStatus
    reason: str = ""
    change: str = ""
    seconds: float = 0.0
    area: bytes = b""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchOutcome:
    """The result of a run.

    Args:
        records: Every item's record, in the order of the plan.
        notes: Remarks for the user.
        interrupted: Whether the user stopped the run.
        seconds: Duration of the run.
    """

    records: tuple[ItemRecord, ...]
    notes: tuple[str, ...]
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def counts(self) -> dict[ItemStatus, int]:
        """Number of items by status."""
        count = Counter(record.status for record in self.records)
        return {status: count[status] for status in ItemStatus}

    @property
    def exit_status(self) -> int:
        """The process's exit status: 0 all done, 1 some not, 130 interrupted."""
        unfinished = self.counts[ItemStatus.FAILED] + self.counts[ItemStatus.LEFT]
        return 130 if self.interrupted else int(unfinished > 0)


def one_line(text: str) -> str:
    """Text on one line, without control characters and undecodable bytes of file names."""
    decoded = re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)
    return "".join(character if character.isprintable() else " " for character in " ".join(decoded.split()))
