"""Every kernel of the fused path by every backend against float64 torch: masks that break sparse code, padded rows,
several edits at once.

Without a GPU, Triton's interpreter runs them in fp32 and fp16 at small shapes (bf16 is wrong there); on one, the same
tests run compiled, in bf16 as well, and at Stable Diffusion's own shapes. What kernels allocate is NaN.
"""

from __future__ import annotations

from itertools import cycle
from math import nan

import pytest
import torch
import torch.nn.functional as F

from fisedit.errors import InputError
from fisedit.sparse_kernels import ops, reference, row_plan, torch_backend, tuning
from fisedit.sparse_kernels.operands import QUANTISED_DTYPES, ConvEpilogue, dequantise, quantise
from fisedit.sparse_kernels.triton import launch
from tests.support.grids import grids
from tests.support.kernel_cases import EPS, cross, dense_attention, near, tokens
from tests.support.padded_edits import DEVICE, TOLERANCE, Edits

pytest.importorskip("triton", reason="the package triton is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # padding, which the interpreter sees

CUDA = DEVICE.type == "cuda"
BACKENDS = [*ops.BACKENDS, "triton"]
DTYPES = list(TOLERANCE) if CUDA else [torch.float32, torch.float16]
SIZES = [(16, 16), (13, 9)]

needs_gpu = pytest.mark.skipif(not CUDA, reason="needs CUDA: torch.cuda.is_available() is False")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_grid = pytest.mark.parametrize("name", grids(8, 8))
each_mask = pytest.mark.parametrize(("name", "size"), list(zip(grids(8, 8), cycle(SIZES))))
real = pytest.mark.parametrize(
    ("side", "channels"), [(64, 320), (32, 640), (16, 1280), (8, 1280)], ids=["64", "32", "16", "8"]
)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """What a kernel allocates is NaN until it is written."""

    def poisoned(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(nan) if tensor.is_floating_point() else tensor

        return made

    with torch.device(DEVICE):
        torch.empty(0)  # torch notes its constructors on first use, for good: the real ones
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def half_of_a_block(edits, backend, channels, groups, width, layout=torch.channels_last, *, added=True, first=None):
    """GroupNorm, SiLU and conv of a ResNet block: what a backend gives, and what torch does with the mixed maps.

    With `first`, the rows' first channels are one tensor, the others another, and a shortcut takes them as well.
    """
    recorded, mixed = edits.maps(0, channels)
    gamma, beta, bias = edits.random(channels), edits.random(channels), edits.random(width)
    weight = edits.random(width, channels, 3, 3, scale=(9 * channels) ** -0.5).to(memory_format=layout)
    time, (_, residual) = edits.random(edits.items, width), edits.maps(0, width)
    through = edits.random(width, channels, scale=channels**-0.5)
    rows, halo, tables = edits.rows(mixed, 0), edits.halo(mixed, 0), edits.tables.levels[0]
    count = edits.levels[0].size * channels // groups
    with ops.use(backend):
        old = edits.rows(recorded.repeat_interleave(edits.edits, 0), 0)
        known = edits.totals(recorded, groups)
        rows = rows if first is None else (rows[..., :first].contiguous(), rows[..., first:].contiguous())
        norm, totals = ops.group_norm_affine(rows, old, known, tables.placement.num_rows, count, gamma, beta, EPS)
        if first is None:
            parts, num_rows = ops.row_statistics(old, groups), tables.placement.num_rows
            summed = ops.summed_group_norm_affine(rows, parts, known, num_rows, count, gamma, beta, EPS)
            check_summed(summed, (norm, totals, ops.row_statistics(rows, groups)), num_rows)
        more = (time, edits.rows(residual, 0)) if added else (None, None)
        short = None if first is None else (rows, through, beta.new_ones(width))
        got = ops.norm_conv3x3(
            rows, halo, tables.same, weight, bias if added else None, norm, ConvEpilogue(*more, short)
        )
    normed = F.group_norm(mixed.double(), groups, gamma.double(), beta.double(), EPS)
    expected = F.conv2d(F.silu(normed), weight.double(), padding=1)
    if first is not None:
        expected += F.conv2d(mixed.double(), through.double()[..., None, None]) + 1
    if added:
        expected += (bias + 0.0).double().view(-1, 1, 1) + time.double()[..., None, None] + residual.double()
    assert torch.allclose(totals, edits.totals(mixed, groups), rtol=1e-6, atol=1e-3)
    edits.close(got, expected, 0)


def check_summed(got, expected, num_rows):
    """GroupNorm by rows' statistics beside that by the rows; statistics of padding rows are of no use."""
    for mine, theirs in zip(got[:2], expected[:2], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-3)
    for mine, theirs, count in zip(got[2], expected[2], num_rows.tolist(), strict=True):
        assert torch.allclose(mine[:count], theirs[:count], rtol=1e-5, atol=1e-4)


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@each_mask
def test_half_of_a_resnet_block(backend, dtype, size, name):
    half_of_a_block(Edits([grids(*size)[name]], dtype), backend, 16, 4, 24)


@pytest.mark.sweep
@each_backend
@each_dtype
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("channels", "groups", "width"), [(5, 5, 7), (36, 3, 33), (8, 2, 4)])
@pytest.mark.parametrize("added", [False, True])
def test_odd_widths(backend, dtype, layout, channels, groups, width, added):
    edits = Edits([grids(13, 9)["blobs"]], dtype, branches=1)
    half_of_a_block(edits, backend, channels, groups, width, layout, added=added)


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@each_mask
def test_a_block_of_two_maps_side_by_side(backend, dtype, size, name):
    """Read where they lie, by the norm, the conv and the shortcut; groups of six channels straddle the seam."""
    half_of_a_block(Edits([grids(*size)[name]], dtype), backend, 24, 4, 24, first=16)


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@pytest.mark.parametrize(("channels", "groups", "width", "first"), [(21, 7, 5, 16), (24, 3, 40, 10), (48, 2, 20, 32)])
def test_odd_widths_side_by_side(backend, dtype, channels, groups, width, first):
    edits = Edits([grids(13, 9)["blobs"], grids(13, 9)["one_cell"]], dtype)
    half_of_a_block(edits, backend, channels, groups, width, added=False, first=first)


@pytest.mark.sweep(1)
@each_backend
@each_dtype
def test_edits_of_several_masks_in_one_batch(backend, dtype):
    masks = [grids(13, 9)[name] for name in ("one_cell", "everything", "noise")]
    half_of_a_block(Edits(masks, dtype), backend, 16, 4, 24)


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@each_mask
def test_samplers(backend, dtype, size, name):
    """The convs that change the level, without a norm before them."""
    edits = Edits([grids(*size)[name]], dtype)
    weight, bias = edits.random(12, 16, 3, 3, scale=1 / 12), edits.random(12)
    (_, fine), (_, coarse) = edits.maps(0, 16), edits.maps(1, 16)
    first, second = edits.tables.levels
    with ops.use(backend):
        down = ops.norm_conv3x3(edits.rows(fine, 0), edits.halo(fine, 0, "down"), first.down, weight, bias)
        up = ops.norm_conv3x3(edits.rows(coarse, 1), edits.halo(coarse, 1, "up"), second.up, weight, bias)
    edits.close(down, F.conv2d(fine.double(), weight.double(), bias.double(), 2, 1), 1)
    larger = F.interpolate(coarse.double(), size=fine.shape[-2:], mode="nearest")
    edits.close(up, F.conv2d(larger, weight.double(), bias.double(), 1, 1), 0)


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@each_mask
def test_attention(backend, dtype, size, name):
    every = {"square": ["square", "one_cell", "checkerboard"]}.get(name, [name])
    dense_attention(Edits([grids(*size)[one] for one in every], dtype), backend, 2, 12)


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@pytest.mark.parametrize(
    ("quantised", "pointers"), [("int8", False), ("fp8", False), ("", True), ("int8", True), ("fp8", True)]
)
@pytest.mark.parametrize("name", ["one_cell", "blobs", "everything"])
def test_attention_over_other_records(backend, dtype, name, quantised, pointers):
    """RecordedMap keys and values in a byte a number, and wherever a number says that they lie."""
    if pointers and CUDA and backend != "triton":
        pytest.skip("a device's memory is read by address in kernels alone")
    edits = Edits([grids(13, 9)[name], grids(13, 9)["square"]], dtype)
    dense_attention(edits, backend, 2, 12, quantised=quantised, pointers=pointers)


@pytest.mark.sweep
@each_dtype
@pytest.mark.parametrize("heads", [1, 3, 12])
@pytest.mark.parametrize("kind", QUANTISED_DTYPES)
def test_a_byte_a_number(dtype, heads, kind):
    """Off by half of a 127th of a head's largest number in its row, or by a sixteenth of itself; zeros stay zeros."""
    rows = tokens(dtype, 2, 40, 12) * torch.logspace(-3, 3, 40, device=DEVICE)[:, None].to(dtype)
    rows[0, 7] = 0
    numbers, scales = quantise(rows, heads, QUANTISED_DTYPES[kind])
    assert numbers.dtype == QUANTISED_DTYPES[kind] and scales.dtype == dtype
    assert numbers.nbytes + scales.nbytes == rows.numel() + dtype.itemsize * 2 * 40 * heads
    largest = rows.float().unflatten(-1, (heads, -1)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, 12 // heads)
    off = (dequantise(numbers, scales).float() - rows.float()).abs()
    rounding = 1e-6 if dtype == torch.float32 else 0.002 if dtype == torch.float16 else 0.01
    finest, most = torch.finfo(dtype).tiny * torch.finfo(dtype).eps, 448 if kind == "fp8" else 127
    half = {"int8": largest.flatten(2) * 0.5 / 127, "fp8": (rows.float().abs() / 16).clamp(largest.flatten(2) / 2**18)}
    assert (off <= half[kind] + largest.flatten(2) * rounding + most * finest).all()  # finest: what scales are made of
    assert not dequantise(numbers, scales)[0, 7].float().any()


@pytest.mark.sweep(1)
@each_backend
@each_dtype
def test_every_float_of_a_byte_is_read_as_what_it_is(backend, dtype):
    """All that fp8 has but NaN, as a value that alone is attended to."""
    every = torch.arange(256, device=DEVICE).to(torch.uint8).view(torch.float8_e4m3fn)
    every = every[every.float().isfinite()]
    edits = Edits([grids(13, 9)["one_cell"]], dtype, branches=1)
    placement, size, width = edits.tables.levels[0].placement, 13 * 9, 16
    first = int((~placement.active_mask[0]).nonzero()[0])
    values = torch.zeros(1, size, width, device=DEVICE).to(torch.float8_e4m3fn)
    keys, scales = values.clone(), torch.ones(1, size, 1, dtype=dtype, device=DEVICE)
    keys.view(torch.uint8)[0, first] = torch.tensor(448.0).to(torch.float8_e4m3fn).view(torch.uint8).to(DEVICE)
    query = torch.full((1, edits.bucket.rows[0], width), 16.0, dtype=dtype, device=DEVICE)
    fresh = torch.zeros(1, edits.bucket.rows[0], 3 * width, dtype=dtype, device=DEVICE)
    fresh[..., :width] = query
    for some in every.split(width):
        wide = F.pad(some.view(torch.uint8), (0, width - len(some))).view(torch.float8_e4m3fn)
        values.view(torch.uint8)[0, first] = wide.view(torch.uint8)
        with ops.use(backend):
            got = ops.attention(*fresh.chunk(3, -1), keys, values, placement, 1, (scales, scales))
        assert torch.equal(got[0, 0], wide.to(dtype))


@pytest.mark.sweep
@each_backend
@each_dtype
@pytest.mark.parametrize("norm", ["none", "group", "layer"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("batch", "rows", "channels", "width"), [(1, 1, 16, 48), (2, 48, 40, 33), (3, 70, 20, 60)])
def test_linear_behind_a_norm(backend, dtype, norm, bias, batch, rows, channels, width):
    linear(backend, dtype, norm, batch, rows, channels, width, bias=bias)


def linear(backend, dtype, norm, batch, rows, channels, width, *, bias=True):
    x, group_norm_affine = tokens(dtype, batch, rows, channels, mean=3), torch.randn(batch, 2, channels, device=DEVICE)
    weight, shift = tokens(dtype, 1, width, channels)[0] * channels**-0.5, tokens(dtype, 1, 1, width)[0, 0]
    layer = (*tokens(dtype, 2, 1, channels).squeeze(1), EPS)
    with ops.use(backend):
        got = ops.norm_linear(
            x,
            weight,
            shift if bias else None,
            affine=group_norm_affine if norm == "group" else None,
            layer_norm=layer if norm == "layer" else None,
        )
    expected = x.double()
    if norm == "group":
        expected = expected * group_norm_affine.double()[:, :1] + group_norm_affine.double()[:, 1:]
    if norm == "layer":
        expected = F.layer_norm(expected, (channels,), layer[0].double(), layer[1].double(), EPS)
    near(got, F.linear(expected, weight.double(), shift.double() if bias else None))


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@pytest.mark.parametrize(("first", "channels"), [(16, 20), (128, 168), (10, 64)])
def test_linear_of_two_tensors_side_by_side(backend, dtype, first, channels):
    rows, (weight,) = tokens(dtype, 2, 48, channels), tokens(dtype, 1, 33, channels) * channels**-0.5
    bias, residual = tokens(dtype, 1, 1, 33)[0, 0], tokens(dtype, 2, 48, 33)
    with ops.use(backend):
        got = ops.norm_linear((rows[..., :first], rows[..., first:]), weight, bias, residual=residual)
    near(got, F.linear(rows.double(), weight.double(), bias.double()) + residual.double())


@pytest.mark.sweep
@each_backend
@each_dtype
@pytest.mark.parametrize(("rows", "channels", "text", "heads", "width"), [(1, 16, 7, 1, 16), (48, 40, 77, 4, 10)])
def test_attention_over_the_text(backend, dtype, rows, channels, text, heads, width):
    cross(backend, dtype, rows, channels, text, heads, width)


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@pytest.mark.parametrize("time", [0.0, 1.0, 999.0, 500.5])
def test_time_is_diffusers_own(backend, dtype, time):
    from diffusers.models.embeddings import TimestepEmbedding, Timesteps

    from fisedit.sparse.packed_weights import frequencies

    waves, embedding = Timesteps(20, flip_sin_to_cos=True, downscale_freq_shift=0), TimestepEmbedding(20, 36)
    last, embedding = torch.nn.Linear(36, 50).to(DEVICE, dtype), embedding.to(DEVICE, dtype)
    layers = [(layer.weight.detach(), layer.bias.detach()) for layer in (embedding.linear_1, embedding.linear_2, last)]
    now = torch.tensor([time], device=DEVICE)
    with ops.use(backend):
        got = ops.time_projections(now, frequencies(waves).to(DEVICE), layers)
    with torch.no_grad():
        expected = last.double()(F.silu(embedding.double()(waves(now).to(dtype).double())))
    assert got.dtype == dtype
    assert ((got.double() - expected).abs() <= TOLERANCE[dtype] * (1 + expected.abs())).all()


@pytest.mark.sweep(1)
@each_backend
@each_dtype
@pytest.mark.parametrize(("batch", "rows", "channels", "width"), [(1, 1, 16, 20), (2, 48, 40, 70), (3, 7, 70, 33)])
def test_gated_linear(backend, dtype, batch, rows, channels, width):
    geglu(backend, dtype, batch, rows, channels, width)


def geglu(backend, dtype, batch, rows, channels, width):
    x, weight = tokens(dtype, batch, rows, channels, mean=1), tokens(dtype, 1, 2 * width, channels)[0]
    weight, bias = weight * channels**-0.5, tokens(dtype, 1, 1, 2 * width)[0, 0]
    layer = (*tokens(dtype, 2, 1, channels).squeeze(1), EPS)
    with ops.use(backend):
        got = ops.norm_geglu(x, weight, bias, layer)
    normed = F.layer_norm(x.double(), (channels,), layer[0].double(), layer[1].double(), EPS)
    hidden, gate = F.linear(normed, weight.double(), bias.double()).chunk(2, -1)
    near(got, hidden * F.gelu(gate))


@pytest.mark.sweep(1)
@each_dtype
@each_mask
def test_scatter_and_composite(dtype, size, name):
    """Torch's own on every device."""
    other = "blobs" if name == "everything" else "everything"
    edits = Edits([grids(*size)[name], grids(*size)[other]], dtype)
    recorded, mixed = edits.maps(0, 4)
    placement, rows = edits.tables.levels[0].placement, edits.rows(mixed, 0)
    full = recorded.repeat_interleave(edits.edits, 0).flatten(2).transpose(1, 2).contiguous()
    with ops.use("fast"):
        assert ops.scatter_rows(full, rows, placement) is full
        composited = ops.composite(recorded[:1], rows[: edits.edits], placement)
    assert torch.equal(full.transpose(1, 2), mixed.flatten(2))
    assert torch.equal(composited, mixed[: edits.edits])


@pytest.fixture
def shared_sums(monkeypatch):
    """Every sum cut to pieces, however small; gives the counters, which a kernel leaves at zero."""
    from fisedit.sparse_kernels.triton import norm

    monkeypatch.setattr(launch, "PROGRAMS", 10**6)
    monkeypatch.setattr(launch, "MIN_BLOCKS", 1)
    monkeypatch.setattr(norm, "sums_tile", lambda rows: launch.SumsTile(64, 64, 4))
    monkeypatch.setattr(launch, "SHARED_PROGRAMS", 10**6)
    monkeypatch.setattr(launch, "MIN_SHARE", 1)
    assert launch.split_k(1, 7) == (7, 1)
    yield
    assert not launch.counters(0, DEVICE).any()


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.usefixtures("shared_sums")
@each_dtype
@each_mask
def test_programs_that_share_a_sum(dtype, size, name):
    """K of a conv and its shortcut cut to pieces, rows of a group cut to pieces: the same as in one."""
    half_of_a_block(Edits([grids(*size)[name]], dtype), "triton", 48, 4, 24, first=32)


def test_streams_and_graphs_have_counters_of_their_own(monkeypatch):
    """Kernels that may run at once must not count together; zeros are not made while a graph is captured."""
    from types import SimpleNamespace

    made, capturing, stream, card = [], False, 7, torch.device("cuda", 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=stream))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: made.append(len(made)) or made[-1])
    first = launch.counters(1, card)
    stream = 8
    second, before = launch.counters(1, card), len(made)
    capturing = True
    captured, stream = launch.counters(1, card), 9
    assert len({first, second, captured}) == 3
    assert launch.counters(1, card) == captured and len(made) == before
    launch._zeros.cache_clear()


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.usefixtures("shared_sums")
@each_dtype
@pytest.mark.parametrize(("quantised", "pointers"), [("", False), ("int8", True), ("fp8", True)])
@each_mask
def test_programs_that_share_the_keys(dtype, size, name, quantised, pointers):
    """Some of them find no key at all: every position is fresh, or no row is."""
    dense_attention(
        Edits([grids(*size)[name], grids(*size)["one_cell"]], dtype),
        "triton",
        2,
        12,
        quantised=quantised,
        pointers=pointers,
    )


@pytest.mark.sweep(1)
@pytest.mark.usefixtures("shared_sums")
@each_dtype
@pytest.mark.parametrize("norm", ["none", "group", "layer"])
def test_linear_layers_that_share_a_sum(dtype, norm):
    linear("triton", dtype, norm, 3, 70, 200, 33)


@pytest.mark.parametrize("shared", [False, True])
def test_two_runs_give_the_same_bits(shared, request):
    if shared:
        request.getfixturevalue("shared_sums")
    edits = Edits([grids(16, 16)["noise"]], torch.float16)
    _, mixed = edits.maps(0, 48)
    weight, tables = edits.random(24, 48, 3, 3), edits.tables.levels[0]
    with ops.use("triton"):
        first, second = (
            ops.norm_conv3x3(edits.rows(mixed, 0), edits.halo(mixed, 0), tables.same, weight, None) for _ in range(2)
        )
    assert torch.equal(first, second)
    placement, full = tables.placement, edits.random(2, 256, 48)
    with ops.use("triton"):
        rows = edits.rows(mixed, 0)
        first, second = (ops.attention(rows, rows, rows, full, full, placement, 4) for _ in range(2))
    count = edits.levels[0].rows
    assert torch.equal(first[:, :count], second[:, :count])


@pytest.mark.sweep(1)
@needs_gpu
@real
@each_dtype
@pytest.mark.parametrize("name", ["square", "noise"])
def test_real_shapes(side, channels, dtype, name):
    edits = Edits([grids(side, side)[name]], dtype)
    half_of_a_block(edits, "triton", channels, 32, channels)
    half_of_a_block(edits, "triton", 2 * channels, 32, channels, first=channels)
    dense_attention(edits, "triton", 8, channels // 8)
    rows = edits.bucket.rows[0]
    linear("triton", dtype, "layer", 2, rows, channels, 3 * channels)
    linear("triton", dtype, "group", 2, rows, channels, channels)
    geglu("triton", dtype, 2, rows, channels, 4 * channels)
    cross("triton", dtype, rows, channels, 77, 8, channels // 8)


def test_without_cuda_or_interpreter_triton_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match="kernels triton need CUDA"), ops.use("triton"):
        pass


def test_without_the_package_triton_is_refused(monkeypatch):
    import builtins
    import sys

    real_import = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return real_import(name, *args, **kwargs)

    for name in [n for n in sys.modules if n.startswith("fisedit.sparse_kernels.") and n.rsplit(".", 1)[1] in TRITON]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InputError, match="pip install"), ops.use("triton"):
        pass


TRITON = {"attention", "backend", "conv", "epilogue", "feedforward", "linear", "norm"}


def test_triton_is_chosen_where_it_was_measured_to_be_faster(monkeypatch):
    monkeypatch.setattr(tuning, "TRITON_ROWS", {"norm_conv3x3": ((320, 512), (640, 64))})

    gpu = torch.device("cuda", 0)
    for rows, channels, expected in [
        (512, 320, True),
        (513, 320, False),
        (64, 640, True),
        (65, 321, False),
        (1, 641, False),
    ]:
        assert tuning.prefers_triton("norm_conv3x3", rows, channels, gpu) is expected
    assert not tuning.prefers_triton("attention", 1, 320, gpu)
    assert not tuning.prefers_triton("norm_conv3x3", 1, 320, torch.device("cpu"))


def test_the_default_on_a_cpu_runs_torchs_kernels_alone(monkeypatch):
    """Neither Triton nor xFormers is imported, though both could be."""
    monkeypatch.setattr(ops, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    rows, plan = torch.zeros(1, 64, 4), row_plan.make_row_plan(grids(8, 8)["everything"], 1, torch.device("cpu"))
    ops.conv3x3(rows, plan.levels[0].same, torch.zeros(2, 4, 3, 3), None)
    assert ops._backend.get() == "fast" and ops._kernels("attention", rows) is torch_backend


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "side", "channels"), [(16, 4, 32), (48, 8, 64)])
def test_the_bench_of_kernels_compares_equals(rows, side, channels):
    """What `triton_speed` would measure: all give the same, so its figures would be printed."""
    from benchmarks import triton_speed

    with torch.device(DEVICE):
        cases = triton_speed.cases(rows, side, channels, torch.float32)
    triton = triton_speed.backends("triton")["triton"]
    for name, make in cases.items():
        expected, by_torch, by_triton = (make(kernels)() for kernels in (reference, torch_backend, triton))
        assert (by_torch - expected).norm() <= 1e-4 * expected.norm(), name
        assert (by_triton - expected).norm() <= 1e-4 * expected.norm(), name
        assert triton_speed.is_own(name, triton) and not triton_speed.is_own(name, torch_backend)


def test_the_bench_of_kernels_goes_on_without_a_backend(monkeypatch, capsys):
    import sys

    from benchmarks import triton_speed

    monkeypatch.setitem(sys.modules, "xformers", None)
    monkeypatch.delitem(sys.modules, "fisedit.sparse_kernels.xformers", raising=False)
    assert triton_speed.backends("xformers") == {}
    assert capsys.readouterr().out.startswith("xformers was left out: kernels xformers need the package xformers")


def test_the_bench_of_kernels_prints_no_figure_for_a_wrong_result(monkeypatch):
    from benchmarks import triton_speed

    monkeypatch.setattr(triton_speed, "seconds", lambda call, device: call().numel())
    right, wrong = (lambda: torch.ones(4)), (lambda: torch.full((4,), nan))
    assert triton_speed.ratio(right(), right, wrong, DEVICE) == "wrong by nan"
    assert triton_speed.ratio(right(), right, right, DEVICE) == "1.00"
