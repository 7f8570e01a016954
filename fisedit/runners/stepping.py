"""Sparse steps of edits: replayed from captured graphs where these can be used, else computed eagerly.

Both give the same predictions and overlays. The first replay of every graph is compared with the eager step; where it
fails or differs, everything goes on eagerly with a warning. Knows steps and plans; neither samplers nor masks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models import attention_processor as processors
from torch import Tensor

from fisedit.errors import InputError, UnsupportedModuleError
from fisedit.features.cache import CachedFeatures, FeatureOverlay, StepFeatures, shifted
from fisedit.features.sites import LayerSite, Role
from fisedit.models.families.conditioning import Conditioning, interleaved
from fisedit.models.injection import exclusive
from fisedit.models.layer_changes import foreign_hooks
from fisedit.runners.cuda_graphs import GraphEdit, GraphExecutor
from fisedit.runners.deep_maps import DeepMaps, FullStep
from fisedit.runners.graph_cache import GraphCache
from fisedit.runners.graph_capture import capture_errors, check_replay, state_of, warn_eager
from fisedit.sparse.executor import Executor, ExtraLayers, apply_guidance
from fisedit.sparse.row_layout import scatter
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.row_plan import SparsePlan

PLAIN_PROCESSORS = tuple(
    getattr(processors, name) for name in ("AttnProcessor", "AttnProcessor2_0", "XFormersAttnProcessor")
)
"""Attention processors that compute attention and nothing else."""


@dataclass(frozen=True, eq=False)
class SparseEdit:
    """The inputs that an edit computes from, over its source.

    Args:
        plans: The plans of every step that is run; steps of one plan share the object.
        features: the source's cached features, of all steps.
        predictions: the source's, [1, 4, h, w], of all steps.
        text: The conditions of its prompt.
        text_keys: the text's keys and values, filled as they are needed.
        injected_text_keys: keys and values of the first `injected_steps` steps.
        injected_steps: so many first steps attend as the source did (attention injection).
        guidance: scale of classifier-free guidance, None where one branch runs.
        extra_layers: gives the layers that are added to the UNet in a step; or None.
        budget: bytes of gathered features that may stay on the device; None is no limit.
        has_dense_steps: dense steps run in between.
        shallow: steps that reuse deep features, none of them the first; captured in graphs of their own.
    """

    plans: Mapping[int, SparsePlan]
    features: Sequence[CachedFeatures]
    predictions: Sequence[Tensor]
    text: Conditioning
    text_keys: dict[str, Tensor]
    injected_text_keys: dict[str, Tensor]
    injected_steps: int
    guidance: float | None
    extra_layers: Callable[[int], ExtraLayers | None] | None = None
    budget: int | None = None
    has_dense_steps: bool = False
    shallow: Collection[int] = ()

    def injects(self, i: int) -> bool:
        """Return whether step i attends as the source did."""
        return i < self.injected_steps

    def text_keys_of(self, i: int) -> dict[str, Tensor]:
        """Keys and values of the text at step i."""
        return self.injected_text_keys if self.injects(i) else self.text_keys


@dataclass(frozen=True, eq=False)
class _Computed:
    """A step that was computed: the guided predictions [E, 4, h, w], the overlays, and what later shallow steps read of
    it, if any do."""

    predictions: Tensor
    overlays: list[FeatureOverlay]
    full: list[FullStep]


class SparseSteps:
    """The sparse steps of some edits of one source.

    Args:
        graphs: The graphs of the UNet.
        executor: The executor of the UNet.
        edits: E of them; they agree in everything but plans, text and text keys. Of several none injects attention.

    Attributes:
        captured: steps that were replayed from captured graphs.
        reason: why others were not, or "".
    """

    def __init__(self, graphs: Graphs, executor: Executor, edits: Sequence[SparseEdit]) -> None:
        self._graphs, self._executor, self._edits = graphs, executor, edits
        self._replays: dict[int, GraphEdit] = {}
        self._deep_maps = [DeepMaps(executor.shallow) for _ in edits]
        self.captured, found = 0, graphs.executor_for(executor)
        self.reason = found if isinstance(found, str) else _eager_reason(edits)
        if not isinstance(found, str) and not self.reason:
            with exclusive(executor.unet):
                self._capture(found)

    @property
    def uses_graphs(self) -> bool:
        """Return whether steps are replayed from captured graphs."""
        return bool(self._replays)

    def step(self, i: int, x: Tensor, t: Tensor, timestep_cond: Tensor | None) -> tuple[Tensor, list[FeatureOverlay]]:
        """One sparse evaluation of every edit.

        Args:
            i: the step.
            x: latents [S * E, 4, h, w], branch by branch, scaled for the model.
            t: timestep.
            timestep_cond: [B, C] for distilled models, or None.

        Returns:
            The guided predictions [E, 4, h, w], and the overlays.
        """
        replay = self._replays.get(i)
        if replay is None:
            found = self._eager(i, x, t, timestep_cond)
        elif replay.verified:
            self.captured += 1
            found = self._replayed(replay, i, x, t)
        else:
            found = self._verified(replay, i, x, t, self._eager(i, x, t, timestep_cond))
        for e, full in enumerate(found.full):
            self._deep_maps[e].keep(full)
        return found.predictions, found.overlays

    def keep_dense(self, e: int, i: int, features: StepFeatures) -> None:
        """Take what a dense step of an edit recorded, which shallow ones after it go on from.

        Args:
            e: index of the edit.
            i: the step.
            features: The features of the step, not yet encoded.
        """
        if self._edits[e].shallow:
            self._deep_maps[e].keep_dense(i, features, self._edits[e].features[i])

    def _eager(self, i: int, x: Tensor, t: Tensor, timestep_cond: Tensor | None) -> _Computed:
        predictions, overlays, count = [], [], len(self._edits)
        for e, edit in enumerate(self._edits):
            overlay, deep_maps = FeatureOverlay(edit.features[i], edit.plans[i]), self._deep_maps[e]
            if i in edit.shallow:
                deep_maps.begin(i, overlay)
            rows, overlay = self._executor.run_sparse(
                x[e::count],
                t,
                edit.text,
                edit.text_keys_of(i),
                overlay,
                timestep_cond,
                inject_attention=edit.injects(i),
                extra_layers=edit.extra_layers(i) if edit.extra_layers else None,
            )
            rows = apply_guidance(rows, edit.guidance)
            predictions.append(scatter(edit.predictions[i], edit.plans[i].levels[0].active, rows))
            overlays.append(overlay)
        joined = torch.cat(predictions) if count > 1 else predictions[0]
        return _Computed(joined, overlays, self._full_steps(i, overlays))

    def _full_steps(self, i: int, overlays: list[FeatureOverlay], replay: GraphEdit | None = None) -> list[FullStep]:
        """Return what shallow steps read of a step, of every edit; nothing where none follow."""
        shallow, entry = self._edits[0].shallow, self._executor.shallow.entry
        if not shallow or i in shallow:
            return []
        recorded = [None] * len(overlays) if replay is None else replay.recorded(entry)
        each = zip(self._deep_maps, overlays, recorded, strict=True)
        return [deep_maps.full_step(i, overlay, before) for deep_maps, overlay, before in each]

    def _replayed(self, replay: GraphEdit, i: int, x: Tensor, t: Tensor) -> _Computed:
        first, each = self._edits[0], zip(self._deep_maps, self._edits, strict=True)
        changes = [deep_maps.change(i, edit.plans[i]) for deep_maps, edit in each if i in edit.shallow]
        with exclusive(self._executor.unet):  # until the graph's own memory has been read
            rows = apply_guidance(replay.step(i, x, t, changes), first.guidance)
            overlays = replay.overlays(i)
            full = self._full_steps(i, overlays, replay)
            return _Computed(ops.composite(first.predictions[i], rows, replay.placement), overlays, full)

    def _verified(self, replay: GraphEdit, i: int, x: Tensor, t: Tensor, eager: _Computed) -> _Computed:
        """A graph's first replay, if prediction and overlays are as the eager step's; else that step, and no graph is
        used any more."""
        try:
            replayed = self._replayed(replay, i, x, t)
            check_replay({"the prediction": replayed.predictions}, {"the prediction": eager.predictions})
            for replayed_overlay, expected in zip(replayed.overlays, eager.overlays, strict=True):
                check_replay(replayed_overlay.all_rows(), expected.all_rows())
        except capture_errors() as error:
            self._use_eager(error)
            return eager
        replay.verified = True
        self.captured += 1
        return replayed

    def _use_eager(self, error: Exception) -> None:
        self._replays, self.reason = {}, self._graphs.refuse(self._executor, error)

    def _capture(self, graphs: GraphExecutor) -> None:
        """Begin a replay of every group of steps that share plans, injected layers and those that are computed."""
        first, groups = self._edits[0], dict[Any, list[int]]()
        for i in first.plans:
            injected = injected_sites(self._executor.sites, first.features[i]) if first.injects(i) else frozenset()
            key = tuple(id(edit.plans[i]) for edit in self._edits), first.injects(i), injected, i in first.shallow
            groups.setdefault(key, []).append(i)
        text = interleaved([edit.text for edit in self._edits])
        text_keys_of_all: dict[str, Tensor] = {}
        try:
            for (_, _, injected, shallow), steps in groups.items():
                plans, features = [edit.plans[steps[0]] for edit in self._edits], {i: first.features[i] for i in steps}
                text_keys = first.text_keys_of(steps[0]) if len(self._edits) == 1 else text_keys_of_all
                replay = graphs.begin(plans, features, text, first.budget, text_keys, injected, shallow)
                self._replays |= dict.fromkeys(steps, replay)
        except capture_errors() as error:
            self._use_eager(error)
        for e, edit in enumerate(self._edits):
            edit.text_keys.update({name: tokens[e :: len(self._edits)] for name, tokens in text_keys_of_all.items()})


def injected_sites(sites: Sequence[LayerSite], step: CachedFeatures) -> frozenset[str]:
    """Sites whose recorded queries or keys attention injection reads of a step."""
    queries = {site.name for site in sites if site.role is Role.QUERY and site.name in step}
    keys = {site.name for site in sites if site.role is Role.TOKENS and site.name.endswith(".to_k")}
    return frozenset(queries | {name for name in keys if f"{name.removesuffix('k')}q" in queries})


def _eager_reason(edits: Sequence[SparseEdit]) -> str:
    if edits[0].extra_layers is not None:
        return "a reference adapter is at work; it runs eagerly"
    if any(plan.hidden for plan in edits[0].plans.values()):
        return "keys are hidden from what is erased; it runs eagerly"
    if any(plan.text_parts for plan in edits[0].plans.values()):
        return "regions have words of their own; it runs eagerly"
    if edits[0].has_dense_steps or any(map(shifted, edits[0].features)):
        return "dense steps in between change what sparse ones read; it runs eagerly"
    return ""


class Graphs:
    """The captured graphs of one pipeline: made when an edit first uses them, and again when the UNet was changed.

    Args:
        enabled: whether edits use them; None for what FISEDIT_GRAPHS says (0 or 1), or else on CUDA devices. On others
            the captured functions run eagerly, which saves nothing but tests them.

    Raises:
        InputError: FISEDIT_GRAPHS says something else.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        self.enabled = _graphs_setting() if enabled is None else enabled
        self.cache = GraphCache(self.is_enabled)
        self._built: tuple[object, GraphExecutor | str] = None, ""

    def is_enabled(self, device: torch.device) -> bool:
        """Return whether they are used on a device."""
        return device.type == "cuda" if self.enabled is None else self.enabled

    def executor_for(self, executor: Executor) -> GraphExecutor | str:
        """The graphs of an executor's UNet, or why there are none; "" where they are off."""
        unet = executor.unet
        if not self.is_enabled(executor.device):
            return ""
        with exclusive(unet):
            if self._built[0] != (state := _state(unet)):
                self._built = state, _build_executor(executor)
            return self._built[1]

    def refuse(self, executor: Executor, error: Exception) -> str:
        """Use no graphs of the UNet as it is now; warn, and give the reason."""
        reason = warn_eager(error)
        with exclusive(executor.unet):
            self._built = _state(executor.unet), reason
        return reason


