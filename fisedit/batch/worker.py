"""A batch worker: one loaded model that edits items in sequence and survives every error that an item causes."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers.models.attention_processor import SlicedAttnProcessor
from PIL import Image

from fisedit.adapters.control_pictures import CANNY, is_canny
from fisedit.batch.values import BatchItem, BatchSettings, ItemFailure, ItemOutput, one_line
from fisedit.editor import Editor
from fisedit.errors import Cancelled, FisEditError, NumericsError
from fisedit.integrations.mask_providers import ALPHA, find, open_provider
from fisedit.machine.malloc import keep_freed_memory
from fisedit.masking.region import Region
from fisedit.metadata.image_metadata import Metadata, read_metadata
from fisedit.storage import images
from fisedit.storage.canvas import needs_crop, to_editable
from fisedit.storage.mask_images import decode_mask
from fisedit.values import MaskSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from fisedit.history import EditResult
    from fisedit.integrations.mask_providers import MaskProvider
    from fisedit.machine.model import Model
    from fisedit.values import OnStep


_OWN_SUFFIXES = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg", ".jfif", ".jpe"),
    "MPO": (".jpg", ".jpeg", ".jfif", ".jpe"),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "BMP": (),
    "GIF": (),
}
"""Format of an input -> file name suffixes of outputs in the same format."""


@dataclass(frozen=True, eq=False)
class _OpenedSource:
    """An opened input: its key, the file's bytes, the decoded image, and the editor that holds it."""

    key: tuple[Path, str | None]
    data: bytes
    picture: images.DecodedImage
    editor: Editor
    result: EditResult
    mask: Path | None = None
    """The mask by which a part of the picture was opened; None for the whole."""


