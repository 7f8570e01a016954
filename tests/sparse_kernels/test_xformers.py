"""Attention by xFormers: what it is asked, by its documented interface; the numbers where it is installed, on a GPU."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from fisedit.errors import InputError
from fisedit.sparse_kernels import ops, reference
from tests.support.grids import grids
from tests.support.kernel_cases import cross, dense_attention
from tests.support.padded_edits import Edits

MODULE = "fisedit.sparse_kernels.xformers"

needs_xformers = pytest.mark.skipif(
    find_spec("xformers") is None or not torch.cuda.is_available(), reason="needs the package xformers, and CUDA"
)


@pytest.fixture
def asked(monkeypatch):
    """A stand-in for the package, with the documented signature; gives the shapes that it was asked for."""
    seen = []

    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
        assert (attn_bias, p, scale, op) == (None, 0.0, None, None)
        assert all(t.ndim == 4 and t.stride(3) == 1 for t in (query, key, value))
        assert query.shape[::2] == key.shape[::2] == value.shape[::2] and key.shape == value.shape
        seen.append((tuple(query.shape), tuple(key.shape)))
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, key, value))).transpose(1, 2)

    package, inside = ModuleType("xformers"), ModuleType("xformers.ops")
    package.ops, inside.memory_efficient_attention = inside, memory_efficient_attention
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", inside)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield seen
    sys.modules.pop(MODULE, None)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("quantised", ["", "int8", "fp8"])
@pytest.mark.parametrize("name", grids(8, 8))
def test_attention_over_recorded_and_fresh_keys(asked, name, quantised):
    edits = Edits([grids(13, 9)[name]], torch.float32, device=torch.device("cpu"))
    dense_attention(edits, "xformers", 2, 12, quantised=quantised)
    assert asked == [((2, edits.bucket.rows[0], 2, 12), (2, 117, 2, 12))]  # [B, M, H, K]


def test_attention_over_the_text(asked):
    cross("xformers", torch.float32, 48, 40, 77, 4, 10)
    assert asked == [((2, 48, 4, 10), (2, 77, 4, 10))] * 2


def test_attention_over_whole_maps(asked):
    query, keys, values = torch.randn(2, 5, 24), torch.randn(2, 9, 24), torch.randn(2, 9, 24)
    with ops.use("xformers"):
        got = ops.dense_attention(query, keys, values, 3)
    assert asked == [((2, 5, 3, 8), (2, 9, 3, 8))]
    assert torch.allclose(got, reference.dense_attention(query, keys, values, 3), atol=1e-6)


def test_everything_else_is_torchs(asked):
    from fisedit.sparse_kernels import torch_backend

    with ops.use("xformers"):
        module = sys.modules[MODULE]
    assert set(module.__all__) == set(torch_backend.__all__)
    own = {"dense_attention", "attention", "cross_attention"}
    assert {name for name in module.__all__ if getattr(module, name) is not getattr(torch_backend, name)} == own


def test_without_the_package_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with (
        pytest.raises(InputError, match=r"kernels xformers need .*pip install 'fisedit\[xformers\]'"),
        ops.use("xformers"),
    ):
        pass


@needs_xformers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_with_the_package(dtype):
    dense_attention(Edits([grids(16, 16)["blobs"]], dtype), "xformers", 2, 40)
    cross("xformers", dtype, 48, 80, 77, 2, 40)
