"""A recorded trajectory as pages, and back: the first has all but the steps' maps, and each of the others a step's.

So a session on disk keeps what an edit reads. Steps are brought into memory when they are read. Knows trajectories and
pages; knows nothing about sessions.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from fisedit.decoder.decode import DecoderCache
from fisedit.errors import PageError
from fisedit.features.cache import StepFeatures, map_bytes
from fisedit.features.codec import from_tensors, to_tensors
from fisedit.features.pages import encode_page
from fisedit.sampling.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from fisedit.features.pages import Page
    from fisedit.features.tiers import FeatureTiers
    from fisedit.values import GenerationConfig

_ABOUT = "about"
_LISTS = ("latents", "predictions", "noises")


@dataclass(frozen=True, eq=False)
class RecordedSource:
    """A source's trajectory and what its decode recorded."""

    trajectory: Trajectory
    decoder: DecoderCache


def to_pages(source: RecordedSource, made_with: str) -> list[Callable[[], bytes]]:
    """Return the functions that return the bytes of each page.

    Args:
        source: made by dense steps alone.
        made_with: identifies model and settings, without which the pages mean nothing.
    """
    steps = [step for step in source.trajectory.features if isinstance(step, StepFeatures)]
    assert len(steps) == len(source.trajectory.features)
    return [
        lambda: _first_page(source, steps, made_with),
        *(lambda step=step: encode_page(to_tensors(step.maps)) for step in steps),
    ]


def _first_page(source: RecordedSource, steps: Sequence[StepFeatures], made_with: str) -> bytes:
    trajectory, decoder = source.trajectory, source.decoder
    assert isinstance(decoder.features, StepFeatures)
    about = {"made_with": made_with, "steps": [_about(step) for step in steps], "decoder": _about(decoder.features)}
    groups: dict[str, Mapping[str, Tensor]] = {
        **{name: _numbered(getattr(trajectory, name)) for name in _LISTS},
        "text_keys": trajectory.text_keys,
        "unconditional": _numbered(trajectory.unconditional or ()),
        "inpaint_inputs": _numbered([] if trajectory.inpaint_inputs is None else [trajectory.inpaint_inputs]),
        "decoder.maps": to_tensors(decoder.features.maps),
        "decoder.norms": decoder.features.statistics,
        "decoder.sums": decoder.sums,
        "decoder.statistics": decoder.statistics,
        "decoder.picture": {"rgb": torch.from_numpy(np.array(decoder.picture))},
        **{f"statistics.{i}": step.statistics for i, step in enumerate(steps)},
    }
    first = {f"{group}:{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}
    first[_ABOUT] = torch.from_numpy(np.frombuffer(json.dumps(about, sort_keys=True).encode(), np.uint8).copy())
    return encode_page(first)


def from_pages(
    config: GenerationConfig, pages: Sequence[Page], made_with: str, tiers: FeatureTiers, device: torch.device
) -> RecordedSource:
    """A source whose steps are on disk until they are read; they are not in the tiers yet.

    Args:
        config: The config of the source.
        pages: The pages, from `to_pages`.
        made_with: identifies model and settings, as in `to_pages`.
        tiers: The tiers that will bring the steps into memory.
        device: The device of the model.

    Raises:
        PageError: the first page is gone or damaged, or the pages were made with another model or other settings.
    """
    first = pages[0].read()
    try:
        about, groups = _parse(first, device)
        if about["made_with"] != made_with or len(about["steps"]) != len(pages) - 1:
            raise PageError("recorded features are of another model, or of other settings")
        return _restore(config, about, groups, tiers, device)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PageError(f"recorded features are damaged ({pages[0].path.name})") from error


def _parse(first: dict[str, Tensor], device: torch.device) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return what the first page tells of the steps, and its tensors by group."""
    about: dict[str, Any] = json.loads(first.pop(_ABOUT).numpy().tobytes())
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in first.items():
        group, _, own = name.partition(":")
        groups[group][own] = tensor.to(device)
    return about, groups


def _restore(
    config: GenerationConfig,
    about: Mapping[str, Any],
    groups: Mapping[str, dict[str, Tensor]],
    tiers: FeatureTiers,
    device: torch.device,
) -> RecordedSource:
    latents, predictions, noises = (_ordered(groups[name]) for name in _LISTS)
    trajectory = Trajectory(config, latents, predictions, text_keys=groups["text_keys"], noises=noises)
    for i, found in enumerate(about["steps"]):
        offloaded_from = None if device.type == "cpu" else device
        step = StepFeatures({}, groups[f"statistics.{i}"], found["joined"], offloaded_from)
        step.maps = tiers.paged(step, found["names"], int(found["nbytes"]))
        trajectory.features.append(step)
    if groups["unconditional"]:
        text, prediction = _ordered(groups["unconditional"])
        trajectory.unconditional = text, prediction
    trajectory.inpaint_inputs = next(iter(_ordered(groups["inpaint_inputs"])), None)
    maps = StepFeatures(from_tensors(groups["decoder.maps"]), groups["decoder.norms"], about["decoder"]["joined"])
    picture = Image.fromarray(groups["decoder.picture"]["rgb"].cpu().numpy())
    decoder = DecoderCache(maps, picture, groups["decoder.sums"], groups["decoder.statistics"])
    return RecordedSource(trajectory, decoder)


def _about(step: StepFeatures) -> dict[str, Any]:
    return {"names": sorted(step.maps), "nbytes": map_bytes(step.maps), "joined": step.joined}


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(i): tensor for i, tensor in enumerate(tensors)}


def _ordered(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Invert `_numbered`."""
    return [tensors[str(i)] for i in range(len(tensors))]
