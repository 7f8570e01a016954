"""E1 to E9 on CUDA, in fp16 and bf16, with graphs and without: beside diffusers there, and the CPU's edits in fp32.

Those are proved against the oracle by the other tests of this folder. Without a GPU one is pretended: the same engine
in bf16, with the rules of two devices.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import numpy as np
import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from fisedit import Editor
from fisedit.costs.model import Costs
from fisedit.sampling import scheduler
from fisedit.values import with_shallow
from tests.support.edits import BIRD, CAT, DOG, Calls, check_outside, latents, same, trajectory
from tests.support.grids import grids
from tests.support.pretended_cuda import pretended_cuda

DEVICE = "cuda"
TOLERANCE = 2e-2
"""Of all latents together, relative; E1's in 16 bit."""

CPU_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.25}
"""Of an edit's change inside its mask, relative to the CPU's change in fp32; no edit at all is 1 away. bf16 has 8
bits of every number, and measures .13 on a CPU too."""

QUICK = {"seed": 7, "num_inference_steps": 4, "guidance_scale": 3.0}
SQUARE, BLOBS = (grids(16, 16)[name] for name in ("square", "blobs"))
DTYPES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_mode = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])


@pytest.fixture(autouse=True)
def _device():
    with nullcontext() if torch.cuda.is_available() else pretended_cuda():
        yield


@pytest.fixture
def editor_of(pipelines):
    """Makes an editor of the small SD 1.5 on a device."""

    def make(dtype: torch.dtype, *, graphs: bool = True, device: str = DEVICE) -> Editor:
        return Editor(deepcopy(pipelines["sd15"]).to(device, dtype), graphs=graphs)

    return make


@pytest.fixture
def noise_in_fp32(monkeypatch):
    """Draws the first noise in fp32 for every dtype: torch before 2.13 draws other numbers in 16 bit."""

    def draw(shape, generator=None, device=None, dtype=None):
        return randn_tensor(shape, generator=generator, device=device).to(dtype)

    monkeypatch.setattr(scheduler, "randn_tensor", draw)