def _state(unet: Any) -> object:
    own = id(vars(unet).get("forward")), tuple(map(id, foreign_hooks(unet)))
    return state_of(unet), tuple(map(type, unet.attn_processors.values())), own


def _graphs_setting() -> bool | None:
    setting = os.environ.get("FISEDIT_GRAPHS", "")
    if setting not in ("", "0", "1"):
        raise InputError(f"FISEDIT_GRAPHS must be 0 or 1, got {setting!r}; unset it for graphs on CUDA devices alone")
    return setting == "1" if setting else None


def _build_executor(executor: Executor) -> GraphExecutor | str:
    try:
        _check(executor.unet)
        return GraphExecutor(executor)
    except UnsupportedModuleError as error:
        return str(error)


def _check(unet: Any) -> None:
    """Refuse what was injected into a UNet, and hooks of the UNet itself: graphs would not see them."""
    if any(foreign_hooks(unet)):
        raise UnsupportedModuleError("the UNet has a hook; it runs eagerly")
    for name, module in unet.named_modules():
        if "forward" in vars(module):
            what = f"UNet's layer {name}" if name else "UNet"
            raise UnsupportedModuleError(f"the {what} was injected; it runs eagerly")
    for name, processor in unet.attn_processors.items():
        if type(processor) not in PLAIN_PROCESSORS:
            kind = type(processor).__name__
            raise UnsupportedModuleError(f"the UNet's {name} is a {kind} and cannot be captured; it runs eagerly")
