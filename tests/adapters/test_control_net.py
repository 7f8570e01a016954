"""ControlNets: whole pictures are diffusers' own pipeline's, sparse steps the mixed dense forward's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline, StableDiffusionXLControlNetPipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from fisedit import Editor
from fisedit.adapters.base import AdapterStack
from fisedit.adapters.control_net import ControlNetReader
from fisedit.bench.workload import square_mask
from fisedit.costs.macs import unet_macs
from fisedit.errors import AdapterError, InputError
from fisedit.features.cache import FeatureOverlay
from fisedit.models.families.conditioning import Conditioning
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.values import AdapterUse, MaskSource
from tests.support import oracle
from tests.support.adapters import SD15_GRIDS, SD15_SIZES, filled
from tests.support.edits import CAT, DOG, pixels_outside
from tests.support.grids import grids
from tests.support.macs import counted, time_macs
from tests.support.pipelines import assembled
from tests.support.references import BLUE, RED, pixels

SQUARE = grids(16, 16)["square"]
QUICK = {"seed": 7, "num_inference_steps": 3, "width": 128, "height": 128}
T = torch.tensor(500)


def network(pipe, salt="", order="rgb"):
    """A ControlNet of the UNet's shape whose last layers are not zero."""
    model = ControlNetModel.from_unet(pipe.unet, controlnet_conditioning_channel_order=order)
    model = filled(model, salt)
    for layer in (*model.controlnet_down_blocks, model.controlnet_mid_block):
        layer.weight.data.mul_(0.3)
    return model


@pytest.fixture(params=["sd15", "demo"])
def pipe(request, pipelines):
    return pipelines[request.param]


@pytest.fixture
def editor(pipe, tmp_path):
    network(pipe).save_pretrained(tmp_path / "control")
    editor = Editor(pipe, model="demo")
    editor.load_adapter(tmp_path / "control", 0.7)
    return editor


def of_diffusers(pipe, networks, prompt, picture, scale, guidance=7.5, steps=3, **options):
    """Latents after every step [N, 4, h, w]."""
    is_xl = "text_encoder_2" in pipe.components
    kind = StableDiffusionXLControlNetPipeline if is_xl else StableDiffusionControlNetPipeline
    own = assembled(pipe, kind, controlnet=networks)
    path = []
    own(
        prompt,
        image=picture,
        num_inference_steps=steps,
        guidance_scale=guidance,
        controlnet_conditioning_scale=scale,
        generator=torch.Generator().manual_seed(7),
        height=128,
        width=128,
        callback_on_step_end=lambda _, __, ___, state: path.append(state["latents"]) or state,
        **options,
    )
    return torch.cat(path)


def latents(editor, result):
    return torch.cat(editor._trajectory_cache.get(result.id)[0].latents[1:])


@pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
def test_a_source_is_the_pipelines_own(pipe, editor, guidance):
    expected = of_diffusers(pipe, network(pipe), CAT, RED, 0.7, guidance)
    result = editor.generate(CAT, control=RED, guidance_scale=guidance, **QUICK)
    assert oracle.deviation(latents(editor, result), expected) <= 1e-4
    plain = editor.generate(CAT, guidance_scale=guidance, **QUICK)
    assert oracle.deviation(latents(editor, plain), expected) > 0.1


@pytest.mark.parametrize("before", [None, BLUE], ids=["over a source without", "over another control"])
def test_an_edit_of_everything_is_the_dense_one(pipe, editor, before):
    editor.generate(CAT, control=before, **QUICK)
    result = editor.edit(DOG, mask=np.ones((16, 16), bool), control=RED)
    expected = of_diffusers(pipe, network(pipe), DOG, RED, 0.7)
    assert oracle.deviation(latents(editor, result), expected) <= 1e-4


