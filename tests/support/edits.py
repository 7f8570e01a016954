"""Whole trajectories, by the engine and by the oracle, and what tests watch while they run."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Self
from unittest.mock import patch

import numpy as np
import torch

from fisedit.sampling import denoise
from fisedit.sampling.engine import Engine
from fisedit.sampling.trajectory import LatentEdit
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import LATENT_FACTOR, ActiveCells, EditMode, Step, make_generation_config
from tests.support import oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from diffusers import StableDiffusionPipeline

    from fisedit import Editor
    from fisedit.history import EditResult
    from fisedit.sampling.trajectory import Trajectory
    from fisedit.values import GenerationConfig

CAT, DOG, BIRD = ("a cat and a cake on a beach", "a dog and a cake on a beach", "a bird and a cake on a beach")
FP32 = 1e-4
"""Largest deviation of fp32 latents, in units of their spread."""

DEFAULTS = {
    "seed": 7,
    "negative_prompt": "",
    "num_inference_steps": 4,
    "guidance_scale": 7.5,
    "width": 128,
    "height": 128,
    "scheduler": "ddim",
}


def config_of(prompt: str = CAT, **changes: object) -> GenerationConfig:
    return make_generation_config(prompt, **(DEFAULTS | changes))


def as_oracle(config: GenerationConfig) -> oracle.GenerationConfig:
    """The same config in the oracle's words."""
    return oracle.GenerationConfig(
        config.prompt,
        seed=config.seed,
        steps=config.num_inference_steps,
        guidance=config.guidance_scale,
        height=config.height,
        width=config.width,
        negative_prompt=config.negative_prompt or None,
    )


def unwatched(*_: object) -> None:
    """An on_step that does nothing."""


def cells(size: tuple[int, int]) -> tuple[int, int]:
    """Latent cells of a picture's height and width in pixels."""
    return size[0] // LATENT_FACTOR, size[1] // LATENT_FACTOR


def record(engine: Engine, config: GenerationConfig) -> Trajectory:
    with torch.inference_mode():
        return denoise.run_dense(engine, config, engine.encode(config), unwatched)


def replay(
    engine: Engine,
    source: Trajectory,
    prompt: str,
    mask: np.ndarray | ActiveCells,
    growth: Sequence[int],
    seed: int | None = None,
) -> Trajectory:
    """A sparse edit in a grid [h, w], or in cells that join as they say, from the first of their steps on."""
    changed = mask if isinstance(mask, ActiveCells) else ActiveCells(mask)
    config = replace(source.config, prompt=prompt, seed=source.config.seed if seed is None else seed)
    with torch.inference_mode():
        edit = LatentEdit(config, engine.encode(config), {}, changed, EditMode(tuple(growth), start=changed.start))
        return denoise.run_sparse(engine, source, [edit], unwatched)[0]


def latents(trajectory: Trajectory) -> torch.Tensor:
    """[N + 1, 4, h, w]."""
    return torch.cat(trajectory.latents)


def oracle_chain(
    pipe: StableDiffusionPipeline,
    config: GenerationConfig,
    edits: Sequence[tuple[str, np.ndarray, Sequence[int]]],
    seeds: Sequence[int] = (),
) -> list[torch.Tensor]:
    """Latents [N + 1, 4, h, w] of a source and of every edit (prompt, mask, growth by step) over the one before it.

    A `Step.DENSE` is dense; those after it are mixed with the source's maps plus what it changed of them. An edit with
    another seed than the one before begins with its noise inside the mask.
    """
    source = as_oracle(config)
    maps: list[oracle.Maps] = [{} for _ in range(config.num_timesteps)]
    with oracle._around_calls(pipe.unet, lambda i: _recording(pipe.unet, maps[i])):
        runs = [oracle.dense_generate(pipe, source).latents]
    before = config.seed
    for (prompt, grid, growth), seed in zip(edits, seeds or [config.seed] * len(edits), strict=True):
        under, maps = maps, [{} for _ in range(config.num_timesteps)]
        shift: oracle.Maps = {}

        @contextmanager
        def around(i: int, under=under, over=maps, grid=grid, growth=growth, shift=shift) -> Iterator[None]:
            if growth[i] is Step.DENSE:
                with _recording(pipe.unet, over[i]):
                    yield
                shift |= {name: map_ - under[i][name] for name, map_ in over[i].items()}
                return
            active, below = torch.from_numpy(dilate(grid, growth[i])), under[i]
            moved = {name: map_ + shift[name] if shift else map_ for name, map_ in below.items()}
            norms = oracle.norms_by_position(pipe.unet, over[i], moved, active)
            with oracle.mixing(pipe.unet, moved, active), oracle.recording(pipe.unet, over[i]), norms:
                yield

        inside, first, draw = torch.from_numpy(grid), runs[-1][:1], pipe.prepare_latents
        own_noise = inside & (seed != before)

        def prepare_latents(*args: object, own=own_noise, first=first, draw=draw) -> torch.Tensor:
            return torch.where(own, draw(*args), first)

        with oracle._around_calls(pipe.unet, around), patch.object(pipe, "prepare_latents", prepare_latents):
            run = replace(source, prompt=prompt, seed=seed)
            runs.append(oracle.dense_generate(pipe, run, oracle.pinned(runs[-1], inside)).latents)
        before = seed
    return runs


