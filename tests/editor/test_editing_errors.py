"""What is refused, what interrupts, and that the editor works on as if it had not happened."""

from __future__ import annotations

import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, replace
from functools import partial
from io import BytesIO
from threading import Thread

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from torch.nn.modules.module import register_module_forward_pre_hook

from fisedit import Cancelled, Editor, Region
from fisedit.edits.pipeline import EditPipeline
from fisedit.errors import AdapterError, InputError, MaskError, ModelError, NumericsError, PromptError, SessionError
from fisedit.sessions.store import SessionStore
from fisedit.storage.canvas import to_editable
from fisedit.values import SavedAdapter
from tests.support.edits import BIRD, CAT, DOG, latents
from tests.support.folders import claims
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline

SQUARE = grids(16, 16)["square"]
QUICK = {"seed": 7, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def expected(pipelines):
    """The edit that every editor here must still be able to make."""
    editor = Editor(pipelines["shallow"])
    editor.generate(CAT, **QUICK)
    return editor.edit(DOG, mask=SQUARE, growth=1)


@pytest.fixture
def gigapixels(monkeypatch, tmp_path):
    """A lazily opened PNG whose header says 60,000 x 60,000 pixels, opened without Pillow's own limit."""
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    (tmp_path / "huge.png").write_bytes(claims(file.getvalue(), 60_000))
    with monkeypatch.context() as patched:
        patched.setattr(Image, "MAX_IMAGE_PIXELS", None)
        huge = Image.open(tmp_path / "huge.png")
    with huge:
        yield huge


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("source")
def test_gigapixels_are_refused_before_they_are_decoded(editor, expected, gigapixels):
    for call in (editor.open, to_editable):  # a reference picture passes the latter
        with pytest.raises(InputError, match="must have at most 64 million pixels, got 60000x60000"):
            call(gigapixels)
    for name in ("mask", "protect"):
        with pytest.raises(MaskError, match="must have at most 64 million pixels, got 60000x60000"):
            editor.edit(DOG, **{"mask": SQUARE, name: gigapixels})
    still_works(editor, expected)


def still_works(editor, expected):
    """One source, nothing added, and the next edit as if nothing had been."""
    assert len(editor.history) == 1 and editor.current is editor.history[0]
    result = editor.edit(DOG, mask=SQUARE, growth=1)
    ours = latents(editor._trajectory_cache.get(result.id)[0])
    assert result.image.tobytes() == expected.image.tobytes()
    assert ours.isfinite().all() and result.id == "1"


GENERATE = [
    ({"prompt": ""}, PromptError, "prompt must say something, got ''"),
    ({"prompt": " \n\t"}, PromptError, "prompt must say something"),
    ({"prompt": None}, PromptError, "prompt must be text, got NoneType"),
    ({"prompt": "a cat \udcff"}, PromptError, "prompt must be Unicode text, got 'a cat .udcff'; remove"),
    ({"negative_prompt": "\ud800"}, PromptError, "negative_prompt must be Unicode text"),
    ({"prompt": "a cat <hypernet:ink:1>"}, PromptError, "prompt has <hypernet:ink:1>, which is a tag that"),
    *(
        ({"prompt": nothing}, PromptError, "prompt must say something, got")
        for nothing in ("((()))", "(:1.5)", "[]", "BREAK", "\u00a0\u200b", "<lora:ink:1>")
    ),
    (
        {"negative_prompt": "a dog, embedding:ink"},
        PromptError,
        "negative_prompt has embedding:ink, which is not loaded",
    ),
    ({"negative_prompt": "[a|b]"}, PromptError, r"negative_prompt has \[a|b\], which changes with every step"),
    ({"prompt": ["a cat"]}, PromptError, "prompt must be text, got list"),
    ({"negative_prompt": None}, PromptError, "negative_prompt must be text, got NoneType"),
    ({"num_inference_steps": 0}, InputError, r"num_inference_steps must be a whole number in \[1, 999\], got 0"),
    ({"num_inference_steps": 1001}, InputError, "got 1001"),
    ({"num_inference_steps": True}, InputError, "got True"),
    ({"num_inference_steps": 2.5}, InputError, "got 2.5"),
    ({"width": 100}, InputError, "width must be divisible by 8, got 100; use 96"),
    ({"height": 0}, InputError, r"height must be a whole number in \[64, 2048\], got 0"),
    ({"height": 4096}, InputError, "got 4096"),
    ({"width": -64}, InputError, "got -64"),
    ({"width": "128"}, InputError, "got '128'"),
    ({"seed": -1}, InputError, "seed must be a whole number"),
    ({"seed": 2**63}, InputError, "seed must be a whole number"),
    ({"guidance_scale": math.nan}, InputError, r"guidance_scale must be in \[0, 100\], got nan"),
    ({"guidance_scale": math.inf}, InputError, "got inf"),
    ({"guidance_scale": -1}, InputError, "got -1"),
    ({"guidance_scale": "much"}, InputError, "got 'much'"),
    ({"guidance_scale": None}, InputError, "got None"),
    ({"scheduler": "deis"}, InputError, r"scheduler must be one of ddim, .*dpmsolver\+\+, .*, got 'deis'"),
    ({"scheduler": None}, InputError, "scheduler must be one of"),
    ({"scheduler": "lcm", "num_inference_steps": 60}, InputError, "must suit the scheduler lcm, got 60; use fewer"),
    ({"num_inference_steps": 1000}, InputError, "num_inference_steps must be .* got 1000"),
]

EDIT = [
    ({"prompt": ""}, PromptError, "prompt must say something"),
    ({"prompt": 7}, PromptError, "prompt must be text, got int"),
    ({"prompt": "a dog AND a cake"}, PromptError, "prompt has AND, which joins pictures of several prompts"),
    ({"regions": [(Region.box(0, 0, 64, 64), "{a|b}")]}, PromptError, r"prompt has \{a\|b\}, which chooses at random"),
    ({"mask": np.ones((15, 16), bool)}, MaskError, "mask must have the picture's 128x128 pixels"),
    ({"mask": np.ones((64, 64))}, MaskError, "got 64x64; resize it"),
    ({"mask": "square"}, MaskError, "mask must be a PIL image, a numpy array or an EditMask, got str"),
    ({"mask": np.full((128, 128), math.nan, np.float32)}, MaskError, "must hold values from 0 to 1, got nan"),
    ({"mask": np.full((128, 128), 300)}, MaskError, "must hold values from 0 to 255"),
    ({"mask": SQUARE, "protect": np.ones((15, 16), bool)}, MaskError, "128x128 pixels"),
    ({"prompt": CAT, "mask": np.ones((15, 16), bool)}, MaskError, "128x128 pixels"),
    ({"growth": -1}, InputError, r"growth must be one number of latent cells in \[0, 64\], or 3 of them, got -1"),
    ({"growth": (1, 2)}, InputError, r"got \(1, 2\)"),
    ({"growth": 65}, InputError, "got 65"),
    ({"growth": 1.5}, InputError, "got 1.5"),
    ({"growth": "wide"}, InputError, "got 'wide'"),
    ({"growth": True}, InputError, "got True"),
    ({"growth": np.ones((9, 300))}, InputError, r"growth must be one number .* got array\(\[\["),
    ({"seed": 10**5000}, InputError, "seed must be a whole number in .* too large to print"),
    ({"seed": np.arange(3)}, InputError, r"seed must be a whole number in .* got array\(\[0, 1, 2"),
    ({"strength": math.nan}, InputError, r"strength must be in \(0, 1\], got nan"),
    ({"regions": None}, InputError, "regions must be 1 to 16 pairs of a Region and a prompt, got None"),
    ({"instance": 10**5000}, MaskError, "instance must be below 1, .* too large to print"),
    ({"probe_steps": 4}, InputError, "probe_steps must be at most the picture's 3 steps, got 4; use fewer"),
    ({"prompt": "a bird on a cat", "probe_steps": 99}, InputError, "at most the picture's 3 steps, got 99"),
    ({"probe_steps": 4, "mask_method": "latents"}, InputError, "at most the picture's 3 steps, got 4"),
]

NO_BYTES = ["4G", math.nan, math.inf, 1.5, -1, True, 10**400, []]


@pytest.mark.usefixtures("source")
def test_generate_refuses_in_one_line(editor, expected):
    for given, error, message in GENERATE:
        with pytest.raises(error, match=message) as caught:
            editor.generate(**({"prompt": CAT} | QUICK | given))
        assert "\n" not in str(caught.value), given
    still_works(editor, expected)


@pytest.mark.usefixtures("source")
def test_edit_refuses_in_one_line(editor, expected):
    for given, error, message in EDIT:
        with pytest.raises(error, match=message) as caught:
            editor.edit(**({"prompt": DOG} | given))
        assert "\n" not in str(caught.value), given
    still_works(editor, expected)


@pytest.mark.parametrize("name", ["max_recorded_bytes", "max_host_bytes", "max_disk_bytes"])
@pytest.mark.parametrize("value", NO_BYTES, ids=lambda value: str(value)[:5])
def test_bounds_of_memory_are_numbers_of_bytes(pipelines, name, value):
    with pytest.raises(InputError, match=rf"{name} must be a whole number in \[0, \d+\], got ") as caught:
        Editor(pipelines["shallow"], **{name: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "call",
    [
        lambda editor: editor.load_lora(None),
        lambda editor: editor.load_adapter(7),
        lambda editor: editor.load_textual_inversion([]),
        lambda editor: editor.scale_loras(None),
        lambda editor: editor.calibrate(10**400),
    ],
)
def test_what_is_no_path_or_no_number_is_one_line(editor, call):
    with pytest.raises(InputError, match="must be") as caught:
        call(editor)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda editor: editor.edit(DOG),
        lambda editor: editor.undo(),
        lambda editor: editor.redo(),
        lambda editor: editor.current,
        lambda editor: editor.attention(DOG),
    ],
)
def test_before_a_source(pipelines, expected, call):
    editor = Editor(pipelines["shallow"])
    with pytest.raises(SessionError, match="there is no source to edit yet; call generate first"):
        call(editor)
    editor.generate(CAT, **QUICK)
    still_works(editor, expected)


