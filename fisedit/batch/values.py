"""Frozen values of a batch; some of them cross process borders. Knows paths and texts, no picture and no model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Format(StrEnum):
    """What outputs are written as; KEEP is the input's own format where it can be written, else PNG."""

    KEEP = "keep"
    PNG = "png"
    JPG = "jpg"
    WEBP = "webp"


class OnError(StrEnum):
    """What happens after an item failed."""

    SKIP = "skip"
    STOP = "stop"


class Executor(StrEnum):
    """Where workers live."""

    LOCAL = "local"
    RAY = "ray"


class Status(StrEnum):
    """How an item stands at the end of a run."""

    DONE = "done"
    BEFORE = "done before"
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True)
class Job:
    """What is to be done: which pictures, where to, and what is said about them.

    Args:
        folder: of the inputs. output: folder of the outputs. recursive: take subfolders as well.
        prompt: of every edit, "{source}" standing for the source prompt; None where `edits` has them.
        source_prompt: of every picture; or captions: a table with one each; or neither: a .txt beside each picture.
        masks: folder of masks named as the pictures are. edits: a table of edits, several per picture if need be.
        format: of the outputs. overwrite: replace files in `output` that no batch wrote.
    """

    folder: Path
    output: Path
    prompt: str | None = None
    source_prompt: str | None = None
    captions: Path | None = None
    masks: Path | None = None
    edits: Path | None = None
    recursive: bool = False
    format: Format = Format.KEEP
    overwrite: bool = False


@dataclass(frozen=True)
class Settings:
    """What every item is edited with; arguments as of `Editor.from_pretrained` and `Editor.open`.

    Args:
        timeout: seconds that one item may take. metadata: tell in the outputs how they were made.
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


@dataclass(frozen=True)
class Item:
    """One output to make.

    Args:
        picture: the file. name: the same within the input folder.
        source_prompt: what it shows; None where nobody said. prompt: what it shall show.
        mask: an image, white where it may change; None for where the words say.
        output: the same within the output folder. target: the file to write.
        problem: why it cannot be tried, or "".
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
        """What items with a common recording share."""
        return self.picture, self.source_prompt


@dataclass(frozen=True)
class Made:
    """An item's result.

    Args:
        data: the output file's bytes. picture, mask: SHA-256 of the inputs that it was made of, mask "" for none.
        area: where it changed, a PNG with one pixel for each latent cell; b"" where nothing did.
        change: what the words changed. seconds: of this item, opening included. notes: what the user should know.
    """

    data: bytes
    picture: str
    mask: str
    area: bytes
    change: str
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed:
    """Why an item has no result.

    Args:
        reason: one line. broken: its worker should not be trusted with another.
        memory: there was too little of it, so that it may go well where no other worker holds any.
    """

    reason: str
    seconds: float = 0.0
    broken: bool = False
    memory: bool = False


@dataclass(frozen=True)
class Record:
    """How an item came out of a run, for the summary and the report.

    Args:
        reason: why it failed, else "". area: as in `Made`.
    """

    item: Item
    status: Status
    reason: str = ""
    change: str = ""
    seconds: float = 0.0
    area: bytes = b""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a job stands.

    Args:
        records: of every item, in the order of the plan. notes: what the user should know.
        interrupted: whether the user stopped the run. seconds: that it took.
    """

    records: tuple[Record, ...]
    notes: tuple[str, ...]
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def counts(self) -> dict[Status, int]:
        """Items by status."""
        count = Counter(record.status for record in self.records)
        return {status: count[status] for status in Status}

    @property
    def status(self) -> int:
        """The exit status: 0 all done, 1 some not, 130 interrupted."""
        unfinished = self.counts[Status.FAILED] + self.counts[Status.LEFT]
        return 130 if self.interrupted else int(unfinished > 0)


def one_line(text: str) -> str:
    """Text on one line, whatever a file's name or an error holds: no control characters, no undecodable bytes."""
    decoded = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(decoded.split()))
