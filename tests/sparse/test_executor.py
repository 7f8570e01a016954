"""Single steps: recording is the dense forward, replaying leaves it alone. Against the oracle: tests/contract/."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0

from fisedit.errors import UnsupportedModuleError
from fisedit.features.cache import FeatureOverlay
from fisedit.features.sites import Role
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support.grids import grids
from tests.support.pipelines import SHAPES, build_pipeline
from tests.support.steps import StepEdit

pytestmark = pytest.mark.usefixtures("no_grad")

TOLERANCE = 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_recording_is_the_dense_forward_itself(pipelines, shape):
    unet, grid = pipelines[shape].unet, grids(13, 17)["square"]
    case = StepEdit(unet, grid)
    got, _ = Executor(unet).run_dense(case.source, case.timestep, case.texts[0], {})
    assert torch.allclose(got, unet(case.source, case.timestep, **case.texts[0].unet_inputs)[0], atol=1e-6, rtol=0)


def test_a_recorded_step_attends_as_it_was_told():
    """An attention processor that came after the executor works on every attention."""
    seen, unet = set(), build_pipeline("sd15").unet
    case, executor = StepEdit(unet, grids(16, 16)["square"]), Executor(unet)

    class Watching(AttnProcessor2_0):
        def __call__(self, attention, *args, **kwargs):
            seen.add(attention)
            return super().__call__(attention, *args, **kwargs)

    unet.set_attn_processor(Watching())
    executor.run_dense(case.source, case.timestep, case.texts[0], {})
    assert seen == {module for module in unet.modules() if isinstance(module, Attention)}


def test_replaying_leaves_the_recording_alone(pipelines):
    unet, grid = pipelines["sd15"].unet, grids(16, 16)["square"]
    case, executor = StepEdit(unet, grid), Executor(unet)
    _, maps = executor.run_dense(case.source, case.timestep, case.texts[0], {})
    before = {key: value.clone() for key, value in maps.maps.items()}
    for _ in range(2):
        executor.run_sparse(
            case.edited,
            case.timestep,
            case.texts[1],
            {},
            FeatureOverlay(maps, make_row_plan(grid, executor.num_levels)),
        )
    assert all(torch.equal(maps.maps[key], value) for key, value in before.items())


def test_what_skips_the_middle_is_recorded_once_and_read_whole():
    """Every norm before a conv and every resampler: its input, whether parts of it were recorded elsewhere or not."""
    for shape in SHAPES:
        unet = build_pipeline(shape).unet
        case, executor, inputs, hooks = StepEdit(unet, grids(13, 17)["square"]), Executor(unet), {}, []
        read = [site for site in executor.sites if site.role in (Role.NORM_HALO, Role.DOWN, Role.UP)]
        hooks += [s.module.register_forward_pre_hook(partial(keep_input, inputs, s.name)) for s in read]
        unet(case.source, case.timestep, **case.texts[0].unet_inputs)
        for hook in hooks:
            hook.remove()
        _, step = executor.run_dense(case.source, case.timestep, case.texts[0], {})
        joining = [name for name in inputs if name.startswith("up_blocks.") and name.endswith(".norm1")]
        assert list(step.joined) == joining
        for site in executor.sites:
            if site.name in inputs:
                assert torch.allclose(step.whole(site.name, site.level), inputs[site.name], atol=1e-4)
                assert step.channels(site.name) == inputs[site.name].shape[2]


def keep_input(inputs, name, _, args):
    inputs[name] = args[0].flatten(2).transpose(1, 2)


def test_an_unknown_layer_is_refused_by_name():
    unet = build_pipeline("sd15").unet
    unet.down_blocks[0].resnets[1] = torch.nn.Identity()
    with pytest.raises(UnsupportedModuleError, match=r"down_blocks\.0\.resnets\.1 is a Identity"):
        Executor(unet)


def test_a_strange_conv_is_refused_by_name():
    unet = build_pipeline("sd15").unet
    unet.conv_in = torch.nn.Conv2d(4, unet.conv_in.out_channels, 5, padding=2)
    with pytest.raises(UnsupportedModuleError, match="conv_in"):
        Executor(unet)


def test_a_resnet_with_another_activation_is_refused_by_name():
    unet = build_pipeline("sd15").unet
    unet.mid_block.resnets[0].nonlinearity = torch.nn.GELU()
    with pytest.raises(UnsupportedModuleError, match=r"mid_block\.resnets\.0 .* another activation"):
        Executor(unet)
