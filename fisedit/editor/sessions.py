"""Writing pictures and sessions, loading them, and making pictures again from their metadata."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
from PIL.Image import Resampling

from fisedit.edits.requests import Repaint
from fisedit.errors import PageError, SessionError
from fisedit.history import EditResult
from fisedit.machine.device import default_torch_state
from fisedit.masking.region import Region
from fisedit.metadata import provenance
from fisedit.metadata.image_metadata import Metadata, read_metadata
from fisedit.metadata.provenance import Origin, PastEdit
from fisedit.sessions.store import SessionContents, SessionStore
from fisedit.storage.canvas import (
    to_editable,
)
from fisedit.storage.files import check_image_path
from fisedit.storage.images import write_image
from fisedit.values import (
    MaskSource,
    OnStep,
    cell_pixels,
    strength_for_start,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.features.pages import Page
    from fisedit.values import EditMask


from fisedit.editor.adapters import AdapterMixin
from fisedit.editor.opening import OpenMixin


class SessionMixin(OpenMixin, AdapterMixin):
    """Files of an editor: pictures, sessions, and pictures that are made again."""

    def metadata(self, result: EditResult | None = None) -> Metadata:
        """Return how a result was made, or the current one without it, for its picture's file.

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
            path: path of the file.
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
            folder: folder of the session; made if it is not there.
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
        contents = SessionContents(
            self.history, self.model, self._dtype, references, pages=pages, vae=self.vae, variant=self.variant
        )
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

    def _remake_by_words(self, edit: PastEdit, past: Origin, on_step: OnStep | None) -> EditResult:
        """An edit with the same words, in the mask that was given, or with a predicted one."""
        run = edit.run
        in_place = run.erases or edit.seed is not None  # then words said where, and may be the same as before
        given = edit.mask.source is MaskSource.GIVEN or in_place
        region, strength = None, strength_for_start(run.start, past.config.num_timesteps)
        if given:
            region = _region_at(edit.mask, self.current.size)
            strength = strength if edit.mask.levels is None else 1.0
        if run.erases:
            assert region is not None, "what was erased is known"
            return self.erase(region, prompt=edit.prompt, seed=edit.seed, on_step=on_step)
        if run.regional:
            size = self.current.size
            regions = [(Region.mask(cell_pixels(each.grid, size)), each.prompt) for each in run.regional]
            return self.edit(edit.prompt, regions=regions, strength=strength, seed=edit.seed, on_step=on_step)
        return self.edit(
            edit.prompt, region=region, structure=run.structure, strength=strength, seed=edit.seed, on_step=on_step
        )


def _region_at(mask: EditMask, size: tuple[int, int]) -> Region:
    """The region of a mask on a picture of another size."""
    return Region.mask(mask.image().resize(size, Resampling.NEAREST), soft=mask.levels is not None)
