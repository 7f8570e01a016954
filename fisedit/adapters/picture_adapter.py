"""Loaded adapters that condition a UNet by a picture or a drive: what every kind of them can do.

A kind reads it once for all steps (`read`), and is put to work on what it read (`condition`). Knows pipelines and
pictures; no files, no history.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fisedit.errors import AdapterError, InputError
from fisedit.machine.flops import count_flops
from fisedit.values import REFERENCE
from fisedit.values.drive import Drive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeVar

    from diffusers import UNet2DConditionModel
    from PIL.Image import Image
    from torch import Tensor

    from fisedit.adapters.base import UNetAdapter
    from fisedit.features.cache import CachedFeatures
    from fisedit.machine.model import Model
    from fisedit.sparse.executor import Executor
    from fisedit.values import AdapterUse, GenerationConfig

    T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class AdapterInputs:
    """The inputs of an adapter: a picture or a drive, and the picture that is made with it.

    Args:
        pipe: The pipeline that is conditioned.
        executor: The executor of its UNet.
        given: a picture of mode RGB, or a drive, as the adapter's `argument` says.
        config: The config of the picture that is made.
        branches: guidance branches, 1 or 2.
    """

    pipe: Model
    executor: Executor
    given: Image | Drive
    config: GenerationConfig
    branches: int

    @property
    def picture(self) -> Image:
        """The picture that is read."""
        assert not isinstance(self.given, Drive), "the adapter reads pictures"
        return self.given

    @property
    def drive(self) -> Drive:
        """The drive that is read."""
        assert isinstance(self.given, Drive), "the adapter reads drives"
        return self.given


class PictureAdapter(ABC):
    """A loaded adapter.

    Args:
        identity: 16 hexadecimal digits that tell its weights from all others.
    """

    argument: ClassVar[str] = REFERENCE
    """`REFERENCE`, `CONTROL`, `DRIVE` or `MOTION`: what it reads."""

    def __init__(self, identity: str) -> None:
        self.identity = identity

    @abstractmethod
    def check_fit(self, unet: UNet2DConditionModel) -> None:
        """Raise AdapterError if it was made for a UNet of another shape."""

    @abstractmethod
    def match(self, unet: UNet2DConditionModel) -> None:
        """Move it to a UNet's device and dtype, and prepare what does not depend on pictures."""

    @abstractmethod
    def read(self, inputs: AdapterInputs) -> tuple[Any, int]:
        """Read the inputs: return what `condition` takes, and the multiply-accumulates spent.

        Raises:
            InputError: a size that it cannot take.
        """

    @abstractmethod
    def condition(self, read: Any, use: AdapterUse, branches: int) -> UNetAdapter:
        """The adapter at work.

        Args:
            read: what `read` gave; None where only layers or costs are needed.
            use: how it takes part; of a step that it covers.
            branches: guidance branches, 1 or 2.
        """

    def joined(self, reads: Sequence[Any]) -> Any:
        """Join what `read` gave for the frames of a clip, as `condition` takes it.

        Raises:
            AdapterError: the frames of a clip share what this kind reads.
        """
        raise AdapterError(f"the frames of a clip share their {self.argument}, got several; give one")

    def check_use(self, use: AdapterUse) -> None:
        """Raise InputError for a use that this kind does not have."""
        if use.guess_mode:
            raise InputError("guess_mode is for ControlNets; leave it out for other adapters")

    def is_recorded(self, features: CachedFeatures, use: AdapterUse) -> bool:
        """Return whether a sparse step over a step's features reads all that it has to of this adapter's layers."""
        return True


def identity_of(kind: str, tensors: Iterable[Tensor]) -> str:
    """16 hexadecimal digits of a SHA-256 of an adapter's kind and weights."""
    whole = hashlib.sha256(kind.encode())
    for tensor in tensors:
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()[:16]


def counted(call: Callable[[], T]) -> tuple[T, int]:
    """Return a call's result and its multiply-accumulates as torch counts them."""
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), count_flops() as counter:
        result = call()
    return result, counter.get_total_flops() // 2