@pytest.mark.usefixtures("source")
def test_an_unknown_result(editor, expected):
    with pytest.raises(SessionError, match="no result '9' in this session; it has 0"):
        editor.checkout("9")
    still_works(editor, expected)


class Boom(Exception):
    """Not one of ours."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("error", [Cancelled("stop"), Boom("stop"), KeyboardInterrupt("stop")], ids=repr)
@pytest.mark.parametrize("call", ["generate", "edit", "words", "dense"])
@pytest.mark.usefixtures("source")
def test_on_step_may_raise_anything(editor, expected, error, call):
    """E8 between steps."""

    def on_step(i, *_):
        if i == 2:
            raise error

    calls = {
        "generate": lambda: editor.generate(BIRD, on_step=on_step, **QUICK),
        "edit": lambda: editor.edit(BIRD, mask=SQUARE, growth=1, on_step=on_step),
        "words": lambda: editor.edit(BIRD, on_step=on_step),
        "dense": lambda: editor.edit(BIRD, mask=np.ones((16, 16), bool), on_step=on_step),
    }
    with pytest.raises(type(error), match="stop"):
        calls[call]()
    still_works(editor, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("place", ["unet.mid_block", "unet.up_blocks.1", "vae.decoder.mid_block"])
@pytest.mark.parametrize("call", ["generate", "edit"])
@pytest.mark.usefixtures("source")
def test_a_failure_inside_a_model(editor, expected, place, call):
    """E8 in the middle of a step or of a decode."""
    pipe = editor.pipe
    name, _, path = place.partition(".")
    before = {key: value.clone() for key, value in pipe.unet.state_dict().items()}

    broken = getattr(pipe, name).get_submodule(path)

    def burst(module, _):
        if module is broken:
            raise Boom("inside")

    handle = register_module_forward_pre_hook(burst)
    with pytest.raises(Boom, match="inside"):
        editor.generate(BIRD, **QUICK) if call == "generate" else editor.edit(BIRD, mask=SQUARE, growth=1)
    handle.remove()
    assert not any("forward" in vars(module) for model in (pipe.unet, pipe.vae) for module in model.modules())
    assert all(torch.equal(pipe.unet.state_dict()[key], value) for key, value in before.items())
    still_works(editor, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", ["unet", "text_encoder", "vae"])
@pytest.mark.parametrize("call", ["generate", "edit"])
def test_nan_in_weights_is_told(part, call):
    pipe = build_pipeline("shallow")
    editor = Editor(pipe)
    source = editor.generate(CAT, **QUICK)
    model = getattr(pipe, part)
    broken = next(p for name, p in reversed(list(model.named_parameters())) if "encoder.conv_out" not in name)
    healthy = broken.detach().clone()
    with torch.no_grad():
        broken.fill_(math.nan)
    with pytest.raises(NumericsError, match="NaN"):
        editor.generate(BIRD, **QUICK) if call == "generate" else editor.edit(BIRD, mask=SQUARE, growth=1)
    with torch.no_grad():
        broken.copy_(healthy)
    assert list(editor.history) == [source]
    assert editor.generate(CAT, **QUICK).image.tobytes() == source.image.tobytes()


def test_two_threads_on_one_pipeline(pipelines, expected):
    """Editors may share a pipeline, also from threads: each injects only while it holds the model."""
    pipe, results = pipelines["shallow"], {}

    def work(name):
        editor = Editor(pipe)
        editor.generate(CAT, **QUICK)
        results[name] = [editor.edit(DOG, mask=SQUARE, growth=1) if i % 2 else editor.undo() for i in range(1, 6)]

    threads = [Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2]
    for edits in results.values():
        assert all(edit.image.tobytes() == expected.image.tobytes() for edit in edits[::2])


def test_numpys_numbers_are_numbers(pipelines, tmp_path):
    editor, (side, guidance) = Editor(pipelines["shallow"], model="shallow"), (np.int64(64), np.float32(4))
    sizes = {"width": side, "height": side, "guidance_scale": guidance}
    ours = editor.generate(CAT, seed=np.int64(7), num_inference_steps=np.int32(2), **sizes)
    plain = {"width": 64, "height": 64, "guidance_scale": 4}
    assert ours.config == Editor(pipelines["shallow"]).generate(CAT, seed=7, num_inference_steps=2, **plain).config
    editor.save(tmp_path / "session")
    other = Editor(pipelines["shallow"], model="shallow")
    other.load(tmp_path / "session")
    assert other.current.config == ours.config
    other.write(tmp_path / "cat.png")
    with pytest.raises(InputError, match="seed must be a whole number"):
        editor.generate(CAT, seed=np.float64(7), num_inference_steps=2)


def test_an_adapter_that_cannot_be_loaded_leaves_the_editor_as_it_was(pipelines, tmp_path, monkeypatch):
    editor = Editor(pipelines["shallow"], model="shallow")
    editor.generate(CAT, **QUICK)
    editor.save(tmp_path / "session")
    read, asked = SessionStore.load, []

    def with_adapters(store, diff):
        loaded = read(store, diff)
        return replace(
            loaded, assets=replace(loaded.assets, adapters={"first": SavedAdapter(), "second": SavedAdapter()})
        )

    def load_adapter(self, source, **options):
        asked.append((source, options["local_files_only"]))
        if source == "second":
            raise AdapterError("adapter must be there, got second")

    monkeypatch.setattr(SessionStore, "load", with_adapters)
    monkeypatch.setattr(Editor, "load_adapter", load_adapter)
    monkeypatch.setattr(Editor, "unload_adapter", lambda self, source: asked.append(("unload", source)))
    before = editor.history
    with pytest.raises(AdapterError, match="got second"):
        editor.load(tmp_path / "session", local_files_only=True)
    assert asked == [("first", True), ("second", True), ("unload", "first")] and editor.history is before


def test_a_long_negative_prompt_is_told(pipelines):
    said = Editor(pipelines["shallow"]).generate(CAT, negative_prompt="blue " * 700, num_inference_steps=1).stats.notes
    assert any(note.startswith("the negative prompt is longer than") for note in said)


MOVES = {
    "dtype": lambda pipe: pipe.to(torch.bfloat16),
    "there and back": lambda pipe: (pipe.to(torch.float64), pipe.to(torch.float32)),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_pipeline_of_another_dtype_is_noticed(name):
    """What was recorded in the old dtype is recorded again, and edits keep the pixels outside their masks."""
    pipe = build_pipeline("shallow")
    editor = Editor(pipe)
    source = editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE, growth=1)
    MOVES[name](pipe)
    edited = editor.edit(BIRD, mask=SQUARE, growth=1)
    editor.history.checkout(source.id)
    again = editor.edit(DOG, mask=SQUARE, growth=1)
    assert edited.changed_outside(source) == again.changed_outside(source) == 0
    assert edited.stats.unet_evaluations_sparse and again.image.tobytes() != source.image.tobytes()


def _other_schedule(pipe):
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, beta_end=0.02)


def _other_weights(pipe):
    with torch.no_grad():
        pipe.unet.conv_in.weight.mul_(0.9)


def _weights_written_through_data(pipe):
    """As PEFT merges and averages of weights are written: torch counts no write."""
    for weight in pipe.vae.parameters():
        weight.data.mul_(0.99)


def _other_vae(pipe):
    pipe.vae = build_pipeline("shallow", seed=3).vae


@pytest.mark.parametrize("change", [_other_schedule, _other_weights, _weights_written_through_data, _other_vae])
def test_what_another_model_recorded_is_not_read(change):
    pipe = build_pipeline("shallow")
    editor = Editor(pipe)
    editor.generate(CAT, **QUICK)
    change(pipe)
    edited = editor.edit(DOG, mask=SQUARE, growth=1)
    assert any("rebuilt" in note for note in edited.stats.notes)
    editor.checkout("0")
    editor.forget()
    assert editor.edit(DOG, mask=SQUARE, growth=1).image.tobytes() == edited.image.tobytes()


def overwriting(file):
    def overwrite(*_):
        with file.open("r+b") as opened:
            opened.seek(-4096, 2)
            opened.write(bytes(4096))

    return overwrite


@pytest.fixture
def own_model(model, tmp_path):
    """A copy of the model, and what overwrites a part of the UNet's file in place."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    return folder, overwriting(next((folder / "unet").glob("*.safetensors")))


