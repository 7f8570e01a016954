"""A pretended GPU: CPU tensors that say they are on CUDA, and refuse what CUDA's would.

Finds tensors of the CPU that meet the GPU's, and kernels with rules of their own, where there is no GPU. Streams and
Triton are not pretended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fisedit.runners import graph_capture
from fisedit.runners.graph_capture import EagerGraph

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")

_PARSERS = {"_parse_to", "device"}
"""What reads a device's name, and makes no tensor."""

_TOLD = {"device": (CPU, CUDA), "is_cuda": (False, True)}

_HOST_RESULTS = {"cpu", "numpy", "item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__array__"}
_TWO_DEVICES = {
    "__deepcopy__",
    "_has_compatible_shallow_copy_type",
    "to",
    "copy_",
    "data.__set__",
    "__getitem__",
    "__setitem__",
}
"""Copies, and indexing, whose indices may be the host's."""


_WRITES = {"copy_", "__setitem__"}


class PretendedCuda(TorchFunctionMode):
    """While it is on, `.to("cuda")` and `device="cuda"` make tensors that behave as a GPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on the CPU, with the rules of two devices."""
        kwargs, name = kwargs or {}, _name(func)
        leaves = list(_leaves((*args, *kwargs.values())))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_cuda = [_is_on_cuda(tensor) for tensor in tensors]
        if name in _PARSERS and not tensors:
            return func(*args, **kwargs)
        if name in _TOLD:
            return _TOLD[name][on_cuda[0]]
        if name not in _TWO_DEVICES:
            _check_one_device(name, tensors, on_cuda)
        if any(on_cuda):
            _check_rules(name, args)
        asked = [torch.device(leaf).type for leaf in leaves if _is_device(leaf)]
        if asked:
            args, kwargs = tree_map(lambda leaf: CPU if _is_device(leaf) else leaf, (args, kwargs))
        result = args[0] if name == "pin_memory" else func(*args, **kwargs)
        if name == "data.__set__":
            args[0]._pretended = on_cuda[1]
        elif name not in _WRITES:
            there = asked[0] == "cuda" if asked else _is_result_on_cuda(name, on_cuda)
            if name in ("to", "cpu") and result is args[0] and there != on_cuda[0]:
                result = result.clone()
            if there or any(on_cuda):
                _mark(result, there)
        return result


def _name(func: Any) -> str:
    name, owner = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
    return {"__get__": str(owner), "__set__": f"{owner}.__set__"}.get(name, str(name))


def _is_on_cuda(tensor: Tensor) -> bool:
    return bool(vars(tensor).get("_pretended", False))


def _is_result_on_cuda(name: str, on_cuda: list[bool]) -> bool:
    if name in _HOST_RESULTS:
        return False
    if name == "to":
        return on_cuda[-1]  # of another tensor, if one was given
    return on_cuda[0] if name in ("__getitem__", "__deepcopy__") else any(on_cuda)


def _mark(result: Any, there: bool) -> None:
    for leaf in _leaves([result]):
        if isinstance(leaf, Tensor):
            leaf._pretended = there


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Values, and those of lists and tuples among them; dicts hold nothing that torch's functions read."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", "cuda"))


def _check_one_device(name: str, tensors: list[Tensor], on_cuda: list[bool]) -> None:
    """Numbers without an axis may be the host's."""
    if len({there for tensor, there in zip(tensors, on_cuda, strict=True) if there or tensor.ndim}) > 1:
        got = [("cuda" if there else "cpu", *tensor.shape) for tensor, there in zip(tensors, on_cuda, strict=True)]
        raise RuntimeError(f"Expected all tensors to be on the same device, {name} got {got}")


def _check_rules(name: str, args: Any) -> None:
    if name == "numpy":
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    if name == "native_group_norm":
        x, weight = args[:2]
        if not x.is_contiguous():
            raise RuntimeError("Expected X.is_contiguous(memory_format) to be true")
        if weight.dtype != x.dtype:
            raise RuntimeError(f"expected scalar type {x.dtype} but found {weight.dtype}")


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Pretend for the length of a test. What is captured runs eagerly."""
    answers: dict[str, Any] = {
        "mem_get_info": (64 << 30, 80 << 30),
        "get_device_name": "a pretended GPU",
        "get_device_properties": SimpleNamespace(name="a pretended GPU", total_memory=80 << 30),
        "graph_pool_handle": None,
        "current_stream": Mock(),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        for name in ("Event", "synchronize"):
            stack.enter_context(patch.object(torch.cuda, name, Mock()))
        stack.enter_context(patch.object(torch.cuda, "Stream", lambda *_, **__: Mock()))
        stack.enter_context(patch.object(torch.cuda, "stream", lambda _: nullcontext()))
        stack.enter_context(patch.object(graph_capture, "Graph", lambda function, _: EagerGraph(function)))
        stack.enter_context(PretendedCuda())
        yield
