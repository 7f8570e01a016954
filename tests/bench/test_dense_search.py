"""The search for the fastest dense run, on seconds that are given."""

import pytest
import torch

from fisedit.bench import dense_pipelines
from fisedit.bench.dense_search import (
    DEEPCACHE,
    DEFAULT_VARIANT,
    NUM_ROUNDS,
    OPENVINO,
    TORCH,
    DenseVariant,
    baseline_rows,
    baseline_settings,
    dense_summary,
    fastest_call,
    find_fastest,
    variants,
)
from tests.support.edits import config_of
from tests.support.pipelines import build_pipeline

BF16, BF16_CONTIGUOUS = DenseVariant("bf16", True, False), DenseVariant("bf16", False, False)
FP32 = DenseVariant("fp32", True, False)
COMPILED = DenseVariant("bf16", True, True)
BY_OPENVINO, CACHED = DenseVariant("bf16", True, False, OPENVINO), DenseVariant("bf16", True, False, DEEPCACHE)
SECONDS = {"dense": [8.0, 9.0, 10.0], CACHED.name: [4.0, 3.0, 5.0], BY_OPENVINO.name: [9.0, 9.0, 9.0]}
FIGURE = {"median": 1.0, "low": 1.0, "high": 1.0}
METRICS = dict.fromkeys(("dense_step", "recorded_step", "source", "source_over_dense"), FIGURE)


class Clock:
    """Seconds of each variant: a number, or one for every timing."""

    def __init__(self, seconds):
        self.seconds, self.timed, self.released = seconds, [], []

    def measure(self, variant):
        self.timed.append(variant)
        seconds = self.seconds[variant]
        if isinstance(seconds, Exception):
            raise seconds
        return seconds[self.timed.count(variant) - 1] if isinstance(seconds, list) else seconds

    def search(self):
        return find_fastest(list(self.seconds), self.measure, self.released.append)


def test_the_fastest_is_found_whatever_it_is():
    for fastest in (BF16, BF16_CONTIGUOUS, FP32, DEFAULT_VARIANT):
        clock = Clock(
            {variant: 1.0 if variant == fastest else 1.2 for variant in (BF16, BF16_CONTIGUOUS, FP32, DEFAULT_VARIANT)}
        )
        assert clock.search().best == fastest


def test_a_slow_first_timing_of_one_turn_decides_nothing():
    clock = Clock({BF16: [1.3, 1.0, 1.0, 1.0], FP32: [1.1, 1.1, 1.1, 1.1]})
    found = clock.search()
    assert found.best == BF16
    assert found.seconds == {BF16: [1.3, 1.0, 1.0, 1.0], FP32: [1.1] * 4}


def test_those_that_are_left_take_turns():
    clock = Clock({BF16: 1.0, FP32: 1.1})
    clock.search()
    assert clock.timed == [BF16, FP32] * (1 + NUM_ROUNDS)


def test_hopeless_ones_are_timed_once_released_and_not_compiled():
    compiled = DenseVariant("fp32", True, True)
    clock = Clock({FP32: 3.0, BF16: 1.0, compiled: 0.1, COMPILED: 0.9})
    found = clock.search()
    assert found.best == COMPILED
    assert found.left_out == {
        FP32: "3.0 times as long as the fastest",
        compiled: "its eager form takes 3.0 times as long as the fastest",
    }
    assert clock.timed.count(FP32) == 1 and compiled not in clock.timed
    assert clock.released == [FP32]


def test_the_fastest_eager_ones_are_compiled_alone():
    near, far = DenseVariant("bf16", False, True), DenseVariant("fp32", True, True)
    clock = Clock({BF16: 1.0, BF16_CONTIGUOUS: 1.2, FP32: 1.4, COMPILED: 0.9, near: 0.8, far: 0.1})
    found = clock.search()
    assert found.best == near and far not in clock.timed
    assert found.left_out[far] == "its eager form takes 1.4 times as long as the fastest"


def test_a_variant_that_cannot_run_is_named_with_its_reason():
    clock = Clock({BF16: 1.0, COMPILED: RuntimeError("no kernel\nfor this")})
    found = clock.search()
    assert found.best == BF16
    assert found.as_dict()["left_out"] == {
        "bf16, channels_last, torch.compile": "it cannot run here: no kernel",
    }


def test_a_machine_on_which_nothing_runs():
    with pytest.raises(RuntimeError, match="no dense run works here: it cannot run here: no memory"):
        Clock({BF16: RuntimeError("no memory")}).search()


def test_every_variant_of_a_device_is_a_candidate():
    cpu, gpu = variants("cpu", compiled=True), variants("cuda", compiled=True)
    assert len(cpu) == 8 + 2 and len(gpu) == 7 and DEFAULT_VARIANT in cpu and DEFAULT_VARIANT in gpu
    assert {variant.dtype for variant in cpu} == {"bf16", "fp32"}
    assert [variant.compiled for variant in gpu] == [False] * 6 + [True]
    assert not any(variant.compiled for variant in variants("cpu", compiled=False))
    assert [variant.name for variant in cpu[-2:]] == ["OpenVINO, bf16", "OpenVINO, fp32"]
    assert all(variant.is_exact for variant in cpu)