@pytest.mark.parametrize("when", ["before", "between", "during"])
def test_a_models_file_that_is_overwritten_changes_no_picture(own_model, when):
    """Weights are copies of the file's pages."""
    folder, overwrite = own_model
    editor = Editor.from_pretrained(folder, device="cpu", dtype="fp32")
    expected = Editor.from_pretrained(folder, device="cpu", dtype="fp32").generate(DOG, **QUICK).image.tobytes()
    if when == "between":
        editor.generate(CAT, **QUICK)
    if when != "during":
        overwrite()
    made = editor.generate(DOG, **QUICK, on_step=overwrite if when == "during" else None)
    assert made.image.tobytes() == expected


@pytest.mark.parametrize("during", [False, True])
def test_a_file_that_a_pipeline_of_ones_own_is_mapped_from_is_not_overwritten_unseen(own_model, during):
    folder, overwrite = own_model
    editor = Editor(StableDiffusionPipeline.from_pretrained(folder, safety_checker=None))
    editor.generate(CAT, **QUICK)
    if not during:
        overwrite()
    with pytest.raises(ModelError, match="was written to while its model is open; load the model again"):
        editor.generate(DOG, **QUICK, on_step=overwrite if during else None)


def test_a_part_that_was_taken_out_is_told():
    pipe = build_pipeline("shallow")
    editor = Editor(pipe)
    editor.generate(CAT, **QUICK)
    for part, message in {"scheduler": "must have a scheduler", "vae": "no VAE", "unet": "another UNet"}.items():
        before = getattr(pipe, part)
        setattr(pipe, part, None)
        with pytest.raises(ModelError, match=message):
            editor.edit(DOG, mask=SQUARE)
        setattr(pipe, part, before)


