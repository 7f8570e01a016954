"""Two published methods that predict a mask with UNet evaluations and edit inside it, each on one `EditCase`.

FISEdit (Yu et al., arXiv 2305.17423): dense first steps on the new prompt; Otsu's threshold of how far they leave the
source's latents; sparse steps from there, in 2x2 blocks, GroupNorm with the source's stale statistics. It runs in our
engine, so its kernels and its cache are not measured. DiffEdit (Couairon et al., arXiv 2210.11427): the mask has the
cells where predictions for the two prompts differ on the noised source. Its numbers are those of diffusers' pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from diffusers import DDIMScheduler

from fisedit.bench.edit_case import EditCase, MethodResult
from fisedit.decoder.decode import decode
from fisedit.features.cache import FeatureOverlay, recorded_statistics
from fisedit.masking.masks import otsu
from fisedit.models.families.conditioning import Conditioning, concatenated
from fisedit.sampling import denoise
from fisedit.sparse.cached_rows import CachedRows
from fisedit.sparse.executor import Executor, apply_guidance
from fisedit.sparse.row_layout import scatter
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.operands import join_rows

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from fisedit.sparse_kernels.operands import Rows
    from fisedit.values import BoolGrid

PROBES = 0.2
"""Share of the steps that FISEdit runs dense: 10 of 50 in the paper."""

NOISES, NOISE_TIMESTEP, CLIP_MEANS, MASK_THRESHOLD, EDIT_STRENGTH = 10, 500, 3.0, 0.5, 0.8
"""Numbers of DiffEdit. They are the noises averaged, the timestep they stand for, and the clip, in means of the map.
Then come the threshold, of the clipped maximum, and the share of the steps that the edit runs."""


class StaleRows(CachedRows):
    """Rows whose norms keep the source's statistics; they record nothing for a later edit."""

    def affine(self, name: str, norm: nn.GroupNorm, rows: Rows) -> Tensor:
        """GroupNorm's scale and shift by the source's statistics. See `CachedRows.affine`."""
        site = self._sites[name]
        level = self.level(site)
        sums = recorded_statistics(self.source, site)
        no_rows, count = join_rows(rows)[:, :0], level.size * (norm.num_channels // norm.num_groups)
        return ops.group_norm_affine(no_rows, no_rows, sums, None, count, norm.weight, norm.bias, norm.eps)[0]


class StaleNormExecutor(Executor):
    """An executor whose sparse norms keep the recorded statistics."""

    rows = StaleRows


@torch.inference_mode()
def fisedit_paper(case: EditCase, share: float = PROBES) -> MethodResult:
    """FISEdit's edit.

    Args:
        case: the edit and its source.
        share: The share of the steps that run dense, above 0 to 1.
    """
    trajectory, engine = case.trajectory, case.engine
    probes = max(1, round(share * case.steps))
    text = engine.encode(case.config)
    path = denoise.sample(engine, case.config, text, trajectory, probes)
    distances = [
        (new - old).float().abs().mean(1)[0] for new, old in zip(path[1:], trajectory.latents[1:], strict=False)
    ]
    grid = as_blocks(otsu(torch.stack(distances).sum(0).cpu().numpy())[0])
    latents = _sparse_steps(case, text, path[-1], probes, grid)
    sparse = case.steps - probes
    macs = case.dense_macs(probes) + sparse * case.costs.sparse_step(grid, 0)
    return MethodResult(_decode_picture(case, latents), grid, case.steps, macs, sparse=sparse > 0)


def as_blocks(grid: BoolGrid) -> BoolGrid:
    """The grid [h, w] in 2x2 blocks, each inside if any of its cells is."""
    height, width = grid.shape
    padded = np.zeros((height + height % 2, width + width % 2), bool)
    padded[:height, :width] = grid
    blocks = padded.reshape(padded.shape[0] // 2, 2, padded.shape[1] // 2, 2).any((1, 3))
    return np.kron(blocks, np.ones((2, 2), bool))[:height, :width]


def _sparse_steps(case: EditCase, text: Conditioning, latents: Tensor, first: int, grid: BoolGrid) -> Tensor:
    """Run the steps from `first` on: the mask's rows over the source's features; outside, the source's latents."""
    trajectory, sampler, plan = case.trajectory, case.engine.sampler(case.config), case.engine.row_plan(grid, 0)
    executor = StaleNormExecutor(case.editor.pipe.unet)
    cache: dict[str, Tensor] = {}
    inside = torch.from_numpy(grid.copy()).to(latents.device)
    latents = torch.where(inside, latents, trajectory.latents[first])
    for i, t in enumerate(sampler.timesteps[first:], first):
        batch = torch.cat([latents] * len(text))
        raw = executor.run_sparse(batch, t, text, cache, FeatureOverlay(trajectory.features[i], plan))[0]
        prediction = scatter(trajectory.predictions[i], plan.levels[0].active, _guided(case, raw))
        latents = torch.where(inside, sampler.step(prediction, i, latents), trajectory.latents[i + 1])
    return latents


@torch.inference_mode()
def diffedit(case: EditCase) -> MethodResult:
    """DiffEdit's edit: dense, blended with the source's latents outside its mask."""
    trajectory, sampler = case.trajectory, case.engine.sampler(case.config)
    grid = difference_mask(case)
    text, inside = case.engine.encode(case.config), torch.from_numpy(grid.copy()).to(trajectory.latents[0].device)
    first = case.steps - round(EDIT_STRENGTH * case.steps)
    latents = trajectory.latents[first]
    for i, t in enumerate(sampler.timesteps[first:], first):
        raw = case.editor.pipe.unet(torch.cat([latents] * len(text)), t, return_dict=False, **text.unet_inputs)[0]
        latents = torch.where(inside, sampler.step(_guided(case, raw), i, latents), trajectory.latents[i + 1])
    evaluations = case.steps - first
    macs = case.dense_macs(evaluations + NOISES * 2 / len(text))
    return MethodResult(_decode_picture(case, latents), grid, NOISES + evaluations, macs)


@torch.inference_mode()
def difference_mask(case: EditCase) -> BoolGrid:
    """Return the cells where the two prompts' predictions differ on the noised source: booleans [h, w]."""
    pipe, clean = case.editor.pipe, case.trajectory.latents[-1]
    scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    text = concatenated([case.engine.encode(config)[-1:] for config in (case.source.config, case.config)])
    generator, t = torch.Generator().manual_seed(case.edit.seed), torch.tensor([NOISE_TIMESTEP], device=clean.device)
    difference = torch.zeros(clean.shape[2:], device=clean.device)
    for _ in range(NOISES):
        noise = torch.randn(clean.shape, generator=generator).to(clean)
        noisy = scheduler.add_noise(clean, noise, t)
        old, new = pipe.unet(torch.cat([noisy] * 2), t, return_dict=False, **text.unet_inputs)[0].float()
        difference += (new - old).abs().mean(0) / NOISES
    difference /= CLIP_MEANS * difference.mean()
    grid: BoolGrid = (difference.clamp(max=1.0) > MASK_THRESHOLD).cpu().numpy()
    return grid


def _guided(case: EditCase, prediction: Tensor) -> Tensor:
    """The guided prediction [1, ...] of one or two branches [B, ...]."""
    return apply_guidance(prediction, case.config.guidance_scale if len(prediction) > 1 else None)


def _decode_picture(case: EditCase, latents: Tensor) -> Image:
    return decode(case.editor.pipe.vae, latents)[0]
