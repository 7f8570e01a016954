"""Every method by its limits, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.quality.methods import METHODS, select_methods
from fisedit import Region
from fisedit.errors import InputError
from tests.support.edits import DOG, Calls
from tests.support.quality import HOW, SIDE, SQUARE, fresh, levels


def plain(pipe, prompt: str) -> Image.Image:
    """What diffusers makes of a prompt and the seed 7."""
    return pipe(prompt, generator=torch.Generator().manual_seed(7), **HOW).images[0]


class Branches(Calls):
    """Counts the rows of dense batches as well."""

    rows = 0

    def _end(self, unet: torch.nn.Module, args: tuple[torch.Tensor, ...], output: Sequence[torch.Tensor]) -> None:
        super()._end(unet, args, output)
        self.rows += len(args[0]) if output[0].shape[-1] > 1 else 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("source", ["generated", "opened"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_and_counts_what_it_ran(request, name, source):
    case = fresh(request.getfixturevalue(source), kind="delete")
    if name == "blended-fisedit":
        assert case.plain.picture
    with Branches(case.editor.pipe.unet) as calls:
        outcome = METHODS[name](case)
    assert outcome.picture.size == (SIDE, SIDE) and outcome.picture.mode == "RGB"
    assert outcome.grid is None or (outcome.grid.shape, outcome.grid.dtype) == ((16, 16), bool)
    assert outcome.evaluations == calls.dense + calls.sparse
    assert outcome.sparse is (name != "erase" and calls.sparse > 0 and not outcome.reason)
    if calls.sparse:
        assert outcome.macs > calls.rows / 2 * case.costs.dense_step()
    else:
        assert outcome.macs == case.dense_macs(calls.rows / 2)


def test_true_masks_are_not_made_up(generated):
    case = fresh(generated, true_mask=None)
    assert METHODS["blended-true"](case) is METHODS["fisedit-given"](case) is None
    assert fresh(generated, true_mask=None, is_global=True).true_grid.all()


def test_reprompting_is_diffusers_own_run(generated):
    expected = plain(generated.editor.pipe, DOG)
    assert levels(generated.blended(generated.everywhere), expected) <= 1
    assert levels(METHODS["reprompt"](generated).picture, expected) <= 1


def test_blending_nothing_gives_the_source(generated, opened):
    nowhere = np.zeros((16, 16), bool)
    assert levels(generated.blended(nowhere), generated.source.image) <= 1
    assert levels(opened.blended(nowhere), METHODS["no-edit"](opened).picture) <= 1
    assert levels(generated.blended(SQUARE), generated.source.image) > 10


def test_only_what_is_deleted_is_erased(generated):
    assert METHODS["erase"](generated) is METHODS["inpaint-empty"](generated) is None
    assert METHODS["erase"](fresh(generated, kind="delete", true_mask=None)) is None
    case = fresh(generated, kind="delete")
    erased = METHODS["erase"](case)
    case.editor.checkout(case.source.id)
    assert erased.picture.tobytes() == case.editor.erase(Region.mask(SQUARE)).image.tobytes()
    assert np.array_equal(erased.grid, SQUARE)


def test_methods_by_name():
    assert list(select_methods([])) == list(METHODS) and list(select_methods(["reprompt", "fisedit"])) == [
        "fisedit",
        "reprompt",
    ]
    with pytest.raises(InputError, match=r"methods must be of fisedit, .*, got magic"):
        select_methods(["fisedit", "magic"])


def test_structure_is_the_editors_own(generated):
    case = fresh(generated)
    held = METHODS["structure-1.0"](case)
    case.editor.checkout(case.source.id)
    assert held.picture.tobytes() == case.editor.edit(case.edit.prompt, structure=1.0).image.tobytes()
