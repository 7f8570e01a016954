"""Erasing: what is inside a mask does not attend to itself."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from PIL import Image

from fisedit import Editor, Region
from fisedit.errors import InputError, MaskError
from fisedit.sampling import denoise, step_runners
from fisedit.sampling.engine import Engine
from fisedit.sampling.latent_blend import filled_from_around
from fisedit.sampling.step_runners import ERASED_GUIDANCE
from fisedit.sampling.trajectory import LatentEdit
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import ActiveCells, EditMode
from tests.support import oracle
from tests.support.edits import CAT, DOG, FP32, as_oracle, check_outside, config_of, latents, record, same, unwatched
from tests.support.grids import grids

BLOBS, SQUARE = (grids(16, 16)[name] for name in ("blobs", "square"))


class Hiding(AttnProcessor2_0):
    """diffusers' attention with a mask: queries inside do not see keys inside."""

    def __init__(self, inside: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._inside = inside

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *_, **__):
        mask = None
        if encoder_hidden_states is None:
            batch, count, _ = hidden_states.shape
            inside = self._inside[count]
            if not inside.all():
                hidden = inside[:, None] & inside[None]
                mask = torch.zeros(count, count).masked_fill(hidden, -torch.inf).expand(batch, -1, -1)
        return super().__call__(attn, hidden_states, encoder_hidden_states, mask)


@pytest.mark.parametrize("growth", [0, 2])
@pytest.mark.parametrize("grid", [BLOBS, SQUARE], ids=["blobs", "square"])
def test_an_erasing_edit_is_the_oracles(pipelines, grid, growth):
    """diffusers' own attention under a mask and less guidance, mixed with the source's maps as every sparse edit is."""
    pipe = pipelines["shallow"]
    engine, config = Engine(pipe), config_of()
    source = record(engine, config)
    changed, steps = replace(config, prompt="", seed=config.seed + 1), config.num_timesteps
    with torch.inference_mode():
        edit = LatentEdit(
            changed, engine.encode(changed), {}, ActiveCells(grid), EditMode((growth,) * steps, erases=True)
        )
        (got,) = denoise.run_sparse(engine, source, [edit], unwatched)
    maps: list[oracle.Maps] = [{} for _ in range(steps)]
    with oracle._around_calls(pipe.unet, lambda i: oracle.recording(pipe.unet, maps[i])):
        before = oracle.dense_generate(pipe, as_oracle(config)).latents
    inside, active = torch.from_numpy(grid), torch.from_numpy(dilate(grid, growth))
    levels = {len(level.flatten()): level.flatten() for level in oracle.levels(inside).values()}

    @contextmanager
    def mixed(i):
        with oracle.mixing(pipe.unet, maps[i], active):
            yield

    draw = pipe.prepare_latents
    pipe.unet.set_attn_processor(Hiding(levels))
    pipe.prepare_latents = lambda *args: torch.where(inside, draw(*args), before[:1])
    try:
        with oracle._around_calls(pipe.unet, mixed):
            less = replace(as_oracle(changed), guidance=ERASED_GUIDANCE)
            run = oracle.dense_generate(pipe, less, oracle.pinned(before, inside))
    finally:
        pipe.unet.set_attn_processor(AttnProcessor2_0())
        del pipe.prepare_latents
    assert oracle.deviation(latents(got), run.latents) <= FP32
    plain = LatentEdit(changed, edit.text, {}, ActiveCells(grid), EditMode((growth,) * steps))
    with torch.inference_mode():
        (without,) = denoise.run_sparse(engine, source, [plain], unwatched)
    assert oracle.deviation(latents(without), run.latents) > 10 * FP32


@pytest.fixture(scope="module")
def shipped():
    return Editor.from_pretrained("demo", local_files_only=True).pipe


@pytest.fixture
def editor(shipped):
    editor = Editor(shipped, model="demo")
    editor.generate(CAT, seed=7, num_inference_steps=6, width=128, height=128)
    return editor


