"""OpenVINO and DeepCache in diffusers' pipeline: through stand-ins, and by the packages where they are installed."""

from __future__ import annotations

import os
from copy import deepcopy
from importlib.util import find_spec

import pytest
import torch

from fisedit.bench import dense_pipelines, dense_search
from fisedit.bench.dense_pipelines import DensePipelines
from fisedit.bench.dense_search import DEEPCACHE, OPENVINO, TORCH, DenseVariant
from fisedit.bench.runtimes import PRECISIONS, compile_openvino, convert_openvino, enable_deepcache
from fisedit.models.group_norm import stabilise
from tests.support import runtimes
from tests.support.edits import CAT, config_of
from tests.support.pipelines import build_pipeline

EAGER = DenseVariant("fp32", False, False)
COMPILED_DEEPCACHE = DenseVariant("fp32", False, True, DEEPCACHE)
BY_OPENVINO = DenseVariant("fp32", False, False, OPENVINO)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(dense_search, "NUM_ROUNDS", 1)


def picture(pipe):
    seed = torch.Generator().manual_seed(7)
    return pipe(CAT, width=64, height=64, num_inference_steps=5, generator=seed, output_type="np").images


def search(pipe):
    dense = DensePipelines(pipe, config_of(width=64, height=64, num_inference_steps=2), compiled=False)
    found = dense.search()
    return dense, found, dense.others(found)


def test_both_are_found_where_they_are_installed(pipelines, no_grad, monkeypatch):
    openvino = runtimes.install(monkeypatch)
    dense, found, others = search(pipelines["shallow"])
    compared = {found.best, *others}
    assert {variant.runtime for variant in compared} == {TORCH, OPENVINO, DEEPCACHE}
    assert not any(others.values()) and found.best.is_exact
    assert {variant.name for variant in found.seconds} >= {"OpenVINO, bf16", "OpenVINO, fp32"}
    assert {settings["INFERENCE_PRECISION_HINT"] for _, settings in openvino.settings} == {"bf16", "f32"}
    (helper,) = runtimes.Helper.made
    assert helper.enabled and helper.parameters == {"cache_interval": 3, "cache_branch_id": 0}
    cached = next(variant for variant in others if variant.runtime == DEEPCACHE)
    assert helper.pipe is dense.get(cached) and helper.pipe.unet is not pipelines["shallow"].unet


def test_a_missing_package_is_told_in_one_line(pipelines, no_grad, monkeypatch):
    runtimes.uninstall(monkeypatch)
    _, found, others = search(pipelines["shallow"])
    assert found.best.runtime == TORCH
    assert {variant.runtime: reason for variant, reason in others.items()} == {
        OPENVINO: "the package openvino is not installed",
        DEEPCACHE: "the package DeepCache is not installed",
    }


def test_one_that_fails_is_told_and_left_out(pipelines, no_grad, monkeypatch):
    runtimes.install(monkeypatch, ValueError("no rule for this operation\nand more"))
    monkeypatch.setattr(runtimes.Helper, "enable", lambda _: torch.empty(3) @ torch.empty(4))
    _, found, others = search(pipelines["shallow"])
    assert found.best.runtime == TORCH
    reasons = {variant.runtime: reason for variant, reason in others.items()}
    assert reasons[OPENVINO] == "it cannot run here: no rule for this operation"
    assert reasons[DEEPCACHE].startswith("it cannot run here: ") and "\n" not in reasons[DEEPCACHE]


def test_openvinos_networks_stand_in_for_unet_and_decoder(pipelines, no_grad, monkeypatch):
    runtimes.install(monkeypatch)
    dense = DensePipelines(pipelines["demo"], config_of(width=64, height=64))
    assert dense.get(BY_OPENVINO).unet.config == dense.get(EAGER).unet.config
    assert (picture(dense.get(BY_OPENVINO)) == picture(dense.get(EAGER))).all()


def test_the_converter_reports_nothing_over_the_network(monkeypatch):
    seen = []
    openvino = runtimes.install(monkeypatch)
    convert = openvino.convert_model
    openvino.convert_model = lambda *a, **k: seen.append(os.environ["CI"]) or convert(*a, **k)
    for before in ("", None):
        monkeypatch.setenv("CI", before) if before is not None else monkeypatch.delenv("CI", raising=False)
        convert_openvino(torch.nn.Linear(2, 2), [torch.ones(1, 2)])
        assert os.environ.get("CI") == before
    assert seen == ["true"] * 2


