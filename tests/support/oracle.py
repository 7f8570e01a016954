"""The oracle: what a sparse edit must equal, computed densely. Knows diffusers and nothing of fisedit.

`mixed_forward` is a dense UNet forward in which, after every conv, linear and attention, positions outside the active
set are overwritten by those of the source's forward. Norms and element-wise layers are left alone: they see the mixed
map and take their statistics from it. Text keys and values and the time embedding have no positions and stay fresh.
A ResNet block's first conv counts with what is added to it for the time: Stable Diffusion XL's has the prompt in it.

After a dense step of an edit, recorded maps are shifted by what it found changed; of a transformer's norm, what each
position has part in its statistics is shifted, as a sparse edit reads nothing else of its input (`norms_by_position`).

`dense_generate`, `dense_blended` and `mixed_edit` run whole trajectories through diffusers' own pipeline.

Shapes: B guidance branches, h, w the latent grid, H, W a map's grid, T text tokens, N steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as fn
from diffusers import TCDScheduler
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from PIL import Image

M = TypeVar("M", bound=nn.Module)
Grid = tuple[int, int]
Maps = dict[str, Tensor]
"""Layer name -> its output: [B, C, H, W] of a conv, [B, HW, C] of a linear or an attention."""

Text = Tensor | Mapping[str, object]
"""Embeddings [B, T, D], or all arguments of a UNet that tell of prompts."""

Visit = Callable[[str, Tensor, Grid], Tensor]
"""Sees a positional layer's name, output and grid (H, W); what it returns takes the output's place."""


@dataclass(frozen=True)
class Recording:
    """One forward: every positional layer's output, and the UNet's own [B, 4, h, w]."""

    maps: Mapping[str, Tensor]
    output: Tensor


def record(unet: UNet2DConditionModel, latents: Tensor, timestep: Tensor | int, text: Text) -> Recording:
    """Run a plain dense forward of `latents` [B, 4, h, w] and `text`, and keep what a mixed one needs."""
    maps: Maps = {}
    with recording(unet, maps):
        return Recording(maps, _forward(unet, latents, timestep, text))


def mix(
    unet: UNet2DConditionModel,
    source: Recording,
    latents: Tensor,
    timestep: Tensor | int,
    text: Text,
    active: Tensor,
) -> Recording:
    """Run the mixed forward and keep its maps, which are the source of an edit on this edit. See `mixed_forward`."""
    maps: Maps = {}
    with mixing(unet, source.maps, active), recording(unet, maps):
        return Recording(maps, _forward(unet, latents, timestep, text))


def mixed_forward(
    unet: UNet2DConditionModel,
    source: Recording,
    latents: Tensor,
    timestep: Tensor | int,
    text: Text,
    active: Tensor,
) -> Tensor:
    """Run the mixed forward.

    Args:
        source: the forward of the source's latents and text at the same timestep.
        latents: [B, 4, h, w], the source's outside the edit.
        text: of the new prompt.
        active: bool [h, w], the same for all branches.

    Returns:
        The UNet's output [B, 4, h, w], equal to the source's where not active.
    """
    return mix(unet, source, latents, timestep, text, active).output


@torch.no_grad()
def _forward(unet: UNet2DConditionModel, latents: Tensor, timestep: Tensor | int, text: Text) -> Tensor:
    inputs = {"encoder_hidden_states": text} if isinstance(text, Tensor) else text
    return unet(latents, timestep, return_dict=False, **inputs)[0]


def coarser(active: Tensor) -> Tensor:
    """Any-pool bool [h, w] to [ceil(h / 2), ceil(w / 2)]: a cell is active if any of its up to four finer cells is."""
    h, w = active.shape
    padded = fn.pad(active, (0, w % 2, 0, h % 2))
    return padded.reshape((h + 1) // 2, 2, (w + 1) // 2, 2).any(dim=3).any(dim=1)


def levels(active: Tensor) -> dict[Grid, Tensor]:
    """Every resolution's grid (H, W) -> its active set bool [H, W], from the latent's down to a single cell."""
    found: dict[Grid, Tensor] = {}
    while grid_of(active) not in found:
        found[grid_of(active)] = active
        active = coarser(active)
    return found


def grid_of(plane: Tensor) -> Grid:
    """Height and width of a map [..., H, W]."""
    height, width = plane.shape[-2:]
    return height, width


@contextmanager
def recording(module: nn.Module, maps: Maps) -> Iterator[None]:
    """While open, a forward of `module` leaves every positional layer's output in `maps`."""

    def keep(name: str, output: Tensor, _: Grid) -> Tensor:
        if name in maps:
            raise ValueError(f"each layer must run once per recording, got {name} twice: record one forward at a time")
        maps[name] = output.clone()
        return output

    with watching(module, keep):
        yield


