"""A 3x3 conv at four outputs a time is torch's, wherever its outputs lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fisedit.adapters.row_column.block_convs import BlockConv
from fisedit.sparse_kernels import winograd
from fisedit.sparse_kernels.row_plan import kernel_map_to, make_row_plan
from tests.support.grids import grids
from tests.support.macs import counted

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.035}
"""Of outputs with a standard deviation of 1.3; largest measured: 6.4e-7 and 0.022."""

GRIDS = sorted(grids(11, 14))


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Tiles even where they would not pay."""
    monkeypatch.setattr(winograd, "MIN_TILES", 1)
    monkeypatch.setattr(winograd, "TAPS", 100)


def made(grid, grown=False):
    """The level, the reads of a conv and its tiles; to the cells grown by one if asked."""
    level, outputs = make_row_plan(grid, 1).levels[0], torch.from_numpy(grid)
    if not grown:
        return (
            level,
            level.same,
            winograd.make_tiles(level.same.table, level.active, level.width, len(level.read_positions)),
            outputs,
        )
    outputs = F.max_pool2d(outputs[None].float(), 3, 1, 1)[0] > 0
    reads = kernel_map_to(torch.from_numpy(grid), outputs)
    at = outputs.flatten().nonzero()[:, 0]
    return level, reads, winograd.make_tiles(reads.table, at, level.width, level.rows + len(reads.halo)), outputs


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("name", GRIDS)
def test_tiles_are_the_conv(name, grown, dtype):
    level, reads, tiled, outputs = made(grids(11, 14)[name], grown)
    full = torch.randn(2, 12, level.height, level.width, dtype=dtype)
    weight, bias = torch.randn(12, 12, 3, 3, dtype=dtype).mul_(108**-0.5), torch.randn(12, dtype=dtype)
    rows = full.flatten(2).transpose(1, 2)[:, torch.cat([level.active, reads.halo])]
    got = BlockConv(weight, bias).forward(rows, reads, tiled)
    expected = F.conv2d(full.double(), weight.double(), bias.double(), padding=1)[:, :, outputs].transpose(1, 2)
    assert got.dtype is dtype
    assert (got.double() - expected).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize(("name", "expected"), [("one_cell", 1), ("corner", 1), ("row", 7), ("everything", 42)])
def test_tiles_waste_little(name, expected):
    assert made(grids(11, 14)[name])[2].count == expected


@pytest.mark.parametrize("left", [4, 5])
def test_a_square_at_any_place_is_covered_without_waste(left):
    grid = grids(16, 16)["square"] & False
    grid[left : left + 6, 5:11] = True
    assert made(grid)[2].count == 9


def test_what_is_multiplied():
    level, reads, tiled, _ = made(grids(11, 14)["blobs"])
    rows, conv = torch.randn(2, len(level.read_positions), 12), BlockConv(torch.randn(12, 12, 3, 3), torch.randn(12))
    assert counted(lambda: conv.forward(rows, reads, tiled)) == 2 * tiled.macs(12)


def test_nine_taps_where_they_take_less(monkeypatch):
    monkeypatch.undo()
    alone = grids(11, 14)["everything"] & False
    alone[::2, ::2] = True
    assert made(grids(11, 14)["everything"])[2] is not None
    assert made(alone)[2] is None
    assert made(grids(11, 14)["corner"])[2] is None


def test_a_gpu_is_spared_the_launches():
    assert [winograd.is_faster(torch.device(name)) for name in ("cpu", "cuda")] == [True, False]