@pytest.mark.parametrize("state", [partial(torch.autocast, "cpu", torch.bfloat16), partial(torch.device, "meta")])
def test_what_the_caller_set_for_its_thread_changes_nothing(state):
    pictures = []
    for context in (nullcontext, state):
        editor = Editor(build_pipeline("shallow"))
        with context():
            editor.generate(CAT, **QUICK)
            pictures += [editor.edit(DOG, mask=SQUARE).image.tobytes(), editor.preview(BIRD).mask.grid.tobytes()]
    assert pictures[:2] == pictures[2:]


def test_threads_that_edit_at_once_lose_no_result(editor):
    editor.generate(CAT, **QUICK)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(editor.edit, [CAT] * 100))
    assert len({result.id for result in made}) == 100 and len(editor.history) == 101


def test_metadata_of_another_editors_result_are_refused(editor):
    editor.generate(CAT, **QUICK)
    other = editor.beside()
    other.generate(DOG, **QUICK)
    with pytest.raises(SessionError, match="another editor"):
        editor.metadata(other.current)


def test_an_editor_beside_another_makes_one_pipeline_and_has_sessions_of_its_own(pipelines, monkeypatch, tmp_path):
    editor = Editor(pipelines["shallow"], model="demo")
    editor.generate(CAT, **QUICK)
    editor.save(tmp_path / "session")
    made, init = [], EditPipeline.__init__
    monkeypatch.setattr(EditPipeline, "__init__", lambda self, *given: made.append(self) or init(self, *given))
    other = editor.beside()
    assert made == [other._pipeline] and (other.pipe, other.model) == (editor.pipe, editor.model)
    assert not len(other.history) and other.max_recorded_bytes == editor.max_recorded_bytes
    other.generate(DOG, **QUICK)
    with pytest.raises(SessionError, match="another session"):
        other.save(tmp_path / "session")


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_a_part_of_another_dtype_is_refused(part):
    pipe = build_pipeline("shallow")
    editor = Editor(pipe)
    editor.generate(CAT, **QUICK)
    getattr(pipe, part).to(torch.bfloat16)
    for call in (lambda: editor.edit(DOG, mask=SQUARE), lambda: editor.preview(DOG), lambda: editor.generate(CAT)):
        with pytest.raises(ModelError, match=r"one dtype and device, got .*bfloat16 on cpu.*; move all of it"):
            call()
    getattr(pipe, part).to(torch.float32)
    assert editor.edit(DOG, mask=SQUARE).parent == "0" and len(editor.history) == 2