class BatchWorker:
    """Edits items with a model that is loaded once; a source stays open while the next item shares it.

    Args:
        settings: The model, and the options of every edit.

    Raises:
        ModelError: As `Editor.from_pretrained`.
        InputError: As `Editor.from_pretrained`.
        NumericsError: As `Editor.from_pretrained`.
    """

    def __init__(self, settings: BatchSettings) -> None:
        keep_freed_memory()
        self._settings = settings
        self._loaded = self._pipe = self._load(settings.device, settings.dtype)
        self._source: _OpenedSource | None = None
        self._base: Editor | None = None
        self._pictures: dict[str, Image.Image] = {}
        if settings.adapters is not None:
            self._new_editor()
            self._pictures = settings.adapters.read_pictures()
        self._provider: MaskProvider | None = None
        if settings.detect:
            self._provider = open_provider(
                settings.detect, threshold=settings.threshold, local_files_only=settings.local_files_only
            )

    def process(self, item: BatchItem) -> ItemOutput | ItemFailure:
        """Edit an item. Errors that the item causes are returned, never raised.

        Args:
            item: The item.

        Returns:
            The output, or the reason why there is none.
        """
        start, memory = monotonic(), False
        try:
            output = self._edit_with_fallbacks(item, start + self._settings.timeout)
            return replace(output, seconds=monotonic() - start)
        except Cancelled:
            reason, broken = f"took longer than {self._settings.timeout:g} seconds; see --timeout", False
        except FisEditError as error:
            reason, broken = str(error), False
        except OSError as error:
            reason, broken = f"cannot be read: {error.strerror or error}", False
        except Exception as error:  # noqa: BLE001 (one bad image never stops a batch; the next gets a fresh worker)
            memory = _is_out_of_memory(error)
            message = "memory ran out; use a smaller picture or fewer --workers"
            reason, broken = message if memory else f"{type(error).__name__}: {error}", True
        self._source = None
        return ItemFailure(one_line(reason), monotonic() - start, broken, memory)

    def _edit_with_fallbacks(self, item: BatchItem, deadline: float) -> ItemOutput:
        """Edit an item; after an error that a fallback may cure, apply the fallback and edit it again."""
        memory_fallbacks, notes = self._out_of_memory_fallbacks(), dict[bool, str]()  # the last note of each kind
        try:
            while True:
                try:
                    output = self._edit(item, deadline)
                    return replace(output, notes=(*output.notes, *notes.values()))
                except (NumericsError, MemoryError, RuntimeError) as error:
                    numerics, fallback = isinstance(error, NumericsError), self._fallback(error, memory_fallbacks)
                    if fallback is None:
                        raise
                gc.collect()  # outside the handler, whose traceback holds what is to be freed
                torch.cuda.empty_cache()
                notes[numerics] = fallback()
        finally:
            if notes:
                self._restore()

    def _fallback(self, error: Exception, memory_fallbacks: Iterator[Callable[[], str]]) -> Callable[[], str] | None:
        """The change that may cure an error, which returns its note; None if there is none (left)."""
        if isinstance(error, NumericsError):
            return self._use_fp32 if self._pipe.unet.dtype is not torch.float32 else None
        return next(memory_fallbacks, None) if _is_out_of_memory(error) else None

    def _out_of_memory_fallbacks(self) -> Iterator[Callable[[], str]]:
        """The changes that need less memory, the cheapest first."""
        yield lambda: "memory ran out once and was freed"
        yield self._evict
        yield self._slice_attention
        if self._pipe.device.type != "cpu":
            yield self._use_cpu

    def _evict(self) -> str:
        self._source = None
        return "memory ran out, and what was recorded was dropped"

    def _slice_attention(self) -> str:
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

    def _restore(self) -> None:
        """Undo the fallbacks of one item: the next has the model as loaded, and a source of its own."""
        self._source, self._pipe = None, self._loaded
        if any(isinstance(one, SlicedAttnProcessor) for one in self._pipe.unet.attn_processors.values()):
            self._pipe.disable_attention_slicing()

    def _load(self, device: str | None, dtype: str | None) -> Model:
        local = self._settings.local_files_only
        editor = Editor.from_pretrained(self._settings.model, device=device, dtype=dtype, local_files_only=local)
        for source, scale in self._settings.loras:
            editor.load_lora(source, scale)
        return editor.pipe

    def _new_editor(self) -> Editor:
        """An editor with features of its own; the model and adapters are shared."""
        adapters, settings = self._settings.adapters, self._settings
        if adapters is None:
            return Editor(self._pipe, model=settings.model)
        if self._base is None or self._base.pipe is not self._pipe:
            base = Editor(self._pipe, model=settings.model)
            own: dict[str, Any] = {
                "image_encoder": adapters.image_encoder or None,
                "local_files_only": settings.local_files_only,
            }
            for source, use in zip(adapters.sources, adapters.uses, strict=True):
                base.load_adapter(source, **use.as_dict(), **own)
            self._base = base
        return self._base.beside()

    def _edit(self, item: BatchItem, deadline: float) -> ItemOutput:
        on_step = _cancel_after(deadline)
        if self._provider is not None:
            return self._edit_found(item, self._provider, on_step)
        data = images.read_bytes(item.mask) if item.mask else b""
        source = self._open(item, data, on_step)
        mask = decode_mask(data) if item.mask else None
        source.editor.checkout(source.result.id)
        own: dict[str, Any] = {"quality": self._settings.quality, **self._pictures}
        result = source.editor.edit(item.prompt, mask=mask, on_step=on_step, **own)
        metadata = source.editor.metadata(result) if self._settings.metadata else None
        output, format_notes = _encode(item, source, result, metadata)
        source.editor.delete(result.id)
        return ItemOutput(
            data=output,
            picture=sha256(source.data).hexdigest(),
            mask=sha256(data).hexdigest() if item.mask else "",
            area=_mask_png(result),
            change=str(result.diff),
            seconds=0.0,
            notes=(*source.picture.notes, *result.stats.notes, *format_notes),
        )

    def _edit_found(self, item: BatchItem, provider: MaskProvider, on_step: OnStep) -> ItemOutput:
        """Edit the things that are found in a picture: together, or in a large one each on a part of its own."""
        self._source, settings = None, self._settings
        data, picture = _read_picture(item)
        image = to_editable(picture.image)
        found = find(
            provider,
            image,
            item.name,
            labels=settings.labels,
            threshold=settings.threshold,
            instance=settings.instance,
        )
        told = ", ".join(f"{each.label or 'a thing'} ({each.score:.0%})" for each in found)
        notes = [f"found {len(found)}: {told}" if found else "nothing was found, and nothing edited", *picture.notes]
        editor, regions = self._new_editor(), [each.region for each in found]
        if regions and not needs_crop(image.size, editor.native_size):
            regions = [Region.union(regions)]
        result, covered = None, np.zeros(image.size[::-1], bool)
        shown = image.convert("RGB") if settings.detect == ALPHA and regions else picture.image
        for region in regions:
            editor = self._new_editor()  # what is recorded of a part ends with it
            opened = shown if result is None else result.image
            source = self._open_part(editor, opened, item.source_prompt, region, on_step)
            own: dict[str, Any] = {"quality": settings.quality, **self._pictures}
            result = editor.edit(item.prompt, region=region, on_step=on_step, **own)
            if result.mask.source is not MaskSource.NOWHERE:
                covered |= result.mask.painted(result.size, source.config.crop)
            notes += result.stats.notes
        area, change, metadata = b"", "", None
        if result is not None:
            area, change = _png(covered), str(result.diff)
            metadata = editor.metadata(result) if settings.metadata else None
        kept = data if not covered.any() and _may_keep(item, picture, metadata=settings.metadata) else None
        edited = image if result is None else result.image
        output, format_notes = (kept, ()) if kept else images.encode(edited, Path(item.output).suffix, metadata)
        notes += format_notes
        return ItemOutput(output, sha256(data).hexdigest(), "", area, change, seconds=0.0, notes=tuple(notes))

    def _open_part(
        self, editor: Editor, image: Image.Image, prompt: str | None, region: Region | None, on_step: OnStep
    ) -> EditResult:
        """The source of a picture, or of the part of a large one that holds a region."""
        adapters = self._settings.adapters
        return editor.open(
            image,
            prompt,
            region=region,
            control=CANNY if adapters is not None and is_canny(adapters.control) else None,
            negative_prompt=self._settings.negative_prompt,
            num_inference_steps=self._settings.num_inference_steps,
            guidance_scale=self._settings.guidance_scale,
            on_step=on_step,
        )

    def _open(self, item: BatchItem, mask: bytes, on_step: OnStep) -> _OpenedSource:
        """The item's source: the one that is open if the item shares it, else a new one in a new editor.

        Of a large picture the part around the item's mask is opened.
        """
        if (opened := self._source) is not None and opened.key == item.source:
            is_large = needs_crop(opened.result.size, opened.editor.native_size)
            if opened.mask == (item.mask if is_large else None):
                return opened
        self._source = None
        data, picture = _read_picture(item)
        editor = self._new_editor()  # its features end with it
        size = picture.image.size
        opened_by = item.mask if needs_crop(size, editor.native_size) else None
        region = Region.mask(decode_mask(mask)) if opened_by else None
        result = self._open_part(editor, picture.image, item.source_prompt, region, on_step)
        self._source = _OpenedSource(item.source, data, picture, editor, result, opened_by)
        return self._source