@contextmanager
def mixing(module: nn.Module, maps: Mapping[str, Tensor], active: Tensor) -> Iterator[None]:
    """While open, a forward of `module` yields at every positional layer the recorded `maps` where not active."""
    masks = levels(active)

    def overwrite(name: str, output: Tensor, grid: Grid) -> Tensor:
        if grid not in masks:
            raise ValueError(f"{name} must lie on a level of the active set, got {grid}: levels are {list(masks)}")
        mask = masks[grid] if output.ndim == 4 else masks[grid].reshape(-1, 1)
        return torch.where(mask, output, maps[name])

    with watching(module, overwrite):
        yield


@contextmanager
def norms_by_position(
    module: nn.Module, maps: Maps, recorded: Mapping[str, Tensor] | None = None, active: Tensor | None = None
) -> Iterator[None]:
    """While open, every transformer's norm adds up what each position has part in its groups' statistics.

    Args:
        maps: is given those parts as they are added up, "NAME.norm" -> [B, HW, 2, groups].
        recorded: such maps, which are added up where not active; None for a dense forward.
        active: bool [h, w].
    """
    masks = {} if active is None else levels(active)

    def forward(name: str, norm: nn.GroupNorm, x: Tensor) -> Tensor:
        values = x.double().flatten(2).unflatten(1, (norm.num_groups, -1))  # [B, groups, C / groups, HW]
        parts = torch.stack([values.sum(2), values.square().sum(2)], 1).permute(0, 3, 1, 2)
        if recorded is not None:
            parts = torch.where(masks[grid_of(x)].reshape(-1, 1, 1), parts, recorded[name])
        maps[name] = parts
        if recorded is None:
            return type(norm).forward(norm, x)
        mean, square = (parts.sum(1) / values[0, 0].numel()).unbind(1)
        normed = (values - mean[..., None, None]) / (square - mean.square() + norm.eps).sqrt()[..., None, None]
        return (normed.flatten(1, 2) * norm.weight[:, None] + norm.bias[:, None]).view(x.shape).to(x.dtype)

    with ExitStack() as patches:
        for place, transformer in _named(module, Transformer2DModel):
            norm = transformer.norm
            norm.forward = partial(forward, f"{place}.norm".lstrip("."), norm)
            patches.callback(delattr, norm, "forward")
        yield


@contextmanager
def watching(module: nn.Module, visit: Visit) -> Iterator[None]:
    """While open, every positional layer inside `module` hands its output to `visit`; nothing stays behind."""
    grids: dict[str, Grid] = {}

    def note(place: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: grids.update({place: grid_of(args[0])})

    def on_map(name: str) -> Callable[..., Tensor]:
        return lambda _, args, output: visit(name, output, grid_of(output))

    def on_timed(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
        return lambda _, args: (visit(name, args[0], grid_of(args[0])),)

    def on_tokens(name: str, place: str) -> Callable[..., Tensor]:
        return lambda _, args, output: visit(name, output, grids[place])

    with ExitStack() as hooks:
        for name, conv in _named(module, nn.Conv2d):
            hooks.callback(conv.register_forward_hook(on_map(name)).remove)
        for name, block in _named(module, ResnetBlock2D):
            hooks.callback(block.norm2.register_forward_pre_hook(on_timed(f"{name}.timed".lstrip("."))).remove)
        for place, transformer in _named(module, Transformer2DModel):
            # Its tokens are laid out on the map that enters its norm: a token count alone does not tell H from W.
            hooks.callback(transformer.norm.register_forward_pre_hook(note(place)).remove)
            for name, layer in _token_layers(place, transformer):
                hooks.callback(layer.register_forward_hook(on_tokens(name, place)).remove)
        yield


def _named(module: nn.Module, kind: type[M]) -> list[tuple[str, M]]:
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, kind)]


def _token_layers(place: str, transformer: Transformer2DModel) -> list[tuple[str, nn.Module]]:
    """Name the attentions and those linears whose tokens are positions: all but the projections of the text."""
    crossing = [a for _, a in _named(transformer, Attention) if a.is_cross_attention]
    of_text = {id(p) for a in crossing for p in (a.to_k, a.to_v)}
    of_text |= {id(p) for a in crossing if isinstance(a.processor, nn.Module) for p in a.processor.modules()}
    layers = _named(transformer, nn.Linear) + _named(transformer, Attention)
    return [(f"{place}.{name}".lstrip("."), layer) for name, layer in layers if id(layer) not in of_text]