class TestWriting:
    """A caller may write to whatever was handed out; the session does not change."""

    @pytest.mark.usefixtures("source")
    def test_masks_are_read_only(self, editor):
        result = editor.edit(DOG, mask=SQUARE)
        for array in (result.mask.grid, editor.preview(BIRD).mask.grid):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = False
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)
        assert result.mask.grid.any()

    @pytest.mark.usefixtures("source")
    def test_pictures_and_seconds_are_copies(self, editor):
        result = editor.current
        before, seconds = result.image.tobytes(), result.stats.seconds
        picture = result.image
        picture.paste(0, (0, 0, *picture.size))
        result.image.frombytes(bytes(len(before)))
        result.image.load()[0, 0] = (1, 2, 3)
        result.image.info["before"] = "x"
        result.stats.seconds.clear()
        assert (result.image.tobytes(), result.image.info, result.stats.seconds) == (before, {}, seconds)
        assert editor.edit(CAT).image.tobytes() == before

    @pytest.mark.usefixtures("source")
    def test_fields_are_frozen(self, editor):
        result = editor.current
        for value, field in ((result, "image"), (result.stats, "seconds"), (result.mask, "grid"), (result, "painted")):
            with pytest.raises(FrozenInstanceError):
                setattr(value, field, None)

    def test_a_mask_that_a_caller_empties_is_rebuilt_as_it_was(self, pipelines):
        tight = Editor(pipelines["shallow"], max_recorded_bytes=0)
        tight.generate(CAT, **QUICK)
        grid = SQUARE.copy()
        result = tight.edit(DOG, mask=grid, growth=1)
        grid[:] = False
        tight.forget()
        again = tight.edit(BIRD, mask=SQUARE, growth=1)
        assert result.mask.grid.any() and "rebuilt" in " ".join(again.stats.notes)