@pytest.mark.parametrize("guess", [False, True])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_one_of_stable_diffusion_xl_is_its_pipelines(pipelines, tmp_path, guess, kind):
    """A source, an edit of everything, and what an edit leaves outside; in guess mode too."""
    pipe, options = pipelines["sdxl"], {"guess_mode": guess}
    network(pipe).save_pretrained(tmp_path / "control")
    if kind == "file":
        (tmp_path / "control" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "one.safetensors")
    editor = Editor(pipe)
    editor.load_adapter(tmp_path / ("one.safetensors" if kind == "file" else "control"), 0.7, **options)
    source = editor.generate(CAT, control=RED, **QUICK)
    assert (
        oracle.deviation(latents(editor, source), of_diffusers(pipe, network(pipe), CAT, RED, 0.7, **options)) <= 1e-4
    )
    sparse = editor.edit(DOG, mask=SQUARE, growth=1)
    assert pixels_outside(sparse, source) and sparse.stats.unet_evaluations_sparse
    editor.checkout(source.id)
    result = editor.edit(DOG, mask=np.ones((16, 16), bool), control=BLUE)
    assert (
        oracle.deviation(latents(editor, result), of_diffusers(pipe, network(pipe), DOG, BLUE, 0.7, **options)) <= 1e-4
    )


def test_of_other_families_are_refused(pipelines, tmp_path):
    for own, other in (("demo", "sdxl"), ("sdxl", "demo")):
        network(pipelines[other]).save_pretrained(tmp_path / other)
        for source in (tmp_path / other, tmp_path / other / "diffusion_pytorch_model.safetensors"):
            with pytest.raises(AdapterError, match=r"for this model|for Stable Diffusion XL"):
                Editor(pipelines[own]).load_adapter(source)


def test_several_add_up(pipe, editor, tmp_path):
    network(pipe, "other", "bgr").save_pretrained(tmp_path / "other")
    editor.load_adapter(tmp_path / "other", 0.3)
    result = editor.generate(CAT, control=RED, **QUICK)
    both = [network(pipe), network(pipe, "other", "bgr")]
    expected = of_diffusers(pipe, both, CAT, [RED, RED], [0.7, 0.3])
    assert oracle.deviation(latents(editor, result), expected) <= 1e-4


USES = {
    "start": {"control_guidance_start": 0.4},
    "end": {"control_guidance_end": 0.6},
    "guess mode": {"guess_mode": True},
    "all": {"control_guidance_start": 0.2, "control_guidance_end": 0.8, "guess_mode": True},
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
def test_it_takes_part_in_the_steps_and_branches_that_diffusers_has(pipe, tmp_path, use, guidance):
    network(pipe).save_pretrained(tmp_path / "control")
    editor = Editor(pipe, model="demo")
    editor.load_adapter(tmp_path / "control", 0.7, **use)
    options = {"num_inference_steps": 5, "guidance_scale": guidance}
    source = editor.generate(CAT, control=RED, **QUICK | options)
    expected = of_diffusers(pipe, network(pipe), CAT, RED, 0.7, guidance, steps=5, **use)
    assert oracle.deviation(latents(editor, source), expected) <= 1e-4
    for control in (None, BLUE):
        editor.checkout(source.id)
        whole = editor.edit(DOG, mask=np.ones((16, 16), bool), control=control)
        expected = of_diffusers(pipe, network(pipe), DOG, control or RED, 0.7, guidance, steps=5, **use)
        assert oracle.deviation(latents(editor, whole), expected) <= 1e-4
    editor.checkout(source.id)
    part = editor.edit(DOG, mask=SQUARE, control=BLUE)
    assert pixels_outside(part, source)


def test_steps_without_it_cost_nothing(pipe, tmp_path):
    network(pipe).save_pretrained(tmp_path / "control")
    macs = []
    for use in ({}, {"control_guidance_end": 0.5}, {"guess_mode": True}):
        editor = Editor(pipe, model="demo")
        plain = editor.generate(CAT, **QUICK | {"num_inference_steps": 4}).stats.macs
        editor.load_adapter(tmp_path / "control", **use)
        macs.append(editor.generate(CAT, control=RED, **QUICK | {"num_inference_steps": 4}).stats.macs - plain)
    reading = 2 * macs[1] - macs[0]  # the control picture, once
    assert 0 < reading < macs[0]
    assert macs[2] - reading == pytest.approx((macs[0] - reading) / 2, rel=0.01)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ({"control_guidance_start": -0.1}, "control_guidance_start must be a share of the steps, 0 to 1, got -0.1"),
        ({"control_guidance_end": "1"}, "control_guidance_end must be a share of the steps, 0 to 1, got '1'"),
        ({"control_guidance_start": 0.5, "control_guidance_end": 0.5}, "must be less than control_guidance_end"),
        ({"guess_mode": 1}, "guess_mode must be True or False, got 1"),
    ],
)
def test_uses_out_of_range(editor, tmp_path, use, message):
    with pytest.raises(InputError, match=message):
        editor.load_adapter(tmp_path / "control", **use)


