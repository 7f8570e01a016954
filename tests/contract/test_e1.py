"""E1: with all rows active a result equals the dense diffusers pipeline's.

Latents, in units of their spread: 1e-4 in fp32, 2e-2 in bf16. With adapters: tests/adapters/.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fisedit.sampling.engine import Engine
from fisedit.sparse_kernels import prepacked, tuning
from tests.support import oracle
from tests.support.edits import DOG, FP32, as_oracle, cells, config_of, latents, record, replay, trajectory
from tests.support.pipelines import ALL_SCHEDULERS, SHAPES, build_pipeline, with_scheduler

BF16 = 2e-2
PIXELS = [(192, 128), (104, 136)]
each_scheduler = pytest.mark.parametrize("scheduler", ALL_SCHEDULERS)
each_guidance = pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])


@pytest.mark.sweep(1)
@each_scheduler
@each_guidance
def test_a_replay_of_everything_is_the_dense_edit(pipelines, scheduler, guidance):
    """Over a source of another prompt."""
    pipe, sampling = pipelines["shallow"], {"scheduler": scheduler, "guidance_scale": guidance}
    engine, config = Engine(pipe), config_of(**sampling)
    got = replay(engine, record(engine, config), DOG, np.ones((16, 16), bool), (0,) * config.num_timesteps)
    dense = oracle.dense_generate(with_scheduler(pipe, scheduler), as_oracle(config_of(DOG, **sampling))).latents
    assert oracle.deviation(latents(got), dense) <= FP32


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", PIXELS, ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_replay_of_everything_at_any_shape_and_size(pipelines, shape, size):
    height, width = size
    pipe, config = pipelines[shape], config_of(height=height, width=width)
    engine = Engine(pipe)
    got = replay(engine, record(engine, config), DOG, np.ones(cells(size), bool), (0,) * 4)
    dense = oracle.dense_generate(pipe, as_oracle(config_of(DOG, height=height, width=width))).latents
    assert oracle.deviation(latents(got), dense) <= FP32


@pytest.mark.parametrize("fp32", [False, True], ids=["bf16", "widened"])
def test_a_replay_of_everything_in_bf16(fp32, monkeypatch):
    """Root mean square over all steps: .008. The largest single difference is .04 spreads. On a CPU that multiplies
    faster in float32 no conv is in bf16."""
    pipe, seen, convolve = build_pipeline("demo").to(torch.bfloat16), set(), F.conv2d
    monkeypatch.setattr(tuning, "prefers_fp32", lambda: fp32)
    monkeypatch.setattr(prepacked, "MIN_WIDENED_NUMEL", 0)
    monkeypatch.setattr(prepacked, "MIN_WIDENED_MACS", 0)
    monkeypatch.setattr(F, "conv2d", lambda x, *rest, **named: seen.add(x.dtype) or convolve(x, *rest, **named))
    engine, config = Engine(pipe), config_of(guidance_scale=1.0)
    source = record(engine, config)
    got = latents(replay(engine, source, DOG, np.ones((16, 16), bool), (0,) * 4)).float()
    assert (torch.bfloat16 if fp32 else torch.float32) not in seen
    dense = oracle.dense_generate(pipe, as_oracle(config_of(DOG, guidance_scale=1.0))).latents.float()
    assert (got - dense).norm() <= BF16 * dense.norm()


def test_a_full_mask_gives_the_picture_of_the_dense_edit(editor, source):
    """The first step's branch without words was computed for the source, beside other words."""
    result = editor.edit(DOG, mask=np.ones((16, 16), bool))
    dense = oracle.dense_generate(editor.pipe, as_oracle(result.config))
    assert oracle.deviation(latents(trajectory(editor, result)), dense.latents) <= FP32
    assert np.abs(np.asarray(result.image, int) - np.asarray(dense.image, int)).max() <= 1
    assert result.stats.fallback == "the mask covers everything"