def test_it_keeps_what_is_outside_and_the_prompt(editor):
    source = editor.current
    result = editor.erase(Region.mask(SQUARE))
    check_outside(editor, result, source)
    assert (result.prompt, result.run.erases, result.stats.fallback) == (CAT, True, "")
    assert np.array_equal(result.mask.grid, SQUARE) and result.config.seed == 8
    editor.undo()
    assert not same(editor.erase(Region.mask(SQUARE), seed=3), result)
    editor.undo()
    told = editor.erase(Region.mask(SQUARE), prompt="a cat on a beach")
    assert told.prompt == "a cat on a beach" and same(told, result)  # both read that there is a beach
    editor.undo()
    told = editor.erase(Region.mask(SQUARE), prompt="a cat and a hat on a beach")
    assert not same(told, result)


def test_the_prompt_no_longer_names_what_went(editor, tmp_path):
    """By words, and where a mask covers a thing; what is painted is the same, and so are later edits, made again."""
    words = editor.erase(Region.words("cake"))
    assert words.prompt == "a cat on a beach" and words.run.erases and str(words.diff) == "- and a cake"
    assert "the prompt no longer names what was erased: cake" in words.stats.notes
    source = editor.undo()
    told = editor.erase(Region.words("cake"), prompt=CAT)
    assert told.prompt == CAT and same(told, words)
    editor.checkout(source.id)
    cat = editor.preview(DOG).mask.grid
    result = editor.erase(Region.mask(dilate(cat, 1)))
    assert result.prompt == "a cake on a beach"
    over = editor.edit("a cake and a hat on a beach", mask=SQUARE)
    editor.undo()
    editor._trajectory_cache.drop([result.id])
    assert same(editor.edit("a cake and a hat on a beach", mask=SQUARE), over)
    editor.write(tmp_path / "over.png")
    remade = Editor.remake(Image.open(tmp_path / "over.png"), local_files_only=True)
    assert same(remade.current, over) and remade.history[1].prompt == "a cake on a beach"
    changed = Editor.remake(
        Image.open(tmp_path / "over.png"), changes={"num_inference_steps": 5}, local_files_only=True
    )
    assert [each.prompt for each in changed.history] == [each.prompt for each in remade.history]


def test_the_prompt_stays_where_no_thing_went(editor):
    """Half of a thing, or nothing that the prompt names."""
    source = editor.current
    half = editor.preview(DOG).mask.grid.copy()
    half[:, np.flatnonzero(half.any(0)).mean().astype(int) :] = False
    for grid in (half, ~dilate(editor.preview("a cat and a cake on a beach, red", words=["cat", "cake"]).mask.grid, 1)):
        assert grid.any() and editor.erase(Region.mask(grid)).prompt == CAT
        editor.checkout(source.id)


def test_a_prompt_of_which_nothing_is_left(editor, tmp_path):
    editor.generate("a cat", seed=7, num_inference_steps=6, width=128, height=128)
    erased = editor.erase(Region.words("cat").grow(1))
    assert erased.prompt == "" and erased.run.erases and erased.stats.fallback == ""
    editor.write(tmp_path / "erased.png")
    editor.save(tmp_path / "session")
    for remade in (
        Editor.remake(Image.open(tmp_path / "erased.png"), local_files_only=True),
        Editor.resume(tmp_path / "session", local_files_only=True),
    ):
        assert same(remade.current, erased) and remade.current.prompt == ""
    over = editor.edit("a dog", mask=SQUARE)
    editor.undo()
    editor._trajectory_cache.drop([erased.id])
    assert same(editor.edit("a dog", mask=SQUARE), over)


def test_words_that_remove_a_thing_erase_it(editor):
    """Its region has a margin, its noise is other than the picture's, and what else the prompt names is not read."""
    source = editor.current
    removed = editor.edit("a cat on a beach")
    check_outside(editor, removed, source)
    assert removed.run.erases and removed.config.seed == source.config.seed
    cells = editor._pipeline.requests.edit("a cat on a beach").region
    editor.checkout(source.id)
    bare = editor.preview("a cat on a beach", grow=-1).mask.grid
    assert np.array_equal(dilate(bare, 1) & removed.mask.grid, dilate(bare, 1)) and cells.reads_words
    assert not removed.run.checked  # other words and less guidance change what stays, too
    by_hand = editor.erase(Region.mask(removed.mask.grid), prompt="a cat on a beach")
    assert np.array_equal(removed.mask.grid, by_hand.mask.grid) and by_hand.run.erases


