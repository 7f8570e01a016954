"""Weights that change are noticed, whether or not torch counted the writes."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fisedit.errors import ModelError
from fisedit.machine.device import write_count
from fisedit.models.weight_changes import SMALL, count_changes


class Model(nn.Module):
    """A conv, a large layer and words."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        self.large, self.words = nn.Linear(90, 90), nn.Embedding(700, 12)
        assert min(self.large.weight.numel(), self.words.weight.numel()) > SMALL > self.conv.weight.numel()
        self.requires_grad_(False)


def optimise(model, **how):
    model.large.weight.requires_grad_(True).grad = torch.ones_like(model.large.weight)
    torch.optim.AdamW([model.large.weight], lr=1e-5, **how).step()
    model.large.weight.requires_grad_(False)


def assign(model):
    model.load_state_dict({name: weight * 0.999 for name, weight in model.state_dict().items()}, assign=True)


def replace(model):
    model.large.weight = nn.Parameter(model.large.weight.clone().index_fill_(0, torch.tensor([3]), 0))


CHANGES = {
    "an optimiser's step": optimise,
    "a fused one": lambda model: optimise(model, fused=True),
    "assigned": assign,
    "replaced by one that differs in a row": replace,
    "written through data": lambda model: model.large.weight.data.mul_(0.999),
    "one number of a small one": lambda model: model.conv.weight.data[3, 2, 1].view(-1)[0:1].add_(1),
    "one number, counted": lambda model: model.large.weight[7, 7:8].add_(1),
    "one word": lambda model: model.words.weight.data[400].add_(1e-3),
    "to bfloat16 and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "NaN": lambda model: model.conv.bias.data.fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_once_and_counted(change):
    with torch.inference_mode(mode=False), torch.no_grad():
        model = Model()
        count_changes(model)
        before = {name: (id(weight), write_count(weight)) for name, weight in model.named_parameters()}
        change(model)
        assert count_changes(model) == count_changes(model) == 1
        after = {name: (id(weight), write_count(weight)) for name, weight in model.named_parameters()}
        assert before != after, "caches of weights go by torch's count"


def test_what_changes_no_weight_is_none():
    with torch.inference_mode(mode=False), torch.no_grad():
        model = Model()
        model.conv.bias.data.fill_(float("nan"))
        count_changes(model)
        model.to(torch.float32).requires_grad_(True).requires_grad_(False)
        more = nn.Embedding(703, 12)
        more.weight.data[:700] = model.words.weight
        model.words = more  # as a textual inversion adds a word
        assert count_changes(model) == 0
        model.words.weight.data[701] = 0
        assert count_changes(model) == 1


def test_a_lora_is_a_change_only_where_another_takes_its_name():
    with torch.inference_mode(mode=False), torch.no_grad():
        model = Model()
        count_changes(model)
        plain, added = model.large, nn.Linear(90, 4, bias=False)
        model.large = nn.Module()
        model.large.base_layer, model.large.lora_A = plain, nn.ModuleDict({"a": added})
        assert count_changes(model) == 0
        model.large = plain
        assert count_changes(model) == 0
        model.large = nn.Module()
        model.large.base_layer, model.large.lora_A = plain, nn.ModuleDict({"a": copy.deepcopy(added)})
        assert count_changes(model) == 0
        model.large.lora_A["a"].weight.data.mul_(1.01)
        assert count_changes(model) == 1


@pytest.mark.parametrize("how", ["in place", "by another file"])
def test_a_mapped_file_that_is_written_to_is_refused(how, tmp_path):
    with torch.inference_mode(mode=False), torch.no_grad():
        file, model = tmp_path / "model.safetensors", Model()
        save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, file)
        model.load_state_dict(load_file(file), assign=True)
        assert count_changes(model) == 0
        data = file.read_bytes()
        if how == "in place":
            with file.open("r+b") as opened:
                opened.seek(-8, 2)
                opened.write(b"12345678")
            with pytest.raises(ModelError, match=r"model\.safetensors was written to while its model is open; load"):
                count_changes(model)
            model.load_state_dict({name: weight.clone() for name, weight in model.state_dict().items()}, assign=True)
            count_changes(model)  # nothing is mapped now
        else:
            other = tmp_path / "other"
            other.write_bytes(data[:-8] + b"12345678")
            other.replace(file)
            assert count_changes(model) == 0
