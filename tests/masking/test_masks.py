"""Masks: a user's in every form, grids shaped by hand, and attention made from blobs whose truth is known."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as quantified
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from fisedit.errors import MaskError, NumericsError
from fisedit.masking import heatmaps, masks, object_masks
from fisedit.prompts.text_diff import diff, words
from fisedit.prompts.whole_picture import object_words
from fisedit.prompts.word_classes import TaggedPrompt
from fisedit.sparse_kernels.dilation import dilate, erode
from fisedit.values import EditKind, EditMask, MaskSource
from tests.support.grids import square
from tests.support.pipelines import build_tokenizer

TOKENIZER = build_tokenizer()
GRIDS = arrays(bool, st.tuples(st.integers(1, 20), st.integers(1, 20)))


def iou(a: np.ndarray, b: np.ndarray) -> float:
    return (a & b).sum() / (a | b).sum()


def pixels(grid: np.ndarray) -> np.ndarray:
    return np.kron(grid, np.ones((8, 8), bool))


CELLS = square(6, 8, 1, 2, 3)  # a picture of 64x48 pixels
FORMS = {
    "pil L": Image.fromarray(pixels(CELLS).astype(np.uint8) * 255),
    "pil 1": Image.fromarray(pixels(CELLS)),
    "pil RGB": Image.fromarray(pixels(CELLS).astype(np.uint8) * 255).convert("RGB"),
    "pil P": Image.fromarray(pixels(CELLS).astype(np.uint8) * 255).convert("P"),
    "pil 16 bit": Image.fromarray(pixels(CELLS).astype(np.uint16) * 65535),
    "pil of another size": Image.fromarray(CELLS.astype(np.uint8) * 255),
    "pil LA": Image.merge("LA", [Image.new("L", (64, 48), 255), Image.fromarray(np.uint8(255) * pixels(CELLS))]),
    "pil F": Image.fromarray(pixels(CELLS).astype(np.float32)),
    "bool": pixels(CELLS),
    "bool with a channel": pixels(CELLS)[..., None],
    "uint8": pixels(CELLS).astype(np.uint8) * 200,
    "uint8 of 0 and 1": pixels(CELLS).astype(np.uint8),
    "int64": pixels(CELLS).astype(np.int64) * 255,
    "float32": pixels(CELLS).astype(np.float32) * 0.5,
    "float64": pixels(CELLS).astype(np.float64),
    "latent grid": CELLS,
    "edit mask": EditMask(CELLS, MaskSource.GIVEN),
}


def test_every_form_of_a_mask_gives_the_same_cells():
    for name, mask in FORMS.items():
        got = masks.grid_of_mask(mask, height=48, width=64)
        assert got.dtype == bool and np.array_equal(got, CELLS), name


def test_a_cell_is_inside_if_any_of_its_pixels_is_at_least_half():
    painted = np.zeros((16, 16), np.uint8)
    painted[7, 8], painted[15, 0] = 128, 127
    assert masks.grid_of_mask(painted, 16, 16).tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("value", [False, True])
def test_empty_and_full_masks_are_legal(value):
    assert (masks.grid_of_mask(np.full((504, 520), value), 504, 520) == np.full((63, 65), value)).all()


def test_masked_out_cells_are_outside():
    grid = np.ma.array(np.ones((8, 8), bool), mask=np.tri(8, dtype=bool))
    assert (masks.grid_of_mask(grid, 64, 64) == ~np.tri(8, dtype=bool)).all()


def test_a_given_grid_is_copied():
    grid = CELLS.copy()
    masks.grid_of_mask(grid, 48, 64)[:] = True
    assert np.array_equal(grid, CELLS)


NAN = np.full((48, 64), np.nan)
BAD = {
    "wrong size": (np.zeros((64, 48), bool), "64x48 pixels.*got 48x64"),
    "latent size, but not boolean": (CELLS.astype(np.uint8), "got 8x6"),
    "colour array": (np.zeros((48, 64, 3), np.uint8), "got an array of shape 48x64x3"),
    "no dimensions": (np.array(True), "got an array of shape nothing"),
    "nothing in it": (np.zeros((0, 0), bool), "got 0x0"),
    "a path": ("mask.png", "got str"),
    "none": (None, "got NoneType"),
    "a list": ([[True]], "got list"),
    "NaN": (NAN, "got nan"),
    "above one": (np.full((48, 64), 255.0), "from 0 to 1, got 255"),
    "negative": (np.full((48, 64), -1), "from 0 to 255, got -1"),
    "16 bit": (np.full((48, 64), 65535, np.uint16), "from 0 to 255"),
    "pil of floats": (Image.fromarray(np.full((48, 64), 1.5, np.float32)), "from 0 to 1, got 1.5"),
    "complex": (np.zeros((48, 64), complex), "got complex128"),
    "objects": (np.full((48, 64), None), "got object"),
}


@pytest.mark.parametrize(("mask", "message"), BAD.values(), ids=BAD)
def test_bad_masks_are_refused_in_one_line(mask, message):
    with pytest.raises(MaskError, match=message) as caught:
        masks.grid_of_mask(mask, height=48, width=64)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


@quantified(GRIDS)
@settings(max_examples=200, deadline=None)
def test_cleaning_empties_no_mask_and_fills_no_empty_one(grid):
    assert masks.clean_mask(grid).any() == grid.any()
    assert masks.clean_mask(grid, dilation=0).any() == grid.any()


def test_cleaning_keeps_blobs_and_drops_specks_threads_and_holes():
    blob = square(32, 32, 8, 8, 8)
    ragged = blob.copy()
    ragged[11:13, 11:13] = False  # a hole
    ragged[10, 16:30] = True  # a thread
    ragged[25:27, 25:27] = True  # a speck of 4 cells, under 1 % of 1024
    ragged[0, ::2] = True
    assert np.array_equal(masks.clean_mask(ragged, dilation=0), blob)
    assert np.array_equal(masks.clean_mask(ragged), dilate(blob, 1))


def test_where_all_is_speck_the_largest_stays():
    grid = square(64, 64, 3, 3, 2) | square(64, 64, 30, 30, 3) | square(64, 64, 60, 0, 1)
    assert np.array_equal(masks.clean_mask(grid, dilation=0), square(64, 64, 30, 30, 3))
    thread = np.zeros((64, 64), bool)
    thread[5, :20] = thread[50, :4] = True
    assert np.array_equal(np.unique(np.nonzero(masks.clean_mask(thread, dilation=0))[0]), [5])


def test_a_small_object_survives_on_a_small_grid():
    grid = square(16, 16, 14, 14, 2)
    assert np.array_equal(masks.clean_mask(grid, dilation=0), grid)


OLD, NEW = square(32, 32, 4, 4, 9), square(32, 32, 6, 6, 10)  # a cat, and where a dog would look
CAKE = square(32, 32, 20, 18, 8)
SOURCE = "a cat and a cake on a beach"


def attention(prompt: str, where: dict[str, np.ndarray], noise: float = 0.2, seed: int = 0) -> np.ndarray:
    """Maps [77, 32, 32] of a prompt whose words attend to the given places, and elsewhere to noise."""
    rng = np.random.default_rng(seed)
    maps = 0.01 * rng.random((77, 32, 32), np.float32)
    for word in words(prompt, TOKENIZER):
        if word.text in where:
            maps[list(word.tokens)] += 0.05 * where[word.text] * (1 + noise * rng.standard_normal((32, 32)))
            maps[list(word.tokens)] += 0.05 * noise * rng.random((32, 32))
    return maps.clip(0)


def affinity(*places: np.ndarray, size: int = 16) -> np.ndarray:
    """Self-attention [n, n] of a grid whose cells attend to their own place evenly, and to all others a little."""
    labels = sum((n + 1) * place[::2, ::2] for n, place in enumerate(places)).ravel()
    same = (labels[:, None] == labels[None, :]) + 0.02
    return (same / same.sum(1, keepdims=True)).astype(np.float32)


def predicted(prompt: str, old: dict, new: dict, source: str = SOURCE, noise: float = 0.2, **options) -> EditMask:
    script = diff(source, prompt, TOKENIZER)
    old_maps, new_maps = attention(source, old, noise), attention(prompt, new, noise, seed=1)
    return heatmaps.predict(script, old_maps, new_maps, affinity(OLD | NEW, CAKE), (16, 16), **options)


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5])
def test_a_swap_covers_the_old_word_and_the_new(noise):
    mask = predicted("a dog and a cake on a beach", {"cat": OLD, "cake": CAKE}, {"dog": NEW, "cake": CAKE}, noise=noise)
    assert mask.source is MaskSource.ATTENTION
    assert mask.confidence > masks.LOW_CONFIDENCE
    assert (mask.grid >= (OLD | NEW)).mean() > 0.99
    assert not (mask.grid & CAKE).any()
    assert iou(predicted("a dog and a cake on a beach", {"cat": OLD}, {"dog": NEW}, dilation=0).grid, OLD | NEW) > 0.8


def test_deletion_insertion_and_adjectives_look_at_their_noun():
    deleted = predicted("a cat on a beach", {"cat": OLD, "cake": CAKE}, {"cat": OLD}, dilation=0)
    assert iou(deleted.grid, CAKE) > 0.8
    inserted = predicted(SOURCE, {"cat": OLD}, {"cat": OLD, "cake": CAKE}, source="a cat on a beach", dilation=0)
    assert iou(inserted.grid, CAKE) > 0.8
    recoloured = predicted("a cat and a red cake on a beach", {"cake": CAKE, "cat": OLD}, {"cake": CAKE}, dilation=0)
    assert iou(recoloured.grid, CAKE) > 0.8


def test_a_large_change_does_not_hide_a_small_one():
    source, prompt = "a cat eats a cake near a big bird", "a dog eats a cake near a big house"
    small = square(32, 32, 26, 4, 3)
    script = diff(source, prompt, TOKENIZER)
    old, new = attention(source, {"cat": CAKE, "bird": small}), attention(prompt, {"dog": CAKE, "house": small}, seed=1)
    mask = heatmaps.predict(script, old, new, affinity(CAKE, small), (16, 16))
    assert len(script.hunks) == 2
    assert (mask.grid & small).sum() / small.sum() > 0.8
    assert (mask.grid & CAKE).sum() / CAKE.sum() > 0.95


def test_objects_at_the_border_stay_inside_the_frame():
    corner = square(32, 32, 24, 24, 8)
    script = diff("a cat", "a dog", TOKENIZER)
    maps = attention("a cat", {"cat": corner}), attention("a dog", {"dog": corner}, seed=1)
    mask = heatmaps.predict(script, *maps, affinity(corner), (16, 16), dilation=0)
    assert iou(mask.grid, corner) > 0.9


def test_prediction_works_on_oblong_and_odd_grids():
    script = diff("a cat", "a dog", TOKENIZER)
    place = np.zeros((63, 65), bool)
    place[20:40, 10:30] = True
    maps = np.zeros((77, 63, 65), np.float32) + place
    near = np.eye(32 * 33, dtype=np.float32)
    assert iou(heatmaps.predict(script, maps, maps, near, (32, 33), dilation=0).grid, place) > 0.85


def test_heat_is_shown_from_0_to_1():
    heat = predicted("a dog and a cake on a beach", {"cat": OLD}, {"dog": NEW}).heatmap
    assert (heat.dtype, heat.shape) == (np.float32, (32, 32))
    assert (float(heat.min()), float(heat.max())) == (0.0, 1.0)


def test_global_and_identical_scripts_need_no_attention():
    everywhere, nowhere = predicted("a cat and a cake in the snow", {}, {}), predicted(SOURCE.upper(), {}, {})
    assert (everywhere.source, everywhere.area, everywhere.confidence) == (MaskSource.EVERYWHERE, 1.0, 1.0)
    assert (nowhere.source, nowhere.area) == (MaskSource.NOWHERE, 0.0)


def test_constant_attention_gives_no_confidence_and_nan_is_refused():
    script = diff("a cat", "a dog", TOKENIZER)
    flat = np.ones((77, 32, 32), np.float32)
    mask = heatmaps.predict(script, flat, flat, affinity(OLD), (16, 16))
    assert (mask.area, mask.confidence) == (0.0, 0.0)
    with pytest.raises(NumericsError):
        heatmaps.predict(script, flat * np.nan, flat, affinity(OLD), (16, 16))


def test_the_seed_is_the_union_over_words_and_hunks():
    script = diff("a cat on a house", "a dog on a house with a cake", TOKENIZER)
    assert script.kind is EditKind.MIXED
    old, new = attention("a cat on a house", {"cat": OLD}, 0), attention(script.prompt, {"dog": NEW, "cake": CAKE}, 0)
    seed = heatmaps.change_heatmap(script, old, new)
    assert np.array_equal(seed > 0.5, OLD | NEW | CAKE)
    assert not heatmaps.change_heatmap(replace(script, hunks=()), old, new).any()


def test_refinement_fills_a_place_and_keeps_the_range():
    spotted = (OLD * (np.indices(OLD.shape).sum(0) % 4 == 0)).astype(np.float32)
    refined = heatmaps.refine(spotted, affinity(OLD), (16, 16), rounds=3)
    assert refined[OLD].min() > 3 * refined[~dilate(OLD, 2)].max()
    assert 0 <= refined.min() <= refined.max() <= 1
    flat = np.full((32, 32), 0.3, np.float32)
    assert np.allclose(heatmaps.refine(flat, affinity(OLD), (16, 16)), 0.3)


def test_confidence_grows_with_otsus_share_of_variance():
    told = [masks.confidence(separation) for separation in np.linspace(0, 1, 101)]
    assert (told[0], told[-1]) == (0.0, 1.0) and told == sorted(told)

    rng = np.random.default_rng(0)
    grid, certain = masks.otsu(OLD.astype(np.float32))
    assert np.array_equal(grid, OLD)
    assert certain == pytest.approx(1)
    ramp = np.linspace(0, 1, 1024, dtype=np.float32).reshape(32, 32)
    assert masks.otsu(ramp)[1] == pytest.approx(0.75, abs=0.01)
    assert masks.otsu(rng.standard_normal((64, 64)).astype(np.float32))[1] == pytest.approx(2 / np.pi, abs=0.02)
    stray = rng.standard_normal((64, 64)).astype(np.float32)
    stray[3, 5] = 40
    assert masks.confidence(masks.otsu(stray)[1]) < masks.LOW_CONFIDENCE == masks.confidence(0.5)


# ---- things, the config that ships ----------------------------------------------------------------------------------

ELL = square(32, 32, 4, 4, 10) & ~square(32, 32, 4, 8, 6)


def found(prompt: str, old: dict, coming: dict | None = None, source: str = SOURCE, noise: float = 0.1) -> EditMask:
    named = object_words(TaggedPrompt.from_words(words(source, TOKENIZER)))
    near = affinity(*(place > 0.5 for place in old.values()))
    scene = object_masks.SourceAttention(attention(source, old, noise), near, (16, 16), named)
    maps = None if coming is None else attention(prompt, coming, noise, seed=1)
    return object_masks.predict(diff(source, prompt, TOKENIZER), scene, maps)


def test_boxes_stand_around_every_piece():
    assert np.array_equal(masks.bounding_boxes(ELL | CAKE), square(32, 32, 4, 4, 10) | CAKE)
    assert not masks.bounding_boxes(np.zeros((4, 5), bool)).any()


def test_another_thing_gets_the_box_and_a_changed_or_removed_one_its_outline():
    where = {"cat": ELL, "cake": CAKE}
    swapped, removed = found("a dog and a cake on a beach", where), found("a cake on a beach", where)
    recoloured = found("a red cat and a cake on a beach", where)
    box, notch = square(32, 32, 4, 4, 10), square(32, 32, 5, 11, 3)
    assert (swapped.grid >= box).all() and (swapped.grid <= dilate(box, 2)).all()
    assert (recoloured.grid >= ELL).all() and (recoloured.grid <= dilate(ELL, 2)).all()
    assert not (recoloured.grid & notch).any()
    assert np.array_equal(removed.grid, recoloured.grid)
    assert (swapped.source, removed.source) == (MaskSource.ATTENTION,) * 2
    assert min(swapped.confidence, removed.confidence) > masks.LOW_CONFIDENCE


def test_things_that_stay_keep_the_cells_that_they_own():
    near = square(32, 32, 2, 10, 6)  # beside the cat, within its box
    mask = found("a dog and a cake on a beach", {"cat": np.maximum(ELL, 0.4 * near), "cake": near})
    assert (mask.grid & ELL).sum() > 0.9 * ELL.sum()
    assert not (mask.grid & near).any()


def test_a_thing_that_cannot_be_told_from_its_neighbour_takes_its_cells():
    """Where confidence is low; above it the cells are the neighbour's, whose word has more attention there."""
    rows, columns = np.indices((32, 32)) - 15.5
    spread = (0.5 * np.clip(1 - np.hypot(rows, columns) / 24, 0, 1)).astype(np.float32)
    near = square(32, 32, 13, 13, 6)
    unsure = found("a dog and a cake on a beach", {"cat": spread, "cake": near}, noise=0.01)
    assert unsure.confidence < object_masks.MIN_OBJECT_CONFIDENCE and (unsure.grid & near).sum() > 0.9 * near.sum()