@pytest.mark.parametrize(
    "options",
    [{"structure": 0.5}, {"strength": 0.5}, {"growth": 2}, {"prompt": "a cake on a beach, watercolor"}],
    ids=lambda options: next(iter(options)),
)
def test_words_that_do_more_than_remove_a_thing_edit_it(editor, options):
    assert not editor.edit(**{"prompt": "a cat on a beach", "mask": SQUARE} | options).run.erases


def test_a_removal_and_its_way_back(editor, tmp_path):
    removed = editor.edit("a cat on a beach", mask=SQUARE)
    over = editor.edit("a dog on a beach", mask=np.roll(SQUARE, 2, 1))
    editor.undo()
    editor._trajectory_cache.drop([removed.id])
    assert same(editor.edit("a dog on a beach", mask=np.roll(SQUARE, 2, 1)), over)
    editor.checkout(removed.id)
    editor.write(tmp_path / "removed.png")
    remade = Editor.remake(Image.open(tmp_path / "removed.png"), local_files_only=True)
    assert same(remade.current, removed) and remade.current.run.erases


def test_a_large_region_is_erased_sparsely_too(editor):
    large = np.ones((16, 16), bool)
    large[:2] = False
    result = editor.erase(Region.mask(large))
    assert result.stats.fallback == "" and result.stats.unet_evaluations_dense == 0


def test_its_way_back(editor, tmp_path):
    """After its features are gone, from its session and from its file."""
    result = editor.erase(Region.mask(SQUARE))
    over = editor.edit("a dog and a cake on a beach", mask=np.roll(SQUARE, 2, 1))
    editor.undo()
    editor._trajectory_cache.drop([result.id])
    assert same(editor.edit("a dog and a cake on a beach", mask=np.roll(SQUARE, 2, 1)), over)
    editor.save(tmp_path / "session")
    loaded = Editor.from_pretrained("demo", local_files_only=True)
    loaded.load(tmp_path / "session")
    assert loaded.history.find(result.id).run.erases and not loaded.history.find(over.id).run.erases
    loaded.checkout(result.id)
    loaded.write(tmp_path / "erased.png")
    remade = Editor.remake(Image.open(tmp_path / "erased.png"), local_files_only=True)
    assert same(remade.current, result) and remade.current.run.erases


def test_little_guidance_is_left_as_it_is(shipped, monkeypatch):
    editor = Editor(shipped, model="demo")
    source = editor.generate(CAT, seed=7, num_inference_steps=3, width=128, height=128, guidance_scale=1.2)
    erased = editor.erase(Region.mask(SQUARE))
    monkeypatch.setattr(step_runners, "ERASED_GUIDANCE", 9.0)
    editor.checkout(source.id)
    assert same(editor.erase(Region.mask(SQUARE)), erased)


def test_what_cannot_be_erased(editor):
    with pytest.raises(MaskError, match=r"erasing must leave a part of the picture, got all of it; give a mask"):
        editor.erase(Region.everywhere())
    with pytest.raises(InputError, match=r"region must be a Region, got ndarray; use Region.mask or Region.words"):
        editor.erase(SQUARE)
    with pytest.raises(MaskError, match=r"erasing must leave a part of the picture, got identical edit"):
        editor.erase(Region.words())
    assert editor.erase(Region.mask(~np.ones((16, 16), bool))).stats.notes == ("nothing was edited: the mask is empty",)
    assert len(editor.history) == 2


def test_later_masks_read_the_prompts_own_words(editor):
    """What was read while it was erased is nothing; words are still found by the words of the picture."""
    source = editor.current
    keys = editor._trajectory_cache.get(source.id)[0].text_keys
    found = editor.preview(DOG).mask.grid
    corner = np.zeros((16, 16), bool)
    corner[:2, :2] = True
    erased = editor.erase(Region.mask(corner))
    own = editor._trajectory_cache.get(erased.id)[0].text_keys
    assert own.keys() == keys.keys() and all(torch.allclose(own[name], keys[name], atol=1e-5) for name in keys)
    again = editor.preview(DOG).mask.grid
    assert (found & again).sum() >= 0.8 * (found | again).sum()


