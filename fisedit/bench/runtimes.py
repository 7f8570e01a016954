"""Runtimes of a pipeline beside torch: OpenVINO, which computes all of a model, and DeepCache, which leaves some out.

Knows how a diffusers pipeline is made to run by each; their packages are imported when they are first used. Compiled,
DeepCache is this module's own, as torch.compile cannot look through the package's hooks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fisedit.machine.hardware import available_bytes

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

PRECISIONS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
"""dtype -> OpenVINO's name of it."""

OPENVINO_COPIES = 4
"""Copies of a module's float32 weights that converting and compiling take at most; SD 1.5's UNet took over 9 GB."""

Network = Callable[..., Tensor]
"""A module that OpenVINO compiled, called with tensors of any precision."""


def convert_openvino(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """OpenVINO's model of a module, for inputs of these shapes.

    Args:
        module: a float32 module whose output is one tensor. Its norms become torch's own.
        inputs: float32 examples of what it is called with.

    Raises:
        ImportError: the package is not installed.
        RuntimeError: the module cannot be converted, or memory would not do: the system would end the process.
    """
    import openvino

    needed, free = OPENVINO_COPIES * sum(weight.nbytes for weight in module.parameters()), available_bytes()
    if free < needed:
        raise RuntimeError(f"converting takes up to {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")

    for norm in module.modules():
        if isinstance(norm, nn.GroupNorm):
            norm.__class__ = nn.GroupNorm
    with _refusals(), torch.inference_mode(mode=False), torch.no_grad():
        examples = tuple(example.clone() for example in inputs)
        shapes = [tuple(example.shape) for example in examples]
        return openvino.convert_model(module.eval(), example_input=examples, input=shapes)


def compile_openvino(model: Any, dtype: str) -> Network:
    """A model as a network on the CPU, with as many threads as torch has.

    Args:
        model: The model that `convert_openvino` gave.
        dtype: The precision that it computes in: fp32 or bf16.

    Raises:
        RuntimeError: the model cannot be compiled.
    """
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    with _refusals():
        compiled = openvino.compile_model(model, "CPU", settings)

    def network(*tensors: Tensor) -> Tensor:
        return torch.from_numpy(compiled([tensor.float().numpy() for tensor in tensors])[0])

    return network


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise what OpenVINO raises as RuntimeError, and keep it from reporting its use over the network.

    Without an opt-out it sends reports, except in a run of a CI.
    """
    before = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the tracer: shapes are the same in every call
            yield
    except Exception as error:  # its converter has classes of its own
        raise RuntimeError(str(error)) from error
    finally:
        os.environ.pop("CI")
        if before is not None:
            os.environ["CI"] = before


class UNetCall(nn.Module):
    """A UNet as a module with three inputs and one output.

    Args:
        unet: diffusers' UNet.
    """

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """The prediction [B, 4, h, w]."""
        prediction: Tensor = self.unet(sample, timestep, encoder_hidden_states=text, return_dict=False)[0]
        return prediction


class UNetStandIn(nn.Module):
    """The place of a UNet in diffusers' pipeline, which a network fills.

    Args:
        network: computes predictions of samples, a timestep and text.
        unet: The UNet that it stands for, whose configuration pipelines read.
    """

    def __init__(self, network: Network, unet: Any) -> None:
        super().__init__()
        self._network, self.config, self.dtype, self.device = network, unet.config, unet.dtype, unet.device

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **_: Any) -> tuple[Tensor]:
        """The prediction, as diffusers' pipelines unpack it."""
        return (self._network(sample, timestep, encoder_hidden_states).to(sample.dtype),)


class DecoderStandIn(nn.Module):
    """The place of an autoencoder's decoder, which a network fills.

    Args:
        network: computes pictures of latents.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network

    def forward(self, latents: Tensor, *_: Any) -> Tensor:
        """The picture [B, 3, H, W]."""
        return self._network(latents).to(latents.dtype)


def enable_deepcache(pipe: StableDiffusionPipeline, interval: int) -> None:
    """Let a pipeline reuse the deep features of its UNet between every so many steps; it stays so.

    Args:
        pipe: A pipeline with a UNet of its own, and a scheduler whose timesteps differ.
        interval: from one whole evaluation to the next, in steps.

    Raises:
        ImportError: the package is not installed.
    """
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=interval, cache_branch_id=0)
    helper.enable()


class CompiledDeepCache:
    """The evaluations of a UNet in DeepCache's runs: every so many whole, the others the first conv and last layer.

    Both kinds are compiled. They give what the package's do with its branch 0.

    Args:
        unet: A UNet of its own, whose last layer gets a hook.
        interval: from one whole evaluation to the next, in steps.
        compiled: The compiler of a function.
    """

    def __init__(self, unet: Any, interval: int, compiled: Callable[[Any], Any]) -> None:
        self._unet, self._forward, self._interval = unet, unet.forward, interval
        self._deep = torch.empty(0)
        self._channels = unet.up_blocks[-1].resnets[-1].in_channels - unet.config.block_out_channels[0]
        unet.up_blocks[-1].resnets[-1].register_forward_pre_hook(self._keep)
        self._whole, self._last_layer = compiled(self._run_whole), compiled(self._run_last_layer)

    def __call__(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **conditions: Any
    ) -> tuple[Tensor]:
        """The prediction, as diffusers' pipelines unpack it.

        Args:
            sample: [B, 4, h, w].
            timestep: A view of the schedule's timesteps, which tells its place among them without waiting for a GPU.
            encoder_hidden_states: [B, T, C].
            conditions: The other arguments of the UNet's own forward.
        """
        if timestep.storage_offset() % self._interval:
            return (self._last_layer(sample, timestep, encoder_hidden_states, self._deep),)
        prediction = self._whole(sample, timestep, encoder_hidden_states, **conditions)
        self._deep = self._deep.clone()  # the next replay of a captured graph writes over its results
        return (prediction,)

    def _keep(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._deep = arguments[0][:, : self._channels]

    def _run_whole(self, sample: Tensor, timestep: Tensor, text: Tensor, **conditions: Any) -> Tensor:
        prediction: Tensor = self._forward(sample, timestep, text, **conditions | {"return_dict": False})[0]
        return prediction

    def _run_last_layer(self, sample: Tensor, timestep: Tensor, text: Tensor, deep: Tensor) -> Tensor:
        unet, block = self._unet, self._unet.up_blocks[-1]
        time = unet.time_embedding(unet.get_time_embed(sample=sample, timestep=timestep))
        rows = block.resnets[-1].forward(torch.cat([deep, unet.conv_in(sample)], 1), time)
        if attentions := getattr(block, "attentions", None):
            rows = attentions[-1](rows, encoder_hidden_states=text, return_dict=False)[0]
        prediction: Tensor = unet.conv_out(unet.conv_act(unet.conv_norm_out(rows)))
        return prediction