def test_what_comes_is_where_it_would_look_and_beside_what_stays():
    source, prompt = "a cat on a beach", "a cat and a cake on a beach"
    beside = found(prompt, {"cat": OLD}, {"cake": CAKE | OLD & square(32, 32, 10, 10, 3), "cat": OLD}, source)
    assert iou(beside.grid, CAKE) > 0.75 and not (beside.grid & erode(OLD, 1)).any()


def test_what_sits_on_a_thing_that_stays_may_take_its_cells():
    head = square(32, 32, 4, 5, 6)
    worn = found("a cat wearing a hat on a beach", {"cat": OLD}, {"hat": head}, "a cat on a beach")
    assert iou(worn.grid, head) > 0.6


@pytest.mark.parametrize(("joined", "covers"), [("and a cake", False), ("with a cake", True)])
def test_what_comes_beside_a_thing_leaves_its_cells_though_it_would_look_there(joined: str, covers: bool):
    over, beside = square(32, 32, 5, 5, 7), square(32, 32, 5, 16, 6)
    looked_for = {"cat": OLD, "cake": np.maximum(0.6 * over, 0.4 * beside)}
    mask = found(f"a cat {joined} on a beach", {"cat": OLD}, looked_for, "a cat on a beach", noise=0.02)
    assert bool((mask.grid & over).any()) is covers
    assert covers or ((mask.grid >= beside) & (mask.grid <= dilate(beside, 2))).all()