def deviation(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, relative."""
    got, expected = got.float().cpu(), expected.float().cpu()
    return float((got - expected).norm() / expected.norm())


def all_latents(editor: Editor, result) -> torch.Tensor:
    return latents(trajectory(editor, result))


def change(editor: Editor, result, source, mask) -> torch.Tensor:
    """What an edit does to its source's latents after every step, inside its mask."""
    inside = torch.from_numpy(mask)
    return (all_latents(editor, result).float().cpu() - all_latents(editor, source).float().cpu())[..., inside]


@each_dtype
@each_mode
def test_e1_everything_active_is_diffusers_own(editor_of, dtype, graphs):
    editor = editor_of(dtype, graphs=graphs)
    plain = editor_of(dtype).pipe
    plain.set_progress_bar_config(disable=True)
    editor.generate(CAT, **QUICK)
    result = editor.edit(DOG, mask=np.ones((16, 16), bool))
    expected = plain(
        DOG,
        width=128,
        height=128,
        num_inference_steps=4,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(7),
        output_type="latent",
    ).images
    assert deviation(all_latents(editor, result)[-1:], expected) <= TOLERANCE


@each_dtype
def test_e2_nothing_to_do_is_the_source_and_no_call(editor_of, dtype):
    editor = editor_of(dtype)
    source = editor.generate(CAT, **QUICK)
    with Calls(editor.pipe.unet) as calls:
        results = [editor.edit(CAT), editor.edit(DOG, mask=np.zeros((16, 16), bool))]
    assert calls.dense == calls.sparse == 0
    assert all(same(result, source) for result in results)


@each_dtype
@each_mode
@pytest.mark.usefixtures("noise_in_fp32")
def test_e3_and_e4_outside_nothing_moves_and_inside_it_is_the_cpus_edit(editor_of, dtype, graphs):
    editor, reference = editor_of(dtype, graphs=graphs), editor_of(torch.float32, device="cpu")
    results, changes = [], []
    for each in (editor, reference):
        source = each.generate(CAT, **QUICK)
        results.append(each.edit(DOG, mask=BLOBS, growth=1))
        check_outside(each, results[-1], source)
        changes.append(change(each, results[-1], source, BLOBS))
    assert results[0].stats.unet_evaluations_captured == (4 if graphs else 0)
    assert deviation(*changes) <= CPU_TOLERANCE[dtype]


@each_dtype
@each_mode
@pytest.mark.usefixtures("noise_in_fp32")
def test_shallow_steps_are_the_cpus_in_an_edit_and_in_one_of_it(editor_of, monkeypatch, dtype, graphs):
    monkeypatch.setattr(Costs, "choose_dilations", lambda *_, **__: with_shallow((1,) * 4, (2,)))
    changes = []
    for each in (editor_of(dtype, graphs=graphs), editor_of(torch.float32, graphs=False, device="cpu")):
        each.generate(CAT, **QUICK)
        first = each.edit(DOG, mask=SQUARE)
        result = each.edit(BIRD, mask=BLOBS)
        assert first.run.shallow == result.run.shallow == (2,)
        captured = [edited.stats.unet_evaluations_captured for edited in (first, result)]
        assert captured == ([4, 4] if not changes and graphs else [0, 0])
        changes.append(change(each, result, first, BLOBS))
    assert deviation(*changes) <= CPU_TOLERANCE[dtype]


@each_dtype
def test_e5_two_editors_take_turns(editor_of, dtype):
    first = editor_of(dtype)
    alone = {seed: session(Editor(first.pipe), seed) for seed in (1, 2)}
    other, between = Editor(first.pipe), []
    other.generate(CAT, **QUICK | {"seed": 2})

    def on_step(i, *_):
        if i == 1:
            between.append(other.edit(DOG, mask=SQUARE, growth=1))
            other.undo()

    assert same(session(Editor(first.pipe), 1, on_step), alone[1])
    assert between and all(same(result, alone[2]) for result in between)


def session(editor, seed, on_step=None):
    editor.generate(CAT, **QUICK | {"seed": seed})
    return editor.edit(DOG, mask=SQUARE, growth=1, on_step=on_step)


@each_dtype
@pytest.mark.usefixtures("noise_in_fp32")
def test_e6_an_edit_of_an_edit_is_the_cpus(editor_of, dtype):
    changes = []
    for editor in (editor_of(dtype), editor_of(torch.float32, device="cpu")):
        editor.generate(CAT, **QUICK)
        source = editor.edit(DOG, mask=SQUARE, growth=1)
        changes.append(change(editor, editor.edit(BIRD, mask=BLOBS, growth=2), source, BLOBS))
    assert deviation(*changes) <= CPU_TOLERANCE[dtype]


@each_dtype
def test_e7_edits_in_one_batch_are_those_one_by_one(editor_of, dtype):
    editor = editor_of(dtype)
    source = editor.generate(CAT, **QUICK)
    together = editor.edit_many([DOG, BIRD], [SQUARE, BLOBS], growth=1)
    for result, mask in zip(together, (SQUARE, BLOBS), strict=True):
        editor.checkout(source.id)
        alone = editor.edit(result.prompt, mask=mask, growth=1)
        check_outside(editor, result, source)
        assert deviation(all_latents(editor, result), all_latents(editor, alone)) <= TOLERANCE


@each_dtype
def test_e8_the_model_is_left_as_it_was(editor_of, dtype):
    editor = editor_of(dtype)
    unet = editor.pipe.unet
    weights = {name: weight.clone() for name, weight in unet.state_dict().items()}
    session(editor, 7)

    def burst(module, _):
        if module is unet.mid_block:
            raise RuntimeError("burst")

    handle = register_module_forward_pre_hook(burst)
    with pytest.raises(RuntimeError, match="burst"):
        editor.generate(BIRD, **QUICK)
    handle.remove()
    assert not any("forward" in vars(module) for module in unet.modules())
    assert list(unet.state_dict()) == list(weights)
    assert all(torch.equal(unet.state_dict()[name], weight) for name, weight in weights.items())


@each_dtype
@each_mode
@pytest.mark.usefixtures("noise_in_fp32")
def test_e9_an_edit_that_is_better_dense_is_the_cpus_blended_one(editor_of, dtype, graphs):
    mask, changes = grids(16, 16)["all_but_one"], []
    for editor in (editor_of(dtype, graphs=graphs), editor_of(torch.float32, device="cpu")):
        source = editor.generate(CAT, **QUICK)
        result = editor.edit(DOG, mask=mask)
        assert result.stats.fallback
        check_outside(editor, result, source)
        changes.append(change(editor, result, source, mask))
    assert deviation(*changes) <= CPU_TOLERANCE[dtype]