def test_each_runtime_has_one_left_and_a_missing_package_is_named():
    openvino, slow = DenseVariant("bf16", True, False, OPENVINO), DenseVariant("fp32", True, False, OPENVINO)
    found = Clock({BF16: 4.0, FP32: 9.0, openvino: 1.0, slow: 2.0}).search()
    assert found.best == openvino == found.best_of(OPENVINO)
    assert found.best_of(TORCH) == BF16 == found.fastest_eager
    assert found.left_out == {FP32: "2.2 times as long as the fastest", slow: "2.0 times as long as the fastest"}
    found = Clock({BF16: 4.0, openvino: ModuleNotFoundError("no", name="openvino")}).search()
    assert found.best == BF16 and found.best_of(OPENVINO) is None
    assert found.left_out == {openvino: "the package openvino is not installed"}


def test_a_compiled_variant_shares_its_eager_ones_unet_and_leaves_its_decoder(pipelines, monkeypatch):
    compiled = []
    monkeypatch.setattr(dense_pipelines.torch, "compile", lambda part, mode: compiled.append((part, mode)) or part)
    dense = dense_pipelines.DensePipelines(pipelines["shallow"], config_of())
    eager, fast = dense.get(BF16), dense.get(COMPILED)
    assert [part for part, _ in compiled] == [fast.vae.decoder, eager.unet]
    assert fast.unet is eager.unet is not pipelines["shallow"].unet and fast.vae.decoder is not eager.vae.decoder
    assert eager.unet.conv_in.weight.dtype is torch.bfloat16 is not pipelines["shallow"].unet.dtype
    assert eager.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert dense.get(BF16) is eager
    dense.release(BF16)
    assert dense.get(BF16) is not eager


def test_a_variant_shares_weights_that_lie_as_the_models(pipelines, monkeypatch):
    """Contiguous convolutions alone are copied, other precisions only where memory is free; the model stays."""
    pipe = build_pipeline("sdxl").to(torch.bfloat16)
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.vae.to(memory_format=torch.channels_last)
    dense = dense_pipelines.DensePipelines(pipe, config_of())
    monkeypatch.setattr(dense_pipelines, "free_bytes", lambda _: 0)
    assert dense.shortage(DEFAULT_VARIANT).startswith("its weights take 0.0 GB more") and not dense.shortage(BF16)
    with pytest.raises(RuntimeError, match=r"GB more, and 0.0 GB are free"):
        dense.get(FP32)
    monkeypatch.undo()
    own, variant, contiguous = (addresses(each) for each in (pipe, dense.get(BF16), dense.get(BF16_CONTIGUOUS)))
    assert variant == own and dense.get(BF16).unet is not pipe.unet
    moved = {name for name in own if contiguous[name] != own[name]}
    convs = {name for name, weight in pipe.unet.named_parameters() if weight.ndim == 4}
    assert moved == convs and addresses(pipe) == own
    assert pipe.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert dense.get(BF16_CONTIGUOUS).unet.conv_in.weight.is_contiguous()


def addresses(pipe):
    """Name of a weight of the UNet -> where it lies."""
    return {name: weight.data_ptr() for name, weight in pipe.unet.named_parameters()}


def test_a_machine_without_a_compiler_says_so(pipelines, monkeypatch):
    monkeypatch.setattr(dense_pipelines.shutil, "which", lambda _: None)
    dense = dense_pipelines.DensePipelines(pipelines["shallow"], config_of())
    assert dense.notes == ["torch.compile was not tried: there is no C++ compiler"]
    monkeypatch.setattr(dense_pipelines.shutil, "which", lambda _: "/a/compiler")
    monkeypatch.setattr(dense_pipelines, "vector_extension", lambda: "avx512")
    dense = dense_pipelines.DensePipelines(pipelines["shallow"], config_of())
    assert dense.notes == ["torch.compile made kernels for avx512"]


def test_the_fastest_exact_run_and_the_fastest_of_any_kind_are_two_baselines():
    rows = baseline_rows(COMPILED, {BY_OPENVINO: "", CACHED: ""}, SECONDS)
    assert fastest_call(rows, "exact") == "dense" and fastest_call(rows, "any") == CACHED.name
    assert {row["run"]: row["exact"] for row in rows} == {
        COMPILED.name: True,
        BY_OPENVINO.name: True,
        CACHED.name: False,
    }
    assert next(row for row in rows if row["run"] == CACHED.name)["over_fastest_exact"]["median"] == 0.5
    assert baseline_settings(rows) == {
        "dense_baseline": "diffusers, bf16, channels_last, torch.compile",
        "any_baseline": "diffusers, DeepCache, interval 3, bf16, channels_last, eager",
    }
    table = dense_summary(METRICS, rows)
    assert [row["run"] for row in table] == [
        "fastest exact run: bf16, channels_last, torch.compile",
        "OpenVINO, bf16",
        "fastest run of any kind: DeepCache, interval 3, bf16, channels_last, eager",
        "our source, recorded",
    ]
    assert [row["over the fastest"].split()[0] for row in table] == ["1", "1.00x", "0.50x", "1.00x"]


def test_one_run_may_be_both_and_others_have_their_reason():
    rows = baseline_rows(COMPILED, {BY_OPENVINO: "no", CACHED: ""}, SECONDS | {CACHED.name: [20.0, 20.0, 20.0]})
    assert fastest_call(rows, "any") == fastest_call(rows, "exact") == "dense"
    table = dense_summary(METRICS, rows)
    assert table[0]["run"] == f"fastest exact run and fastest run of any kind: {COMPILED.name}"
    assert table[2] == {"run": BY_OPENVINO.name, "step": "", "whole": "no", "over the fastest": ""}
