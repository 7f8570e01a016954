#!/usr/bin/env bash
# transformers 5.24.0 with peft 0.21.2: no adapter can be added to a model, and no released peft is new enough (November 2026).
# Guess: two packages that pip installs together without a word work together, as 5.23.0 does with the same peft.
# Seen: 5.23.0 adds the adapter. 5.24.0 raises "The version of PEFT you are using is not compatible, please use a version
# >= 0.22.0". Its metadata names no bound of peft, so that pip does not notice.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
for version in 5.23.0 5.24.0; do
  "$trial/env/bin/python" -m pip install -qq --disable-pip-version-check transformers=="$version" peft==0.21.2 \
    accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
  "$trial/env/bin/python" - <<'PYTHON'
from importlib.metadata import requires

import peft
import transformers
from peft import LoraConfig
from transformers import CLIPTextConfig, CLIPTextModel

sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64}
model = CLIPTextModel(CLIPTextConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
try:
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    seen = "added"
except ValueError as error:
    seen = str(error)
print(f"transformers {transformers.__version__}, peft {peft.__version__}: {seen}")
bounds = [each for each in requires("transformers") if each.startswith("peft")]
asked = "The version of PEFT you are using is not compatible, please use a version >= 0.22.0"
expected = {"5.23.0": "added", "5.24.0": asked}[transformers.__version__]
assert seen == expected and not bounds, f"this has changed: {bounds}"
PYTHON
done