def test_of_a_picture_that_was_opened_without_words(editor, tmp_path):
    editor.open(editor.current.image, num_inference_steps=6, width=128, height=128)
    result = editor.erase(Region.mask(SQUARE))
    check_outside(editor, result, editor.history.find(result.parent))
    assert result.prompt == ""
    editor.write(tmp_path / "erased.png")
    editor.save(tmp_path / "session")
    loaded = Editor.from_pretrained("demo", local_files_only=True)
    loaded.load(tmp_path / "session")
    assert loaded.current.run.erases and same(loaded.current, result)
    remade = Editor.remake(Image.open(tmp_path / "erased.png"), local_files_only=True)
    assert remade.current.config.opened


def test_steps_that_would_compute_everything_are_refused(editor):
    with pytest.raises(InputError, match="where regions with prompts are edited"):
        editor.edit(regions=[(Region.mask(SQUARE), "a dog")], growth=64)
    with pytest.raises(InputError, match="keep no structure"):
        editor.edit(regions=[(Region.mask(SQUARE), "a dog")], structure=0.5)
    with pytest.raises(InputError, match="grow by themselves"):
        editor.edit(regions=[(Region.mask(SQUARE), "a dog")], grow=1)


def test_a_remade_variation_stays_where_it_was(editor, tmp_path):
    """With another value the edits are made anew, but in the cells that are recorded."""
    editor.erase(Region.words("cake"))
    erased = editor.current
    editor.edit(CAT, words=["cat"], seed=99)
    editor.write(tmp_path / "varied.png")
    remade = Editor.remake(
        Image.open(tmp_path / "varied.png"), changes={"num_inference_steps": 5}, local_files_only=True
    )
    assert [result.run.erases for result in remade.history] == [False, True, False]
    assert np.array_equal(remade.history[1].mask.grid, erased.mask.grid)
    assert remade.current.config.seed == 99 and remade.current.mask.grid.any()


def test_a_hole_begins_with_what_continues_the_picture_around_it(shipped):
    """Noise of its own lies over it, as diffusers' scheduler adds noise at the first step that runs."""
    engine, config = Engine(shipped), config_of()
    source = record(engine, config)
    changed, start = replace(config, seed=config.seed + 1), config.num_timesteps // 2
    mode = EditMode((0,) * config.num_timesteps, start=start, erases=True)
    with torch.inference_mode():
        edit = LatentEdit(changed, engine.encode(changed), {}, ActiveCells(SQUARE), mode)
        (got,) = denoise.run_sparse(engine, source, [edit], unwatched)
    scheduler = shipped.scheduler.from_config(shipped.scheduler.config)
    scheduler.set_timesteps(config.num_inference_steps)
    noise = torch.randn(source.latents[0].shape, generator=torch.Generator().manual_seed(changed.seed))
    filled = filled_from_around(source.latents[-1], SQUARE)
    inside = torch.from_numpy(SQUARE)
    expected = scheduler.add_noise(filled, noise.to(filled), scheduler.timesteps[start : start + 1])
    first = torch.where(inside, expected, source.latents[start])
    assert oracle.deviation(latents(got)[start], first) <= FP32
    ramp = torch.linspace(0, 1, 16).expand(1, 4, 16, 16) + torch.linspace(0, 2, 16)[:, None]
    assert oracle.deviation(filled_from_around(torch.where(inside, 0, ramp), SQUARE), ramp) <= FP32


@pytest.mark.parametrize(("scheduler", "start"), [("ddim", 6), ("dpmsolver++", 6), ("pndm", 0), ("heun", 12)])
def test_erasing_skips_the_first_steps(shipped, scheduler, start):
    """Words that remove skip them too; PLMS cannot, and Heun's steps are pairs."""
    editor = Editor(shipped, model="demo")
    options = {"seed": 7, "num_inference_steps": 20, "scheduler": scheduler, "width": 128, "height": 128}
    source = editor.generate(CAT, **options)
    assert editor.erase(Region.mask(SQUARE)).run.start == start
    editor.checkout(source.id)
    assert editor.edit("a cat on a beach").run.start == start
