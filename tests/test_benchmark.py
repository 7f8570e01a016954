"""What `fisedit bench edit` says of its own figures."""

import pytest

from fisedit import benchmark


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_counts_the_same_multiply_accumulates(dtype):
    """Whichever kernels a step takes; torch counts the time's embedding besides, which is little."""
    told = benchmark.run(
        model="demo", areas=(0.15,), size=128, num_inference_steps=3, dtype=dtype, repeats=1, plain=False
    )
    for row in (told["dense"], *told["rows"]):
        assert row["step_macs_counted_by_torch"] == pytest.approx(row["step_macs"], rel=0.005)
