"""The study with attention over the whole map: as many weights, written out once more, and refused where it must be."""

from __future__ import annotations

import pytest
import torch

from fisedit.adapters.base import AdapterStack, inject_adapters
from fisedit.adapters.insertion_points import insertion_points, record_maps
from fisedit.adapters.row_column.checkpoints import fresh_adapter, load_adapter, save_adapter
from fisedit.adapters.row_column.cost import dense_macs
from fisedit.adapters.row_column.reader import ReferenceCondition
from fisedit.errors import AdapterError
from fisedit.models.families.conditioning import Conditioning
from fisedit.sparse.executor import Executor
from tests.support.adapters import filled
from tests.support.macs import counted

T = torch.tensor(500)


def reference(unet, height=16, width=24):
    make = torch.Generator().manual_seed(0)
    text = torch.randn(2, 11, unet.config.cross_attention_dim, generator=make)
    latents = torch.randn(2, 4, height, width, generator=make)
    with torch.no_grad():
        return latents, text, record_maps(unet, latents, text, tuple(insertion_points(unet)))


def test_it_is_attention_of_everything_to_everything(unet):
    """By torch's own attention: two of them in a row, each over the map and the reference to its right."""
    block = filled(fresh_adapter(unet, "full", 4)).blocks["up_3"]
    make = torch.Generator().manual_seed(1)
    x, reference = torch.randn(2, 2, block.channels, 5, 7, generator=make)
    y, across = torch.meshgrid(torch.arange(5), torch.arange(14), indexing="ij")
    frequencies = 10000 ** -(torch.arange(block.channels // 4) / (block.channels // 4))
    places_ = [f(at.flatten()[:, None] * frequencies) for at in (across, y) for f in (torch.sin, torch.cos)]
    table = torch.cat(places_, 1).unflatten(0, (5, 14))
    found, kept = x.permute(0, 2, 3, 1), reference.permute(0, 2, 3, 1)
    for heads in (block.row_attention, block.column_attention):
        tokens = block.norm(torch.cat([found, kept], 2) + table).flatten(1, 2)
        own = torch.nn.MultiheadAttention(block.channels, 4, bias=False, batch_first=True)
        own.in_proj_weight.data = torch.cat([heads.to_q.weight, heads.to_k.weight, heads.to_v.weight])
        own.out_proj.weight.data = heads.to_out[0].weight
        looked = own(tokens, tokens, tokens)[0] + heads.to_out[0].bias
        found = looked.unflatten(1, (5, 14))[:, :, :7]
    expected = block.proj(found.permute(0, 3, 1, 2))
    assert torch.allclose(block(x, block.read(reference)), expected, atol=1e-5, rtol=1e-5)


def test_as_many_weights_and_more_work(unet):
    whole, lines = fresh_adapter(unet, "full"), fresh_adapter(unet, "v5")
    own, published = ({name: p.shape for name, p in one.named_parameters()} for one in (whole, lines))
    assert own == published
    latents, text, seen = reference(unet)
    condition, grids = ReferenceCondition(filled(whole), whole.read(seen)), [(16, 24), (8, 12), (4, 6), (2, 3)]
    with torch.no_grad():
        plain = counted(lambda: unet(latents, T, text))
        with inject_adapters(unet, [condition]):
            assert counted(lambda: unet(latents, T, text)) - plain == 2 * dense_macs(whole, unet, grids)
    assert dense_macs(whole, unet, grids) > dense_macs(lines, unet, grids)


def test_a_fresh_one_changes_nothing(unet):
    latents, text, seen = reference(unet)
    whole = fresh_adapter(unet, "full")
    with torch.no_grad():
        plain = unet(latents, T, text)[0]
        with inject_adapters(unet, [ReferenceCondition(whole, whole.read(seen))]):
            assert torch.equal(unet(latents, T, text)[0], plain)


def test_neither_files_nor_sparse_steps_take_it(unet, tmp_path):
    whole = fresh_adapter(unet, "full")
    save_adapter(whole, tmp_path / "whole")
    with pytest.raises(AdapterError, match="got a FullAttentionAdapter"):
        load_adapter(tmp_path / "whole")
    latents, text, seen = reference(unet)
    with torch.no_grad(), pytest.raises(AdapterError, match="along rows and columns, got an adapter of family full"):
        Executor(unet).run_dense(
            latents, T, Conditioning(text), {}, extra_layers=AdapterStack([ReferenceCondition(whole, whole.read(seen))])
        )