class TestWithinARun:
    """What `on_step` may not do to what the run needs: one line, and the editor is as it was."""

    @pytest.mark.parametrize("wrong", ["delete", "delete the source", "forget", "load"])
    @pytest.mark.usefixtures("source")
    def test_a_parent_stays_while_an_edit_of_it_runs(self, editor, tmp_path, wrong):
        source = editor.current
        parent = editor.edit(DOG, mask=SQUARE, growth=1)
        calls = {
            "delete": lambda: editor.delete(parent.id),
            "delete the source": lambda: editor.delete(source.id),
            "forget": editor.forget,
            "load": lambda: editor.load(tmp_path),
        }
        for edit in (
            lambda on_step: editor.edit(BIRD, mask=SQUARE, growth=1, on_step=on_step),
            lambda on_step: editor.edit("a cat at night", on_step=on_step),
            lambda on_step: editor.edit_many([BIRD, CAT], [SQUARE, SQUARE], growth=1, on_step=on_step),
        ):
            with pytest.raises(SessionError, match=f"result {parent.id} is being edited"):
                edit(lambda *_: calls[wrong]())
            assert [result.id for result in editor.history] == [source.id, parent.id]
            assert editor.current is parent
        assert editor.edit(BIRD, mask=SQUARE, growth=1).parent == parent.id
        assert editor.delete(parent.id) == (parent.id, str(int(parent.id) + 1))

    def test_a_parent_stays_while_it_is_rebuilt(self, pipelines):
        tight = Editor(pipelines["shallow"], max_recorded_bytes=0)
        source = tight.generate(CAT, **QUICK)
        tight.edit(DOG, mask=SQUARE, growth=1)
        tight.forget()
        with pytest.raises(SessionError, match="is being edited"):
            tight.edit(BIRD, mask=SQUARE, growth=1, on_step=lambda *_: tight.delete(source.id))
        assert len(tight.history) == 2

    @pytest.mark.usefixtures("source")
    def test_another_branch_may_go(self, editor):
        source = editor.current
        other = editor.edit(DOG, mask=SQUARE, growth=1)
        editor.checkout(source.id)
        gone = []
        editor.edit(BIRD, mask=SQUARE, growth=1, on_step=lambda i, *_: i or gone.extend(editor.delete(other.id)))
        assert gone == [other.id] and len(editor.history) == 2