def _read_picture(item: BatchItem) -> tuple[bytes, images.DecodedImage]:
    """The bytes and pixels of an item's picture. Raises InputError if they do not fit the format of its output."""
    data = images.read_bytes(item.picture)
    picture = images.decode(data)
    images.check_size(Path(item.output).suffix, picture.image.size)
    return data, picture


def _encode(
    item: BatchItem, source: _OpenedSource, result: EditResult, metadata: Metadata | None
) -> tuple[bytes, tuple[str, ...]]:
    """The output file's bytes, and notes on what its format cannot hold; the input's own bytes if nothing changed."""
    is_unchanged = result.mask.source is MaskSource.NOWHERE
    if is_unchanged and _may_keep(item, source.picture, metadata=metadata is not None):
        return source.data, ()
    return images.encode(result.image, Path(item.output).suffix, metadata)


def _may_keep(item: BatchItem, picture: images.DecodedImage, *, metadata: bool) -> bool:
    """Return whether an unchanged output may be its input's bytes: of its format, and silent on its making if asked."""
    is_own = Path(item.output).suffix.lower() in _OWN_SUFFIXES[picture.format]
    return is_own and (metadata or read_metadata(picture.image) == Metadata())


def _mask_png(result: EditResult) -> bytes:
    """The mask as a PNG with one pixel per latent cell, of a part of a picture one per pixel; b"" if nothing was
    edited."""
    if result.mask.source is MaskSource.NOWHERE:
        return b""
    crop = result.config.crop
    return _png(result.mask.raster if crop is None else result.mask.painted(result.size, crop))


def _png(raster: NDArray[Any]) -> bytes:
    file = BytesIO()
    Image.fromarray(raster).save(file, "PNG")
    return file.getvalue()


def _cancel_after(deadline: float) -> OnStep:
    """An `on_step` that raises Cancelled after a time of the monotonic clock, in seconds."""

    def on_step(step: int, steps: int, preview: Image.Image | None) -> None:
        if monotonic() > deadline:
            raise Cancelled("the time limit of this item has passed")

    return on_step


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether the device's or the machine's memory ran out; torch's CPU allocator raises a RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
