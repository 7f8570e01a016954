"""The benchmark of edits: metrics with known answers, edits with known truth, and every method by its limits."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import Attention
from PIL import Image
from safetensors.torch import save_file

from fisedit import cli
from fisedit.errors import Cancelled, InputError, ModelError
from fisedit.evaluation.classifier import ADJECTIVES, BACKGROUND_WORDS, COLOURS, WORDS, SceneClassifier
from fisedit.evaluation.quality import (
    baselines,
    edit_quality,
    global_edit_detection,
    mask_quality,
    metrics,
    pie_bench,
    scene_edits,
    tables,
)
from fisedit.evaluation.quality import diffusers_baselines as by_diffusers
from fisedit.evaluation.quality.edit_case import EditCase, make_case
from fisedit.evaluation.quality.global_edit_prompts import prompt_pairs
from fisedit.evaluation.quality.methods import METHODS, select_methods
from fisedit.evaluation.quality.prompt_to_prompt import AttentionControl, prompt_to_prompt, unchanged_tokens
from fisedit.evaluation.quality.scene_edits import BenchmarkEdit
from fisedit.evaluation.quality.scores import EditScore, edit_succeeded, score_edit
from fisedit.evaluation.scenes.drawing import FontMissing, emoji_font
from fisedit.evaluation.scenes.layout import CHANGE_KINDS, SceneChange, sample_change
from fisedit.evaluation.scenes.scene import PlacedObject, Scene
from fisedit.evaluation.scenes.vocabulary import BACKGROUND, OBJECT
from fisedit.evaluation.settings import EditQualitySettings, EvaluationSettings
from fisedit.sparse.executor import Executor
from tests.support import pipelines as tiny
from tests.support.edits import BIRD, CAT, DOG, Calls
from tests.support.grids import grids
from training.tokens import build_tokenizer

HOW = {"num_inference_steps": 7, "guidance_scale": 4.0}
SIDE = 128
SQUARE = grids(16, 16)["square"]


def font_is_there() -> bool:
    try:
        emoji_font()
    except FontMissing:
        return False
    return True


needs_font = pytest.mark.skipif(not font_is_there(), reason="the font Noto Color Emoji is not installed")


def grey(level: int, side: int = 16) -> np.ndarray:
    return np.full((side, side, 3), level, np.uint8)


def picture(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels)


# metrics


def test_overlap_by_hand():
    found, true = np.zeros((3, 4), bool), np.zeros((3, 4), bool)
    found[:2, :2], true[:2, 1:] = True, True
    assert metrics.mask_overlap(found, true) == metrics.MaskOverlap(2 / 8, 2 / 4, 2 / 6)
    assert metrics.mask_overlap(np.zeros_like(true), true) == metrics.MaskOverlap(0, 0, 0)


def test_a_mask_fits_by_cells_and_by_pixels():
    true = np.zeros((16, 16), bool)
    true[:8, :8] = true[15, 15] = True  # one whole cell, and one pixel of another
    fit = metrics.mask_fit(np.array([[True, False], [False, False]]), true)
    assert fit.cells == metrics.MaskOverlap(1 / 2, 1, 1 / 2)
    assert fit.pixels == metrics.MaskOverlap(64 / 65, 1, 64 / 65)
    assert fit.coverage == 64 / 65
    assert metrics.mask_fit(np.ones((2, 2), bool), true).coverage == 256 / 65


def test_psnr_counts_the_pixels_inside_alone():
    inside = np.zeros((16, 16), bool)
    inside[:4] = True
    other = grey(105)
    other[8:] = 0
    assert metrics.psnr(picture(other), picture(grey(100)), inside) == pytest.approx(20 * np.log10(255 / 5))
    assert metrics.psnr(picture(other), picture(grey(105)), inside) == pytest.approx(148.13, abs=0.01)


def test_one_byte_outside_is_seen():
    grid = np.array([[True, False], [False, False]])
    inside, outside = grey(100), grey(100)
    inside[3, 3, 1], outside[12, 3, 1] = 101, 101
    assert metrics.equal_outside(picture(inside), picture(grey(100)), grid)
    assert not metrics.equal_outside(picture(outside), picture(grey(100)), grid)


def test_seam_is_the_ratio_of_steps_along_the_rim():
    grid = np.array([[True, False], [False, False]])
    low, high = grey(100), grey(100)
    low[:8, :8], high[:8, :8] = 110, 125
    high[0, 0] = 200  # far from the rim
    assert metrics.seam(picture(low), picture(low), grid) == 1
    assert metrics.seam(picture(high), picture(low), grid) == 2.5
    assert metrics.seam(picture(low), picture(low), np.ones((2, 2), bool)) is None
    assert metrics.seam(picture(low), picture(grey(100)), grid) is None


def test_f1_by_hand():
    assert metrics.f1_score([True, True, False, False], [True, False, True, False]) == 0.5
    assert metrics.f1_score([True, True, True], [True, True, False]) == 0.8
    assert metrics.f1_score([False], [True]) == 0
    assert metrics.f1_score([False], [False]) is None


def test_the_tail_is_the_bad_one():
    values = list(range(11))
    assert metrics.median_and_tail(values, high_is_good=True) == (5, 1)
    assert metrics.median_and_tail(values, high_is_good=False) == (5, 9)


# edits and their truth


@pytest.fixture(scope="module")
def words():
    return scene_edits.single_token_words(build_tokenizer())


def test_a_word_is_known_when_it_is_one_token():
    tokenizer = build_tokenizer()
    assert scene_edits.is_single_token(tokenizer, "cat") and scene_edits.is_single_token(tokenizer, "snowflakes")
    assert not scene_edits.is_single_token(tokenizer, "zebra")


def spoken(edit: BenchmarkEdit) -> set[str]:
    return set(re.findall(r"[a-z]+", f"{edit.source_prompt} {edit.prompt}"))


@needs_font
def test_edits_are_of_all_kinds_from_a_seed(words):
    assert scene_edits.available_kinds(words) == CHANGE_KINDS
    first, again, other = (list(scene_edits.sample_edits(40, 64, words, CHANGE_KINDS, seed)) for seed in (0, 0, 1))
    assert Counter(edit.kind for edit in first) == dict.fromkeys(CHANGE_KINDS, 5)
    assert sum(edit.picture is None for edit in first) == 8
    assert [e.prompt for e in first] == [e.prompt for e in again] != [e.prompt for e in other]
    assert all(np.array_equal(a.picture, b.picture) for a, b in zip(first, again, strict=True))
    assert all(map(words, set().union(*map(spoken, first))))
    assert all(edit.source_prompt != edit.prompt for edit in first)


@needs_font
@pytest.mark.parametrize("kind", CHANGE_KINDS)
def test_the_truth_holds_every_pixel_that_differs(kind):
    rng = np.random.default_rng(0)
    for change in (sample_change(rng, kind) for _ in range(30)):
        true_mask, differs = scene_edits.true_mask(change, 64), change.region(64)
        if kind in scene_edits.GLOBAL_KINDS:
            assert true_mask is None
            continue
        assert (true_mask | ~differs).all() and differs.sum() > 0.3 * true_mask.sum()
        if kind == "insert":
            assert true_mask.sum() == true_mask.any(1).sum() * true_mask.any(0).sum()


@needs_font
def test_only_opened_sources_have_a_truth(words):
    for edit in scene_edits.sample_edits(32, 64, words, CHANGE_KINDS):
        assert edit.whole is (edit.kind in scene_edits.GLOBAL_KINDS)
        assert (edit.true_mask is None) is (edit.whole or edit.picture is None)


def test_a_small_vocabulary_is_kept_to(monkeypatch):
    monkeypatch.setattr(scene_edits, "_TRIES", 300)
    few = {*OBJECT, *BACKGROUND, *"a an and the on in at under mountains there is picture of".split()}
    said = scene_edits.available_kinds(few.__contains__)
    assert set(said) == {"swap", "insert", "delete", "background"}
    assert set().union(*(spoken(e) for e in scene_edits.sample_edits(8, 64, few.__contains__, said))) <= few
    with pytest.raises(InputError, match="words of drawn scenes"):
        scene_edits.available_kinds({"cat", "beach"}.__contains__)


def test_prompt_pairs_are_said_whole_or_not():
    pairs = list(prompt_pairs(16, seed=3))
    assert pairs == list(prompt_pairs(16, seed=3))
    assert Counter(whole for *_, whole in pairs) == {True: 12, False: 4}
    for old, new, _ in pairs[1::4]:  # reordered
        assert old != new and Counter(re.findall(r"[a-z]+", old.replace("an ", "a "))) == Counter(
            re.findall(r"[a-z]+", new.replace("an ", "a "))
        )
    assert all(old in new for old, new, _ in pairs[::2])


def test_detection_counts_misses_and_false_alarms():
    pairs = [("a cat on a beach", "a cat at night", True), ("a cat on a beach", "a dog on a beach", True)]
    verdicts = global_edit_detection.detect_by_text(
        [*pairs, ("a cat in the city", "a cat in space", False)], build_tokenizer()
    )
    assert [verdict.said for verdict in verdicts] == [True, False, True]
    told = global_edit_detection.detection_row("words", verdicts)
    assert (told["edits"], told["whole"], told["missed"], told["false alarms"], told["F1"]) == (3, 2, 1, 1, 0.5)


# PIE-Bench


def test_runs_are_decoded_with_the_border():
    mask = pie_bench.decode_runs([7, 2, 19, 1], side=6)
    inner = np.zeros((4, 4), bool)
    inner[0, :2] = inner[2, 0] = True
    assert np.array_equal(mask[1:-1, 1:-1], inner)
    assert mask[0].all() and mask[-1].all() and mask[:, 0].all() and mask[:, -1].all()
    assert pie_bench.decode_runs([30, 100], side=6)[5].all()  # a run is cut at the end
    for bad in ([7], [7, 2, 36, 1], [-1, 2]):
        with pytest.raises(InputError, match="start and length pairs"):
            pie_bench.decode_runs(bad, side=6)


def test_published_background_by_hand():
    edited = np.zeros((32, 32), bool)
    edited[:8] = True
    inside, outside = grey(100, 32), grey(100, 32)
    inside[:8], outside[16:] = 0, 151
    same = pie_bench.background_metrics(picture(inside), picture(grey(100, 32)), edited)
    assert (same.mse, same.ssim) == (0, 1) and same.psnr == pytest.approx(148.13, abs=0.01)
    moved = pie_bench.background_metrics(picture(outside), picture(grey(100, 32)), edited)
    assert moved.mse == pytest.approx(0.2**2 / 2) and moved.psnr == pytest.approx(-10 * np.log10(0.02))
    assert 0 < moved.ssim < 1
    assert pie_bench.background_metrics(picture(inside), picture(outside), np.ones((32, 32), bool)) is None


ENTRY = {
    "image_path": "1_change_object/one.png",
    "original_prompt": "a [cat] and a cake on a beach",
    "editing_prompt": "a [dog] and a cake on a beach",
    "editing_instruction": "turn the cat into a dog",
    "editing_type_id": "1",
    "blended_word": "cat dog",
    "mask": [pie_bench.SIDE * row + 128 for row in range(128, 256)],
}
ENTRY["mask"] = [n for start in ENTRY["mask"] for n in (start, 128)]


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "pie"
    path = folder / "annotation_images" / ENTRY["image_path"]
    path.parent.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    picture(pixels).resize((pie_bench.SIDE, pie_bench.SIDE)).save(path)
    (folder / "mapping_file.json").write_text(json.dumps({"000000000000": ENTRY}))
    return folder


def test_a_folder_of_pie_bench_is_read(dataset):
    entries = pie_bench.read_mapping(dataset)
    (edit,) = pie_bench.load_edits(dataset, entries, 128)
    assert (edit.kind, edit.source_prompt, edit.prompt) == ("change object", CAT, DOG)
    assert edit.picture.size == (128, 128) and edit.whole is edit.change is None
    assert edit.true_mask[32:64, 32:64].all() and edit.true_mask[2:-2, 2:-2].sum() == 32 * 32


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"0": {"image_path": "one.png"}}', '{"0": 1}'])
def test_another_folder_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "mapping_file.json").write_text(content)
    with pytest.raises(InputError, match=r"mapping_file\.json"):
        pie_bench.read_mapping(tmp_path)


def test_a_missing_picture_is_told(dataset):
    (dataset / "annotation_images" / ENTRY["image_path"]).write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"one\.png must be a picture"):
        next(pie_bench.load_edits(dataset, [ENTRY], 128))


# methods


@pytest.fixture(scope="module")
def generated(pipelines):
    """A case of a generated source whose true mask is a square."""
    edit = BenchmarkEdit("swap", CAT, DOG, None, 7, metrics.cells_to_pixels(SQUARE), whole=False)
    return make_case(pipelines["demo"], edit, **HOW)


@pytest.fixture(scope="module")
def opened(pipelines):
    """The same of an opened picture."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    shown = picture(pixels).resize((SIDE, SIDE))
    edit = BenchmarkEdit("swap", CAT, DOG, shown, 7, metrics.cells_to_pixels(SQUARE), whole=False)
    return make_case(pipelines["demo"], edit, **HOW)


