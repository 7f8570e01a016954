"""The base of every editor: a model, its history, and the memory that recorded features may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from fisedit.costs import store as cost_store
from fisedit.costs.pace import Pace
from fisedit.diagnosis.calibration import CalibrationSettings, calibrate, predictions
from fisedit.edits.pipeline import EditPipeline
from fisedit.edits.state import EditState
from fisedit.errors import InputError
from fisedit.features.codec import choose_encoding
from fisedit.features.pages import PageFolder, default_folder
from fisedit.features.tiers import FeatureTiers
from fisedit.history import EditResult, History
from fisedit.machine.device import default_torch_state
from fisedit.machine.hardware import recordable_bytes
from fisedit.masking.region import Region
from fisedit.masking.region_arguments import joined
from fisedit.models.families.stable_diffusion_xl import as_model
from fisedit.models.loader import load
from fisedit.models.paths import absolute_name, expand_home
from fisedit.runners.stepping import Graphs
from fisedit.sampling.engine import Engine
from fisedit.sampling.trajectory_cache import TrajectoryCache
from fisedit.sessions.store import SessionStore
from fisedit.values import (
    LATENT_FACTOR,
    OnStep,
    check_integer,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.machine.model import Model


class EditorBase:
    """A model, the results that were made with it, and what was recorded of them; arguments as in `Editor`."""

    def __init__(
        self,
        pipe: Model,
        *,
        model: str = "",
        vae: str = "",
        max_recorded_bytes: int | None = None,
        max_host_bytes: int | None = None,
        max_disk_bytes: int | None = None,
        graphs: bool | None = None,
        cache_dtype: str = "auto",
    ) -> None:
        self.pipe, self.model, self.vae = as_model(pipe), model, vae
        self.variant = ""  # name of the variant of the model's weights, for saved sessions
        self._stores: dict[Path, SessionStore] = {}
        device = pipe.unet.device
        max_recorded_bytes = _checked_bytes("max_recorded_bytes", max_recorded_bytes)
        max_host_bytes = _checked_bytes("max_host_bytes", max_host_bytes)
        max_disk_bytes = _checked_bytes("max_disk_bytes", max_disk_bytes)
        limit = recordable_bytes(device) if max_recorded_bytes is None else max_recorded_bytes
        host_limit = recordable_bytes(torch.device("cpu")) if max_host_bytes is None else max_host_bytes
        folder = default_folder() if max_disk_bytes != 0 else None
        pages = None if folder is None else PageFolder(folder, max_disk_bytes)
        tiers = FeatureTiers(limit if device.type == "cpu" else host_limit, pages)
        encoding = choose_encoding(cache_dtype, device)
        self._pipeline = EditPipeline(EditState(self.pipe, TrajectoryCache(limit, tiers), Graphs(graphs), encoding))

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "demo",
        *,
        vae: str | Path | None = None,
        preview_vae: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        variant: str | None = None,
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
            vae: another autoencoder than the model's, a folder or a .safetensors file; None for the model's own. One
                file that holds no autoencoder needs it.
            preview_vae: a folder with an `AutoencoderTiny` (TAESD), which decodes what `on_step` gets; without it, that
                has one pixel per latent cell.
            device: "cpu", "cuda" or "cuda:N"; None for CUDA where there is some.
            dtype: "fp32", "bf16", "fp16" or torch's; None for fp16 on CUDA, and on a CPU for the faster of
                bf16 and fp32.
            variant: name of the variant of a folder's weights, such as "fp16" or "non_ema"; None for those without
                one, or else for fp16, or the only one.
            local_files_only: never reach for the network.
            max_recorded_bytes: recorded features in the device's memory; see `Editor`.
            max_host_bytes: recorded features in the host's memory; see `Editor`.
            max_disk_bytes: recorded features on disk; see `Editor`.
            graphs: replay sparse steps from captured graphs; None for what FISEDIT_GRAPHS says, or else on CUDA; see
                `Editor`.
            cache_dtype: what recorded features are kept in; see `Editor`.

        Raises:
            ModelError: the model is missing, damaged, unsafe to load or of another architecture.
            NumericsError: its weights hold NaN or infinity. InputError: a device or dtype that cannot be used here.
        """
        pipe = load(
            model,
            vae=vae,
            preview_vae=preview_vae,
            device=device,
            dtype=dtype,
            variant=variant,
            local_files_only=local_files_only,
        )
        editor = cls(
            pipe,
            model=absolute_name(model),
            vae="" if vae is None else absolute_path(vae),
            max_recorded_bytes=max_recorded_bytes,
            max_host_bytes=max_host_bytes,
            max_disk_bytes=max_disk_bytes,
            graphs=graphs,
            cache_dtype=cache_dtype,
        )
        editor.variant = variant or ""
        return editor

    def beside(self, history: History | None = None, references: dict[str, Image] | None = None) -> Self:
        """Another editor over the same model, with a history and a trajectory cache of its own within the same bounds.

        Args:
            history: results that it shares with editors over other models; None for its own. A result is edited by an
                editor of the model that made it.
            references: reference pictures by their digests, shared with the editors that share the history, whose
                results name them; None for its own.
        """
        editor = type(self).__new__(type(self))  # `__init__` would make a pipeline that is thrown away
        vars(editor).update(vars(self), _stores={}, _pipeline=self._pipeline.beside(history, references))
        return editor

    @property
    def history(self) -> History:
        """All results, in the order of making."""
        return self._pipeline.state.history

    @property
    def _engine(self) -> Engine:
        return self._pipeline.state.engine

    @property
    def _trajectory_cache(self) -> TrajectoryCache:
        return self._pipeline.state.cache

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
        self._pipeline.state.cache = self._trajectory_cache.emptied()

    @default_torch_state()
    def calibrate(
        self, seconds: float = 20.0, *, size: int | None = None, on_step: OnStep | None = None
    ) -> Mapping[str, Any]:
        """Measure what this machine takes for the model's layers, and keep the table for it.

        Later editors decide by it between dense and sparse, and previews tell seconds. Without a table both go by
        constants.

        Args:
            seconds: duration of the measurement, about; 0 for the fewest measurements that make a table.
            size: side in pixels of the pictures that are measured, 64 to 2048, divisible by 8; None for the model's
                own, at most 256.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Returns:
            The table, and what it predicts for pictures of the model's own size and 25 steps, ready for JSON.

        Raises:
            InputError: an argument out of range, or a table that cannot be written. OSError: its disk became full.
            MeasurementError: other programs ran beside it; the table is dropped, and one that was there stays.
        """
        cost_store.check_table_path(self.pipe)
        table = calibrate(self._pipeline, CalibrationSettings(seconds, size), on_step)
        cost_store.save_table(self.pipe, table)
        self._engine.table, self._engine.pace = table, Pace()
        return table.as_dict() | {
            "predicted": predictions(self._pipeline, (0.05, 0.15, 0.25, 0.5), self.native_size, 25)
        }

    @property
    def calibrated(self) -> bool | None:
        """Return whether this machine's table of the model is there; None where FISEDIT_COSTS=0 switches tables off."""
        return None if cost_store.folder() is None else cost_store.load_table(self.pipe) is not None

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
            result_id: id of the result.

        Returns:
            The ids that are gone.

        Raises:
            SessionError: an unknown id, or one of an edit's parents while it runs.
        """
        deleted = self.history.delete(result_id)
        self._trajectory_cache.drop(deleted)
        self._pipeline.requests.release_references()
        return deleted

    def _join_regions(
        self, prompt: str | None, regions: Sequence[tuple[Region, str]], region: Region | None, grow: int
    ) -> tuple[str, Region | None]:
        """Return what the whole picture shows, and where it may change."""
        if isinstance(regions, Sequence) and not regions:
            if prompt is None:
                raise InputError("edit needs a prompt, got none; or regions with their own, or see erase")
            return prompt, region
        if grow:
            raise InputError(f"regions grow by themselves, as Region.grow, got grow={grow!r}; leave it out")
        return self.current.prompt if prompt is None else prompt, joined(regions, region)

    @property
    def _dtype(self) -> str:
        return str(self.pipe.unet.dtype).removeprefix("torch.")


def _checked_bytes(name: str, value: int | None) -> int | None:
    """A number of bytes, if it is one or None. Raises InputError otherwise."""
    return None if value is None else check_integer(name, value, (0, 2**63 - 1))


def absolute_path(source: str | Path) -> str:
    """The absolute path of what lies on disk, or a hub id."""
    path = expand_home(source)
    return str(path.resolve()) if path.exists() else str(source)