def test_a_module_that_memory_would_not_do_for_is_not_converted(monkeypatch):
    runtimes.install(monkeypatch)
    module = torch.nn.Linear(10, 10, bias=False)  # 400 bytes
    monkeypatch.setattr("fisedit.bench.runtimes.available_bytes", lambda: 1599)
    with pytest.raises(RuntimeError, match=r"converting takes up to .* GB, and .* GB are free"):
        convert_openvino(module, [torch.ones(1, 10)])
    monkeypatch.setattr("fisedit.bench.runtimes.available_bytes", lambda: 1600)
    convert_openvino(module, [torch.ones(1, 10)])


def test_deepcache_at_every_step_is_diffusers_own_pipeline():
    if find_spec("DeepCache") is None:
        pytest.skip("needs the package DeepCache")
    for name in ("sd15", "demo"):
        pipe = build_pipeline(name)
        expected = picture(pipe)
        cached = DensePipelines(pipe, config_of()).get(EAGER)
        enable_deepcache(cached, 1)
        assert (picture(cached) == expected).all()
        every_third = DensePipelines(pipe, config_of()).get(EAGER)
        enable_deepcache(every_third, 3)
        assert not (picture(every_third) == expected).all()


def compiled_every(monkeypatch, interval, pipe):
    """The pipeline of compiled DeepCache, with torch's eager functions in place of compiled ones."""
    monkeypatch.setattr(torch, "compile", lambda part, mode: part)
    monkeypatch.setattr(dense_pipelines, "DEEPCACHE_INTERVAL", interval)
    return DensePipelines(pipe, config_of()).get(COMPILED_DEEPCACHE)


@pytest.mark.parametrize("name", ["sd15", "demo"])
def test_compiled_deepcaches_last_layer_goes_on_from_the_whole_evaluation_before(no_grad, monkeypatch, name):
    pipe = build_pipeline(name)
    assert (picture(compiled_every(monkeypatch, 1, pipe)) == picture(pipe)).all()
    unet = compiled_every(monkeypatch, 3, pipe).unet
    text = torch.randn(2, 77, unet.config.cross_attention_dim)
    whole, again, other = (
        unet(latents, time, encoder_hidden_states=text, return_dict=False)[0]
        for latents, time in zip(
            (torch.ones(2, 4, 8, 8), torch.ones(2, 4, 8, 8), -torch.ones(2, 4, 8, 8)),
            torch.tensor([500.0, 500.0, 480.0]),
            strict=True,
        )
    )
    assert torch.allclose(again, whole, atol=1e-5)  # over the deep map of the same input
    expected = pipe.unet(-torch.ones(2, 4, 8, 8), 480, encoder_hidden_states=text).sample
    assert (other - expected).norm() / expected.norm() > 1e-3  # over that of another one
    assert unet is not pipe.unet and "forward" not in vars(pipe.unet)


def test_compiled_deepcache_makes_the_packages_picture(monkeypatch):
    if find_spec("DeepCache") is None:
        pytest.skip("needs the package DeepCache")
    pipe = build_pipeline("demo")
    published = DensePipelines(pipe, config_of()).get(EAGER)
    enable_deepcache(published, 3)
    assert abs(picture(compiled_every(monkeypatch, 3, pipe)) - picture(published)).max() < 1e-5


@pytest.mark.parametrize("dtype", sorted(set(PRECISIONS) - {"fp16"}))
def test_openvino_computes_what_torch_does(dtype, no_grad):
    if find_spec("openvino") is None:
        pytest.skip("needs the package openvino")
    decoder = deepcopy(build_pipeline("demo").vae.decoder)
    latents = torch.randn(1, 4, 8, 8)
    expected = decoder(latents)
    stabilise(decoder)
    network = compile_openvino(convert_openvino(decoder, [latents]), dtype)
    error = (network(latents) - expected).norm() / expected.norm()
    assert error < {"fp32": 1e-5, "bf16": 5e-2}[dtype]
