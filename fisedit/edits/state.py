"""One user's model, history and recorded features, which requests, plans and pictures share.

Knows the model's placement, weights and LoRAs; reads no arguments of users, and runs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fisedit.costs import store as cost_store
from fisedit.costs.pace import Pace
from fisedit.errors import ModelError, SessionError
from fisedit.history import History
from fisedit.machine.device import device_and_dtype
from fisedit.models.weight_changes import count_changes
from fisedit.sampling.engine import Engine

if TYPE_CHECKING:
    from torch.nn import Module

    from fisedit.features.codec import FeatureEncoding
    from fisedit.history import EditResult
    from fisedit.machine.model import Model
    from fisedit.runners.stepping import Graphs
    from fisedit.sampling.trajectory_cache import TrajectoryCache


class EditState:
    """One user's engine, history and trajectory cache.

    Args:
        pipe: the model.
        cache: for trajectories.
        graphs: whether edits want captured ones.
        encoding: encoding of recorded features.
    """

    def __init__(self, pipe: Model, cache: TrajectoryCache, graphs: Graphs, encoding: FeatureEncoding) -> None:
        self.engine = Engine(pipe, graphs, cache.max_bytes, encoding, cache.tiers)
        self.history, self.cache = History(), cache
        self._recorded_with: object = None
        self._priced_with: object = None
        for part in self.parts():
            count_changes(part)  # those before are the model's own

    def parts(self) -> list[Module]:
        """The parts of the model with weights that pictures are made with."""
        pipe = self.engine.pipe
        return [part for part in (pipe.unet, pipe.vae, pipe.text_encoder) if part is not None]

    def refresh(self) -> None:
        """Read the model's LoRAs, placement and scheduler again; a model that is another one drops what was recorded.

        Raises:
            ModelError: the pipeline's parts differ in dtype or device, one was taken out, or a file that weights are
                mapped from was written to.
        """
        pipe = self.engine.pipe
        if pipe.unet is not self.engine.executor.unet:
            raise ModelError("the pipeline has another UNet than this editor was made for; make a new Editor(pipe)")
        placement = device_and_dtype(pipe)
        weights = [count_changes(part) for part in self.parts()]
        if pipe.scheduler is None:
            raise ModelError("a pipeline must have a scheduler, got None; set pipe.scheduler")
        model = placement, weights, pipe.vae, pipe.text_encoder, dict(pipe.scheduler.config)
        if self._recorded_with != model:
            self.cache = self.cache if self._recorded_with is None else self.cache.emptied()
            self.engine.references.refresh()
        if (found := (model, cost_store.table_version(pipe))) != self._priced_with:  # it may have been measured since
            self.engine.table, self.engine.pace, self._priced_with = cost_store.load_table(pipe), Pace(), found
        self._recorded_with = model
        self.engine.refresh()

    def check_own_loras(self, result: EditResult) -> None:
        """Raise SessionError where the model has other LoRAs, or other scales, than a result was made with."""
        if result.config.loras != self.engine.loras:
            names = ", ".join(dict(result.config.loras)) or "no LoRA"
            raise SessionError(
                f"result {result.id} must be rebuilt with {names}, as it was made, and with the same scales; "
                "load that, and unload others"
            )
