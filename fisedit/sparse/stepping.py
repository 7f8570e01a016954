"""How an edit's sparse steps are run: replayed from captured graphs where there are some, else layer by layer.

Both give the same prediction and the same overlay. A step that no graph can do (one that keeps its source's structure,
a UNet with a LoRA) runs layer by layer, and the reason is told. Knows steps and plans; neither samplers nor masks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models import attention_processor as processors
from torch import Tensor

from fisedit.errors import InputError, UnsupportedModuleError
from fisedit.models.injection import exclusive
from fisedit.sparse.cuda_graphs import GraphEdit, GraphExecutor
from fisedit.sparse.executor import Executor, ExtraLayers
from fisedit.sparse.feature_cache import CachedFeatures, FeatureOverlay, scatter, shifted
from fisedit.sparse.graph_cache import Ends
from fisedit.sparse.graph_capture import state_of
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.row_plan import SparsePlan

PLAIN = tuple(getattr(processors, name) for name in ("AttnProcessor", "AttnProcessor2_0", "XFormersAttnProcessor"))
"""Attention processors that compute attention and nothing else."""


@dataclass(frozen=True, eq=False)
class Work:
    """What an edit computes over its source.

    Args:
        plans: of every step that is run; steps of one plan share the object. features, predictions: the source's, of
            all steps. text: embeddings [B, T, D]. cache: their keys and values, filled as they are needed.
        kept: those of the first `structured` steps, which attend as the source did.
        guidance: its scale, None where one branch runs. extra: layers added to the UNet, or None. budget: see `feed`.
        mixed: dense steps run in between.
    """

    plans: Mapping[int, SparsePlan]
    features: Sequence[CachedFeatures]
    predictions: Sequence[Tensor]
    text: Tensor
    cache: dict[str, Tensor]
    kept: dict[str, Tensor]
    structured: int
    guidance: float | None
    extra: ExtraLayers | None = None
    budget: int | None = None
    mixed: bool = False


class Layers:
    """Steps layer by layer, whatever the UNet."""

    def __init__(self, executor: Executor, work: Work) -> None:
        self._executor, self._work = executor, work

    def step(self, i: int, x: Tensor, t: Tensor, extra: Tensor | None) -> tuple[Tensor, FeatureOverlay]:
        """The guided prediction of step i [1, 4, h, w], and its overlay.

        Args:
            x: latents [B, 4, h, w], scaled for the model. t: timestep. extra: for distilled models, or None.
        """
        work, structured = self._work, i < self._work.structured
        text, plan = work.kept if structured else work.cache, work.plans[i]
        rows, overlay = self._executor.run_sparse(
            x, t, work.text, text, work.features[i], plan, extra, inject_attention=structured, extra=work.extra
        )
        if work.guidance is not None:
            without, with_text = rows.chunk(2)
            rows = without + work.guidance * (with_text - without)
        return scatter(work.predictions[i], plan.levels[0].active, rows), overlay


class Captured:
    """Steps by captured graphs, one batch for each of the edit's plans; several editors may take turns.

    Args:
        steps: those that are run so.
    """

    def __init__(self, graphs: GraphExecutor, work: Work, steps: Sequence[int]) -> None:
        self._unet, self._work = graphs.executor.unet, work
        plans = {id(work.plans[i]): work.plans[i] for i in steps}
        with exclusive(self._unet):
            self._edits = {
                key: graphs.begin(
                    [plan],
                    {i: work.features[i] for i in steps if work.plans[i] is plan},
                    work.text,
                    work.budget,
                    work.cache,
                )
                for key, plan in plans.items()
            }

    def step(self, i: int, x: Tensor, t: Tensor, extra: Tensor | None) -> tuple[Tensor, FeatureOverlay]:
        """See `Layers.step`; the host does not wait."""
        edit = self._edits[id(self._work.plans[i])]
        with exclusive(self._unet):  # until the graph's own memory has been read
            rows = edit.step(i, x, t)
            return ops.composite(self._work.predictions[i], rows, edit.placement, self._work.guidance), edit.overlays(
                i
            )[0]


class Batch:
    """Steps of several edits of one source at once, each with a text and plans of its own.

    Args:
        works: of the edits; they agree in everything but plans, text and cache, and none keeps structure.
    """

    def __init__(self, graphs: GraphExecutor, works: Sequence[Work]) -> None:
        self._unet, self._works, first = graphs.executor.unet, works, works[0]
        text = torch.stack([work.text for work in works], 1).flatten(0, 1)
        rows: dict[tuple[int, ...], list[int]] = {}
        for i in first.plans:
            rows.setdefault(tuple(id(work.plans[i]) for work in works), []).append(i)
        self._edits: dict[int, GraphEdit] = {}
        known: dict[str, Tensor] = {}
        with exclusive(self._unet):
            for steps in rows.values():
                features = {i: first.features[i] for i in steps}
                edit = graphs.begin([work.plans[steps[0]] for work in works], features, text, first.budget, known)
                self._edits |= dict.fromkeys(steps, edit)
        for e, work in enumerate(works):
            work.cache.update({name: tokens[e :: len(works)] for name, tokens in known.items()})

    def step(self, i: int, x: Tensor, t: Tensor) -> tuple[Tensor, list[FeatureOverlay]]:
        """The guided predictions of step i [E, 4, h, w], and the overlays.

        Args:
            x: latents [S * E, 4, h, w], branch by branch, scaled for the model. t: timestep.
        """
        edit, work = self._edits[i], self._works[0]
        with exclusive(self._unet):
            rows = edit.step(i, x, t)
            return ops.composite(work.predictions[i], rows, edit.placement, work.guidance), edit.overlays(i)


class Graphs:
    """The captured graphs of one pipeline: made when an edit first wants them, and anew when the UNet was changed.

    Args:
        wanted: whether edits use them; None for what FISEDIT_GRAPHS says (0 or 1), or else on CUDA devices. On others
            a stand-in runs in their place, which saves nothing, and shows that they are right.

    Raises:
        InputError: FISEDIT_GRAPHS says something else.
    """

    def __init__(self, wanted: bool | None = None) -> None:
        self.wanted = _wanted() if wanted is None else wanted
        self.ends = Ends(self.on)
        self._made: tuple[object, GraphExecutor | str] = None, ""

    def on(self, device: torch.device) -> bool:
        """Whether they are wanted on a device."""
        return device.type == "cuda" if self.wanted is None else self.wanted

    def of(self, executor: Executor) -> GraphExecutor | str:
        """The graphs of an executor's UNet, or why there are none; "" where nobody wants any."""
        unet = executor.unet
        if not self.on(executor.device):
            return ""
        with exclusive(unet):
            known, state = self._made[0], (state_of(unet), tuple(map(type, unet.attn_processors.values())))
            if known != state:
                self._made = state, _made(executor)
            return self._made[1]

    def steps(self, executor: Executor, work: Work) -> tuple[dict[int, Layers | Captured], str]:
        """What runs each of an edit's steps, and why some are not captured, or ""."""
        layers, graphs = Layers(executor, work), self.of(executor)
        ways: dict[int, Layers | Captured] = dict.fromkeys(work.plans, layers)
        if isinstance(graphs, str):
            return ways, graphs
        if work.extra is not None:
            return ways, "a reference adapter is at work; run it layer by layer"
        if work.mixed or any(map(shifted, work.features)):
            return ways, "dense steps in between change what sparse ones read; run it layer by layer"
        free = [i for i in work.plans if i >= work.structured]
        kept = len(work.plans) - len(free)
        if free:
            ways |= dict.fromkeys(free, Captured(graphs, work, free))
        return ways, f"the first {kept} steps keep the source's structure, layer by layer" if kept else ""


def _wanted() -> bool | None:
    said = os.environ.get("FISEDIT_GRAPHS", "")
    if said not in ("", "0", "1"):
        raise InputError(f"FISEDIT_GRAPHS must be 0 or 1, got {said!r}; unset it for graphs on CUDA devices alone")
    return said == "1" if said else None


def _made(executor: Executor) -> GraphExecutor | str:
    try:
        _check(executor.unet)
        return GraphExecutor(executor)
    except UnsupportedModuleError as error:
        return str(error)


def _check(unet: Any) -> None:
    """Refuse what somebody put into a UNet: graphs would not see it."""
    for name, module in unet.named_modules():
        if "forward" in vars(module):
            what = f"UNet's layer {name}" if name else "UNet"
            raise UnsupportedModuleError(f"the {what} was injected; it runs eagerly")
    for name, processor in unet.attn_processors.items():
        if type(processor) not in PLAIN:
            kind = type(processor).__name__
            raise UnsupportedModuleError(f"the UNet's {name} is a {kind} and cannot be captured; it runs eagerly")