@dataclass(frozen=True)
class GenerationConfig:
    """All that decides a generated picture besides the pipeline; sizes in pixels."""

    prompt: str
    seed: int = 0
    steps: int = 6
    guidance: float = 7.5
    height: int = 128
    width: int = 128
    negative_prompt: str | None = None


@dataclass(frozen=True)
class DenseRun:
    """A trajectory [N + 1, 4, h, w], the initial noise first, and the picture that diffusers makes of its end."""

    latents: Tensor
    image: Image.Image


def deviation(got: Tensor, expected: Tensor) -> float:
    """Largest difference in units of the spread of `expected`: under a random epsilon UNet latents grow to 10 to 50."""
    return float((got - expected).abs().max() / expected.std())


Pin = Callable[[int, Tensor], Tensor]
"""Sees a step's index and the latents [1, 4, h, w] after it; what it returns is carried on."""


def dense_generate(
    pipe: StableDiffusionPipeline, config: GenerationConfig, pin: Pin = lambda _, latents: latents
) -> DenseRun:
    """Run diffusers' pipeline on `config`, with `pin` applied after every scheduler step."""
    trajectory = [first_latents(pipe, config)]

    def on_step_end(_: StableDiffusionPipeline, step: int, __: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        trajectory.append(pin(step, tensors["latents"]))
        return {"latents": trajectory[-1]}

    result = pipe(
        config.prompt,
        negative_prompt=config.negative_prompt,
        height=config.height,
        width=config.width,
        num_inference_steps=config.steps,
        guidance_scale=config.guidance,
        eta=0.3 if isinstance(pipe.scheduler, TCDScheduler) else 0.0,  # TCD's own default
        generator=torch.Generator().manual_seed(config.seed),
        callback_on_step_end=on_step_end,
    )
    return DenseRun(torch.cat(trajectory), result.images[0])


def first_latents(pipe: StableDiffusionPipeline, config: GenerationConfig) -> Tensor:
    """Draw the initial noise [1, 4, h, w] as the pipeline does: from the seed, scaled to the scheduler's spread."""
    pipe.scheduler.set_timesteps(config.steps)
    generator = torch.Generator().manual_seed(config.seed)
    return pipe.prepare_latents(
        1, pipe.unet.config.in_channels, config.height, config.width, pipe.unet.dtype, pipe.device, generator
    )


def dense_blended(pipe: StableDiffusionPipeline, source: GenerationConfig, prompt: str, mask: Tensor) -> DenseRun:
    """Run the fidelity reference (E9): dense on `prompt` from the same seed, pinned to the source outside `mask`.

    Args:
        mask: bool [h, w], the ungrown mask of the edit.
    """
    return dense_generate(pipe, replace(source, prompt=prompt), pinned(dense_generate(pipe, source).latents, mask))


@torch.no_grad()
def dense_decode(pipe: StableDiffusionPipeline, latents: Tensor) -> Tensor:
    """Decode `latents` [B, 4, h, w] as the pipeline does, before clipping: [B, 3, 8h, 8w] in about [-1, 1]."""
    return pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]


def pinned(trajectory: Tensor, mask: Tensor) -> Pin:
    """Overwrite, after step i, the latents outside `mask` [h, w] with `trajectory`'s [N + 1, 4, h, w] at i + 1."""
    return lambda step, latents: torch.where(mask, latents, trajectory[step + 1 : step + 2])


def mixed_edit(
    pipe: StableDiffusionPipeline, source: GenerationConfig, prompt: str, mask: Tensor, active: Tensor | None = None
) -> DenseRun:
    """Run a whole edit by the oracle: every UNet call mixed with the source's of the same step, latents pinned.

    Args:
        mask: bool [h, w], the ungrown mask, by which latents are pinned.
        active: bool [h, w], the grown mask, which the UNet computes; `mask` itself if not given.
    """
    steps: defaultdict[int, Maps] = defaultdict(dict)
    with _around_calls(pipe.unet, lambda call: recording(pipe.unet, steps[call])):
        trajectory = dense_generate(pipe, source).latents
    grown = mask if active is None else active
    with _around_calls(pipe.unet, lambda call: mixing(pipe.unet, steps[call], grown)):
        return dense_generate(pipe, replace(source, prompt=prompt), pinned(trajectory, mask))


@contextmanager
def _around_calls(module: nn.Module, context: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """While open, the i-th forward of `module` runs inside `context(i)`."""
    dense, calls = module.forward, count()

    def forward(*args: object, **kwargs: object) -> object:
        with context(next(calls)):
            return dense(*args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