@contextmanager
def _recording(unet: torch.nn.Module, maps: oracle.Maps) -> Iterator[None]:
    with oracle.recording(unet, maps), oracle.norms_by_position(unet, maps):
        yield


def midway(
    pipe: StableDiffusionPipeline,
    config: oracle.GenerationConfig,
    prompt: str,
    start: int,
    grid: np.ndarray | Callable[[int], np.ndarray],
    around: Callable[[int], AbstractContextManager[None]] = lambda i: nullcontext(),
) -> torch.Tensor:
    """Latents [N + 1, 4, h, w] of a pipeline that reads another prompt from step `start` on, pinned to the source.

    Args:
        pipe: diffusers' pipeline.
        config: of the source.
        prompt: that is read from `start` on.
        start: index of a step.
        grid: booleans [h, w], the cells that are not pinned, or those of a step's index.
        around: what the i-th call of the UNet runs inside.
    """
    source = oracle.dense_generate(pipe, config).latents
    told = [source[:1]]

    def pin(step: int, latents: torch.Tensor) -> torch.Tensor:
        inside = torch.from_numpy(grid(step) if callable(grid) else grid)
        return oracle.pinned(source, inside)(step, latents)

    with torch.no_grad():
        text, empty = pipe.encode_prompt(prompt, pipe.device, 1, True, negative_prompt="")

    def on_step_end(_, step, __, tensors):
        told.append(pin(step, tensors["latents"]) if step >= start else tensors["latents"])
        return {"latents": told[-1]} | ({"prompt_embeds": torch.cat([empty, text])} if step == start - 1 else {})

    with oracle._around_calls(pipe.unet, around):
        pipe(
            config.prompt if start else prompt,
            height=config.height,
            width=config.width,
            num_inference_steps=config.steps,
            guidance_scale=config.guidance,
            generator=torch.Generator().manual_seed(config.seed),
            callback_on_step_end=on_step_end,
            callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
        )
    return torch.cat(told)


class Calls:
    """Counts a UNet's forwards while open; a sparse one gives one column of rows, and one that stops early is dense."""

    def __init__(self, unet: torch.nn.Module) -> None:
        self._unet = unet
        self.started = self.sparse = 0

    @property
    def dense(self) -> int:
        return self.started - self.sparse

    def __enter__(self) -> Self:
        handles = self._unet.register_forward_pre_hook(self._start), self._unet.register_forward_hook(self._end)
        self._handles = handles
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _start(self, *_: object) -> None:
        self.started += 1

    def _end(self, _: torch.nn.Module, __: object, output: Sequence[torch.Tensor]) -> None:
        self.sparse += output[0].shape[-1] == 1


def pixels_outside(result: EditResult, parent: EditResult) -> bool:
    """Whether the two pictures have the same bytes wherever the result's mask is not."""
    import numpy as np

    outside = ~np.kron(result.mask.grid, np.ones((LATENT_FACTOR, LATENT_FACTOR), bool))
    new, old = np.asarray(result.image), np.asarray(parent.image)
    return bool((new[outside] == old[outside]).all())


def check_pinned(edit: Trajectory, source: Trajectory, grid: np.ndarray) -> None:
    """Check that the latents outside are the source's at every step, bit for bit."""
    outside = ~torch.from_numpy(grid)
    assert torch.equal(latents(edit)[..., outside], latents(source)[..., outside])
    assert not torch.equal(latents(edit)[1:], latents(source)[1:])


def trajectory(editor: Editor, result: EditResult) -> Trajectory:
    """The result's latents and features, as the editor keeps them."""
    return editor._trajectory_cache.get(result.id)[0]


def same(a: EditResult, b: EditResult) -> bool:
    """Whether two results have the same picture."""
    return a.image.tobytes() == b.image.tobytes()


def check_outside(editor: Editor, result: EditResult, source: EditResult) -> None:
    """Check that latents and pixels outside the mask are the source's, and that the picture is another."""
    outside = torch.from_numpy(~result.latent_cells)
    ours, theirs = latents(trajectory(editor, result)), latents(trajectory(editor, source))
    assert torch.equal(ours[..., outside], theirs[..., outside])
    assert pixels_outside(result, source) and not same(result, source)


def masks_square(editor):
    grid = np.zeros(editor.current.mask.grid.shape, bool)
    grid[4:8, 4:8] = True
    return grid
