"""`fisedit plan`: what a source and edits would take on this machine, and what to change where it does not fit.

Reads the cost tables that were measured; runs nothing of the model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fisedit.costs import store as cost_store
from fisedit.costs.schedules import find_shallow_steps
from fisedit.diagnosis.calibration import shape_mask
from fisedit.diagnosis.record_placement import RecordPlacement, place_records
from fisedit.errors import InputError
from fisedit.features.codec import choose_encoding
from fisedit.features.pages import free_page_bytes
from fisedit.machine.device import choose_dtype
from fisedit.sampling.engine import Engine
from fisedit.values import LATENT_FACTOR, Step, make_generation_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from fisedit.costs.model import Costs
    from fisedit.costs.table import CostTable
    from fisedit.features.record_size import RecordSize
    from fisedit.machine.model import Model
    from fisedit.values import GenerationConfig

_DTYPES = ("float32", "bfloat16", "float16")
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The settings of a plan.

    Args:
        size: side of the picture in pixels, 64 to 2048, divisible by 8; None for the model's own.
        num_inference_steps: 1 to 999.
        guidance_scale: 0 to 100; 1 or less runs one branch.
        memory: bytes for weights and records together; None for all that is free.
        areas: shares of the picture that edits cover, each in (0, 1].
        dtype: fp32, bf16 or fp16; None for the fastest that was calibrated.
    """

    size: int | None = None
    num_inference_steps: int = 25
    guidance_scale: float = 7.5
    memory: int | None = None
    areas: tuple[float, ...] = (0.05, 0.25)
    dtype: str | None = None


def plan_edits(pipe: Model, settings: PlanSettings, free: int) -> dict[str, Any]:
    """The plan of a source and its edits, in the settings' dtype or the fastest that was calibrated.

    Args:
        pipe: the model.
        settings: what is planned.
        free: bytes of the device's memory that are free without the model, for settings without a limit.

    Returns:
        {"choice", "source", "edits", "changes"}, ready for JSON; changes are lines, none where all fits.

    Raises:
        InputError: a setting out of range, or a model that was never calibrated here in the dtype.
    """
    names = _DTYPES if settings.dtype is None else (_dtype_name(choose_dtype(settings.dtype, pipe.unet.device)),)
    tables = _tables(pipe, names)
    if not tables:
        raise InputError(
            f"plan needs this machine's cost table of the model in {' or '.join(names)}, got none; run fisedit "
            "calibrate first, with its --dtype"
        )
    limit = free if settings.memory is None else settings.memory
    plans = [_plan(pipe, settings, limit, dtype, table) for dtype, table in tables.items()]
    return min(plans, key=lambda plan: (len(plan["changes"]) > 0, sum(one["seconds"] for one in plan["edits"])))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tables(pipe: Model, dtypes: Sequence[str]) -> dict[str, CostTable]:
    """Name of a dtype -> this machine's table of the model in it."""
    found = {dtype: cost_store.load_table(pipe, dtype) for dtype in dtypes}
    return {dtype: table for dtype, table in found.items() if table is not None}


def _plan(pipe: Model, settings: PlanSettings, limit: int, dtype: str, table: CostTable) -> dict[str, Any]:
    """The plan in one dtype."""
    engine, config = Engine(pipe), _config(pipe, settings)
    engine.table = table
    weights = _WEIGHT_BYTES[dtype] * sum(
        weight.numel() for part in (pipe.unet, pipe.vae, pipe.text_encoder) for weight in part.parameters()
    )
    records = [_records(engine, config, dtype, name, settings, limit - weights) for name in ("auto", "int4")]
    chosen = min(records, key=lambda each: (each.unplaced, each.late))  # the first of those that are alike
    steps, costs = settings.num_inference_steps, engine.costs(config)
    return {
        "choice": {
            "dtype": dtype,
            "cache_dtype": chosen.cache_dtype,
            "batch": 1,
            "weights_bytes": weights,
            "limit_bytes": limit,
            "steps_in_memory": chosen.kept["memory"],
            "steps_on_disk": chosen.kept["disk"],
        },
        "source": {"seconds": costs.seconds(None, ()), "bytes": chosen.bytes},
        "edits": [_edit(costs, chosen, config, area) for area in settings.areas],
        "changes": _changes(chosen, steps, limit - weights, weights) if chosen.unplaced else [],
    }


