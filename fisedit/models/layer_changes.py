"""Refuses a model whose layers compute something else than their classes and weights say.

Sparse steps compute from weights and call no layers. So a hook, another forward or a switch on a layer would be left
out of them. Knows torch's and diffusers' ways to change a layer; knows nothing about features or plans.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fisedit.errors import UnsupportedModuleError
from fisedit.models.injection import exclusive, is_injected

if TYPE_CHECKING:
    from collections.abc import Iterator

_PRODUCTS = (
    [nn.Linear.forward, None],
    [nn.Conv2d.forward, vars(nn.Conv2d)["_conv_forward"]],
)
_FREEU = ("s1", "s2", "b1", "b2")
_REMOVE = "remove it, or merge it into the weights"


def check_layers(model: nn.Module, owner: str, part: str = "") -> None:
    """Check that a model's layers compute what their weights say, but for what this package injects.

    Hooks and a forward of the model itself are left to the caller, which calls it.

    Args:
        model: With layers that are computed from their weights.
        owner: Its name in the message.
        part: Name of the part of it that is meant; "" for all of it.

    Raises:
        UnsupportedModuleError: A layer has a hook or another forward, or is compiled; or FreeU is on.
    """
    if not any(_changes(model, part)):
        return
    with exclusive(model):  # another thread may have ejected something meanwhile
        for name, found, advice in _changes(model, part):
            raise UnsupportedModuleError(
                f"the {owner}'s layer {name} must compute what its weights say, as sparse steps do, got {found}; "
                f"{advice}"
            )


def _changes(model: nn.Module, part: str) -> Iterator[tuple[str, str, str]]:
    """Name of a layer, what was done to it, and what to do."""
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules:  # noqa: SLF001 (the class's import takes a second)
            yield name or "at its root", "one of torch.compile", "give the model that was compiled, its _orig_mod"
        if not name or not name.startswith(part):
            continue
        for hook in foreign_hooks(module):
            yield name, f"a forward hook ({_name_of(hook)})", _REMOVE
        if "forward" in vars(module) and not is_injected(module):
            yield name, f"another forward ({_name_of(vars(module)['forward'])})", _REMOVE
        if "_conv_forward" in vars(module):
            yield name, "another _conv_forward, as of tiling", _REMOVE
        if all(getattr(module, each, None) for each in _FREEU):
            yield name, "FreeU (s1, s2, b1, b2)", "call pipe.disable_freeu()"


def foreign_hooks(module: nn.Module) -> Iterator[Any]:
    """The forward hooks and pre-hooks of a module that are not of this package, whose hooks only measure."""
    package = __name__.partition(".")[0]
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):  # noqa: SLF001 (no other way)
        if str(getattr(hook, "__module__", "")).partition(".")[0] != package:
            yield hook


def _name_of(change: Any) -> str:
    """The module and name of a function or of an object's class, which tell whose it is."""
    while isinstance(change, partial):  # accelerate's and diffusers' say that they are what they wrap
        change = change.func
    name = str(getattr(change, "__qualname__", type(change).__name__)).rpartition("<locals>.")[2]
    return f"{getattr(change, '__module__', '')}.{name}".lstrip(".")


def why_no_product(layer: nn.Module) -> str:
    """Tell why a linear or convolution is no product of its input and its weight; "" where it is one.

    Args:
        layer: Without LoRAs around it.
    """
    computed = [getattr(type(layer), each, None) for each in ("forward", "_conv_forward")]
    if computed not in _PRODUCTS:
        return "it has no sparse counterpart"
    if is_parametrized(layer):
        return "its weight is parametrized (remove_parametrizations merges it)"
    weight: Any = layer.weight
    if type(weight) not in (nn.Parameter, Tensor):
        return f"its weight is a {type(weight).__name__}, which is quantised or made when it is read"
    return "" if weight.is_floating_point() and weight.element_size() > 1 else f"its weight is of {weight.dtype}"


def check_lora_kind(name: str, layer: Any) -> None:
    """Refuse what diffusers or peft put into a layer and `modules.weight_of` does not know.

    Args:
        name: The name of the layer.
        layer: A layer of a UNet.

    Raises:
        UnsupportedModuleError: It is of another kind than a plain LoRA.
    """
    if not isinstance(getattr(layer, "base_layer", None), nn.Module):
        return
    is_lora = hasattr(layer, "lora_A") and not getattr(layer, "lora_variant", None)
    if not is_lora or any(up.bias is not None for up in layer.lora_B.values()):
        raise UnsupportedModuleError(
            f"the UNet's layer {name} must have LoRAs without magnitudes (DoRA) or biases (lora_bias), got others in "
            f"peft's {type(layer).__module__.rpartition('.')[0]}; unload them"
        )
