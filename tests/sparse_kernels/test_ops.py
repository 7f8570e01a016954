"""Every backend against float64 torch, in fp32 and bf16.

Errors are in units of the expected values' spread. Largest measured: 2.7e-6 in fp32, 0.024 in bf16 (the rounding of
an output of four to eight spreads to eight bits); the tolerances leave room for another machine's order of sums.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fisedit.errors import InputError
from fisedit.features.cache import CachedMap, StepFeatures
from fisedit.features.sites import LayerSite, Role
from fisedit.sparse_kernels import ops, prepacked, torch_backend, tuning
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support.grids import grids

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.035}
EPS = 1e-5
SIZES = [(16, 16), (13, 9)]
WIDTHS = [(16, 24), (5, 7)]

each_backend = pytest.mark.parametrize("backend", sorted(ops.BACKENDS))
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
ATTENTIONS = {
    "reference": ("reference", torch.float32, False),
    "fp32": ("fast", torch.float32, False),
    "bf16": ("fast", torch.bfloat16, False),
    "bf16 in fp32": ("fast", torch.bfloat16, True),
}
"""Ways of dense attention: backend, dtype, and whether the CPU prefers float32."""
each_grid = pytest.mark.parametrize("name", grids(8, 8))
each_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")


@pytest.fixture
def close():
    def check(got, expected, dtype):
        assert got.dtype == dtype
        assert (got.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.std(correction=0).clamp(min=0.1)

    return check


def rows_at(full, positions):
    """[B, C, H, W] -> [B, len(positions), C]."""
    return full.flatten(2)[:, :, positions].transpose(1, 2)


class Conv:
    """A random conv of a random map, its reads at every resampler of a plan, and what each must give."""

    def __init__(self, grid, dtype, *, batch=2, widths=WIDTHS[0], layout=torch.contiguous_format):
        self.plan, (c_in, c_out) = make_row_plan(grid, 2), widths
        self.maps = [torch.randn(batch, c_in, lv.height, lv.width, dtype=dtype) for lv in self.plan.levels]
        self.weight = torch.randn(c_out, c_in, 3, 3, dtype=dtype).mul_((9 * c_in) ** -0.5).to(memory_format=layout)
        self.bias = torch.randn(c_out, dtype=dtype)

    def cases(self):
        """Yields the rows [B, R + G, C], their reads and the expected output."""
        fine, coarse = self.plan.levels
        upsampled = F.interpolate(self.maps[1], size=self.maps[0].shape[-2:], mode="nearest")
        yield self._case(fine, fine.same, fine, self.maps[0], self.maps[0])
        yield self._case(fine, fine.down, coarse, self.maps[0], self.maps[0])
        yield self._case(coarse, coarse.up, fine, self.maps[1], upsampled)

    def _case(self, level, reads, out, full, slid):
        rows = rows_at(full, torch.cat([level.active, reads.halo]))
        weight, bias = self.weight.double(), self.bias.double()
        dense = F.conv2d(slid.double(), weight, bias, reads.stride, padding=1)
        return rows, reads, rows_at(dense, out.active)


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@each_size
@each_grid
def test_conv_of_rows_is_torchs_conv(backend, dtype, size, name, close):
    conv = Conv(grids(*size)[name], dtype)
    with ops.use(backend):
        for rows, reads, expected in conv.cases():
            close(ops.conv3x3(rows, reads, conv.weight, conv.bias), expected, dtype)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("form", [torch_backend.gathered_conv, torch_backend.cropped_conv])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 3])
@each_dtype
@each_grid
def test_both_forms_of_the_cpu_conv(form, layout, widths, batch, dtype, name, close):
    conv = Conv(grids(13, 9)[name], dtype, batch=batch, widths=widths, layout=layout)
    for rows, reads, expected in conv.cases():
        close(form(F.pad(rows, (0, 0, 0, 1)), reads, conv.weight, conv.bias), expected, dtype)


@each_backend
def test_conv_without_bias(backend, close):
    conv = Conv(grids(13, 9)["blobs"], torch.float32)
    conv.bias = torch.zeros_like(conv.bias)
    with ops.use(backend):
        for rows, reads, expected in conv.cases():
            close(ops.conv3x3(rows, reads, conv.weight, None), expected, torch.float32)


@pytest.mark.sweep
@each_backend
@each_dtype
@pytest.mark.parametrize(("rows", "channels", "groups"), [(1, 8, 8), (7, 12, 3), (130, 40, 4), (4096, 32, 2)])
def test_group_statistics(backend, dtype, rows, channels, groups):
    x = torch.randn(3, rows, channels, dtype=dtype) + 0.5
    grouped = x.double().view(3, rows, groups, -1)
    expected = torch.stack([grouped.sum((1, 3)), grouped.square().sum((1, 3))], -1)
    with ops.use(backend):
        got = ops.group_statistics(x, groups)
    assert got.dtype == torch.float64
    count = rows * channels // groups
    assert torch.allclose(got / count, expected / count, atol=1e-6, rtol=0)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "rows": lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, x.shape[2:]),
    "one_of_many": lambda x: torch.cat([x, x, x]).to(memory_format=torch.channels_last)[-len(x) :],
}


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize(("channels", "groups"), [(16, 4), (15, 5), (8, 8)])
def test_norm_of_a_map_and_its_totals(backend, dtype, layout, batch, channels, groups, close):
    x = LAYOUTS[layout](torch.randn(batch, channels, 13, 9, dtype=dtype) * 3 + 1)
    weight, bias = torch.randn(2, channels, dtype=dtype)
    with ops.use(backend):
        got, totals = ops.dense_group_norm(x, groups, weight, bias, EPS)
    close(got, F.group_norm(x.double(), groups, weight.double(), bias.double(), EPS), dtype)
    grouped = x.double().unflatten(1, (groups, -1)).flatten(2)
    expected = torch.stack([grouped.sum(2), grouped.square().sum(2)], -1)
    assert totals.dtype == torch.float64
    assert torch.allclose(totals, expected, rtol=1e-5, atol=1e-3)


@each_backend
@each_dtype
def test_norm_of_a_constant_map_is_its_bias(backend, dtype):
    x, (weight, bias) = torch.full((2, 8, 5, 7), 3.0, dtype=dtype), torch.randn(2, 8, dtype=dtype)
    with ops.use(backend):
        got, totals = ops.dense_group_norm(x, 4, weight, bias, EPS)
        rows = ops.group_norm(rows_at(x, torch.arange(6)), totals, 35 * 2, weight, bias, EPS)
    for out in (rows_at(got, torch.arange(6)), rows):
        assert torch.allclose(out, bias.expand_as(out), atol=0.02)  # 3 - 3 is not quite 0 beside a deviation of 0.003


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@each_size
@each_grid
@pytest.mark.parametrize(("channels", "groups", "mean"), [(16, 4, 0.0), (15, 5, 3.0)])
def test_norm_of_mixed_rows_is_the_mixed_maps_own(backend, dtype, size, name, channels, groups, mean, close):
    """Totals of the recorded map, less the recorded active rows, plus the new ones."""
    level = make_row_plan(grids(*size)[name], 1).levels[0]
    recorded = torch.randn(2, channels, *size, dtype=dtype) + mean
    mixed = recorded.clone()
    mixed.flatten(2)[:, :, level.active] = torch.randn(2, channels, level.rows, dtype=dtype) * 2 - mean
    weight, bias = torch.randn(2, channels, dtype=dtype)
    with ops.use(backend):
        _, totals = ops.dense_group_norm(recorded, groups, weight, bias, EPS)
        totals = totals - ops.group_statistics(rows_at(recorded, level.active), groups)
        totals = totals + ops.group_statistics(rows_at(mixed, level.active), groups)
        count = level.size * channels // groups
        got = ops.group_norm(rows_at(mixed, level.read_positions), totals, count, weight, bias, EPS)
        _, known = ops.dense_group_norm(recorded, groups, weight, bias, EPS)
        old, rows = (rows_at(each, level.active) for each in (recorded, mixed))
        expected = ops.group_norm_affine(rows, old, known, None, count, weight, bias, EPS)
        parts = ops.row_statistics(old, groups)
        summed = ops.summed_group_norm_affine(rows, parts, known, None, count, weight, bias, EPS)
        expected = *expected, ops.row_statistics(rows, groups)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(summed, expected, strict=True))
    dense = F.group_norm(mixed.double(), groups, weight.double(), bias.double(), EPS)
    close(got, rows_at(dense, level.read_positions), dtype)


@pytest.mark.parametrize(("mean", "tolerance"), [(3, 1e-5), (30, 1e-3)])
def test_replacing_every_row_of_a_map_with_a_large_mean(mean, tolerance):
    """The totals all but cancel: sums in fp32 leave an error of 2e-6 at a mean of 3 spreads and of 2e-4 at 30."""
    for backend in sorted(ops.BACKENDS):
        check_large_mean(backend, mean, tolerance)


def check_large_mean(backend, mean, tolerance):
    recorded = torch.randn(1, 32, 32, 32) + mean
    mixed = recorded + 0.01 * torch.randn_like(recorded)
    everywhere, weight, bias = torch.arange(32 * 32), torch.ones(32), torch.zeros(32)
    rows = rows_at(mixed, everywhere)
    with ops.use(backend):
        _, totals = ops.dense_group_norm(recorded, 8, weight, bias, EPS)
        totals = totals - ops.group_statistics(rows_at(recorded, everywhere), 8) + ops.group_statistics(rows, 8)
        got = ops.group_norm(rows, totals, 32 * 32 * 4, weight, bias, EPS)
    expected = rows_at(F.group_norm(mixed.double(), 8, eps=EPS), everywhere)
    assert (got - expected).abs().max() <= tolerance


@pytest.mark.parametrize("small_map", [0, tuning.SMALL_MAP])
def test_statistics_of_a_mixed_map_are_updated_or_computed_anew(monkeypatch, small_map):
    """The reference computes all anew; the fast kernels do so for small maps, and keep none of those."""
    monkeypatch.setattr(tuning, "SMALL_MAP", small_map)
    level, step = make_row_plan(grids(8, 8)["blobs"], 1).levels[0], StepFeatures({"norm": torch.randn(2, 64, 16)})
    rows, weight, bias = torch.randn(2, level.rows, 16), torch.randn(16), torch.randn(16)
    site = LayerSite("norm", nn.GroupNorm(4, 16), Role.NORM_HALO, 0)
    given = rows, CachedMap(step, site), level, level.same.halo, 4, weight, bias, EPS
    with ops.use("reference"):
        expected = ops.mixed_group_norm_affine(*given)
    affine, halo, statistics = ops.mixed_group_norm_affine(*given)
    assert torch.allclose(affine, expected[0], atol=1e-5) and torch.equal(halo, expected[1])
    if small_map:
        assert statistics is None
    else:
        assert torch.allclose(statistics, expected[2], rtol=1e-5, atol=1e-3)


def test_an_unknown_backend_is_refused():
    for name in ("", "cuda", "Fast"):
        with (
            pytest.raises(InputError, match="kernels must be one of reference, fast, triton, xformers, got"),
            ops.use(name),
        ):
            pass


def test_the_switch_goes_back(monkeypatch):
    calls = []
    monkeypatch.setattr(torch_backend, "group_statistics", lambda *_: calls.append("fast"))
    x = torch.zeros(1, 1, 2)
    with ops.use("fast"):
        with pytest.raises(AssertionError), ops.use("reference"):
            ops.group_statistics(x, 3)
        with ops.use("reference"):
            ops.group_statistics(x, 1)
        assert not calls
        ops.group_statistics(x, 1)
    assert calls == ["fast"]


def test_shapes_are_checked():
    reads = make_row_plan(grids(8, 8)["square"], 1).levels[0].same
    with pytest.raises(AssertionError):
        ops.conv3x3(torch.zeros(1, 4, 3), reads, torch.zeros(2, 4, 3, 3), None)
    with pytest.raises(AssertionError):
        ops.group_statistics(torch.zeros(1, 4, 6), 4)


@pytest.mark.sweep
@pytest.mark.parametrize(("backend", "dtype", "fp32"), ATTENTIONS.values(), ids=ATTENTIONS)
@pytest.mark.parametrize("scores", [1 << 22, 500, 7], ids=["whole", "pieces", "rows"])
@pytest.mark.parametrize(("rows", "size", "heads", "width"), [(1, 1, 1, 8), (5, 64, 2, 40), (130, 576, 8, 16)])
def test_attention_over_whole_maps(backend, dtype, fp32, scores, rows, size, heads, width, monkeypatch):
    """In pieces of any size, and on any CPU, it is torch's own of float64."""
    monkeypatch.setattr(torch_backend, "MAX_SCORES", scores)
    monkeypatch.setattr(torch_backend, "MAX_FUSED_KEYS", 32)
    monkeypatch.setattr(tuning, "prefers_fp32", lambda: fp32)
    query, keys, values = (torch.randn(2, n, heads * width).to(dtype) for n in (rows, size, size))
    with ops.use(backend):
        got = ops.dense_attention(query, keys, values, heads)
    split = (t.double().unflatten(-1, (heads, width)).transpose(1, 2) for t in (query, keys, values))
    expected = F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
    assert got.dtype == dtype
    assert (got.double() - expected).norm() <= {torch.float32: 1e-6, torch.bfloat16: 0.01}[dtype] * expected.norm()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"cpu_name": "Intel Xeon", "amx_bf16": False}, True),
        ({"cpu_name": "Intel Xeon", "amx_bf16": True}, False),
        ({"cpu_name": "AMD Zen4"}, False),
        ({}, False),
    ],
)
def test_the_cpus_that_prefer_fp32(told, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    assert tuning.prefers_fp32.__wrapped__() is expected


@pytest.mark.sweep
@each_backend
@each_dtype
@pytest.mark.parametrize("scores", [1 << 22, 200], ids=["whole", "pieces"])
@pytest.mark.parametrize("filled", [False, True])
def test_attention_along_lines(backend, dtype, filled, scores, monkeypatch):
    """Torch's own of float64, over a line's keys that are there and all of those beside it."""
    monkeypatch.setattr(torch_backend, "MAX_SCORES", scores)
    heads, width = 4, 8
    query, *own = (torch.randn(6, n, heads * width).to(dtype) for n in (5, 9, 9))
    beside = tuple(torch.randn(6, heads, 7, width).to(dtype) for _ in "kv")
    seen = torch.arange(9) <= torch.arange(6)[:, None] if filled else None
    with ops.use(backend):
        got = ops.row_column_attention(query, tuple(own), beside, seen)
    expected = []
    for i in range(6):
        there = 9 if seen is None else int(seen[i].sum())
        q = query[i].double().unflatten(1, (heads, width)).transpose(0, 1)
        lines = (t[i, :there].double().unflatten(1, (heads, width)).transpose(0, 1) for t in own)
        k, v = (torch.cat([line, other[i].double()], 1) for line, other in zip(lines, beside, strict=True))
        expected.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
    expected = torch.stack(expected)
    assert got.dtype == dtype
    assert (got.double() - expected).norm() <= {torch.float32: 1e-6, torch.bfloat16: 0.015}[dtype] * expected.norm()


def test_packed_weights_follow_their_parameters(monkeypatch):
    monkeypatch.setattr(prepacked, "available_bytes", lambda: 1 << 60)
    monkeypatch.setattr(tuning, "prefers_fp32", lambda: False)
    torch.manual_seed(0)
    prepacked.refresh()
    others = set(prepacked._copies)  # of models that other tests share
    rows, linear = torch.randn(2, 9, 24).bfloat16(), nn.Linear(24, 16).bfloat16()
    conv, patches = nn.Conv2d(24, 16, 3, padding=1).bfloat16(), torch.randn(2, 9, 216).bfloat16()
    whole = [torch.randn(shape).bfloat16() for shape in ((2, 24, 8, 8), (1, 24, 5, 7), (2, 24, 8, 8))]
    whole[:2] = (x.to(memory_format=torch.channels_last) for x in whole[:2])
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(prepacked.linear(rows, linear.weight, linear.bias), linear(rows))
            flat = conv.weight.permute(0, 2, 3, 1).reshape(16, -1)
            assert torch.equal(prepacked.linear(patches, conv.weight, conv.bias), F.linear(patches, flat, conv.bias))
            for x in whole:
                got, expected = prepacked.conv(x, conv.weight, conv.bias, padding=1), conv(x)
                assert torch.equal(got, expected) and got.stride() == expected.stride()
            linear.weight.mul_(2)
            conv.weight.data = torch.randn(16, 24, 3, 3).bfloat16()
        linear.weight.data += 1  # as PEFT merges: torch counts no such write
        prepacked.refresh()
        assert torch.equal(prepacked.linear(rows, linear.weight, linear.bias), linear(rows))
    assert prepacked._copies.keys() > others or not prepacked._can_pack(linear.weight)
    del linear, conv
    assert prepacked._copies.keys() <= others


@pytest.mark.parametrize(
    ("told", "expected"), [({"cpu_name": "AMD EPYC"}, True), ({"cpu_name": "Intel Xeon"}, False), ({}, False)]
)
def test_the_cpus_whose_float32_onednn_multiplies(told, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert tuning.prefers_onednn.__wrapped__() is expected


@pytest.mark.skipif(not prepacked._available(), reason="this build of torch has no packed products")
@pytest.mark.parametrize("rows", [0, 1, 9, 300])
def test_products_of_float32_by_onednn(rows, monkeypatch):
    """Packed, where half of the memory is free and it is wanted, or not: the same to the bit, and float64's product."""
    monkeypatch.setattr(tuning, "prefers_onednn", lambda: True)
    x, linear = torch.randn(2, rows, 288), nn.Linear(288, 256)
    conv, patches = nn.Conv2d(32, 256, 3).to(memory_format=torch.channels_last), torch.randn(2, rows, 288)
    found, key = [], id(linear.weight)
    with torch.inference_mode():
        for free, wanted, is_packed in ((0, "", False), (1 << 60, "0", False), (1 << 60, "", True), (0, "1", True)):
            prepacked._copies.pop(key, None)
            monkeypatch.setattr(prepacked, "available_bytes", lambda free=free: free)
            monkeypatch.setenv("FISEDIT_PACK", wanted)
            found.append(
                [prepacked.linear(x, linear.weight, linear.bias), prepacked.linear(patches, conv.weight, None)]
            )
            assert (key in prepacked._copies) is is_packed
        dense = prepacked.dense_linear(x, linear.weight, linear.bias)
        expected = F.linear(x.double(), linear.weight.double(), linear.bias.double())
        assert torch.equal(dense, linear(x))
    assert all(torch.equal(*each) for other in found[1:] for each in zip(found[0], other, strict=True))
    torch.testing.assert_close(found[0][0].double(), expected, rtol=0, atol=1e-5)
    monkeypatch.setattr(prepacked, "available_bytes", lambda: 0)
    gradient = torch.autograd.grad(prepacked.linear(x, linear.weight, linear.bias).sum(), linear.bias)[0]
    assert float(gradient[0]) == 2 * rows


def test_products_that_are_widened(monkeypatch):
    """On a CPU that multiplies faster in float32 they are float32's of the same numbers, rounded once."""
    seen, convolve = [], F.conv2d
    monkeypatch.setattr(prepacked, "available_bytes", lambda: 1 << 60)
    monkeypatch.setattr(tuning, "prefers_fp32", lambda: True)
    monkeypatch.setattr(prepacked, "MIN_WIDENED_NUMEL", 0)
    monkeypatch.setattr(prepacked, "MIN_WIDENED_MACS", 0)
    monkeypatch.setattr(
        prepacked.F, "conv2d", lambda x, w, *rest: seen.append((x.dtype, w.dtype)) or convolve(x, w, *rest)
    )
    torch.manual_seed(0)
    rows, linear = torch.randn(2, 9, 24).bfloat16(), nn.Linear(24, 16).bfloat16()
    conv, patches = nn.Conv2d(24, 16, 3, padding=1).bfloat16(), torch.randn(2, 9, 216).bfloat16()
    maps = [torch.randn(2, 24, side, side).bfloat16().to(memory_format=torch.channels_last) for side in (8, 24)]
    near = partial(torch.testing.assert_close, rtol=2**-7, atol=1e-5)  # a step of bf16, as sums have another order
    with torch.inference_mode():
        for _ in range(2):
            w, b = linear.weight.float(), linear.bias.float()
            near(prepacked.linear(rows, linear.weight, linear.bias), F.linear(rows.float(), w, b).bfloat16())
            near(prepacked.Matrix(linear.weight).linear(rows), F.linear(rows.float(), w).bfloat16())
            w, b = conv.weight.float(), conv.bias.float()
            flat = w.permute(0, 2, 3, 1).reshape(16, -1)
            near(prepacked.linear(patches, conv.weight, conv.bias), F.linear(patches.float(), flat, b).bfloat16())
            for x in maps:
                near(
                    prepacked.conv(x, conv.weight, conv.bias, padding=1),
                    convolve(x.float(), w, b, padding=1).bfloat16(),
                )
                near(
                    prepacked.conv(x, conv.weight[..., 1:2, 1:2], conv.bias),
                    convolve(x.float(), w[..., 1:2, 1:2], b).bfloat16(),
                )
                got = prepacked.conv(x, conv.weight, None, 2)
                near(got, convolve(x.float(), w, None, 2).bfloat16())
                assert got.is_contiguous(memory_format=torch.channels_last)
            linear.weight.mul_(2)
        assert set(seen) == {(torch.float32, torch.float32)} and len(seen) == 6  # small maps are rows
        kept = [prepacked._copies.get(id(layer.weight)) for layer in (linear, conv)]
        if prepacked._available():
            assert [copy.packed.dtype for copy in kept] == [torch.float32, torch.float32]
        before = prepacked.linear(rows, linear.weight, linear.bias)
        monkeypatch.setattr(tuning, "prefers_fp32", lambda: False)
        if prepacked._available():  # by the copy that there is
            assert torch.equal(prepacked.linear(rows, linear.weight, linear.bias), before)
        prepacked.conv(maps[1], conv.weight, None)
        assert seen[6:] == [(torch.bfloat16, torch.bfloat16)]


def test_small_weights_are_not_widened(monkeypatch):
    """A small model's products stay torch's own, to the bit."""
    monkeypatch.setattr(tuning, "prefers_fp32", lambda: True)
    rows, linear = torch.randn(2, 9, 24).bfloat16(), nn.Linear(24, 16).bfloat16()
    conv, x = nn.Conv2d(24, 16, 3, padding=1).bfloat16(), torch.randn(2, 24, 8, 8).bfloat16()
    with torch.inference_mode():
        assert torch.equal(prepacked.linear(rows, linear.weight, linear.bias), linear(rows))
        assert torch.equal(prepacked.conv(x, conv.weight, conv.bias, padding=1), conv(x))
