#!/usr/bin/env bash
# torch 2.13.0: a fused optimiser's step, and three other writes, leave a parameter's version counter as it was.
# Guess: `_version` is raised by every write in place, so that a cache of something computed of a weight can compare it.
# Seen: the step of `AdamW(fused=False)` raises it; `AdamW(fused=True)`, `.data` and `.to()` there and back do not.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
"$trial/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$trial/env/bin/python" - <<'PYTHON'
import torch
from torch import nn


def step(layer: nn.Linear, fused: bool) -> None:
    optimiser = torch.optim.AdamW(layer.parameters(), fused=fused)
    layer(torch.ones(1, 4)).sum().backward()
    optimiser.step()


def data(layer: nn.Linear) -> None:
    layer.weight.data.mul_(2)


def there_and_back(layer: nn.Linear) -> None:
    layer.to(torch.bfloat16).to(torch.float32)


writes = {"AdamW": lambda x: step(x, False), "fused AdamW": lambda x: step(x, True), ".data": data, ".to": there_and_back}
for name, write in writes.items():
    layer = nn.Linear(4, 4)
    weight, before, values = layer.weight, layer.weight._version, layer.weight.detach().clone()
    write(layer)
    raised, changed = layer.weight._version > before, not torch.equal(values, layer.weight)
    print(torch.__version__, name, "raised" if raised else "not raised", "same object" if layer.weight is weight else "")
    assert changed and raised is (name == "AdamW"), "this has changed"
PYTHON
