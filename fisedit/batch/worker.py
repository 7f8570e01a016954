"""One loaded model that edits pictures, one item after another, and stands whatever a picture does to it."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import torch
from diffusers.models.attention_processor import SlicedAttnProcessor
from PIL import Image

from fisedit.batch.digest import of_bytes
from fisedit.batch.values import Failed, Item, Made, Settings, one_line
from fisedit.editor import Editor
from fisedit.errors import Cancelled, FisEditError, NumericsError
from fisedit.models.malloc import keep_freed_memory
from fisedit.storage import image_decoder
from fisedit.values import MaskSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diffusers import StableDiffusionPipeline

    from fisedit.history import EditResult
    from fisedit.storage.image_metadata import Metadata
    from fisedit.values import OnStep


_OWN = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg"),
    "MPO": (".jpg", ".jpeg"),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "BMP": (),
    "GIF": (),
}
"""Format -> endings of outputs that are written in it."""


@dataclass(frozen=True, eq=False)
class _Source:
    """An opened picture: whose, its file's bytes, and where its edits are made."""

    key: tuple[Path, str | None]
    data: bytes
    picture: image_decoder.Picture
    editor: Editor
    result: EditResult


class Hand:
    """Edits items with a model that is loaded once; a source stays open while the next item shares it.

    Args:
        settings: the model, and what every item is edited with.

    Raises:
        ModelError, InputError, NumericsError: as `Editor.from_pretrained`.
    """

    def __init__(self, settings: Settings) -> None:
        keep_freed_memory()
        self._settings = settings
        self._home = self._pipe = self._load(settings.device, settings.dtype)
        self._source: _Source | None = None

    def attempt(self, item: Item) -> Made | Failed:
        """An item's result, or why there is none; nothing that a picture does is raised."""
        start, memory = monotonic(), False
        try:
            return replace(self._with_relief(item, start + self._settings.timeout), seconds=monotonic() - start)
        except Cancelled:
            why, broken = f"took longer than {self._settings.timeout:g} seconds; see --timeout", False
        except FisEditError as error:
            why, broken = str(error), False
        except OSError as error:
            why, broken = f"cannot be read: {error.strerror or error}", False
        except Exception as error:  # noqa: BLE001 (one bad picture never stops a batch; the next gets a fresh worker)
            memory = _out_of_memory(error)
            short = "memory ran out; use a smaller picture or fewer --workers"
            why, broken = short if memory else f"{type(error).__name__}: {error}", True
        self._source = None
        return Failed(one_line(why), monotonic() - start, broken, memory)

    def _with_relief(self, item: Item, deadline: float) -> Made:
        """Try an item, and again after each relief that there is for what went wrong."""
        rungs, notes = self._ladder(), dict[bool, str]()  # of digits and of memory, the last one each
        try:
            while True:
                try:
                    made = self._edit(item, deadline)
                    return replace(made, notes=(*made.notes, *notes.values()))
                except (NumericsError, MemoryError, RuntimeError) as error:
                    digits, relieve = isinstance(error, NumericsError), self._relief(error, rungs)
                    if relieve is None:
                        raise
                gc.collect()  # out of the handler, whose traceback holds what shall be freed
                torch.cuda.empty_cache()
                notes[digits] = relieve()
        finally:
            if notes:
                self._as_before()

    def _relief(self, error: Exception, rungs: Iterator[Callable[[], str]]) -> Callable[[], str] | None:
        """What to try against an error that more memory, another device or more digits may cure; None for nothing."""
        if isinstance(error, NumericsError):
            return self._use_fp32 if self._pipe.unet.dtype is not torch.float32 else None
        return next(rungs, None) if _out_of_memory(error) else None

    def _ladder(self) -> Iterator[Callable[[], str]]:
        """What helps where memory ran out, the cheapest first."""
        yield lambda: "memory ran out once and was freed"
        yield self._evict
        yield self._slice
        if self._pipe.device.type != "cpu":
            yield self._use_cpu

    def _evict(self) -> str:
        self._source = None
        return "memory ran out, and what was recorded was dropped"

    def _slice(self) -> str:
        self._source = None
        self._pipe.enable_attention_slicing("max")
        return "made with sliced attention, as memory ran out"

    def _use_cpu(self) -> str:
        self._source = None
        self._pipe = self._load("cpu", "fp32" if self._pipe.unet.dtype is torch.float32 else None)
        return "made on the CPU, as the device's memory ran out"

    def _use_fp32(self) -> str:
        self._source = None
        self._pipe = self._load(str(self._pipe.device), "fp32")
        return "made in fp32, as the model gave NaN in less"

    def _as_before(self) -> None:
        """A relief is for one picture: the next has the model as it was, and a source of its own."""
        self._source, self._pipe = None, self._home
        if any(isinstance(one, SlicedAttnProcessor) for one in self._pipe.unet.attn_processors.values()):
            self._pipe.disable_attention_slicing()

    def _load(self, device: str | None, dtype: str | None) -> StableDiffusionPipeline:
        local = self._settings.local_files_only
        return Editor.from_pretrained(self._settings.model, device=device, dtype=dtype, local_files_only=local).pipe

    def _edit(self, item: Item, deadline: float) -> Made:
        on_step = _until(deadline)
        source = self._open(item, on_step)
        data = image_decoder.read_bytes(item.mask) if item.mask else b""
        mask = image_decoder.levels(data, source.result.image.size) if item.mask else None
        source.editor.checkout(source.result.id)
        result = source.editor.edit(item.prompt, mask=mask, on_step=on_step)
        made = source.editor.metadata(result) if self._settings.metadata else None
        output, lost = _file(item, source, result, made)
        fallback = (f"dense: {result.stats.fallback}",) if result.stats.fallback else ()
        return Made(
            data=output,
            picture=of_bytes(source.data),
            mask=of_bytes(data) if item.mask else "",
            area=_area(result),
            change=str(result.diff),
            seconds=0.0,
            notes=(*source.picture.notes, *fallback, *result.stats.notes, *lost),
        )

    def _open(self, item: Item, on_step: OnStep) -> _Source:
        """The item's source: the one that is open, where they share it, else a new one in a new editor."""
        if self._source is not None and self._source.key == item.source:
            return self._source
        self._source = None
        data = image_decoder.read_bytes(item.picture)
        picture = image_decoder.decode(data)
        editor = Editor(self._pipe, model=self._settings.model)  # what is recorded ends with it; the model is shared
        result = editor.open(
            picture.image,
            item.source_prompt,
            negative_prompt=self._settings.negative_prompt,
            num_inference_steps=self._settings.num_inference_steps,
            guidance_scale=self._settings.guidance_scale,
            on_step=on_step,
        )
        self._source = _Source(item.source, data, picture, editor, result)
        return self._source


def _file(item: Item, source: _Source, result: EditResult, made: Metadata | None) -> tuple[bytes, tuple[str, ...]]:
    """The output's bytes: the input's own where nothing was edited; and what was lost in its format."""
    if result.mask.source is MaskSource.NOWHERE and Path(item.output).suffix.lower() in _OWN[source.picture.format]:
        return source.data, ()
    return image_decoder.encode(result.image, item.output, made)


def _area(result: EditResult) -> bytes:
    """The mask as a PNG with one pixel a latent cell; b"" where nothing was edited."""
    if result.mask.source is MaskSource.NOWHERE:
        return b""
    file = BytesIO()
    Image.fromarray(result.mask.grid).save(file, "PNG")
    return file.getvalue()


def _until(deadline: float) -> OnStep:
    """An `on_step` that stops the work at a moment of the monotonic clock."""

    def on_step(step: int, steps: int, preview: Image.Image | None) -> None:
        if monotonic() > deadline:
            raise Cancelled("the time for this picture is over")

    return on_step


def _out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, the device's or the machine's; torch's CPU allocator says so in words alone."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