@pytest.mark.parametrize(("coming", "places"), [("a cake", 1), ("two cakes", 2), ("a cake and a pie", 2)])
def test_one_thing_that_comes_gets_one_place(coming: str, places: int):
    stronger, weaker = square(32, 32, 20, 18, 8), square(32, 32, 20, 2, 7)
    looked_for = {word: np.maximum(0.6 * stronger, 0.5 * weaker) for word in ("cake", "cakes", "pie")}
    mask = found(f"a cat and {coming} on a beach", {"cat": OLD}, {"cat": OLD} | looked_for, "a cat on a beach")
    assert (mask.grid >= stronger).mean() > 0.99
    assert masks.count_components(mask.grid) == places


def test_places_and_times_own_nothing():
    named = object_words(
        TaggedPrompt.from_words(words("a red cat, a cake in a box on a beach at night in the snow", TOKENIZER))
    )
    assert [word.text for word in named] == ["cat", "cake", "box"]


def test_the_rim_adds_the_flanks_that_otsus_threshold_cuts_off():
    rows, columns = np.indices((32, 32)) - 15.5
    bump = np.exp(-(rows**2 + columns**2) / 2 / 4**2).astype(np.float32)
    otsu_cells, li_cells = object_masks.above_otsu(bump), object_masks.above_li(bump)
    assert (li_cells >= otsu_cells).all() and 1.3 * otsu_cells.sum() < (li_cells & dilate(otsu_cells, 1)).sum()
    assert bump[otsu_cells].sum() < 0.72 * bump.sum()
    assert bump[li_cells & dilate(otsu_cells, 1)].sum() > 0.8 * bump.sum()
    low_threshold = object_masks.above_li(bump, object_masks.BOUNDARY_RATIO) & dilate(otsu_cells, 2)
    assert (low_threshold >= li_cells & dilate(otsu_cells, 1)).all() and bump[low_threshold].sum() > 0.88 * bump.sum()


