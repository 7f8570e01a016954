"""Editing methods by name: this engine, published ones, diffusers and dense references, each on one `EditCase`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.quality.baselines import PROBES, diffedit, fisedit_paper
from benchmarks.quality.diffusers_baselines import img2img, inpaint_empty, inpaint_true, resampled
from benchmarks.quality.prompt_to_prompt import prompt_to_prompt
from benchmarks.quality.scene_edits import DELETE
from benchmarks.schedules import BALANCED, SHIPPED
from fisedit.bench.edit_case import EditCase, MethodResult
from fisedit.decoder.decode import decode
from fisedit.errors import InputError
from fisedit.masking.region import Region

Method = Callable[[EditCase], MethodResult | None]
"""Returns None where it needs a true mask and that is unknown."""


def plain(case: EditCase) -> MethodResult:
    """The editor, given the prompt alone."""
    return case.plain


def given_mask(case: EditCase) -> MethodResult | None:
    """The editor, given the prompt and the true mask."""
    return None if case.true_grid is None else case.edited(case.true_grid)


def sd_schedule(case: EditCase) -> MethodResult:
    """The editor by the schedule of dilations that Stable Diffusion has by default."""
    return case.edited(growth=SHIPPED[BALANCED](case.steps))


def erased(case: EditCase) -> MethodResult | None:
    """The editor's `erase` of the true cells, without words; None for edits that remove nothing or of unknown truth."""
    if case.edit.kind != DELETE or case.true_grid is None:
        return None
    case.editor.checkout(case.source.id)
    result = case.editor.erase(Region.mask(case.true_grid))
    stats = result.stats
    evaluations = stats.unet_evaluations_dense + stats.unet_evaluations_sparse
    return MethodResult(result.image, result.latent_cells, evaluations, stats.macs, rim=result.run.rim)


def structured(case: EditCase, share: float) -> MethodResult:
    """The editor with attention injection (`structure`) for a share of the steps, 0 to 1."""
    return case.edited(structure=share)


def reprompt(case: EditCase) -> MethodResult:
    """A dense run of the new prompt from the source's first latents."""
    return MethodResult(case.blended(case.everywhere), None, case.steps, case.dense_macs(case.steps))


def blended_true(case: EditCase) -> MethodResult | None:
    """The dense blended edit with the true mask: the best that this model can do."""
    return None if case.true_grid is None else _blended(case, case.true_grid)


def blended_found(case: EditCase) -> MethodResult:
    """The dense blended edit with fisedit's mask, which the sparse engine approximates."""
    grid = case.plain.grid
    assert grid is not None
    return _blended(case, grid)


def _blended(case: EditCase, grid: np.ndarray) -> MethodResult:
    return MethodResult(case.blended(grid), grid, case.steps, case.dense_macs(case.steps))


def p2p(case: EditCase) -> MethodResult:
    """Dense prompt-to-prompt, whose batches hold the source as well: an evaluation costs twice."""
    return MethodResult(prompt_to_prompt(case), None, case.steps, case.dense_macs(2 * case.steps))


@torch.inference_mode()
def no_edit(case: EditCase) -> MethodResult:
    """The source, encoded and decoded: what the autoencoder loses."""
    picture = decode(case.editor.pipe.vae, case.trajectory.latents[-1])[0]
    return MethodResult(picture, None, 0, case.decode_macs, reconstructs=True)


PLAIN = "fisedit"
PAPER = "FISEdit (paper)"

STRUCTURES = (0.3, 0.6, 1.0)
"""Values of `structure` that are measured; "fisedit" has 0."""

METHODS: dict[str, Method] = {
    PLAIN: plain,
    "fisedit-given": given_mask,
    "fisedit-sd": sd_schedule,
    **{f"structure-{share}": partial(structured, share=share) for share in STRUCTURES},
    "erase": erased,
    PAPER: fisedit_paper,
    f"{PAPER} 2/5 dense": partial(fisedit_paper, share=2 * PROBES),
    "diffedit": diffedit,
    "img2img": img2img,
    "inpaint-true": inpaint_true,
    "inpaint-empty": inpaint_empty,
    "reprompt": reprompt,
    "prompt-to-prompt": p2p,
    "blended-true": blended_true,
    "blended-fisedit": blended_found,
    "no-edit": no_edit,
    "resampled": resampled,
    "resampled-unguided": partial(resampled, guidance_scale=1.0),
}
"""The methods by their names in `--methods` and in reports.

"FISEdit (paper)" runs a fifth of the steps dense, as in arXiv 2305.17423."""

REFERENCE = "blended-true"
"""The method that relative success is measured against."""


def select_methods(names: Sequence[str]) -> dict[str, Method]:
    """Methods by name, in the order of `METHODS`.

    Args:
        names: keys of `METHODS`; none for all.

    Raises:
        InputError: an unknown name.
    """
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise InputError(f"methods must be of {', '.join(METHODS)}, got {', '.join(unknown)}")
    return {name: method for name, method in METHODS.items() if name in names or not names}