def fresh(case: EditCase, **changes: object) -> EditCase:
    """The same source without what was kept of earlier methods."""
    return EditCase(case.editor, replace(case.edit, **changes), case.source, case.trajectory)


def levels(one: Image.Image, other: Image.Image) -> int:
    """Largest difference of two pictures, of 255."""
    return int(np.abs(np.asarray(one, int) - np.asarray(other, int)).max())


def plain(pipe, prompt: str) -> Image.Image:
    """What diffusers makes of a prompt and the seed 7."""
    return pipe(prompt, generator=torch.Generator().manual_seed(7), **HOW).images[0]


class Branches(Calls):
    """Counts the rows of dense batches as well."""

    rows = 0

    def _count(self, unet: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        super()._count(unet, args)
        self.rows += len(args[0]) if args[0].shape[-1] > 1 else 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("source", ["generated", "opened"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_and_counts_what_it_ran(request, name, source):
    case = fresh(request.getfixturevalue(source))
    if name == "blended-ours":
        assert case.ours.picture
    with Branches(case.editor.pipe.unet) as calls:
        outcome = METHODS[name](case)
    assert outcome.picture.size == (SIDE, SIDE) and outcome.picture.mode == "RGB"
    assert outcome.grid is None or (outcome.grid.shape, outcome.grid.dtype) == ((16, 16), bool)
    assert outcome.evaluations == calls.dense + calls.sparse
    assert outcome.sparse is (calls.sparse > 0 and not outcome.reason)
    if calls.sparse:
        assert outcome.macs > calls.rows / 2 * case.costs.dense_step()
    else:
        assert outcome.macs == case.dense_macs(calls.rows / 2)


def test_true_masks_are_not_made_up(generated):
    case = fresh(generated, true_mask=None)
    assert METHODS["blended-true"](case) is METHODS["ours-given"](case) is None
    assert fresh(generated, true_mask=None, whole=True).true_grid.all()


def test_reprompting_is_diffusers_own_run(generated):
    expected = plain(generated.editor.pipe, DOG)
    assert levels(generated.blended(generated.everywhere), expected) <= 1
    assert levels(METHODS["reprompt"](generated).picture, expected) <= 1


def test_blending_nothing_gives_the_source(generated, opened):
    nowhere = np.zeros((16, 16), bool)
    assert levels(generated.blended(nowhere), generated.source.image) <= 1
    assert levels(opened.blended(nowhere), METHODS["no-edit"](opened).picture) <= 1
    assert levels(generated.blended(SQUARE), generated.source.image) > 10


def decoded_by(name: str, case: EditCase) -> torch.Tensor:
    """The latents [4, h, w] that a method decodes in the end."""
    seen: list[torch.Tensor] = []
    vae = case.editor.pipe.vae
    watched = vae.post_quant_conv.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    METHODS[name](case)
    watched.remove()
    return seen[-1] * vae.config.scaling_factor


def test_inpainting_paints_the_true_mask_and_nothing_else(opened):
    """With the same noise, two prompts differ in all of it and nowhere else."""
    dog, bird = (decoded_by("inpaint-true", fresh(opened, prompt=prompt)) for prompt in (DOG, BIRD))
    moved = (dog != bird).any(0).numpy()
    assert moved[SQUARE].all() and not moved[~SQUARE].any()
    assert np.array_equal(METHODS["inpaint-true"](fresh(opened)).grid, SQUARE)
    assert METHODS["inpaint-true"](fresh(opened, true_mask=None)) is None


def test_image_to_image_begins_at_the_picture(opened, monkeypatch):
    """The less it runs, the more of the picture stays."""
    moved = []
    for strength in (0.15, 0.5, by_diffusers.STRENGTH):
        monkeypatch.setattr(by_diffusers, "STRENGTH", strength)
        moved.append(float((decoded_by("img2img", fresh(opened)) - opened.trajectory.latents[-1][0]).norm()))
        assert METHODS["img2img"](fresh(opened)).evaluations == int(7 * strength)
    assert moved[0] < moved[1] < moved[2]


def test_a_source_sampled_again(generated, opened):
    """A generated one comes back; an opened one does not, and less so with guidance."""
    again, unguided = ("resampled", "resampled-unguided")
    assert levels(METHODS[again](generated).picture, generated.source.image) <= 1
    told = {name: score_edit(opened, METHODS[name](opened), None).again_psnr for name in (again, unguided, "no-edit")}
    assert told[again] < told[unguided] < told["no-edit"] < 60
    assert score_edit(opened, opened.ours, None).again_psnr is None


def test_prompt_to_prompt_replacing_nothing_is_reprompting(generated, opened):
    for case in (generated, opened):
        assert levels(prompt_to_prompt(case, 0, 0), case.blended(case.everywhere)) <= 1
        assert levels(prompt_to_prompt(case), case.blended(case.everywhere)) > 10


def test_prompt_to_prompt_of_the_same_prompt_is_the_source(generated):
    assert levels(prompt_to_prompt(fresh(generated, prompt=CAT), 1, 1), generated.source.image) <= 1


def test_prompt_to_prompt_replaces_for_a_share_of_the_steps(generated):
    none, some, all_steps = (prompt_to_prompt(generated, 0, own) for own in (0, 2 / 7, 1))
    assert levels(some, none) > 10 and levels(some, all_steps) > 10


def test_prompt_to_prompts_source_stays_on_its_path(opened):
    seen = []
    watched = opened.editor.pipe.unet.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    prompt_to_prompt(opened)
    watched.remove()
    old, new, old_guided, new_guided = torch.stack(seen).unbind(1)
    assert torch.equal(old, torch.cat(opened.trajectory.latents[:-1])) and torch.equal(old, old_guided)
    assert torch.equal(new, new_guided) and not torch.equal(new[1:], old[1:])


def test_prompt_to_prompt_leaves_the_model_as_it_was(generated):
    layers = [m for m in generated.editor.pipe.unet.modules() if isinstance(m, Attention)]
    assert layers and not any("forward" in layer.__dict__ for layer in layers)


def test_unchanged_tokens_by_hand():
    pairs = unchanged_tokens("a cat on a beach", "a big dog on a beach", tiny.build_tokenizer())
    assert pairs[:5] == [(0, 0), (1, 1), (3, 4), (4, 5), (5, 6)]
    assert pairs[5:] == [(6 + k, 7 + k) for k in range(70)]
    back = unchanged_tokens("a big dog on a beach", "a cat on a beach", tiny.build_tokenizer())
    assert back[-2:] == [(76, 75), (76, 76)]


def test_attention_is_taken_from_the_source_for_its_share_of_steps():
    layer = Attention(8, heads=2, dim_head=4, cross_attention_dim=6).eval()
    hidden, text = torch.randn(4, 9, 8), torch.randn(4, 3, 6)
    control = AttentionControl([(0, 0), (2, 1)], cross=2, own=1)

    def maps(context: torch.Tensor) -> torch.Tensor:
        query, key = (layer.head_to_batch_dim(t) for t in (layer.to_q(hidden), layer.to_k(context)))
        return layer.get_attention_scores(query, key).unflatten(0, (4, 2))

    def out(probabilities: torch.Tensor) -> torch.Tensor:
        value = layer.head_to_batch_dim(layer.to_v(text))
        return layer.to_out[0](layer.batch_to_head_dim(probabilities.flatten(0, 1) @ value))

    with torch.inference_mode():
        expected = maps(text).clone()
        expected[3, ..., 0], expected[3, ..., 1] = expected[2, ..., 0], expected[2, ..., 2]
        torch.testing.assert_close(control.attend(layer, hidden, text), out(expected))
        own = Attention(8, heads=2, dim_head=4).eval()
        same = torch.cat([hidden[:3], hidden[2:3]])
        kept = control.attend(own, hidden)
        assert not torch.allclose(kept[3], own(hidden)[3])
        torch.testing.assert_close(control.attend(own, same), own(same))
        control.step = 1
        torch.testing.assert_close(control.attend(own, hidden), own(hidden))
        control.step = 2
        torch.testing.assert_close(control.attend(layer, hidden, text), layer(hidden, text))


def test_blocks_are_whole():
    grid = np.zeros((5, 6), bool)
    grid[1, 3] = grid[4, 0] = True
    expected = np.zeros((5, 6), bool)
    expected[:2, 2:4] = expected[4, :2] = True
    assert np.array_equal(baselines.as_blocks(grid), expected)


def test_stale_norms_repeat_the_source_and_nothing_else(generated):
    """On the source's own inputs old and mixed statistics are the same; on others they are not."""
    case, trajectory = generated, generated.trajectory
    unet, plan = case.editor.pipe.unet, case.engine.plan(SQUARE, 0)
    text, t = case.engine.encode(case.source.config), case.engine.sampler(case.config).timesteps[2]

    def rows(executor: Executor, latents: torch.Tensor) -> torch.Tensor:
        return executor.run_sparse(torch.cat([latents] * 2), t, text, {}, trajectory.features[2], plan)[0]

    with torch.inference_mode():
        old, other = trajectory.latents[2], 2 * trajectory.latents[2]
        stale, exact = baselines.StaleNormExecutor(unet), Executor(unet)
        torch.testing.assert_close(rows(stale, old), rows(exact, old), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(rows(stale, other), rows(exact, other), rtol=1e-2, atol=1e-2)


def test_fisedits_latents_outside_its_mask_are_the_sources(generated):
    trajectory, engine = generated.trajectory, generated.engine
    with torch.inference_mode():
        text = engine.encode(generated.config)
        latents = baselines._sparse_steps(generated, text, trajectory.latents[2], 2, SQUARE)
    moved = (latents != trajectory.latents[-1]).any(1)[0].numpy()
    assert moved[SQUARE].all() and not moved[~SQUARE].any()


def test_fisedits_mask_is_where_the_dense_steps_leave_the_source(generated):
    """With all steps dense nothing is sparse, and the mask is Otsu's of the whole way."""
    outcome = baselines.fisedit(fresh(generated), probes=99)
    assert outcome.evaluations == HOW["num_inference_steps"]
    assert outcome.grid.any() and not outcome.grid.all()
    assert np.array_equal(baselines.as_blocks(outcome.grid), outcome.grid)


def test_diffedits_mask_is_where_the_prompts_differ(generated):
    mask = baselines.difference_mask(generated)
    assert 0 < mask.mean() < 0.9 and np.array_equal(mask, baselines.difference_mask(fresh(generated)))
    assert not np.array_equal(mask, baselines.difference_mask(fresh(generated, prompt=BIRD)))
    same = fresh(generated, prompt=CAT)
    assert not baselines.difference_mask(same).any()
    assert levels(baselines.diffedit(same).picture, same.source.image) <= 1


def test_methods_by_name():
    assert list(select_methods([])) == list(METHODS) and list(select_methods(["reprompt", "ours"])) == [
        "ours",
        "reprompt",
    ]
    with pytest.raises(InputError, match=r"methods must be of ours, .*, got magic"):
        select_methods(["ours", "magic"])


# scores


class Sees(torch.nn.Module):
    """A judge that sees what it is told, wherever it looks."""

    def __init__(self, objects: str, place: str, **colours: str) -> None:
        super().__init__()
        self.objects = torch.tensor([[1.0 if word in objects.split() else -1.0 for word in WORDS]])
        self.places = torch.tensor([[float(name == place) for name in BACKGROUND_WORDS]])
        self.looks = torch.full((1, len(WORDS), len(ADJECTIVES)), -1.0)
        for word, colour in colours.items():
            self.looks[0, WORDS.index(word), ADJECTIVES.index(colour)] = 1.0

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert pictures.shape == (1, 3, 16, 16)
        return self.objects, self.places, self.looks


TWO = Scene("beach", 16, (PlacedObject("cat", 0, 30, 12), PlacedObject("car", 16, 30, 12, colour="red")))
SWAP = SceneChange("swap", TWO, TWO.change(0, word="dog"), 0)
PAINT = SceneChange("recolour", TWO, TWO.change(1, colour="blue"), 1)
DROP = SceneChange("delete", TWO, TWO.without(0), 0)
DRESS = SceneChange("dress", TWO, TWO.change(0, accessory="hat"), 0)
MOVE = SceneChange("background", TWO, replace(TWO, background="snow"))

SEEN = [
    (SWAP, Sees("dog car", "beach"), True),
    (SWAP, Sees("cat car", "beach"), False),
    (SWAP, Sees("cat dog car", "beach"), False),
    (SWAP, Sees("dog", "beach"), False),
    (SWAP, Sees("dog car", "snow"), False),
    (SWAP, Sees("dog car tree", "beach"), True),
    (PAINT, Sees("cat car", "beach", car="blue"), True),
    (PAINT, Sees("cat car", "beach", car="red", cat="blue"), False),
    (DROP, Sees("car", "beach"), True),
    (DROP, Sees("cat car", "beach"), False),
    (DRESS, Sees("cat car hat", "beach"), True),
    (DRESS, Sees("cat car", "beach"), False),
    (MOVE, Sees("cat car", "snow"), True),
    (MOVE, Sees("cat car", "beach"), False),
    (SceneChange("weather", TWO, replace(TWO, weather="rain")), Sees("cat car", "beach"), None),
]


@pytest.mark.parametrize(("change", "judge", "expected"), SEEN)
def test_success_is_all_that_was_asked_and_nothing_that_was_taken(change, judge, expected):
    assert edit_succeeded(judge, change, picture(grey(100))) is expected
    assert "blue" in COLOURS


def test_our_own_score(generated):
    case = fresh(generated)
    told = score_edit(case, case.edited(SQUARE), None)
    assert (told.fit.cells.iou, told.fit.pixels.recall, told.fit.coverage) == (1, 1, 1)
    assert told.exact and told.success is None and told.background_psnr == pytest.approx(148.13, abs=0.01)
    assert told.inside_psnr > 20 and told.seam > 0 and told.dense_psnr is None and told.published
    nothing = score_edit(case, replace(case.edited(SQUARE), picture=case.source.image), None)
    assert nothing.kept_psnr == pytest.approx(148.13, abs=0.01) and told.kept_psnr < 60


def test_structure_is_the_editors_own(generated):
    case = fresh(generated)
    held = METHODS["structure-1.0"](case)
    case.editor.checkout(case.source.id)
    assert held.picture.tobytes() == case.editor.edit(case.edit.prompt, structure=1.0).image.tobytes()


def test_the_references_score(generated):
    case = fresh(generated, change=SWAP)
    told = score_edit(case, METHODS["blended-true"](case), SceneClassifier().eval())
    assert told.fit.cells.iou == 1 and told.exact is False and type(told.success) is bool
    assert told.inside_psnr is told.seam is told.published is None
    unmasked = score_edit(case, METHODS["reprompt"](case), None)
    assert unmasked.fit is unmasked.exact is unmasked.area is None and unmasked.background_psnr < told.background_psnr


def test_a_dense_fallback_is_compared_with_the_dense_run(generated):
    case = fresh(generated, prompt="a cat and a cake at night", true_mask=None, whole=True)
    told = score_edit(case, case.ours, None)
    assert told.whole and told.fell_back and told.dense_psnr > 50 and told.background_psnr is told.inside_psnr is None


# report


def scored(kind: str, success: bool | None, *, drawn: bool = True, macs: int = 2 * 10**9) -> object:
    figures = ("background_psnr", "inside_psnr", "seam", "dense_psnr", "kept_psnr", "again_psnr")
    blank = dict.fromkeys(("area", "whole", "fit", "exact", *figures))
    return EditScore(kind, drawn, 5, macs, "", success=success, published=None, **blank)


def test_rows_by_hand():
    ours = [scored("swap", True), scored("swap", False), scored("delete", True, drawn=False), scored("weather", None)]
    best = [scored("swap", True), scored("swap", True), None, scored("weather", None)]
    found = tables.metric_rows({"ours": ours, "blended-true": best}, ("swap", "delete", "weather"))
    by = {(row["method"], row["source"], row["kind"]): row for row in found}
    assert by["ours", "drawn", "all"]["edits"] == 3 and by["ours", "drawn", "all"]["success"] == {
        "mean": 0.5,
        "edits": 2,
    }
    assert by["ours", "drawn", "all"]["relative success"] == {"mean": 0.5, "edits": 2}
    assert by["ours", "generated", "delete"]["relative success"] == {"mean": None, "edits": 0}
    assert by["ours", "drawn", "swap"]["GMACs"] == {"median": 2.0, "tail": 2.0, "edits": 2}
    assert by["ours", "drawn", "swap"]["IoU"] == {"median": None, "tail": None, "edits": 0}
    assert ("blended-true", "generated", "all") not in by
    told = tables.format_table([by["ours", "drawn", "all"]], ("method",))
    assert told == [
        {"method": "ours", "success": "50% of 2", "relative success": "50% of 2", "fell back": "0%"}
        | {"GMACs": "2 (2)", "evaluations": "5 (5)"}
    ]


# whole runs


@pytest.fixture(scope="module")
def spoken_pipe():
    """A tiny pipeline whose tokenizer knows every word of the scenes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "build_tokenizer", build_tokenizer)
        return tiny.build_pipeline("demo")


@pytest.fixture
def loaded(monkeypatch, spoken_pipe):
    monkeypatch.setattr(edit_quality, "load", lambda *_, **__: spoken_pipe)


@pytest.fixture(scope="module")
def judge_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("judge") / "judge.safetensors"
    torch.manual_seed(0)
    save_file(SceneClassifier().state_dict(), path)
    return path


KEYS = ["settings", "notes", "summary", "classes", "whole", "misjudged", "rows", "edits"]


@needs_font
def test_two_edits_by_all_methods(loaded, judge_file, tmp_path):
    steps = []
    settings = EditQualitySettings(edits=2, num_inference_steps=3, classifier=judge_file, html=tmp_path)
    told = edit_quality.measure_edit_quality(settings, lambda i, n, _: steps.append((i, n)))
    assert list(told) == KEYS and steps == [(0, 2), (1, 2)]
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert [row["method"] for row in told["summary"]] == list(METHODS) and told["settings"]["edits"] == 2
    assert all(set(edit["scores"]) == set(METHODS) for edit in told["edits"])
    assert all(type(edit["scores"]["ours"]["success"]) is bool for edit in told["edits"])
    assert [row["asked"] for row in told["whole"]] == ["words", "prompts alone", "words and prompts alone", "as edited"]
    page = ET.fromstring((tmp_path / "report.html").read_text(encoding="utf-8"))
    shown = [Image.open(tmp_path / image.get("src")).size for image in page.iter("img")]
    assert len(shown) == 2 and all(width > 10 * height / 2 for width, height in shown)
    assert len(page.findall(".//table")) == 4


@needs_font
def test_runs_repeat_and_need_no_judge(loaded, monkeypatch, tmp_path):
    monkeypatch.setattr(edit_quality, "demo_folder", lambda: tmp_path)
    settings = EditQualitySettings(edits=1, num_inference_steps=2, methods=("reprompt",))
    first, again = (edit_quality.measure_edit_quality(settings) for _ in range(2))
    assert first == again
    assert first["edits"][0]["scores"]["reprompt"]["success"] is None and first["classes"] == []
    assert "success is not measured: there is no judge.safetensors" in first["notes"][0]


@needs_font
def test_a_stopped_run_goes_on_from_its_journal(loaded, judge_file, tmp_path):
    def stop(i, n, preview):
        if i:
            raise Cancelled

    steps, kept = [], tmp_path / "kept.jsonl"
    methods = ("ours", "diffedit", "reprompt")
    plain = EditQualitySettings(edits=2, num_inference_steps=2, methods=methods, classifier=judge_file)
    logged, measure = replace(plain, results_log=kept), edit_quality.measure_edit_quality
    with pytest.raises(Cancelled):
        measure(logged, stop)
    told = measure(logged, lambda i, n, _: steps.append(i))
    assert steps == [1] and told == measure(plain)
    assert measure(logged, lambda i, n, _: steps.append(i)) == told and steps == [1]
    with pytest.raises(InputError, match="other settings"):
        measure(replace(logged, seed=1))


def test_a_judge_that_was_named_must_be_there(tmp_path):
    with pytest.raises(ModelError, match="classifier"):
        edit_quality.measure_edit_quality(EditQualitySettings(edits=1, classifier=tmp_path / "none.safetensors"))


def test_pie_bench_by_two_methods(loaded, dataset):
    methods = ("ours-given", "no-edit")
    settings = EditQualitySettings(edits=5, num_inference_steps=2, methods=methods, pie_bench=dataset)
    told = edit_quality.measure_edit_quality(settings)
    (edit,) = told["edits"]
    given, kept = (edit["scores"][name] for name in ("ours-given", "no-edit"))
    assert (edit["kind"], edit["whole"], given["success"]) == ("change object", None, None)
    assert given["exact"] and given["published"]["psnr"] > kept["published"]["psnr"] > 0
    assert {"PIE PSNR", "PIE MSE", "PIE SSIM"} <= set(told["summary"][0]) and not told["whole"]
    assert any("LPIPS" in note for note in told["notes"]) and any("scaled from 512" in note for note in told["notes"])


def test_the_command_line_hands_everything_on(monkeypatch, tmp_path, capsys):
    told = {"summary": [{"method": "ours", "IoU": "0.9 (0.8)"}], "classes": [], "whole": [], "notes": ["a note"]}
    asked = []
    monkeypatch.setattr(edit_quality, "measure_edit_quality", lambda settings, _: asked.append(settings) or told)
    arguments = [
        "bench",
        "quality",
        "--edits",
        "3",
        "--methods",
        "ours, reprompt",
        "--seed",
        "5",
        "--html",
        str(tmp_path),
    ]
    assert cli._run([*arguments, "--output", str(tmp_path / "report.json")], debug=True) == 0
    assert asked == [EditQualitySettings(edits=3, methods=("ours", "reprompt"), seed=5, html=tmp_path)]
    assert (asked[0].classifier, asked[0].guidance_scale) == (None, 4.0)
    assert json.loads((tmp_path / "report.json").read_text()) == told
    assert "0.9 (0.8)" in (said := capsys.readouterr().out) and "note: a note" in said


# masks by every config


def test_recipes_rows_by_hand():
    def one(iou: float, gmacs: float, fell_back: bool = False) -> mask_quality.MaskResult:
        overlap = metrics.MaskOverlap(iou, 1.0, iou)
        return mask_quality.MaskResult(metrics.MaskFit(overlap, overlap, 2.0), gmacs, fell_back)

    found = [
        {"a": one(0.2, 1), "b": one(1, 1)},
        {"a": one(0.6, 3), "b": one(1, 1)},
        {"a": one(1, 9, True), "b": one(1, 1)},
    ]
    every = mask_quality.mask_rows(["swap", "swap", "insert"], found)
    assert [(row["kind"], row["recipe"], row["edits"]) for row in every] == [
        *(("all", "a", 3), ("all", "b", 3), ("swap", "a", 2), ("swap", "b", 2), ("insert", "a", 1), ("insert", "b", 1))
    ]
    assert every[0]["IoU"]["median"] == 0.6 and every[0]["GMACs"]["median"] == 3
    assert every[0]["fell back"]["mean"] == pytest.approx(1 / 3) and every[2]["IoU"]["median"] == pytest.approx(0.4)


def test_every_recipe_is_measured_on_the_same_edits():
    report = mask_quality.measure_mask_quality(EvaluationSettings(edits=3, num_inference_steps=4, seed=3))
    assert {row["recipe"] for row in report["rows"]} == set(mask_quality.MASK_METHODS) and json.dumps(report)
    assert [edit["kind"] for edit in report["edits"]] == ["swap", "insert", "delete"]
    for row in report["rows"]:
        assert (
            all(0 <= row[name]["median"] <= 1 for name in ("IoU", "recall", "precision")) and row["GMACs"]["median"] > 0
        )