def test_a_faint_part_of_what_goes_belongs_to_it_and_one_far_away_does_not():
    ear, far = square(32, 32, 6, 14, 2), square(32, 32, 26, 26, 2)
    heat = np.maximum(square(32, 32, 4, 4, 10), 0.4 * (ear | far)).astype(np.float32)
    mask = found("a cake on a beach", {"cat": heat, "cake": CAKE})
    assert (mask.grid & ear).sum() == ear.sum() and not (mask.grid & far).any()


def test_things_of_flat_maps_are_nowhere_and_nan_is_refused():
    scene = object_masks.SourceAttention(np.ones((77, 32, 32), np.float32), affinity(OLD), (16, 16))
    script = diff("a cat", "a dog", TOKENIZER)
    nothing = object_masks.predict(script, scene)
    assert (nothing.area, nothing.confidence) == (0.0, 0.0)
    with pytest.raises(NumericsError):
        object_masks.predict(script, replace(scene, maps=scene.maps * np.nan))


def test_the_import_is_light():
    code = "import sys, fisedit.masking.object_masks\n"
    code += "print({'torch', 'transformers', 'scipy', 'skimage'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_pieces_connect_at_their_corners():
    grid = np.zeros((6, 7), bool)
    grid[1, 1] = grid[2, 2] = grid[4, 5] = grid[4, 6] = True
    assert masks.count_components(grid) == 2 and masks.count_components(np.zeros((3, 3), bool)) == 0


@pytest.mark.parametrize(("kept", "soft"), [(True, True), (True, False), (False, True), (False, False)])
def test_levels_of_a_mask_that_is_placed_again(kept, soft):
    levels = np.zeros((8, 12), np.uint8)
    levels[2:5, 3:7], levels[4, 4] = 200, 7
    mask = EditMask(levels > 0, MaskSource.GIVEN, levels=levels if kept else None)
    expected = levels if kept and soft else 255 * (levels > 0)
    assert np.array_equal(masks.place_mask(mask, 64, 96, soft=soft).levels, expected)