class Case:
    def __init__(self, pipe, batch, *, guess_mode=False):
        mask = np.zeros((16, 16), bool)
        mask[3:7, 2:6] = mask[10:12, 9:14] = True
        self.unet, self.inside, make = pipe.unet, torch.from_numpy(mask), torch.Generator().manual_seed(0)
        self.source = torch.randn(batch, 4, 16, 16, generator=make)
        self.texts = torch.randn(2, batch, 77, pipe.unet.config.cross_attention_dim, generator=make)
        self.edited = torch.where(self.inside, torch.randn(self.source.shape, generator=make), self.source)
        self.picture = torch.rand(1, 3, 128, 128, generator=make)
        self.reader, self.executor = ControlNetReader(network(pipe)), Executor(pipe.unet)
        self.map = self.reader.model.controlnet_cond_embedding(self.picture)
        self.stack = AdapterStack([self.reader.condition(self.map, AdapterUse(0.7, guess_mode=guess_mode), batch)])
        self.guess_mode = guess_mode
        self.plan = make_row_plan(mask, self.executor.num_levels)

    def record(self, stack):
        return self.executor.run_dense(self.source, T, Conditioning(self.texts[0]), {}, extra_layers=stack)[1]

    def replay(self, features, stack):
        overlay = FeatureOverlay(features, self.plan)
        return self.executor.run_sparse(self.edited, T, Conditioning(self.texts[1]), {}, overlay, extra_layers=stack)[0]

    def control(self, latents, text):
        left_out = len(latents) // 2 if self.guess_mode else 0
        latents, text = latents[left_out:], text[left_out:]
        options = {"conditioning_scale": 0.7, "guess_mode": self.guess_mode, "return_dict": False}
        skips, middle = self.reader.model(latents, T, text, self.picture.expand(len(latents), -1, -1, -1), **options)
        if not left_out:
            return skips, middle
        *skips, middle = (torch.cat([torch.zeros_like(each), each]) for each in (*skips, middle))
        return skips, middle

    def expected(self, *, recorded):
        """The oracle's prediction: the network mixed like the UNet, or without a record of it whole."""
        model, maps = self.reader.model, {}
        if recorded:
            with oracle.recording(model, maps):
                given = self.control(self.source, self.texts[0])
            picture = model.controlnet_cond_embedding
            with adding(self.unet, given):
                recording = oracle.record(self.unet, self.source, T, self.texts[0])
            inner = {name: each for name, each in maps.items() if not name.startswith("controlnet_")}
            with mixing_encoder(model, inner, self.inside):
                given = self.control(self.edited, self.texts[1])
            assert model.controlnet_cond_embedding is picture
        else:
            recording = oracle.record(self.unet, self.source, T, self.texts[0])
            skips, middle = self.control(self.edited, self.texts[1])
            masks = oracle.levels(self.inside)
            own = [torch.where(masks[oracle.grid_of(x)], x, torch.zeros_like(x)) for x in (*skips, middle)]
            given = own[:-1], own[-1]
        with adding(self.unet, given):
            return oracle.mixed_forward(self.unet, recording, self.edited, T, self.texts[1], self.inside)

    def rows(self, full):
        return full.flatten(2).transpose(1, 2)[:, self.inside.flatten()]


class mixing_encoder:  # noqa: N801 (a context)
    """`oracle.mixing` of a network's encoder alone: what its control picture becomes has other sizes."""

    def __init__(self, model, maps, active):
        self.contexts = []
        for name in ("conv_in", "down_blocks", "mid_block"):
            own = {
                key.removeprefix(f"{name}.").removeprefix(name): each
                for key, each in maps.items()
                if key.startswith(name)
            }
            self.contexts.append(oracle.mixing(getattr(model, name), own, active))

    def __enter__(self):
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error):
        for context in reversed(self.contexts):
            context.__exit__(*error)


