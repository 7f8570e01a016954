"""The editor: its parts, and what takes several of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from PIL.Image import Resampling

from fisedit.editor.adapters import AdapterMixin
from fisedit.editor.editing import EditMixin
from fisedit.editor.opening import OpenMixin
from fisedit.editor.preview import PreviewMixin
from fisedit.editor.sessions import SessionMixin
from fisedit.edits.requests import Repaint
from fisedit.errors import SessionError
from fisedit.history import EditResult
from fisedit.masking.region import Region
from fisedit.masking.region_values import check_border
from fisedit.metadata import provenance
from fisedit.metadata.image_metadata import read_metadata
from fisedit.metadata.provenance import Origin, PastEdit
from fisedit.sessions.store import SessionStore
from fisedit.storage.canvas import to_editable
from fisedit.values import (
    LATENT_FACTOR,
    REFERENCE,
    Inversion,
    MaskSource,
    OnStep,
    cell_pixels,
    check_prompt,
    check_seed,
    next_seed,
    strength_for_start,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.values import BoolGrid, Box, EditMask


class Editor(EditMixin, OpenMixin, PreviewMixin, SessionMixin, AdapterMixin):
    """The editor: it generates a picture and edits it, computing only what the words change.

    Args:
        pipe: a Stable Diffusion 1.x, 2.x or XL pipeline. Editors may share one.
        model: its name, for saved sessions.
        vae: path of its autoencoder, for saved sessions; "" for the model's own.
        max_recorded_bytes: recorded features kept in the memory of the device; None for half of what is free there
            beyond 1 GB. On a CPU steps that do not fit lie on disk and are fetched while an edit runs. On a GPU they
            wait in the host's memory first.
        max_host_bytes: those that a GPU's memory does not hold, kept in the host's; None for half of what is free
            beyond 1 GB.
        max_disk_bytes: those that do not fit there, kept on disk; None for a quarter of what is free, 0 for none.
            What fits nowhere is dropped, the least recently used first, and made again when it is needed.
        graphs: replay sparse steps from captured graphs of fused kernels; None for what the environment's
            FISEDIT_GRAPHS says, 0 or 1, or else on CUDA devices. Elsewhere a stand-in runs in their place, which shows
            that they are right and saves no time. A UNet or an edit that they cannot run is run eagerly, and
            `stats.uncaptured` says why.
        cache_dtype: what recorded features are kept in: "int8", "int4" for the least memory, or "model" for the model's
            own; "auto" for int8 where maps are large, and the model's own on a GPU.

    Raises:
        UnsupportedModuleError: the UNet has a layer without an exact sparse counterpart.
        InputError: another name of a dtype, or bounds that are no numbers of bytes.
    """

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
        """Make the current picture larger and paint what is added; the pixels that it had stay.

        Only what a decoder painted within a cell of the old border is painted anew. A decoder tints the last pixels of
        its picture; kept, they would be a line. Of a photograph every pixel stays.

        The larger picture is opened as a source of its own, with the settings and the reference of the current one.
        That is no step of its own: undo goes back to the picture before, and `history.steps` has one more. A control or
        a drive was of its canvas, and is left behind. Whatever is raised, the editor is as it was.

        Args:
            left: pixels to add, 0 or more, as many as the picture has at most.
            top: pixels to add.
            right: pixels to add.
            bottom: pixels to add.
            prompt: what the larger picture shows; None for the current prompt, of which the background alone is added.
            seed: seed of the noise of what is added.
            quality: "fast", "balanced" or "close", as in `edit`.
            on_step: called before every step, as in `edit`.

        Raises:
            SessionError: there is no picture yet. InputError, PromptError: an argument out of range, or no words.
        """
        widths, now = check_border((left, top, right, bottom)), self.current
        config, words = now.config, check_prompt(now.prompt if prompt is None else prompt)
        with self.transaction():
            larger = self.open(
                now.image,
                words,
                extend=widths,
                inversion=str(config.inversion or Inversion.DDIM),
                seed=next_seed(check_seed(seed)),  # so that what is added gets noise of its own
                negative_prompt=config.negative_prompt,
                num_inference_steps=config.num_inference_steps,
                guidance_scale=config.guidance_scale,
                clip_skip=config.clip_skip,
                negative_clip_skip=config.negative_clip_skip,
                sizes=config.sizes,
                reference=self._engine.references.picture_of(config.like, REFERENCE),
                on_step=on_step,
            )
            self.history.mark_as_extension(larger, now)
            border = Region.border(*widths)
            if (tinted := _tinted(self.history.lineage(now.id), widths)).any():
                border |= Region.mask(tinted)
            if words == now.prompt:  # whose things are there already
                return self.erase(border, prompt=words, seed=seed, quality=quality, on_step=on_step)
            return self.edit(words, region=border, seed=seed, quality=quality, on_step=on_step)

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
        """Load a saved session with its model and VAE.

        Features that were not saved, or are of no use, are recorded again when an edit first needs them.

        Args:
            folder: folder of the session.
            device: torch device, as in `from_pretrained`.
            dtype: precision, as in `from_pretrained`; None for the session's own.
            local_files_only: never reach for the network.
            cache_dtype: dtype of recorded features, as in `from_pretrained`.

        Raises:
            SessionError: no session there, or a damaged one. ModelError: its model, or an adapter with what belongs to
                it, cannot be loaded.
        """
        index = SessionStore(Path(folder)).read_index()
        dtype = dtype or index.dtype
        editor = cls.from_pretrained(
            index.model,
            vae=index.vae or None,
            variant=index.variant or None,
            device=device,
            dtype=dtype,
            local_files_only=local_files_only,
            cache_dtype=cache_dtype,
        )
        editor.load(folder, local_files_only=local_files_only)
        return editor

    def load(self, folder: str | Path, *, local_files_only: bool = False) -> None:
        """Load a saved session of this editor's model, in place of the present history. Whatever is raised, the editor
        is as it was.

        Args:
            folder: folder of the session.
            local_files_only: never reach for the network.

        Raises:
            SessionError: no session there, a damaged one, or another model's; or an edit is running.
            AdapterError: one of its adapters cannot be loaded.
        """
        self.history.check_unused()
        store = SessionStore(Path(folder))
        loaded = store.load(lambda _, *prompts: self._pipeline.requests.diff(*prompts))
        if other_models := {loaded.index.model, *(entry.model for entry in loaded.index.results)} - {self.model}:
            names = " and ".join(map(repr, sorted(other_models)))
            raise SessionError(f"the session is of the model {names}, got {self.model!r}; start that one")
        if loaded.index.vae != self.vae:
            own = "the model's own VAE"
            raise SessionError(f"the session is of {loaded.index.vae or own}, got {self.vae or own}; load that one")
        if loaded.index.variant != self.variant:
            own = "weights without a variant"
            found = f"{loaded.index.variant or own}, got {self.variant or own}"
            raise SessionError(f"the session is of the variant {found}; load that one")
        with ExitStack() as added:
            for source, use in loaded.assets.adapters.items():
                if not self._engine.references.loaded(source):
                    self.load_adapter(source, **use.as_dict(), local_files_only=local_files_only)
                    added.callback(self.unload_adapter, source)
            added.pop_all()
        self._engine.references.pictures |= loaded.assets.references
        self.forget()
        self._pipeline.state.history = loaded.history
        self._pipeline.requests.release_references()
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
            picture: a picture as Pillow opens it.
            model: a model, as in `from_pretrained`; None for the one that the file names, if that is on this machine.
            device: torch device, as in `from_pretrained`.
            dtype: precision, as in `from_pretrained`; None for the one that the file names.
            local_files_only: never reach for the network.
            cache_dtype: dtype of recorded features, as in `from_pretrained`.
            changes: values to use instead of the file's, named as in `generate` or, for an opened picture, in `open`.
            on_step: called before every step, as in `generate`.

        Raises:
            InputError: the file has no such metadata, or damaged ones, or a change is out of range.
            ModelError: the model cannot be loaded.
        """
        past = provenance.parse_origin(read_metadata(picture))
        arguments, name = provenance.source_arguments(past, changes), provenance.choose_model(past, model)
        local = local_files_only or model is None  # a picture is no reason to bring a model from the network
        dtype = dtype or past.dtype or None
        editor = cls.from_pretrained(name, device=device, dtype=dtype, local_files_only=local, cache_dtype=cache_dtype)
        exact = not changes and provenance.model_name(editor.model) == past.model
        editor._repeat(past, picture, arguments, on_step, exact=exact)  # noqa: SLF001 (its own)
        return editor

    def _repeat(
        self, past: Origin, picture: Image, arguments: Mapping[str, Any], on_step: OnStep | None, *, exact: bool
    ) -> None:
        """Make a source and its edits again; `exact` where nothing of them is another now."""
        if past.config.opened:
            self._open(to_editable(picture), crop=past.config.crop, on_step=on_step, **arguments)
            return
        self.generate(on_step=on_step, **arguments)
        for edit in past.edits:
            if exact:
                self._run_as_recorded(edit, on_step)
            else:
                self._edit_by_words(edit, past, on_step)

    def _run_as_recorded(self, edit: PastEdit, on_step: OnStep | None) -> EditResult:
        """An edit just as it was: the same cells at every step."""
        run = edit.run
        strength = strength_for_start(run.start, self.current.config.num_timesteps)
        request = self._pipeline.requests.edit(
            edit.prompt,
            repaint=Repaint(strength, run.structure, edit.seed, run.erases),
            regional=[(Region.mask(each.grid), each.prompt) for each in run.regional],
            on_step=on_step,
        )
        text = self._pipeline.renderer.encode(request)
        self._pipeline.renderer.rebuild(request)
        source, _ = self._pipeline.renderer.source(request)
        plan = self._pipeline.planner.plan_recorded(request, text, source, edit.mask, run)
        return self._pipeline.run(request, plan)

    def _edit_by_words(self, edit: PastEdit, past: Origin, on_step: OnStep | None) -> EditResult:
        """An edit with the same words, in the mask that was given, or with a predicted one."""
        run = edit.run
        erased = run.erases and (edit.seed is not None or edit.prompt == self.current.prompt)  # else words removed it
        in_place = erased or edit.seed is not None  # then words said where, and may be the same as before
        given = edit.mask.source is MaskSource.GIVEN or in_place
        region, strength = None, strength_for_start(run.start, past.config.num_timesteps)
        if given:
            region = _region_at(edit.mask, self.current.size)
            strength = strength if edit.mask.levels is None else 1.0
        if erased:
            assert region is not None, "what was erased is known"
            return self.erase(region, prompt=edit.prompt, seed=edit.seed, on_step=on_step)
        if run.regional:
            size = self.current.size
            regions = [(Region.mask(cell_pixels(each.grid, size)), each.prompt) for each in run.regional]
            return self.edit(edit.prompt, regions=regions, strength=strength, seed=edit.seed, on_step=on_step)
        strength = 1.0 if run.erases else strength  # words that remove choose it themselves
        return self.edit(
            edit.prompt, region=region, structure=run.structure, strength=strength, seed=edit.seed, on_step=on_step
        )


def _region_at(mask: EditMask, size: tuple[int, int]) -> Region:
    """The region of a mask on a picture of another size."""
    return Region.mask(mask.image().resize(size, Resampling.NEAREST), soft=mask.levels is not None)


def _tinted(lineage: Sequence[EditResult], widths: Box) -> BoolGrid:
    """Return the pixels of a larger picture that a decoder painted within a cell of the border before: [H, W] booleans.

    Args:
        lineage: the results from the source to the picture that is made larger.
        widths: pixels that are added at the left, top, right and bottom.
    """
    source, now = lineage[0], lineage[-1]
    painted = np.full(now.size[::-1], not source.config.opened)
    for edit in lineage[1:]:
        painted |= edit.mask.painted(edit.size, edit.config.crop)
    crop = now.config.crop or (0, 0, *now.size)
    cell = ceil(LATENT_FACTOR * (crop[2] - crop[0]) / now.config.width)
    (left, top, right, bottom), (height, width) = widths, painted.shape
    painted[cell * (top > 0) : height - cell * (bottom > 0), cell * (left > 0) : width - cell * (right > 0)] = False
    return np.pad(painted, ((top, bottom), (left, right)))