@dataclass(frozen=True, eq=False)
class _Records:
    """The way a source's records are kept.

    Args:
        cache_dtype: The argument of `Editor`.
        size: The bytes of a step.
        bytes: The bytes of all steps.
        kept: "memory" and "disk" -> steps that are kept there.
        late: seconds that an edit waits for records.
        unplaced: steps that fit nowhere.
    """

    cache_dtype: str
    size: RecordSize
    bytes: int
    kept: Mapping[str, int]
    late: float
    unplaced: int


def _records(
    engine: Engine, config: GenerationConfig, dtype: str, cache_dtype: str, settings: PlanSettings, room: int
) -> _Records:
    """Return where a source's steps go within so many bytes of memory, and what is free on the disk, in one
    cache_dtype."""
    encoding, table, steps = (
        choose_encoding(cache_dtype, engine.executor.device),
        engine.table,
        settings.num_inference_steps,
    )
    size = engine.record_size(config, encoding, _WEIGHT_BYTES[dtype])
    total = engine.recorded_bytes(config, size=size)
    page, costs = -(-total // steps), engine.costs(config)
    grid = shape_mask(settings.areas[0], config.width // LATENT_FACTOR, discs=False)
    sparse = costs.step_seconds(grid, costs.choose_dilations(grid, shallow=find_shallow_steps(steps)))
    choices = [RecordPlacement("memory", page, sparse)]
    if table is not None and "disk read" in table.rates:
        choices.append(RecordPlacement("disk", 0, sparse + page / table.rates["disk read"]))
    on_disk = min(steps, free_page_bytes() // page) if len(choices) > 1 else 0
    placed = place_records([choices] * on_disk + [choices[:1]] * (steps - on_disk), max(0, room))
    kept = Counter(one.name for one in placed or ())
    late = sum(one.seconds - sparse for one in placed or ())
    return _Records(cache_dtype, size, total, kept, late, 0 if placed else steps - on_disk - max(0, room) // page)


def _config(pipe: Model, settings: PlanSettings) -> GenerationConfig:
    size = int(pipe.unet.config.sample_size) * LATENT_FACTOR if settings.size is None else settings.size
    return make_generation_config(
        "a cat",
        seed=0,
        negative_prompt="",
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        width=size,
        height=size,
        scheduler="ddim",
    )


def _edit(costs: Costs, records: _Records, config: GenerationConfig, area: float) -> dict[str, Any]:
    """An edit in a square, of a source with such records."""
    grid = shape_mask(area, config.width // LATENT_FACTOR, discs=False)
    growth = costs.choose_dilations(grid, shallow=find_shallow_steps(config.num_timesteps))
    size = records.size
    fallback = costs.dense_is_cheaper(grid, growth)
    seconds = costs.seconds(grid, () if fallback else growth)
    assert seconds is not None
    sparse = sum(size.overlay(costs.rows(grid, (cells,))) for cells in growth if isinstance(cells, int))
    dense = growth.count(Step.DENSE) * size.step
    return {
        "area": area,
        "seconds": seconds + (0.0 if fallback else records.late),
        "bytes": records.bytes if fallback else sparse + dense,
        "growth": max((cells for cells in growth if isinstance(cells, int)), default=0),
        "dense_steps": len(growth) if fallback else growth.count(Step.DENSE),
        "fallback": fallback,
    }


def _changes(records: _Records, steps: int, room: int, weights: int) -> list[str]:
    """Return what to change where records fit neither in memory nor on the disk, a line each."""
    fit = steps - records.unplaced
    wanted = (weights + records.bytes + (1 << 28)) / (1 << 30)
    taken = (
        f"records of {steps} steps take {records.bytes / 1e9:.1f} GB beside {weights / 1e9:.1f} GB of weights, and "
        f"{max(0, room) / 1e9:.1f} GB of memory and what may be taken of the disk do not hold them; "
        f"give --memory {wanted:.1f}G"
    )
    fewer = [f"or --num-inference-steps {fit}, whose records fit"] if fit else []
    return [taken, *fewer, "or a smaller --size; records that are dropped are made again, at the seconds of a source"]


def as_rows(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """A plan's source and edits as rows of one table.

    Args:
        plan: The plan that `plan_edits` returned.
    """
    source = {"run": "source", **plan["source"], "growth": "", "dense_steps": "", "fallback": ""}
    return [source, *({"run": f"edit of {one['area']:.0%}", **_without_area(one)} for one in plan["edits"])]


def _without_area(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "area"}