class adding:  # noqa: N801 (a context)
    """The UNet with a ControlNet's maps."""

    def __init__(self, unet, given):
        self.unet, self.given = unet, given

    def __enter__(self):
        (skips, middle), forward, unet = self.given, type(self.unet).forward, self.unet
        unet.forward = lambda *args, **kwargs: forward(
            unet, *args, down_block_additional_residuals=skips, mid_block_additional_residual=middle, **kwargs
        )

    def __exit__(self, *_):
        del self.unet.__dict__["forward"]


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(
    ("batch", "guess_mode"), [(2, False), (1, False), (2, True)], ids=["guided", "unguided", "guess mode"]
)
@pytest.mark.parametrize("recorded", [True, False], ids=["with", "without"])
def test_a_sparse_step_is_the_mixed_forward(pipe, batch, guess_mode, recorded):
    """E4, over a source with the network or without."""
    case = Case(pipe, batch, guess_mode=guess_mode)
    rows = case.replay(case.record(case.stack if recorded else None), case.stack)
    assert oracle.deviation(rows, case.rows(case.expected(recorded=recorded))) <= 1e-4


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("recorded", [True, False], ids=["with", "without"])
def test_costs_are_the_counters(pipe, recorded):
    case = Case(pipe, 1)
    features = case.record(case.stack if recorded else None)
    (condition,) = case.stack.adapters
    sizes = [(16 >> i, 16 >> i) for i in range(case.executor.num_levels)]
    keys = [{}, {}]
    runs = [
        lambda: case.executor.run_sparse(
            case.edited,
            T,
            Conditioning(case.texts[1]),
            keys[0],
            FeatureOverlay(features, case.plan),
            extra_layers=case.stack,
        ),
        lambda: case.executor.run_sparse(
            case.edited, T, Conditioning(case.texts[1]), keys[1], FeatureOverlay(features, case.plan)
        ),
    ]
    for run in runs:
        run()  # the text is projected once
    own = counted(runs[0]) - counted(runs[1]) - time_macs(case.reader.model, 1)
    expected = condition.macs(case.unet, sizes, case.plan, recorded=recorded)
    assert abs(own - expected) <= (0.02 if recorded else 0.25) * expected


def test_an_edit_follows_its_control_inside_its_mask_alone(editor):
    source = editor.generate(CAT, **QUICK)
    results = [editor.checkout(source.id) and editor.edit(DOG, mask=SQUARE, control=p) for p in (None, RED, BLUE)]
    assert all(pixels_outside(result, source) for result in results)
    assert len({pixels(result).tobytes() for result in results}) == 3
    kept = editor.generate(CAT, control=RED, **QUICK)
    edit = editor.edit(DOG, mask=SQUARE)
    assert edit.config.like == kept.config.like != () and pixels_outside(edit, kept)


def test_a_session_keeps_it(editor, tmp_path):
    editor.unload_adapter()
    editor.load_adapter(tmp_path / "control", 0.7, control_guidance_end=0.7, guess_mode=True)
    source = editor.generate(CAT, control=RED, **QUICK)
    before = editor.edit(DOG, mask=SQUARE)
    editor.save(tmp_path / "session")
    again = Editor(editor.pipe, model="demo")
    again.load(tmp_path / "session")
    assert again.history[0].config.like == source.config.like
    again.undo()
    assert np.array_equal(pixels(again.edit(DOG, mask=SQUARE)), pixels(before))
    assert again.generate(CAT, control=RED, **QUICK).config.like == source.config.like


def test_networks_that_do_not_fit(pipe, pipelines, tmp_path):
    other = pipelines["sd15" if pipe is pipelines["demo"] else "demo"]
    network(other).save_pretrained(tmp_path / "other")
    editor = Editor(pipe, model="demo")
    with pytest.raises(AdapterError, match="the ControlNet's block_out_channels must be"):
        editor.load_adapter(tmp_path / "other")
    ControlNetModel.from_unet(pipe.unet, conditioning_channels=4).save_pretrained(tmp_path / "four")
    with pytest.raises(AdapterError, match="must read pictures of 3 channels, got 4"):
        editor.load_adapter(tmp_path / "four")
    network(pipe).save_pretrained(tmp_path / "cut")
    weights = tmp_path / "cut/diffusion_pytorch_model.safetensors"
    whole = load_file(weights)
    save_file({name: each for name, each in whole.items() if name != "conv_in.weight"}, weights, {"format": "pt"})
    with pytest.raises(AdapterError, match=r"weights lack conv_in\.weight; download them again"):
        editor.load_adapter(tmp_path / "cut")
    with pytest.raises(AdapterError, match="a control needs a control adapter"):
        editor.generate(CAT, control=RED, **QUICK)


def moved(left):
    """A control picture with one bright square."""
    levels = np.zeros((128, 128, 3), np.uint8)
    levels[40:72, left : left + 32] = 255
    return Image.fromarray(levels)


