"""E8: inject then eject leaves the model bit-identical with the same state_dict keys, also after an exception mid-step.

Injection alone: tests/models/test_injection.py. Edits that fail: tests/editor/test_editing_errors.py. Adapters: their
tests.
"""

from __future__ import annotations

import pytest
import torch

from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline
from tests.support.steps import StepEdit


@pytest.mark.parametrize("shape", ["sd15", "sdxl"])
def test_the_model_is_left_as_it_was(shape):
    """Also after an exception in the middle of a step."""
    unet = build_pipeline(shape).unet
    keys, weights = list(unet.state_dict()), {k: v.clone() for k, v in unet.state_dict().items()}
    case, executor = StepEdit(unet, grids(16, 16)["square"]), Executor(unet)
    dense = unet(case.source, case.timestep, **case.texts[0].unet_inputs)[0]
    case.sparse(executor, make_row_plan(grids(16, 16)["square"], executor.num_levels))

    def burst(*_):
        assert list(unet.state_dict()) == keys
        raise RuntimeError("burst")

    handle = unet.mid_block.register_forward_pre_hook(burst)
    with pytest.raises(RuntimeError, match="burst"):
        executor.run_dense(case.source, case.timestep, case.texts[0], {})
    handle.remove()
    assert not any("forward" in vars(module) for module in unet.modules())
    assert list(unet.state_dict()) == keys
    assert all(torch.equal(unet.state_dict()[k], v) for k, v in weights.items())
    assert torch.equal(unet(case.source, case.timestep, **case.texts[0].unet_inputs)[0], dense)
