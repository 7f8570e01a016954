"""`FisEditPipeline` beside diffusers' own pipeline: the same pictures of the same arguments, and edits by them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    TCDScheduler,
    UniPCMultistepScheduler,
)
from safetensors.torch import save_file

from fisedit import Editor, FisEditPipeline
from fisedit.errors import AdapterError, FisEditError, InputError, PromptError
from fisedit.integrations.diffusers_pipeline import _scheduler_name
from fisedit.models import paths
from tests.support import ip_adapters
from tests.support.edits import CAT, DOG, Calls
from tests.support.grids import grids
from tests.support.pictures import scene
from tests.support.pipelines import build_pipeline

QUICK = {"num_inference_steps": 3, "guidance_scale": 4.0}
SMALL = {"num_inference_steps": 1, "guidance_scale": 4.0, "height": 64, "width": 64}


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.fixture
def pipe(pipelines) -> FisEditPipeline:
    """Over models of its own scheduler, which a test may exchange."""
    own = StableDiffusionPipeline(**pipelines["demo"].components, requires_safety_checker=False)
    own.set_progress_bar_config(disable=True)
    return FisEditPipeline.from_pipe(own)


@pytest.mark.parametrize("scheduler", [DDIMScheduler, EulerAncestralDiscreteScheduler])
def test_without_an_image_it_is_diffusers_pipeline(pipe, scheduler):
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    theirs = StableDiffusionPipeline(**pipe.components, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    asked = {**QUICK, "negative_prompt": "blue", "height": 64, "width": 72, "output_type": "np"}
    ours = pipe(CAT, generator=seed(5), **asked).images
    assert ours.shape == (1, 64, 72, 3)
    assert np.abs(ours - theirs(CAT, generator=seed(5), **asked).images).max() <= 1.5 / 255


def test_tcd_runs_with_its_own_eta(pipe):
    pipe.scheduler = TCDScheduler.from_config(pipe.scheduler.config)
    theirs = StableDiffusionPipeline(**pipe.components, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    asked = {**QUICK, "eta": 0.3, "height": 64, "width": 64, "output_type": "np"}
    ours = pipe(CAT, generator=seed(5), **asked).images
    assert np.abs(ours - theirs(CAT, generator=seed(5), **asked).images).max() <= 1.5 / 255
    with pytest.raises(InputError, match="at their defaults, got eta; leave them out"):
        pipe(CAT, **QUICK, eta=0.0)


def test_a_picture_of_its_own_is_edited_as_it_was_made(pipe):
    source, _ = pipe([CAT, DOG], generator=seed(7), **QUICK).images
    with Calls(pipe.editor.pipe.unet) as calls:
        (edit,) = pipe(DOG, image=source, mask_image=grids(16, 16)["square"], growth=1, **QUICK).images
    assert calls.sparse == 3 and not calls.dense
    changed = (np.asarray(source) != np.asarray(edit)).any(-1)
    assert changed.any() and not changed[~np.kron(grids(16, 16)["square"], np.ones((8, 8), bool))].any()


def test_an_image_is_opened_once_and_several_prompts_give_several_images(pipe):
    asked = {"image": scene(), "source_prompt": CAT, "mask_image": grids(16, 16)["square"], "growth": 1, **QUICK}
    images, unsafe = pipe([DOG, "a fox and a cake on a beach"], return_dict=False, **asked)
    assert unsafe is None and len(images) == 2 and images[0].tobytes() != images[1].tobytes()
    with Calls(pipe.editor.pipe.unet) as calls:
        pipe(DOG, **asked)
        assert not calls.dense
        pipe(DOG, **{**asked, "source_prompt": "a lion and a cake on a beach"})
    assert calls.dense == 4  # DDIM's inversion of three steps


def test_a_scheduler_that_an_opened_image_cannot_have_is_told(pipe, caplog):
    asked = {"image": scene(), "source_prompt": CAT, "mask_image": grids(16, 16)["square"], **QUICK}
    pipe.editor.pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe(DOG, **asked)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    pipe(DOG, **asked)
    assert not caplog.records, "nobody asked for another one"
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    for prompt in (DOG, "a fox and a cake on a beach"):
        pipe(prompt, **asked)
    line = "an opened image is edited with DDIM, got EulerAncestralDiscreteScheduler; set DDIMScheduler"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(line)
    own = pipe(CAT, **QUICK).images[0]
    pipe(DOG, image=own, mask_image=grids(16, 16)["square"], **QUICK)
    assert len(caplog.messages) == 1 and pipe.editor.current.config.scheduler == "euler_a"


@pytest.mark.parametrize(
    ("scheduler", "name"),
    [
        (DDIMScheduler(), "ddim"),
        (DDIMScheduler(timestep_spacing="trailing"), "ddim_trailing"),
        (PNDMScheduler(skip_prk_steps=True), "pndm"),
        (EulerDiscreteScheduler(timestep_spacing="trailing"), "euler_trailing"),
        (DPMSolverMultistepScheduler(use_karras_sigmas=True), "dpmsolver++_karras"),
        (
            DPMSolverMultistepScheduler(use_karras_sigmas=True, algorithm_type="sde-dpmsolver++"),
            "dpmsolver++_sde_karras",
        ),
    ],
)
def test_a_scheduler_of_diffusers_is_known_by_its_class_and_settings(scheduler, name):
    assert _scheduler_name(scheduler) == name


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        (EulerDiscreteScheduler(use_karras_sigmas=True), "runs with trailing, got karras"),
        (UniPCMultistepScheduler(use_beta_sigmas=True), "runs with none of these, got beta"),
        (PNDMScheduler(skip_prk_steps=False), "runs with none of these, got skip_prk_steps=False; set it otherwise"),
        (
            DPMSolverMultistepScheduler(algorithm_type="dpmsolver", final_sigmas_type="sigma_min"),
            "runs with exponential, karras, sde, got algorithm_type=dpmsolver",
        ),
    ],
)
def test_settings_that_no_sampler_has_are_refused(scheduler, line):
    with pytest.raises(InputError, match=line):
        _scheduler_name(scheduler)


def test_what_it_cannot_do_is_one_line(pipe):
    for output_type in ("pil", "np"):
        with pytest.raises(PromptError, match="got an empty list"):
            pipe([], output_type=output_type)
    with pytest.raises(InputError, match=r"scheduler must be one of .*, got DDPMScheduler; exchange it"):
        pipe.scheduler = DDPMScheduler()
    with pytest.raises(InputError, match="output_type must be one of pil, np, got 'latent'"):
        pipe(CAT, output_type="latent")
    with pytest.raises(InputError, match=r"generator must be a torch.Generator, got int; seed one"):
        pipe(CAT, generator=3)
    for prompt in (None, 7):
        with pytest.raises(PromptError, match=f"prompt must be text or several texts, got {type(prompt).__name__}"):
            pipe(prompt)
    with pytest.raises(PromptError, match="prompt must be text, got NoneType"):
        pipe([None])
    for image in ("a.png", np.zeros((64, 64, 3)), [scene()]):
        with pytest.raises(InputError, match=f"picture must be a PIL image, got {type(image).__name__}; open files"):
            pipe(CAT, image=image)


def test_arguments_that_would_be_ignored_are_refused_by_name(pipe):
    unknown = {"num_images_per_prompt": 4, "callback_on_step_end": print, "eta": 1.0, "nonsense": 3}
    for image in (None, scene()):
        with pytest.raises(InputError) as refused:
            pipe(CAT, image=image, **QUICK, **unknown)
        line = str(refused.value)
        assert all(name in line for name in unknown) and line.endswith("; leave them out") and "\n" not in line
    edits = {"mask_image": scene(), "source_prompt": CAT, "strength": 0.5, "quality": "fast"}
    for name, value in edits.items():
        with pytest.raises(InputError, match=f"image must be given with {name}, got None; give it, or leave"):
            pipe(CAT, **QUICK, **{name: value})


def test_arguments_at_diffusers_defaults_are_accepted(pipe):
    usual = {"num_images_per_prompt": 1, "eta": 0.0, "guidance_rescale": 0.0, "latents": None, "strength": 1.0}
    usual |= {"callback_on_step_end": None, "callback_on_step_end_tensor_inputs": ["latents"], "mask_image": None}
    plain = pipe(CAT, generator=None, output_type="pil", return_dict=True, **QUICK).images[0]
    assert pipe(CAT, **QUICK, **usual).images[0].tobytes() == plain.tobytes()
    assert len(pipe(DOG, image=plain, **QUICK, **usual | {"mask_image": grids(16, 16)["square"]}).images) == 1


def test_loading_takes_what_asks_for_nothing_else(monkeypatch):
    taken = {}
    monkeypatch.setattr(Editor, "from_pretrained", lambda model, **given: taken.update(given))
    usual = {"safety_checker": None, "requires_safety_checker": False, "use_safetensors": True, "variant": None}
    FisEditPipeline.from_pretrained("m", torch_dtype=torch.bfloat16, **usual, feature_extractor=None, device="cpu")
    assert taken == {"dtype": torch.bfloat16, "device": "cpu"}
    FisEditPipeline.from_pretrained("m", torch_dtype=torch.float16, variant="fp16")
    assert taken == {"dtype": torch.float16, "device": "cpu"}
    FisEditPipeline.from_single_file("m", variant="non_ema", config=None)
    assert taken["variant"] == "non_ema"
    for other in (
        {"original_config": "v1.yaml"},
        {"use_safetensors": False},
        {"safety_checker": 3},
        {"revision": "main"},
    ):
        with pytest.raises(InputError, match=f"got {next(iter(other))}; leave them out"):
            FisEditPipeline.from_pretrained("m", **other)


def test_models_move_and_are_loaded_as_in_diffusers(model):
    pipe = FisEditPipeline.from_pretrained(model, torch_dtype=torch.float32, device="cpu", local_files_only=True)
    assert pipe.to(torch.bfloat16) is pipe and pipe.components["unet"].dtype == torch.bfloat16
    assert len(pipe(CAT, num_inference_steps=1, height=64, width=64).images) == 1


def test_what_moves_keeps_its_adapters_and_bounds():
    bounds = {"cache_dtype": "int4", "max_recorded_bytes": 10**8}
    pipe = FisEditPipeline.from_pretrained("demo", torch_dtype=torch.float32, **bounds)
    pipe.editor.load_adapter("demo-look", scale=0.5)
    before = pipe.editor
    pipe.to(torch.float64)
    now = pipe.editor
    assert now is not before and now.max_recorded_bytes == before.max_recorded_bytes == 10**8
    assert [(one.source, one.use) for one in now.adapters] == [(one.source, one.use) for one in before.adapters]
    assert now._engine.encoding == before._engine.encoding != Editor(now.pipe)._engine.encoding


def test_nothing_moves_where_an_adapter_is_gone(tmp_path):
    pipe = FisEditPipeline.from_pretrained("demo", torch_dtype=torch.float32)
    folder = shutil.copytree(paths.demo_adapter_folder("demo-look"), tmp_path / "look")
    pipe.editor.load_adapter(folder)
    source = pipe(CAT, **QUICK).images[0]
    before = pipe.editor
    shutil.rmtree(folder)
    with pytest.raises(AdapterError):
        pipe.to(torch.float64)
    assert pipe.editor is before and before.adapters and before.pipe.unet.dtype == torch.float32
    assert len(pipe(DOG, image=source, mask_image=grids(32, 32)["square"], **QUICK).images) == 1


def test_sources_of_an_editor_that_was_exchanged_are_forgotten(pipe):
    source = pipe(CAT, **QUICK).images[0]
    pipe.editor = Editor(pipe.editor.pipe)
    assert len(pipe(DOG, image=source, mask_image=grids(16, 16)["square"], **QUICK).images) == 1


@pytest.fixture
def loaded(pipelines, tmp_path) -> FisEditPipeline:
    """Over a folder, beside which are a LoRA, a word and an IP-Adapter."""
    own = build_pipeline("demo")
    own.save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    layer, width = "lora_unet_mid_block_attentions_0_proj_out", own.unet.mid_block.attentions[0].proj_out.in_channels
    weights = {
        f"{layer}.lora_down.weight": torch.randn(2, width, 1, 1, generator=generator),
        f"{layer}.lora_up.weight": torch.randn(width, 2, 1, 1, generator=generator),
    }
    save_file(weights | {f"{layer}.alpha": torch.tensor(2.0)}, tmp_path / "style.safetensors")
    word = torch.randn(1, own.text_encoder.config.hidden_size, generator=generator)
    save_file({"<toy>": word}, tmp_path / "learned_embeds.safetensors")
    ip_adapters.save(ip_adapters.tensors(own.unet, "plain"), tmp_path / "models", "ip.safetensors")
    return FisEditPipeline.from_pretrained(tmp_path / "model", device="cpu", torch_dtype=torch.float32)


def test_a_script_loads_loras_words_and_pictures_by_diffusers_methods(loaded, tmp_path):
    def picture(prompt=CAT, **more):
        return loaded(prompt, generator=seed(5), **SMALL, **more).images[0].tobytes()

    plain, editor = picture(), Editor(loaded.editor.pipe)
    name = editor.load_lora(tmp_path / "style.safetensors", 0.5)
    half = editor.generate(CAT, seed=5, **SMALL).image.tobytes()
    editor.unload_lora(name)
    loaded.load_lora_weights(tmp_path, weight_name="style.safetensors", adapter_name="mine")
    assert loaded.get_active_adapters() == ["mine"] == loaded.get_list_adapters()["unet"]
    loaded.set_adapters("mine", 0.5)
    assert picture() == half != plain
    loaded.disable_lora()
    assert picture() == plain and not loaded.get_active_adapters()
    loaded.enable_lora()
    loaded.set_adapters([name], [0.5])  # by the name of its file
    assert picture() == half
    with pytest.raises(AdapterError, match="unload_lora_weights first"):
        loaded.save_pretrained(tmp_path / "saved")
    loaded.unload_lora_weights()
    assert picture() == plain
    word = picture(f"{CAT} <toy>")
    loaded.load_textual_inversion(tmp_path)
    assert picture(f"{CAT} <toy>") != word and picture() == plain
    loaded.unload_textual_inversion()
    assert picture(f"{CAT} <toy>") == word
    loaded.load_ip_adapter(tmp_path, subfolder="models", weight_name="ip.safetensors")
    seen = picture(ip_adapter_image=scene())
    loaded.set_ip_adapter_scale(0.0)
    assert picture(ip_adapter_image=scene()) != seen
    loaded.unload_ip_adapter()
    assert picture() == plain


def test_parts_are_those_of_the_editor_and_may_be_exchanged(loaded, tmp_path):
    plain = loaded(CAT, generator=seed(5), **SMALL).images[0]
    assert loaded.unet is loaded.editor.pipe.unet and loaded.safety_checker is None
    loaded.safety_checker = None
    other = build_pipeline("demo", seed=1).vae
    loaded.vae = other
    theirs = StableDiffusionPipeline(**loaded.components, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    own = loaded(CAT, generator=seed(5), **SMALL).images[0]
    expected = theirs(CAT, generator=seed(5), **SMALL).images[0]
    assert np.abs(np.asarray(own, int) - np.asarray(expected, int)).max() <= 1
    assert own.tobytes() != plain.tobytes() and not loaded.editor.model
    given = FisEditPipeline.from_pretrained(tmp_path / "model", vae=other, torch_dtype=torch.float32, device="cpu")
    assert given.vae is other and given(CAT, generator=seed(5), **SMALL).images[0].tobytes() == own.tobytes()
    loaded.save_pretrained(tmp_path / "saved")
    again = FisEditPipeline.from_pretrained(tmp_path / "saved", torch_dtype=torch.float32, device="cpu")
    assert again(CAT, generator=seed(5), **SMALL).images[0].tobytes() == own.tobytes()


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda pipe: pipe.fuse_lora(lora_scale=0.7), "has no fuse_lora of diffusers' pipelines; a LoRA counts"),
        (lambda pipe: pipe.enable_model_cpu_offload(), "bound memory by max_recorded_bytes"),
        (lambda pipe: pipe.enable_freeu(1, 1, 1, 1), "has no enable_freeu .* leave it out"),
        (lambda pipe: pipe.encode_prompt(CAT), "give the prompt itself"),
        (lambda pipe: pipe.guidance_scale, "has no guidance_scale"),
        (lambda pipe: pipe.load_lora_weights({"a": 1}), "must be given, got dict"),
        (lambda pipe: pipe.load_lora_weights("owner/name", local_files_only=True), "owner/name is not on this machine"),
        (lambda pipe: pipe.set_adapters(["a"], [1, 2]), "must be 1 numbers, got 2"),
        (lambda pipe: pipe.set_adapters("a"), "no LoRA 'a' is loaded"),
        (lambda pipe: pipe.load_ip_adapter("owner/name", ["a", "b"], "c"), "load adapters one by one"),
        (lambda pipe: pipe.unload_ip_adapter(), "none"),
        (lambda pipe: setattr(pipe, "vae", pipe.unet), "vae must be AutoencoderKL, got UNet2DConditionModel"),
        (lambda pipe: setattr(pipe, "safety_checker", 3), "does not use safety_checker, got int; only None"),
        (lambda pipe: setattr(pipe, "vea", pipe.vae), "does not use vea"),
        (lambda pipe: type(pipe).from_single_file("gone.safetensors"), "nothing there"),
        (lambda pipe: type(pipe).from_single_file("demo", original_config="v1.yaml"), "original_config"),
    ],
)
def test_what_has_no_counterpart_is_one_line_that_names_it(pipe, call, line):
    with pytest.raises(FisEditError, match=line) as raised:
        call(pipe)
    assert "\n" not in str(raised.value)


def test_what_changes_no_picture_is_told_and_what_diffusers_has_not_is_no_attribute(pipe, caplog):
    pipe.enable_attention_slicing()
    pipe.enable_vae_tiling()
    pipe.set_progress_bar_config(disable=True)
    assert [message.split()[0] for message in caplog.messages] == ["enable_attention_slicing", "enable_vae_tiling"]
    assert not hasattr(pipe, "text_encoder_2") and hasattr(pipe, "unet")