@pytest.mark.parametrize("prompt", [CAT, DOG], ids=["same words", "other words"])
def test_what_changed_in_the_control_is_edited(editor, prompt):
    source = editor.generate(CAT, control=moved(16), **QUICK)
    result = editor.edit(prompt, control=moved(24))
    rows, columns = np.flatnonzero(result.mask.grid.any(1)), np.flatnonzero(result.mask.grid.any(0))
    if prompt == CAT:  # the strips that were left and entered, and a cell around them
        assert (rows.min(), rows.max(), columns.min(), columns.max()) == (4, 9, 1, 7)
    assert result.mask.grid[4:10, 1:4].all() and result.mask.grid[4:10, 5:8].all()
    assert pixels_outside(result, source) and not np.array_equal(pixels(result), pixels(source))


def test_a_given_mask_stays_as_it_is(editor):
    editor.generate(CAT, control=moved(16), **QUICK)
    assert np.array_equal(editor.edit(DOG, mask=SQUARE, control=moved(24)).mask.grid, SQUARE)


def test_the_same_control_changes_nothing(editor):
    source = editor.generate(CAT, control=moved(16), **QUICK)
    assert np.array_equal(pixels(editor.edit(CAT, control=moved(16))), pixels(source))


def test_an_edit_keeps_the_control_of_what_it_edits(editor):
    """Words alone then edit what they name, and the same words nothing."""
    editor.generate(CAT, control=moved(16), **QUICK)
    second = editor.edit(CAT, control=moved(24))
    assert np.array_equal(pixels(editor.edit(CAT)), pixels(second))
    words = editor.edit(DOG)
    assert words.config.like == second.config.like
    assert words.mask.source is MaskSource.ATTENTION


@pytest.mark.parametrize("prompt", [CAT, DOG], ids=["same words", "other words"])
def test_what_is_protected_stays_whatever_the_control(editor, prompt):
    source = editor.generate(CAT, control=moved(16), **QUICK)
    keep = np.zeros((16, 16), bool)
    keep[:, 5:] = True
    result = editor.edit(prompt, protect=keep, control=moved(24))
    assert result.mask.grid.any() and not (result.mask.grid & keep).any()
    assert np.array_equal(pixels(result)[:, 40:], pixels(source)[:, 40:])


@pytest.mark.parametrize("first", [True, False])
def test_a_source_and_an_edit_of_other_modes(pipe, tmp_path, first):
    network(pipe).save_pretrained(tmp_path / "control")
    editor = Editor(pipe, model="demo")
    editor.load_adapter(tmp_path / "control", 0.7, guess_mode=first)
    source = editor.generate(CAT, control=RED, **QUICK)
    editor.unload_adapter()
    editor.load_adapter(tmp_path / "control", 0.7, guess_mode=not first)
    result = editor.edit(DOG, mask=np.ones((16, 16), bool), control=RED)
    expected = of_diffusers(pipe, network(pipe), DOG, RED, 0.7, guess_mode=not first)
    assert oracle.deviation(latents(editor, result), expected) <= 1e-4
    editor.checkout(source.id)
    assert pixels_outside(editor.edit(DOG, mask=SQUARE, control=RED), source)


def test_a_network_that_pools_is_refused(pipe, tmp_path):
    model = network(pipe)
    model.register_to_config(global_pool_conditions=True)
    model.save_pretrained(tmp_path / "shuffle")
    with pytest.raises(AdapterError, match="a ControlNet that pools its maps"):
        Editor(pipe, model="demo").load_adapter(tmp_path / "shuffle")


@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_a_control_net_adds_at_most_half_to_a_step_of_5_percent(sd15_executor, monkeypatch, dilation):
    monkeypatch.setattr("fisedit.adapters.control_net.identity_of", lambda *_: "network")  # no weights to hash
    with torch.device("meta"):
        network = ControlNetModel.from_unet(sd15_executor.unet, load_weights_from_unet=False)
    plan = make_row_plan(dilate(square_mask(0.05, 64), dilation), sd15_executor.num_levels)
    condition = ControlNetReader(network).condition(None, AdapterUse(), 2)
    without = unet_macs(sd15_executor.sites, plan.rows, SD15_SIZES, 1, 77)
    assert 0.3 < condition.macs(sd15_executor.unet, SD15_GRIDS, plan, recorded=True) / without < 0.4
