"""Several regions with prompts of their own in one run."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from PIL import Image

from fisedit import Editor, Region
from fisedit.errors import InputError, MaskError, PromptError
from fisedit.sampling import denoise
from fisedit.sampling.engine import Engine
from fisedit.sampling.trajectory import LatentEdit
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import ActiveCells, EditMode, RegionalPrompt
from tests.support import oracle
from tests.support.edits import (
    CAT,
    DOG,
    FP32,
    as_oracle,
    check_outside,
    config_of,
    latents,
    record,
    replay,
    same,
    unwatched,
)
from tests.support.grids import square

LEFT, RIGHT = square(16, 16, 3, 1, 5), square(16, 16, 4, 5, 7)  # which overlap
OWN = ("a red house in snow", "a bird")


class OwnText(AttnProcessor2_0):
    """diffusers' attention over the texts one after the other, with a mask: every row sees the text of its region."""

    def __init__(self, text_of_row: dict[int, torch.Tensor], texts: int) -> None:
        super().__init__()
        self._text_of_row, self._texts = text_of_row, texts

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *_, **__):
        mask = None
        if encoder_hidden_states is not None:
            batch, count, _ = hidden_states.shape
            tokens = encoder_hidden_states.shape[1]
            text_of_token = torch.arange(self._texts).repeat_interleave(tokens // self._texts)
            hidden = self._text_of_row[count][:, None] != text_of_token
            mask = torch.zeros(count, tokens).masked_fill(hidden, -torch.inf).expand(batch, -1, -1)
        return super().__call__(attn, hidden_states, encoder_hidden_states, mask)


def texts_of_rows(*grids: np.ndarray) -> dict[int, torch.Tensor]:
    """Positions of a level -> the number of the text that each attends to."""
    found = {}
    for i, grid in reversed(list(enumerate(grids, 1))):
        for level in oracle.levels(torch.from_numpy(grid)).values():
            cells = level.flatten()
            found[len(cells)] = torch.where(cells, i, found.get(len(cells), torch.zeros(len(cells), dtype=torch.long)))
    return found


@pytest.mark.parametrize("growth", [0, 2])
def test_every_row_attends_to_the_text_of_its_region(pipelines, growth):
    """diffusers' own attention under a mask, mixed with the source's maps as every sparse edit is."""
    pipe = pipelines["shallow"]
    engine, config = Engine(pipe), config_of()
    source = record(engine, config)
    grid, steps = LEFT | RIGHT, config.num_timesteps
    with torch.inference_mode():
        texts = [engine.encode(replace(config, prompt=prompt)) for prompt in (DOG, *OWN)]
        regional = tuple(RegionalPrompt(*each) for each in zip(OWN, (LEFT, RIGHT), strict=True))
        changed = replace(config, prompt=DOG)
        edit = LatentEdit(
            changed,
            texts[0],
            {},
            ActiveCells(grid),
            EditMode((growth,) * steps, regional=regional),
            regional_text=texts[1:],
        )
        (got,) = denoise.run_sparse(engine, source, [edit], unwatched)
    maps: list[oracle.Maps] = [{} for _ in range(steps)]
    with oracle._around_calls(pipe.unet, lambda i: oracle.recording(pipe.unet, maps[i])):
        before = oracle.dense_generate(pipe, as_oracle(config)).latents
    active, encode = torch.from_numpy(dilate(grid, growth)), pipe.encode_prompt
    unconditional, conditional = (torch.cat([text.text[i : i + 1] for text in texts], 1) for i in (0, 1))

    @contextmanager
    def mixed(i):
        with oracle.mixing(pipe.unet, maps[i], active):
            yield

    pipe.unet.set_attn_processor(OwnText(texts_of_rows(LEFT, RIGHT), len(texts)))
    pipe.encode_prompt = lambda *_, **__: (conditional, unconditional)
    try:
        with oracle._around_calls(pipe.unet, mixed):
            run = oracle.dense_generate(pipe, as_oracle(changed), oracle.pinned(before, torch.from_numpy(grid)))
    finally:
        pipe.unet.set_attn_processor(AttnProcessor2_0())
        pipe.encode_prompt = encode
    assert oracle.deviation(latents(got), run.latents) <= FP32
    one_text = replay(engine, source, DOG, grid, (growth,) * steps)
    assert oracle.deviation(latents(one_text), run.latents) > 10 * FP32


@pytest.fixture(scope="module")
def shipped():
    return Editor.from_pretrained("demo", local_files_only=True).pipe


@pytest.fixture
def editor(shipped):
    editor = Editor(shipped, model="demo")
    editor.generate(CAT, seed=7, num_inference_steps=6, width=128, height=128)
    return editor


def regions() -> list[tuple[Region, str]]:
    return [(Region.mask(LEFT), "a house"), (Region.mask(RIGHT), "a bird")]


def test_one_region_is_an_edit_with_its_prompt(editor):
    """But for the cells around it, which read the prompt of the picture."""
    source = editor.current
    alone = editor.edit("a dog", mask=LEFT, growth=0)
    editor.undo()
    told = editor.edit("a dog", regions=[(Region.mask(LEFT), "a dog")], growth=0)
    assert (
        oracle.deviation(
            latents(editor._trajectory_cache.get(told.id)[0]), latents(editor._trajectory_cache.get(alone.id)[0])
        )
        <= FP32
    )
    check_outside(editor, told, source)


def test_it_costs_what_one_edit_of_all_of_them_does(editor):
    both = editor.edit(regions=regions(), growth=1)
    assert both.prompt == CAT and [each.prompt for each in both.run.regional] == ["a house", "a bird"]
    assert np.array_equal(both.mask.grid, LEFT | RIGHT)
    editor.undo()
    one = editor.edit(DOG, mask=LEFT | RIGHT, growth=1)
    assert both.stats.unet_evaluations_sparse == one.stats.unet_evaluations_sparse == 6
    assert both.stats.macs - one.stats.macs == 2 * editor._engine.costs(one.config).text()
    editor.undo()
    swapped = editor.edit(regions=regions()[::-1], growth=1)
    assert not same(swapped, both)  # the first that holds a cell counts


def test_the_preview_says_what_the_edit_does(editor):
    found = editor.preview(regions=regions())
    result = editor.edit(regions=regions())
    assert np.array_equal(found.mask.grid, result.mask.grid) and found.macs == result.stats.macs
    with pytest.raises(InputError, match="needs a prompt"):
        editor.preview()


def test_their_way_back(editor, tmp_path):
    result = editor.edit(regions=regions())
    over = editor.edit(DOG, mask=np.roll(LEFT, 7, 0))
    editor.undo()
    editor._trajectory_cache.drop([result.id])
    assert same(editor.edit(DOG, mask=np.roll(LEFT, 7, 0)), over)
    editor.save(tmp_path / "session")
    loaded = Editor.from_pretrained("demo", local_files_only=True)
    loaded.load(tmp_path / "session")
    found = loaded.history.find(result.id).run.regional
    assert [each.prompt for each in found] == ["a house", "a bird"] and np.array_equal(found[1].grid, RIGHT)
    loaded.checkout(result.id)
    loaded.write(tmp_path / "regions.png")
    remade = Editor.remake(Image.open(tmp_path / "regions.png"), local_files_only=True).current
    assert same(remade, result) and [each.prompt for each in remade.run.regional] == ["a house", "a bird"]


def test_regions_by_words(editor):
    source = editor.current
    result = editor.edit(regions=[(Region.words("cat"), "a dog"), (Region.words("cake"), "a ball")])
    check_outside(editor, result, source)
    assert not result.mask.grid.all() and len(result.run.regional) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, InputError, "edit needs a prompt, got none"),
        ({"regions": [(Region.mask(LEFT), " ")]}, PromptError, "prompt must say something"),
        ({"regions": [Region.mask(LEFT)]}, InputError, "regions must be 1 to 16 pairs of a Region and a prompt"),
        ({"regions": regions() * 9}, InputError, "regions must be 1 to 16 pairs"),
        ({"regions": regions(), "region": Region.words()}, InputError, "give region or regions, got both"),
        ({"regions": [(Region.mask(LEFT & ~LEFT), "a dog")]}, MaskError, "the region of 'a dog' must be a part"),
        ({"regions": [(Region.words(), "a dog")]}, MaskError, "the region of 'a dog' must be a part of the picture"),
    ],
)
def test_what_no_regions_are(editor, arguments, error, message):
    with pytest.raises(error) as raised:
        editor.edit(**arguments)
    assert str(raised.value).startswith(message) and len(editor.history) == 1
