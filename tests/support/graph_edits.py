"""Whole edits by captured graphs, compared with eager ones."""

from __future__ import annotations

import numpy as np
import torch

from fisedit import Editor
from tests.support.edits import latents, pixels_outside

TOLERANCE = 1e-4


def both(pipe, script, **options):
    """What a script does with an editor that runs eagerly, and with one that has graphs."""
    editors = [Editor(pipe, graphs=graphs, **options) for graphs in (False, True)]
    return editors, [script(editor) for editor in editors]


def check_alike(editors):
    """Every result of two histories: pictures, latents and what was recorded."""
    layers, graphs = editors
    assert len(layers.history) == len(graphs.history) > 0
    for expected, got in zip(layers.history, graphs.history, strict=True):
        assert np.array_equal(expected.mask.grid, got.mask.grid) and expected.run.growth == got.run.growth
        difference = np.asarray(expected.image, int) - np.asarray(got.image, int)
        assert np.abs(difference).max() <= 1
        if got.parent is not None and got.painted is None:
            assert pixels_outside(got, graphs.history.find(got.parent))
        if expected.id in layers._trajectory_cache and got.id in graphs._trajectory_cache:
            check_stories(*(editor._trajectory_cache.get(got.id)[0] for editor in editors))


def check_stories(expected, got):
    size = latents(expected).abs().max()
    assert (latents(expected) - latents(got)).abs().max() <= TOLERANCE * size
    assert torch.equal(latents(expected)[0], latents(got)[0])
    for theirs, mine in zip(expected.features[expected.start :], got.features[got.start :], strict=True):
        assert theirs.maps.keys() == mine.maps.keys() and theirs.statistics.keys() <= mine.statistics.keys()
        for name, rows in theirs.maps.items():
            assert torch.allclose(rows, mine.maps[name], atol=1e-3 * float(rows.abs().max()), rtol=0), name


def captured(editor):
    return [result.stats.unet_evaluations_captured for result in editor.history]
