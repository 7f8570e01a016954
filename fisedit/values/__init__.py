"""Frozen values that cross module borders. Knows numpy and PIL, and neither torch nor any model.

Shape legend, used in every docstring of the package:

    - B: batch, guidance branches times edits
    - C: channels
    - R: active rows of a level
    - G: halo rows of a level (read, not computed)
    - h, w: latent grid (image / 8)
    - H, W: a feature map's grid, or image pixels
    - T: text tokens
    - N: steps
"""

from typing import TYPE_CHECKING

from fisedit.values.base import (
    DENSE_GROWTH,
    LATENT_FACTOR,
    MAX_DILATION,
    MAX_PROMPT_CHARS,
    Dilation,
    OnStep,
    Shallow,
    Step,
    are_numbers,
    as_dilations,
    as_growth,
    copy_on_read,
    is_number,
    shallow_steps,
    with_shallow,
)
from fisedit.values.edit_mask import (
    MAX_REGIONS,
    ActiveCells,
    EditMask,
    MaskSource,
    RegionalPrompt,
    cell_pixels,
    dense_run_as_text,
    entry_steps,
    over_pixels,
    soft_levels,
)
from fisedit.values.edit_run import (
    EditMode,
    EditStats,
    Quality,
    check_quality,
    check_structure,
    first_step,
    strength_for_start,
)
from fisedit.values.generation_config import (
    CLIP_SKIPS,
    CONTROL,
    DRIVE,
    MAX_CROP,
    MOTION,
    REFERENCE,
    SEEDS,
    SIDE,
    STEPS,
    AdapterReference,
    AdapterUse,
    GenerationConfig,
    Inversion,
    SavedAdapter,
    check_integer,
    check_prompt,
    check_scale,
    check_seed,
    config_to_dict,
    is_unicode,
    level_grids,
    make_adapter_use,
    make_generation_config,
    make_lora_entry,
    next_seed,
    parse_adapter_references,
)
from fisedit.values.schedulers import SCHEDULER_LABELS, SchedulerName, num_timesteps, web_ui_scheduler
from fisedit.values.text_edit import EditKind, EditScript, Hunk, Word

if TYPE_CHECKING:
    from fisedit.values.base import BoolGrid as BoolGrid
    from fisedit.values.base import Box as Box

__all__ = [
    "CLIP_SKIPS",
    "CONTROL",
    "DENSE_GROWTH",
    "DRIVE",
    "LATENT_FACTOR",
    "MAX_CROP",
    "MAX_DILATION",
    "MAX_PROMPT_CHARS",
    "MAX_REGIONS",
    "MOTION",
    "REFERENCE",
    "SCHEDULER_LABELS",
    "SEEDS",
    "SIDE",
    "STEPS",
    "ActiveCells",
    "AdapterReference",
    "AdapterUse",
    "Dilation",
    "EditKind",
    "EditMask",
    "EditMode",
    "EditScript",
    "EditStats",
    "GenerationConfig",
    "Hunk",
    "Inversion",
    "MaskSource",
    "OnStep",
    "Quality",
    "RegionalPrompt",
    "SavedAdapter",
    "SchedulerName",
    "Shallow",
    "Step",
    "Word",
    "are_numbers",
    "as_dilations",
    "as_growth",
    "cell_pixels",
    "check_integer",
    "check_prompt",
    "check_quality",
    "check_scale",
    "check_seed",
    "check_structure",
    "config_to_dict",
    "copy_on_read",
    "dense_run_as_text",
    "entry_steps",
    "first_step",
    "is_number",
    "is_unicode",
    "level_grids",
    "make_adapter_use",
    "make_generation_config",
    "make_lora_entry",
    "next_seed",
    "num_timesteps",
    "over_pixels",
    "parse_adapter_references",
    "shallow_steps",
    "soft_levels",
    "strength_for_start",
    "web_ui_scheduler",
    "with_shallow",
]
