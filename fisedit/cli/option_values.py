"""The options that say more than one value: adapters and LoRAs with their scales, areas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fisedit.errors import InputError, as_text

if TYPE_CHECKING:
    from fisedit.values import AdapterUse


def parse_adapters(given: Mapping[str, Any]) -> list[tuple[str, AdapterUse]]:
    """Adapters of a command's parameters, and how each takes part.

    Args:
        given: parameter -> value.

    Raises:
        InputError: a number out of range, or not one scale or one for each.
    """
    from fisedit.values import AdapterUse, make_adapter_use

    scaled = _with_scales("adapter", given)
    rest = {name: given[name] for name in ("control_guidance_start", "control_guidance_end", "guess_mode")}
    unused = [name for name, value in rest.items() if value != getattr(AdapterUse(), name)]
    unused += ["image_encoder"] if given.get("image_encoder") else []
    if not scaled and unused:
        raise InputError(f"--{unused[0].replace('_', '-')} is of an --adapter, got none; give one, or leave it out")
    return [(source, make_adapter_use(scale, **rest)) for source, scale in scaled]


def parse_loras(given: Mapping[str, Any]) -> list[tuple[str, float]]:
    """LoRAs of a command's parameters, and their scales; none where a command has no such option.

    Args:
        given: parameter -> value.

    Raises:
        InputError: a scale out of range, or not one or one for each.
    """
    from fisedit.values import check_scale

    return [(source, check_scale(scale)) for source, scale in _with_scales("lora", given)]


def _with_scales(option: str, given: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the values of an option that may be repeated, each with its scale."""
    sources, scales = given.get(option) or (), given.get(f"{option}_scale") or ()
    if scales and not sources:
        raise InputError(f"--{option}-scale is of --{option}, got none; give one, or leave it out")
    if len(scales) not in (0, 1, len(sources)):
        raise InputError(f"--{option}-scale must be given once or as often as --{option}, got {len(scales)} times")
    return [(source, scales[i % len(scales)] if scales else 1.0) for i, source in enumerate(sources)]


def parse_areas(areas: str) -> tuple[float, ...]:
    """Shares from percentages with commas between. Raises InputError."""
    try:
        shares = tuple(float(area) / 100 for area in areas.split(","))
    except ValueError as error:
        raise InputError(f"areas must be percentages such as 1,5,15, got {as_text(areas)}") from error
    if not all(0 < share <= 1 for share in shares):
        raise InputError(f"areas must lie above 0 and up to 100 percent, got {as_text(areas)}")
    return shares
