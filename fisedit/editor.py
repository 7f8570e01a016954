"""The public face: a source is made once, then edited by changing its prompt.

`Editor.edit` reads in the order the data travels: text diff, mask, plan, sparse denoising, sparse decoding, result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from fisedit.adapters import lora, textual_inversion
from fisedit.adapters.control_pictures import CANNY, canny
from fisedit.adapters.loading import load_picture_adapter
from fisedit.diagnosis.calibration import CalibrationSettings, calibrate, predictions
from fisedit.errors import AdapterError, InputError, PageError, SessionError
from fisedit.history import EditResult, History
from fisedit.masking.localize import change_heatmap
from fisedit.masking.mask_options import DEFAULT_METHOD, MaskOptions
from fisedit.masking.masks import count_components
from fisedit.masking.region import Region, cells_on_picture, check_border, joined, region_of
from fisedit.models.device import default_torch_state
from fisedit.models.loader import load
from fisedit.models.machine import free_bytes
from fisedit.models.paths import absolute_name, expand_home
from fisedit.models.stopwatch import Stopwatch
from fisedit.pipeline import EditPipeline
from fisedit.planner import EditRequest, Repaint
from fisedit.sampling.denoise import Engine
from fisedit.sampling.trajectory_cache import TrajectoryCache
from fisedit.sparse import cost_store
from fisedit.sparse.feature_codec import choose_encoding
from fisedit.sparse.feature_tiers import FeatureTiers
from fisedit.sparse.modules import project_text
from fisedit.sparse.stepping import Graphs
from fisedit.storage import provenance
from fisedit.storage.canvas import (
    CONTEXT,
    MAX_CONTEXT,
    canvas_size,
    crop_around,
    extended,
    needs_crop,
    to_canvas,
    to_editable,
)
from fisedit.storage.files import check_image_path
from fisedit.storage.image_metadata import Metadata, read_metadata
from fisedit.storage.images import write_image
from fisedit.storage.pages import PageFolder, default_folder
from fisedit.storage.provenance import Origin, PastEdit
from fisedit.storage.session_store import SessionContents, SessionStore
from fisedit.values import (
    CONTROL,
    DRIVE,
    LATENT_FACTOR,
    REFERENCE,
    SEEDS,
    EditMask,
    EditScript,
    Inversion,
    MaskSource,
    OnStep,
    cell_pixels,
    check_prompt,
    check_quality,
    check_scale,
    check_seed,
    make_adapter_use,
    make_generation_config,
    strength_for_start,
)

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from numpy.typing import NDArray
    from PIL.Image import Image

    from fisedit.adapters.references import LoadedAdapter
    from fisedit.drive import Drive
    from fisedit.storage.pages import Page
    from fisedit.values import Box


@dataclass(frozen=True, eq=False)
class Preview:
    """What an edit would do, before it is run.

    Args:
        mask: where it would paint, with heatmap and confidence.
        diff: what the words change.
        macs: multiply-accumulates that it would spend.
        macs_dense: those of a dense run.
        fallback: why it would run dense, or "".
        nothing: why it would do nothing, or "".
        seconds: that it would take, by this machine's cost table; None where there is none.
        seconds_dense: those of a dense run; None where there is no cost table.
        recorded_bytes: that it would keep for later edits, about.
        notes: things the user should know, such as words that the model does not know.
    """

    mask: EditMask
    diff: EditScript
    macs: int
    macs_dense: int
    fallback: str = ""
    nothing: str = ""
    seconds: float | None = None
    seconds_dense: float | None = None
    recorded_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def confidence(self) -> float:
        """How well the attention separated inside from outside, 0 to 1."""
        return self.mask.confidence

    @property
    def pieces(self) -> int:
        """Connected pieces of the mask, which `instance` counts."""
        return count_components(self.mask.grid)


class Editor:
    """Generates a picture and edits it, computing only what the words change.

    Args:
        pipe: a Stable Diffusion 1.x or 2.x pipeline. Editors may share one.
        model: its name, for saved sessions.
        vae: path of its autoencoder, for saved sessions; "" for the model's own.
        max_recorded_bytes: recorded features kept in the memory of the device; None for half of what is free there. On
            a CPU steps that do not fit lie on disk and are fetched while an edit runs; on a GPU they wait in the host's
            memory first.
        max_host_bytes: of those that a GPU's memory does not hold, kept in the host's; None for half of what is free.
        max_disk_bytes: of those that do not fit there, kept on disk; None for a quarter of what is free, 0 for none.
            What fits nowhere is dropped, the least recently used first, and made again when it is needed.
        graphs: replay sparse steps from captured graphs of fused kernels; None for what the environment's
            FISEDIT_GRAPHS says, 0 or 1, or else on CUDA devices. Elsewhere a stand-in runs in their place, which shows
            that they are right and saves no time. A UNet or an edit that they cannot run is run eagerly, and
            `stats.uncaptured` says why.
        cache_dtype: what recorded features are kept in: "int8", "int4" for the least memory, or "model" for the model's
            own; "auto" for int8 where maps are large, and the model's own on a GPU.

    Raises:
        UnsupportedModuleError: the UNet has a layer without an exact sparse counterpart.
        InputError: another name of a dtype.
    """

    def __init__(
        self,
        pipe: StableDiffusionPipeline,
        *,
        model: str = "",
        vae: str = "",
        max_recorded_bytes: int | None = None,
        max_host_bytes: int | None = None,
        max_disk_bytes: int | None = None,
        graphs: bool | None = None,
        cache_dtype: str = "auto",
    ) -> None:
        self.pipe, self.model, self.vae = pipe, model, vae
        self._stores: dict[Path, SessionStore] = {}
        device = pipe.unet.device
        limit = free_bytes(device) // 2 if max_recorded_bytes is None else max_recorded_bytes
        host_limit = free_bytes(torch.device("cpu")) // 2 if max_host_bytes is None else max_host_bytes
        folder = default_folder() if max_disk_bytes != 0 else None
        pages = None if folder is None else PageFolder(folder, max_disk_bytes)
        tiers = FeatureTiers(limit if device.type == "cpu" else host_limit, pages)
        encoding = choose_encoding(cache_dtype, device)
        self._pipeline = EditPipeline(pipe, TrajectoryCache(limit, tiers), Graphs(graphs), encoding)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "demo",
        *,
        vae: str | Path | None = None,
        preview_vae: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        local_files_only: bool = False,
        max_recorded_bytes: int | None = None,
        max_host_bytes: int | None = None,
        max_disk_bytes: int | None = None,
        graphs: bool | None = None,
        cache_dtype: str = "auto",
    ) -> Self:
        """Load a model, checked before its weights are read; no code of a model is ever run.

        Args:
            model: "demo", a diffusers folder, a hub id such as "owner/name", or one .safetensors file.
            vae: another autoencoder than the model's, a folder or a .safetensors file; None for the model's own.
            preview_vae: a folder with an `AutoencoderTiny` (TAESD), which decodes what `on_step` gets; without it, that
                has one pixel per latent cell.
            device: "cpu", "cuda" or "cuda:N"; None for CUDA where there is some.
            dtype: "fp32", "bf16", "fp16" or torch's; None for fp16 on CUDA, and on a CPU for the faster of
                bf16 and fp32.
            local_files_only: never reach for the network.
            max_recorded_bytes: of recorded features in the device's memory; see `Editor`.
            max_host_bytes: of those in the host's memory; see `Editor`.
            max_disk_bytes: of those on disk; see `Editor`.
            graphs: capture sparse steps as CUDA graphs; None where that can be done.
            cache_dtype: what recorded features are kept in; see `Editor`.

        Raises:
            ModelError: the model is missing, damaged, unsafe to load or of another architecture.
            NumericsError: its weights hold NaN or infinity. InputError: a device or dtype that cannot be used here.
        """
        pipe = load(
            model, vae=vae, preview_vae=preview_vae, device=device, dtype=dtype, local_files_only=local_files_only
        )
        return cls(
            pipe,
            model=absolute_name(model),
            vae="" if vae is None else _absolute_path(vae),
            max_recorded_bytes=max_recorded_bytes,
            max_host_bytes=max_host_bytes,
            max_disk_bytes=max_disk_bytes,
            graphs=graphs,
            cache_dtype=cache_dtype,
        )

    def beside(self, history: History | None = None, references: dict[str, Image] | None = None) -> Self:
        """Another editor over the same model, with a history and a trajectory cache of its own within the same bounds.

        Args:
            history: results that it shares with editors over other models; None for its own. A result is edited by an
                editor of the model that made it.
            references: reference pictures by their digests, shared with editors over other models; None for its own.
        """
        limit = self._trajectory_cache.max_bytes
        editor = type(self)(self.pipe, model=self.model, vae=self.vae, max_recorded_bytes=limit)
        editor._pipeline = self._pipeline.beside(history, references)  # noqa: SLF001 (of its own class)
        return editor

    @property
    def history(self) -> History:
        """All results, in the order of making."""
        return self._pipeline.history

    @property
    def _engine(self) -> Engine:
        return self._pipeline.engine

    @property
    def _trajectory_cache(self) -> TrajectoryCache:
        return self._pipeline.cache

    @property
    def native_size(self) -> int:
        """The side in pixels of the square that the model was made for."""
        return int(self.pipe.unet.config.sample_size) * LATENT_FACTOR

    @property
    def max_recorded_bytes(self) -> int:
        """Bytes of recorded features that are kept in the device's memory at most."""
        return self._trajectory_cache.max_bytes

    @property
    def recorded_bytes(self) -> int:
        """Bytes of recorded features that are kept in memory now; those on disk are not counted."""
        return self._trajectory_cache.bytes

    def forget(self) -> None:
        """Drop all recorded features; an edit that needs them rebuilds them. Pictures stay.

        Raises:
            SessionError: an edit is running, which needs them.
        """
        self.history.check_unused()
        self._pipeline.cache = self._trajectory_cache.emptied()

    def load_lora(self, source: str | Path, scale: float = 1.0) -> str:
        """Load a LoRA, which changes what is painted from now on.

        Args:
            source: a .safetensors file in kohya's or diffusers' format, or a folder with diffusers' own.
            scale: how much it counts in the UNet and in the text encoder, -10 to 10. Several LoRAs add up.

        Returns:
            Its name, for `unload_lora`.

        Raises:
            AdapterError: it is missing, damaged, no LoRA or made for another model. InputError: a scale out of range.
        """
        return lora.load(self.pipe, source, scale)

    def scale_loras(self, scales: Mapping[str, float]) -> None:
        """Set the scales of loaded LoRAs for later pictures, for all editors of the model.

        Args:
            scales: their names, from `load_lora`, -> -10 to 10. Those left out stay loaded with scale 0.

        Raises:
            AdapterError: one that is not loaded. InputError: a scale out of range.
        """
        for name in scales:
            self._check_lora(name)
        others = dict.fromkeys(lora.loaded_scales(self.pipe), 0.0)
        if others:
            lora.set_scales(self.pipe, others | {name: check_scale(scale) for name, scale in scales.items()})

    def unload_lora(self, name: str) -> None:
        """Take a LoRA out; the model is as it was before. Raises AdapterError where there is none of that name."""
        self._check_lora(name)
        lora.unload(self.pipe, name)

    def load_textual_inversion(self, source: str | Path, token: str | None = None) -> str:
        """Load a word's embeddings (textual inversion, arXiv 2208.01618), for prompts and negative prompts.

        Args:
            source: a .safetensors file in Automatic1111's or diffusers' format.
            token: the word; None for the file's name. Its case does not matter.

        Returns:
            The word, for `unload_textual_inversion`.

        Raises:
            AdapterError: it is missing, damaged, of another model, or a word that the model knows already.
            InputError: a word that is none.
        """
        return textual_inversion.load(self.pipe, source, token)

    def unload_textual_inversion(self, token: str) -> None:
        """Take a word's embeddings out. Raises AdapterError where no such word was loaded."""
        textual_inversion.unload(self.pipe, token)

    def load_adapter(
        self,
        source: str | Path,
        scale: float = 1.0,
        *,
        weight_name: str | None = None,
        image_encoder: str | Path | None = None,
        control_guidance_start: float = 0.0,
        control_guidance_end: float = 1.0,
        guess_mode: bool = False,
        local_files_only: bool = False,
    ) -> None:
        """Load an adapter that conditions pictures by another one, or by a drive.

        HelloMeme's reference adapters (arXiv 2410.22901) and IP-Adapters (arXiv 2308.06721) let pictures take the look
        of a `reference`; T2I-Adapters (arXiv 2302.08453) and ControlNets (arXiv 2302.05543) let a `control` say where
        things are; HelloMeme's control networks let a `drive` say how a head is held and what its face does. Those of
        two parts are loaded by their base, ..._base, with the projection, ..._proj, beside it.

        Args:
            source: "demo-look", which ships for the demo model, a published folder, a .safetensors file, or a hub id
                such as "songkey/hm3_reference".
            scale: factor of its effect, -10 to 10. Several adapters add up.
            weight_name: of a file in a folder or on the hub: "models/ip-adapter_sd15.safetensors" of "h94/IP-Adapter".
            image_encoder: folder of an IP-Adapter's image encoder; None for "image_encoder" beside its file.
            control_guidance_start: share of the steps before which the adapter does nothing, 0 to 1.
            control_guidance_end: share of the steps after which it does nothing.
            guess_mode: a ControlNet takes part in the branch with the prompt alone, and its finer maps are fainter.
            local_files_only: never reach for the network.

        Raises:
            AdapterError: it is missing, damaged, loaded already, of another architecture or made for another model.
            InputError: a number out of range, or guess_mode for another kind than a ControlNet.
        """
        use = make_adapter_use(scale, control_guidance_start, control_guidance_end, guess_mode)
        adapter = load_picture_adapter(
            source,
            self.pipe.unet,
            weight_name=weight_name,
            image_encoder=image_encoder,
            local_files_only=local_files_only,
        )
        self._engine.references.load(adapter, _adapter_name(source, weight_name), use)

    @default_torch_state()
    def calibrate(
        self, seconds: float = 20.0, *, size: int | None = None, on_step: OnStep | None = None
    ) -> Mapping[str, Any]:
        """Measure what this machine takes for the model's layers, and keep the table for it, so that later editors
        decide by it between dense and sparse and previews tell seconds. Without a table both go by constants.

        Args:
            seconds: that it takes, about; 0 for the fewest measurements that make a table.
            size: side in pixels of the pictures that are measured, 64 to 2048, divisible by 8; None for the model's
                own, at most 256.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Returns:
            The table, and what it predicts for pictures of the model's own size and 25 steps, ready for JSON.

        Raises:
            InputError: an argument out of range, or a table that cannot be written. OSError: its disk became full.
        """
        cost_store.check_table_path(self.pipe)
        table = calibrate(self._pipeline, CalibrationSettings(seconds, size), on_step)
        cost_store.save_table(self.pipe, table)
        self._engine.table = table
        return table.as_dict() | {
            "predicted": predictions(self._pipeline, (0.05, 0.15, 0.25, 0.5), self.native_size, 25)
        }

    @property
    def calibrated(self) -> bool | None:
        """Whether this machine's table of the model is there; None where FISEDIT_COSTS=0 switches tables off."""
        return None if cost_store.folder() is None else cost_store.load_table(self.pipe) is not None

    def _check_lora(self, name: str) -> None:
        if name not in (loaded := lora.loaded_scales(self.pipe)):
            raise AdapterError(f"no LoRA {name!r} is loaded; loaded are {', '.join(loaded) or 'none'}")

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Those that are loaded and read pictures."""
        return tuple(self._engine.references.adapters.values())

    def scale_adapter(self, scale: float, source: str | Path | None = None) -> None:
        """Set a loaded adapter's scale for later references; of all adapters where no source is named.

        Raises:
            AdapterError: it is not loaded. InputError: a scale outside -10 to 10.
        """
        self._engine.references.set_scale(None if source is None else _absolute_path(source), scale)

    def unload_adapter(self, source: str | Path | None = None) -> None:
        """Unload an adapter, or all. Later edits of a picture that was made with it run without.

        Raises:
            AdapterError: it is not loaded.
        """
        self._engine.references.unload(None if source is None else _absolute_path(source))

    @property
    def current(self) -> EditResult:
        """The current result. Raises SessionError before the first source."""
        return self.history.current

    def undo(self) -> EditResult:
        """Go back to the parent. Raises SessionError at a source."""
        return self.history.undo()

    def redo(self) -> EditResult:
        """Go forward to the edit visited last. Raises SessionError where there is none."""
        return self.history.redo()

    def checkout(self, result_id: str) -> EditResult:
        """Make any result the current one; the next edit branches there. Raises SessionError for an unknown id."""
        return self.history.checkout(result_id)

    def delete(self, result_id: str) -> tuple[str, ...]:
        """Remove a result and all edits of it. If one of them was current, its parent becomes current, or the newest
        result where it was a source. Ids are never given again.

        Args:
            result_id: of the result.

        Returns:
            The ids that are gone.

        Raises:
            SessionError: an unknown id, or one of an edit's parents while it runs.
        """
        deleted = self.history.delete(result_id)
        self._trajectory_cache.drop(deleted)
        return deleted

    def generate(
        self,
        prompt: str,
        *,
        seed: int = 0,
        negative_prompt: str = "",
        num_inference_steps: int = 25,
        guidance_scale: float = 7.5,
        width: int | None = None,
        height: int | None = None,
        scheduler: str = "ddim",
        clip_skip: int = 0,
        reference: Image | None = None,
        control: Image | None = None,
        drive: Drive | None = None,
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Make a source: what diffusers' pipeline makes of the same arguments, with everything recorded.

        Args:
            prompt: text, of which 600 tokens are read, 75 in a chunk; brackets weigh words, as `(cat:1.4)` or `[cat]`.
            negative_prompt: text with the same syntax, for the unconditional branch.
            seed: of a CPU generator, 0 to 2^63 - 1.
            num_inference_steps: 1 to 999.
            guidance_scale: 0 to 100; 1 or less runs one branch.
            width: pixels, 64 to 2048 and divisible by 8; None for the model's own size.
            height: pixels, 64 to 2048 and divisible by 8; None for the model's own size.
            scheduler: a `SchedulerName`, or its name in web UIs or diffusers, such as "DPM++ 2M Karras".
            clip_skip: layers of the text encoder to leave out at its end, 0 to 11; one less than web UIs' clip skip.
            reference: a picture whose look it takes, and all edits of it that name no other; see `load_adapter`.
            control: a picture that says where things are, for it and all edits that name no other; see `load_adapter`.
            drive: a head's pose and expression, for it and all edits that name no other; see `load_adapter`.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Returns:
            The result, which is the current one from now on: image, config and stats.

        Raises:
            PromptError, InputError: an argument out of range. AdapterError: a reference, and no adapter that reads it.
            NumericsError: the model produced NaN.
        """
        own = self.native_size
        config = make_generation_config(
            prompt,
            seed=seed,
            negative_prompt=negative_prompt,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            width=own if width is None else width,
            height=own if height is None else height,
            scheduler=scheduler,
            clip_skip=clip_skip,
        )
        conditions = {REFERENCE: reference, CONTROL: control, DRIVE: drive}
        request = self._pipeline.request_source(config, conditions=conditions, on_step=on_step)
        plan = self._pipeline.planner.plan_source(request, self._pipeline.encode(request))
        return self._pipeline.run(request, plan)

    def edit(
        self,
        prompt: str | None = None,
        *,
        region: Region | None = None,
        regions: Sequence[tuple[Region, str]] = (),
        mask: object = None,
        protect: object = None,
        grow: int = 0,
        words: Sequence[str] = (),
        instance: int | None = None,
        mask_method: str = DEFAULT_METHOD,
        probe_steps: int | None = None,
        structure: float = 0.0,
        strength: float = 1.0,
        seed: int | None = None,
        verify: bool = True,
        quality: str = "balanced",
        growth: int | Sequence[int] | None = None,
        reference: Image | None = None,
        control: Image | None = None,
        drive: Drive | None = None,
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Change the current picture to fit a new prompt, where the words changed and nowhere else.

        Whatever is raised, the editor is as it was.

        Args:
            prompt: the changed words, as in `generate`; settings are the source's.
            region: where to edit, as a whole: words, masks and boxes, joined. Else these say it:
            regions: several regions, each with a prompt of its own, edited in one run; at most 16, and the first that
                holds a cell counts. The prompt is what the whole picture shows then, without it the current one.
            mask: where to edit, instead of what the words say: a PIL image or numpy array of the picture's size, or a
                boolean latent grid [h, w].
            protect: where never to edit, of the same forms as `mask`; None for nowhere.
            grow: latent cells to dilate the mask by, given or predicted, -64 to 64; negative erodes it.
            words: words of either prompt that localize the edit, instead of the changed ones.
            instance: which component of the mask to edit alone, counted from the left and from 0.
            mask_method: one of `masking.localize.METHODS`, for comparison.
            probe_steps: dense steps on the new prompt to spend on the mask; None for one where an object is inserted.
            structure: how long, inside the mask, the words that stay attend as they did in the picture and
                self-attention is the picture's: from 0, never, to 1, for the first 40 % of the steps.
            strength: share of the steps to run, above 0 to 1, from the last; the first ones are the picture's own, so
                that less keeps more of its layout and colours.
            seed: of other noise inside the mask, for a variation: with it, and with `mask` or `words`, the prompt may
                stay the same. None for the picture's noise.
            verify: check once, early on, whether the change leaves a predicted mask; dilate it then.
            quality: "fast", "balanced" or "close": how near the edit comes to a dense one, against its time.
            growth: latent cells computed beyond the mask, for all steps or each; None for what `quality` says. A step
                with 64 computes the whole picture, and what it finds changed outside the mask is carried on.
            reference: a picture whose look the edited things take (see `load_adapter`); with it, and with `mask` or
                `words`, the prompt may stay the same. None for that of the source, if it has one.
            control: a picture that says where things are (see `load_adapter`), as `reference`.
            drive: a head's pose and expression (see `load_adapter`), as `reference`; None for that of the picture.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Returns:
            The result, which is the current one from now on: image, mask, diff of the words, config and stats.

        Raises:
            SessionError: there is no source yet. PromptError, MaskError, InputError: an argument out of range.
            AdapterError: a reference, and no adapter that reads it. NumericsError: the model produced NaN.
        """
        prompt, region = self._join_regions(prompt, regions, region, grow)
        request = self._pipeline.request_edit(
            prompt,
            region_of(region, mask, protect, grow, MaskOptions(words, instance, mask_method, probe_steps)),
            growth=check_quality(quality) if growth is None else growth,
            repaint=Repaint(strength, structure, seed),
            verify=verify,
            conditions={REFERENCE: reference, CONTROL: control, DRIVE: drive},
            regional=regions,
            on_step=on_step,
        )
        plan = self._pipeline.plan(request)
        return self._pipeline.run(request, plan)

    def _join_regions(
        self, prompt: str | None, regions: Sequence[tuple[Region, str]], region: Region | None, grow: int
    ) -> tuple[str, Region | None]:
        """What the whole picture shows, and where it may change."""
        if not regions:
            if prompt is None:
                raise InputError("edit needs a prompt, got none; or regions with their own, or see erase")
            return prompt, region
        if grow:
            raise InputError(f"regions grow by themselves, as Region.grow, got grow={grow!r}; leave it out")
        return self.current.prompt if prompt is None else prompt, joined(regions, region)

    def erase(
        self,
        region: Region,
        *,
        prompt: str | None = None,
        seed: int | None = None,
        quality: str = "balanced",
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Let what is around a region grow into it, without words for what is to be seen there.

        Inside the region nothing attends to the region itself (Attentive Eraser, arXiv 2412.12974), and no words are
        read unless they change.

        Args:
            region: what goes, with what it casts, such as a shadow.
            prompt: what the picture shows then; None for the current prompt, of which no word is read.
            seed: of the noise inside; None for another one than the picture's.
            quality: as in `edit`.
            on_step: as in `edit`.

        Raises:
            SessionError: there is no picture yet. MaskError: nothing would be left. InputError: no region.
        """
        if not isinstance(region, Region):
            raise InputError(f"region must be a Region, got {type(region).__name__}; use Region.mask or Region.words")
        now = self.current
        request = self._pipeline.request_edit(
            now.prompt if prompt is None else prompt,
            region,
            growth=check_quality(quality),
            repaint=Repaint(seed=(now.config.seed + 1) % (SEEDS[1] + 1) if seed is None else seed, erases=True),
            on_step=on_step,
        )
        return self._pipeline.run(request, self._pipeline.plan(request))

    def edit_many(
        self,
        prompts: Sequence[str],
        masks: Sequence[object],
        *,
        seeds: Sequence[int] | None = None,
        quality: str = "balanced",
        growth: int | Sequence[int] | None = None,
        on_step: OnStep | None = None,
    ) -> tuple[EditResult, ...]:
        """Several edits of the current picture, each with a prompt and a mask of its own; it stays the current one.

        Where there are captured graphs those that run sparse share one batch; else they run one after another.

        Args:
            prompts: one an edit, as in `edit`.
            masks: one an edit, as in `edit`.
            seeds: one an edit, as in `edit`; None for the picture's noise in all of them.
            quality: as in `edit`, for all of them.
            growth: as in `edit`, for all of them.
            on_step: as in `edit`; a batch calls it once a step.

        Returns:
            The results, in that order.

        Raises:
            InputError: not as many masks or seeds as prompts; the other errors as in `edit`. Results made before stay.
        """
        lists: dict[str, Any] = {"prompts": prompts, "masks": masks} | ({} if seeds is None else {"seeds": seeds})
        for name, given in lists.items():
            if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
                raise InputError(f"{name} must be a list, got {type(given).__name__} {given!r:.80}; put it into a list")
            if len(given) != len(prompts):
                raise InputError(f"{name} must be as many as prompts, {len(prompts)}, got {len(given)}")
        chosen = check_quality(quality) if growth is None else growth
        own_seeds: Sequence[int | None] = [None] * len(prompts) if seeds is None else seeds
        return self._pipeline.run_many(
            [
                self._pipeline.request_edit(
                    prompt, Region.mask(mask), growth=chosen, repaint=Repaint(seed=seed), on_step=on_step
                )
                for prompt, mask, seed in zip(prompts, masks, own_seeds, strict=True)
            ]
        )

    @default_torch_state()
    def preview(
        self,
        prompt: str | None = None,
        *,
        region: Region | None = None,
        regions: Sequence[tuple[Region, str]] = (),
        mask: object = None,
        protect: object = None,
        grow: int = 0,
        words: Sequence[str] = (),
        instance: int | None = None,
        mask_method: str = DEFAULT_METHOD,
        probe_steps: int | None = None,
        strength: float = 1.0,
        seed: int | None = None,
        quality: str = "balanced",
        growth: int | Sequence[int] | None = None,
        reference: Image | None = None,
        control: Image | None = None,
        drive: Drive | None = None,
        on_step: OnStep | None = None,
    ) -> Preview:
        """Where `edit` would paint and what it would cost. Nothing is kept, and nothing is run but what the mask needs.

        Args:
            prompt: the changed words, as in `edit`.
            region: where to edit, as in `edit`.
            regions: regions with prompts of their own, as in `edit`.
            mask: where to edit, as in `edit`; None for where the words say.
            protect: where never to edit, as in `edit`.
            grow: latent cells to dilate the mask by, -64 to 64; negative erodes it.
            words: words of either prompt that localize the edit, instead of the changed ones.
            instance: which component of the mask to edit alone, counted from the left and from 0.
            mask_method: one of `masking.localize.METHODS`.
            probe_steps: dense steps on the new prompt to spend on the mask; None for one where an object is inserted.
            strength: share of the steps to run, above 0 to 1, from the last.
            seed: of other noise inside the mask, as in `edit`.
            quality: "fast", "balanced" or "close", as in `edit`.
            growth: latent cells computed beyond the mask, 0 to 64, for all steps or each; None for what `quality` says.
            reference: a picture whose look the edited things take; None for that of the source, if it has one.
            control: a picture that says where things are; None for that of the source, if it has one.
            drive: a head's pose and expression; None for that of the picture, if it has one.
            on_step: called before every step of a source whose features are gone and rebuilt, with (i, n, preview); may
                raise `Cancelled`.

        Returns:
            Mask, diff of the words, multiply-accumulates and, where this machine is calibrated, seconds.

        Raises:
            SessionError, PromptError, MaskError, InputError, AdapterError, NumericsError: as in `edit`.
        """
        prompt, region = self._join_regions(prompt, regions, region, grow)
        request = self._pipeline.request_edit(
            prompt,
            region_of(region, mask, protect, grow, MaskOptions(words, instance, mask_method, probe_steps)),
            growth=check_quality(quality) if growth is None else growth,
            repaint=Repaint(strength, seed=seed),
            conditions={REFERENCE: reference, CONTROL: control, DRIVE: drive},
            regional=regions,
            on_step=on_step,
        )
        plan, planner = self._pipeline.plan(request), self._pipeline.planner
        costs = planner.costs(request.config)
        return Preview(
            mask=plan.mask,
            diff=request.script,
            macs=0 if plan.skip_reason else planner.macs(request, plan),
            macs_dense=costs.dense(plan.start),
            fallback=plan.fallback,
            nothing=plan.skip_reason,
            seconds=0.0 if plan.skip_reason else planner.seconds(request, plan),
            seconds_dense=costs.seconds(None, (), plan.start),
            recorded_bytes=planner.recorded_bytes(request, plan),
            notes=plan.notes,
        )

    def dense(self, result_id: str, on_step: OnStep | None = None) -> tuple[Image, float]:
        """What a dense run makes of a result's prompt, seed and settings, and how long it takes; nothing is kept.

        Args:
            result_id: of the result.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Returns:
            A picture of the config's size, and seconds from prompt to picture.

        Raises:
            SessionError: no such result.
        """
        result = self.history.find(result_id)
        request = EditRequest(result.config, result.diff, result, on_step=on_step)
        self._pipeline.again_if_damaged(request, lambda: self._pipeline.restore(request))
        request = replace(request, stopwatch=Stopwatch())
        return self._pipeline.render_dense(request), request.stopwatch.done()["total"]

    def open(
        self,
        picture: Image,
        prompt: str | None = None,
        *,
        region: Region | None = None,
        context: float = CONTEXT,
        extend: tuple[int, int, int, int] | None = None,
        inversion: str = "ddim",
        seed: int = 0,
        negative_prompt: str = "",
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        width: int | None = None,
        height: int | None = None,
        clip_skip: int = 0,
        reference: Image | None = None,
        control: Image | str | None = None,
        drive: Drive | None = None,
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Make a source of a picture that was not generated here: it is inverted, with everything recorded.

        Edits of it have its size, mode, alpha and colour profile, and every pixel outside their masks is its own.

        Args:
            picture: of any size and mode; turned upright as its EXIF says.
            prompt: what it shows; None where it is unknown. Then the objects that the next prompt names localize the
                edit, and one that names a scene or style too runs dense.
            region: where it will be edited, by masks and boxes: of a picture of more than 1.5 times the model's pixels
                the part around it alone is on the canvas, at full resolution. None for the whole picture.
            context: what that part takes along on every side, as a ratio of the region's longer side, 0 to 8.
            extend: pixels added at the left, top, right and bottom, for `Region.border` to be painted on; the region
                then, unless another is given.
            inversion: "ddim", or "ddpm" for edit-friendly noise maps (arXiv 2304.06140), with which the sampler leads
                back to the picture exactly, in one pass.
            seed: of the noise of "ddpm", 0 to 2^63 - 1.
            negative_prompt: of later edits.
            num_inference_steps: 1 to 999.
            guidance_scale: of later edits, 0 to 100; DDIM's inversion has none.
            width: of the canvas that the model paints on, in pixels, divisible by 8; None for what suits the model. The
                picture is resized to it as a whole, and paint is resized back: of a photograph of 3000x2000 a model of
                512x512 sees 624x416. Crop what matters, or give more, for finer paint.
            height: of the canvas in pixels, divisible by 8; None for what suits the model.
            clip_skip: as in `generate`.
            reference: as in `generate`; edits then read what was recorded of it.
            control: as in `generate`, or "canny" for the edges of what is on the canvas. One of the picture's size is
                cut as the picture is.
            drive: as in `generate`.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Raises:
            PromptError, InputError: an argument out of range. NumericsError: the model produced NaN. AdapterError: no
            loaded adapter reads the reference, control or drive.
        """
        original = to_editable(picture)
        if extend is not None:
            original, region = extended(original, check_border(extend)), region or Region.border(*extend)
        return self._open(
            original,
            prompt,
            crop=None if region is None else self._crop(original.size, region, context),
            inversion=str(inversion),
            seed=seed,
            negative_prompt=negative_prompt,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            width=width,
            height=height,
            clip_skip=clip_skip,
            conditions={REFERENCE: reference, CONTROL: control, DRIVE: drive},
            on_step=on_step,
        )

    def _open(
        self,
        picture: Image,
        prompt: str | None,
        *,
        crop: Box | None,
        on_step: OnStep | None,
        conditions: Mapping[str, object] | None = None,
        **settings: Any,
    ) -> EditResult:
        """Open an upright picture, or a part of it."""
        left, top, right, bottom = crop or (0, 0, *picture.size)
        if right > picture.width or bottom > picture.height:
            raise InputError(f"the part {crop} must lie on the picture, got {picture.width}x{picture.height} pixels")
        for name, side in zip(
            ("width", "height"), canvas_size((right - left, bottom - top), self.native_size), strict=True
        ):
            settings[name] = side if settings[name] is None else settings[name]
        words = "" if prompt is None else check_prompt(prompt)
        config = make_generation_config(words, scheduler="ddim", crop=crop, **settings)
        read = dict(conditions or {})
        if read.get(CONTROL) == CANNY:
            part = picture if crop is None else picture.crop(crop)
            read[CONTROL] = canny(to_canvas(part, (config.width, config.height)))
        request = self._pipeline.request_source(config, picture=picture, conditions=read, on_step=on_step)
        plan = self._pipeline.planner.plan_source(request, self._pipeline.encode(request))
        return self._pipeline.run(request, plan)

    def _crop(self, size: tuple[int, int], region: Region, context: float) -> Box | None:
        """The part of an opened picture that is edited on the canvas; None for all of it."""
        if not isinstance(context, int | float) or not 0 <= context <= MAX_CONTEXT:
            raise InputError(
                f"context must be in [0, {MAX_CONTEXT}], got {context!r}; 0.5 is half of the region's side"
            )
        grid = cells_on_picture(region, size)
        if not (grid.any() and needs_crop(size, self.native_size)):
            return None
        crop = crop_around(grid, size, self.native_size, context)
        return None if crop == (0, 0, *size) else crop

    def extend(
        self,
        left: int = 0,
        top: int = 0,
        right: int = 0,
        bottom: int = 0,
        *,
        prompt: str | None = None,
        seed: int = 1,
        quality: str = "balanced",
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Make the current picture larger and paint what is added; every pixel that it had stays.

        The larger picture is opened as a source of its own, with the settings of the current one. Whatever is raised,
        the editor is as it was.

        Args:
            left: pixels to add, 0 or more, as many as the picture has at most.
            top: pixels to add.
            right: pixels to add.
            bottom: pixels to add.
            prompt: what the larger picture shows; None for the current prompt.
            seed: of the noise of what is added.
            quality: as in `edit`.
            on_step: as in `edit`.

        Raises:
            SessionError: there is no picture yet. InputError, PromptError: an argument out of range, or no words.
        """
        widths, now = check_border((left, top, right, bottom)), self.current
        config, words = now.config, check_prompt(now.prompt if prompt is None else prompt)
        with self.transaction():
            self.open(
                now.image,
                words,
                extend=widths,
                inversion=str(config.inversion or Inversion.DDIM),
                seed=(check_seed(seed) + 1)
                % (SEEDS[1] + 1),  # another one, so that what is added gets noise of its own
                negative_prompt=config.negative_prompt,
                num_inference_steps=config.num_inference_steps,
                guidance_scale=config.guidance_scale,
                clip_skip=config.clip_skip,
                on_step=on_step,
            )
            return self.edit(words, region=Region.border(*widths), seed=seed, quality=quality, on_step=on_step)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep what is made in a block if it comes to its end; whatever it raises, the editor is then as it was."""
        before, current = [result.id for result in self.history], self.current.id
        try:
            yield
        except BaseException:
            self.checkout(current)
            added = [result for result in self.history if result.id not in before]
            for result in added:
                if result.parent is None or result.parent in before:  # what was made of it goes with it
                    self.delete(result.id)
            raise

    @default_torch_state()
    def attention(self, prompt: str) -> NDArray[np.float32]:
        """Heatmap of the words that would change in the current picture; no UNet call is spent.

        Args:
            prompt: as in `edit`.

        Returns:
            Floats [h, w], 0 to 1.

        Raises:
            SessionError: there is no source yet. PromptError: an empty prompt.
        """
        request = self._pipeline.request_edit(prompt)
        text = self._pipeline.encode(request)
        with torch.inference_mode():
            project_text(self._engine.executor.sites, text.embeddings, text.keys)

        def heatmap() -> NDArray[np.float32]:
            self._pipeline.restore(request)
            source = self._pipeline.source(request)[0]
            return change_heatmap(self._engine, source, request.config, text.keys, request.script)

        return self._pipeline.again_if_damaged(request, heatmap)

    def metadata(self, result: EditResult | None = None) -> Metadata:
        """How a result, the current one without it, was made, for its picture's file.

        Raises:
            SessionError: the result is not one of this editor's.
        """
        result = result or self.current
        if self.history.find(result.id) is not result:
            raise SessionError(f"result {result.id} was made by another editor; ask that one")
        lineage = self.history.lineage(result.id)
        return provenance.to_metadata(
            provenance.make_origin(lineage, self.model, self._dtype, self.pipe.unet.device.type)
        )

    def write(self, path: str | Path, *, metadata: bool = True) -> tuple[str, ...]:
        """Write the current picture in the format of its file's ending, whole or not at all.

        Args:
            path: of the file.
            metadata: tell in the file how it was made, for web UIs to read and for `remake`. An opened picture's own
                metadata stays either way.

        Returns:
            What the format could not hold.
        """
        return write_image(self.current.image, check_image_path(Path(path)), self.metadata() if metadata else None)

    @default_torch_state()
    def save(
        self, folder: str | Path, *, metadata: bool = True, features: bool = False, overwrite: bool = False
    ) -> None:
        """Write the session: pictures, masks, prompts, seeds, lineage, parameters. Wherever that ends, what is in the
        folder is the old session or the new one, whole.

        Args:
            folder: of the session; made if it is not there.
            metadata: tell in every picture's file how it was made.
            features: write what was recorded with sources too, as far as it is kept: then the first edit after `resume`
                need not make them again. `recorded_bytes` of their `stats` tells what that takes; where there is no
                room for it, the session is saved without, with a warning. Features that are in the folder stay.
            overwrite: replace a session in the folder that is not this one, or that another run has changed since.

        Raises:
            SessionError: there is nothing to save, the model has no name to load it by again, another session is in the
                folder, or another run is saving into it. OSError: a file could not be written.
        """
        if not self.model and len(self.history):
            raise SessionError(
                "a saved session names its model, and this editor's has no name; use Editor(pipe, model=)"
            )
        references = self._engine.references.used(like for result in self.history for like in result.config.like)
        metadata_of = self.metadata if metadata else lambda _: None
        pages = self.recorded_pages() if features else {}
        contents = SessionContents(self.history, self.model, self._dtype, references, pages=pages, vae=self.vae)
        try:
            self._store(folder).save(contents, metadata_of, overwrite=overwrite)
        except (OSError, MemoryError, PageError) as error:
            if not pages:
                raise
            self._store(folder).save(replace(contents, pages={}), metadata_of, overwrite=overwrite)
            logging.getLogger(__name__).warning("the session was saved without recorded features: %s", error)

    @default_torch_state()
    def recorded_pages(self) -> dict[str, list[Callable[[], bytes]]]:
        """Id of every source whose features are kept -> what returns the bytes of each of their pages."""
        return self._pipeline.pages()

    @default_torch_state()
    def load_pages(self, pages: Mapping[str, Sequence[Page]]) -> None:
        """Read features of sources from their pages when edits need them; pages of no use are ignored.

        Args:
            pages: id of a source -> its pages.
        """
        self._pipeline.load_pages(pages)

    def _store(self, folder: str | Path) -> SessionStore:
        """A session's folder, as far as this editor has loaded or saved what is in it."""
        resolved = Path(folder).resolve()
        return self._stores.setdefault(resolved, SessionStore(resolved))

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        local_files_only: bool = False,
        cache_dtype: str = "auto",
    ) -> Self:
        """Load a saved session with its model and VAE; features that were not saved, or are of no use, are recorded
        again when an edit first needs them.

        Args:
            folder: of the session.
            device: as in `from_pretrained`.
            dtype: as in `from_pretrained`; None for the session's own.
            local_files_only: never reach for the network.
            cache_dtype: as in `from_pretrained`.

        Raises:
            SessionError: no session there, or a damaged one. ModelError: its model cannot be loaded.
        """
        index = SessionStore(Path(folder)).read_index()
        dtype = dtype or index.dtype
        editor = cls.from_pretrained(
            index.model,
            vae=index.vae or None,
            device=device,
            dtype=dtype,
            local_files_only=local_files_only,
            cache_dtype=cache_dtype,
        )
        editor.load(folder)
        return editor

    def load(self, folder: str | Path) -> None:
        """Load a saved session of this editor's model, in place of the present history.

        Raises:
            SessionError: no session there, a damaged one, or another model's; or an edit is running. The editor is as
                it was then.
        """
        self.history.check_unused()
        store = SessionStore(Path(folder))
        loaded = store.load(lambda _, *prompts: self._pipeline.diff(*prompts))
        if other_models := {loaded.index.model, *(entry.model for entry in loaded.index.results)} - {self.model}:
            names = " and ".join(map(repr, sorted(other_models)))
            raise SessionError(f"the session is of the model {names}, got {self.model!r}; start that one")
        if loaded.index.vae != self.vae:
            own = "the model's own VAE"
            raise SessionError(f"the session is of {loaded.index.vae or own}, got {self.vae or own}; load that one")
        for source, use in loaded.assets.adapters.items():
            if not self._engine.references.loaded(source):
                self.load_adapter(source, **use.as_dict())
        self._engine.references.pictures |= loaded.assets.references
        self.forget()
        self._pipeline.history = loaded.history
        self._stores = {store.folder: store}
        if loaded.index.dtype == self._dtype:
            self.load_pages(store.pages(loaded.index))

    @classmethod
    def remake(
        cls,
        picture: Image,
        *,
        model: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        local_files_only: bool = False,
        cache_dtype: str = "auto",
        changes: Mapping[str, Any] = MappingProxyType({}),
        on_step: OnStep | None = None,
    ) -> Self:
        """Make a picture again from the metadata in its file, source and every edit, so that it can be edited further.

        A picture that was opened, or made by another program, is opened again with its prompt. With another model or
        other values every mask is predicted again, but for masks that were given.

        Args:
            picture: as Pillow opens it.
            model: as in `from_pretrained`; None for the one that the file names, if that is on this machine.
            device: as in `from_pretrained`.
            dtype: as in `from_pretrained`; None for the one that the file names.
            local_files_only: never reach for the network.
            cache_dtype: as in `from_pretrained`.
            changes: values to use instead of the file's, named as in `generate` or, for an opened picture, in `open`.
            on_step: as in `generate`.

        Raises:
            InputError: the file has no such metadata, or damaged ones, or a change is out of range.
            ModelError: the model cannot be loaded.
        """
        past = provenance.parse_origin(read_metadata(picture))
        arguments, name = provenance.source_arguments(past, changes), provenance.choose_model(past, model)
        local = local_files_only or model is None  # a picture is no reason to bring a model from the network
        dtype = dtype or past.dtype or None
        editor = cls.from_pretrained(name, device=device, dtype=dtype, local_files_only=local, cache_dtype=cache_dtype)
        if past.config.opened:
            editor._open(to_editable(picture), crop=past.config.crop, on_step=on_step, **arguments)  # noqa: SLF001 (its own)
            return editor
        editor.generate(on_step=on_step, **arguments)
        exact = not changes and provenance.model_name(editor.model) == past.model
        for edit in past.edits:
            editor._remake_exactly(edit, on_step) if exact else editor._remake_by_words(edit, past, on_step)  # noqa: SLF001 (its own)
        return editor

    def _remake_exactly(self, edit: PastEdit, on_step: OnStep | None) -> EditResult:
        """An edit just as it was: the same cells at every step."""
        run = edit.run
        strength = strength_for_start(run.start, self.current.config.num_timesteps)
        request = self._pipeline.request_edit(
            edit.prompt,
            repaint=Repaint(strength, run.structure, edit.seed, run.erased),
            regional=[(Region.mask(each.grid), each.prompt) for each in run.regional],
            on_step=on_step,
        )
        text = self._pipeline.encode(request)
        self._pipeline.restore(request)
        source, _ = self._pipeline.source(request)
        plan = self._pipeline.planner.replay(request, text, source, edit.mask, run)
        return self._pipeline.run(request, plan)

    def _remake_by_words(self, edit: PastEdit, past: Origin, on_step: OnStep | None) -> EditResult:
        """An edit with the same words, in the mask that was given, or with a predicted one."""
        run = edit.run
        in_place = run.erased or edit.seed is not None  # then words said where, and may be the same as before
        given = edit.mask.source is MaskSource.GIVEN or in_place
        region, strength = None, strength_for_start(run.start, past.config.num_timesteps)
        if given and edit.mask.levels is None:
            region = Region.mask(cell_pixels(edit.mask.grid, self.current.size))
        elif given:
            region, strength = Region.mask(edit.mask.image().resize(self.current.size, 0), soft=True), 1.0
        if run.erased:
            assert region is not None, "what was erased is known"
            return self.erase(region, prompt=edit.prompt, seed=edit.seed, on_step=on_step)
        if run.regional:
            size = self.current.size
            regions = [(Region.mask(cell_pixels(each.grid, size)), each.prompt) for each in run.regional]
            return self.edit(edit.prompt, regions=regions, strength=strength, seed=edit.seed, on_step=on_step)
        return self.edit(
            edit.prompt, region=region, structure=run.structure, strength=strength, seed=edit.seed, on_step=on_step
        )

    @property
    def _dtype(self) -> str:
        return str(self.pipe.unet.dtype).removeprefix("torch.")


def _adapter_name(source: str | Path, weight_name: str | None) -> str:
    """What an adapter is called: its path or hub id, and its file there if that was named."""
    return _absolute_path(source) if weight_name is None else f"{_absolute_path(source)}/{weight_name}"


def _absolute_path(source: str | Path) -> str:
    """The absolute path of what lies on disk, or a hub id."""
    path = expand_home(source)
    return str(path.resolve()) if path.exists() else str(source)
