"""`fisedit validate`: what edits of a model are worth, checked and measured on that model itself.

A fixed list of prompts and edits is run. The first three rules of the contract are checked. Edits are compared with the
dense blended ones, masks with what dense edits change, and whole edits are timed beside diffusers. One folder receives
a page, pictures and figures; they name neither paths nor people, so that they can be attached to a report. A run that
was stopped goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fisedit.bench import environment, metrics
from fisedit.bench.dense_pipelines import DensePipelines, has_compiler
from fisedit.bench.dense_search import DEEPCACHE, OPENVINO, DenseVariant
from fisedit.bench.edit_case import BenchmarkEdit, EditCase, get_trajectory
from fisedit.bench.timing import Calls, interval, peak_memory, ratio, seconds_by_round
from fisedit.bench.validation_report import NOTES, check_rows, report_page, speed_row, summary_rows
from fisedit.bench.workload import PROMPTS, square_mask
from fisedit.editor import Editor
from fisedit.errors import InputError, ModelError
from fisedit.machine.device import DTYPES, weights_digest
from fisedit.models.loader import load
from fisedit.models.vae import is_inpainting
from fisedit.sampling import denoise
from fisedit.sampling.trajectory import LatentEdit
from fisedit.storage import files, images
from fisedit.storage.contact_sheet import make_sheet, overlay
from fisedit.values import (
    LATENT_FACTOR,
    ActiveCells,
    EditMode,
    GenerationConfig,
    OnStep,
    SchedulerName,
    make_generation_config,
)

if TYPE_CHECKING:
    from pathlib import Path

    from fisedit.bench.settings import ValidationSettings
    from fisedit.history import EditResult
    from fisedit.machine.model import Model

EDITS = (
    ("swap", *PROMPTS),
    ("swap", "a photo of a dog in the park", "a photo of a fox in the park"),
    ("swap", "a bowl of apples on a table", "a bowl of oranges on a table"),
    ("swap", "a castle on a hill at sunset", "a lighthouse on a hill at sunset"),
    ("delete", "a cat and a ball on the grass", "a cat on the grass"),
    ("delete", "a boat and a balloon by the sea", "a boat by the sea"),
    ("insert", "a cat on a sofa", "a cat wearing a hat on a sofa"),
    ("insert", "a beach with palm trees", "a beach with palm trees and a boat"),
    ("recolour", "a red car in the street", "a blue car in the street"),
    ("recolour", "a woman in a white dress, portrait photo", "a woman in a green dress, portrait photo"),
    ("global", "a house by a lake in summer", "a house by a lake in winter"),
    ("global", "a mountain village", "a mountain village, watercolor painting"),
)
"""Kind, source's prompt and edit's prompt. Nothing was tuned on them."""

QUICK_EDITS = (0, 4, 6, 10)
"""Indices of the edits of a quick run."""

AREAS = (0.05, 0.15, 0.25)
"""Areas of the squares whose edits are timed."""

MAX_DEVIATIONS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""dtype -> the largest deviation of an edit with all rows active from diffusers' latents (E1). In fp32 it is the
largest difference. In 16 bit it is the relative root mean square, without guidance, which would multiply roundings."""

FULL_STEPS = 4
"""Denoising steps of the check with all rows active."""

REPORT, PAGE = "report.json", "report.html"
"""Files of the folder."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Checked:
    """The checks and measurements of one edit.

    Args:
        kind: The kind of the edit.
        source_prompt: The prompt of the source.
        prompt: The prompt of the edit.
        unchanged: whether the source's own prompt gave the source, without a call of the UNet (E2).
        exact: whether latents and pixels outside the mask are the source's (E3); None for an edit that ran dense.
        area: share of the picture in the mask, 0 to 1.
        confidence: The confidence of the mask.
        fallback: why it ran dense, or "".
        covered: share of what a dense edit of the whole picture changes, by squared levels, that the mask covers.
        psnr: dB to the dense blended edit inside the mask; None for an edit that ran dense.
        ssim: structural similarity to it inside the mask, -1 to 1; None likewise.
        macs_ratio: multiply-accumulates of a dense run over the edit's.
        picture: name of the file that shows it.
    """

    kind: str
    source_prompt: str
    prompt: str
    unchanged: bool
    exact: bool | None
    area: float
    confidence: float
    fallback: str
    covered: float
    psnr: float | None
    ssim: float | None
    macs_ratio: float
    picture: str


def validate_model(settings: ValidationSettings, folder: Path, on_step: OnStep | None = None) -> Row:
    """Check and measure a model, and write the folder.

    Args:
        settings: model, sampling, and whether the run is a quick one.
        folder: receives report.html, report.json and pictures; a run of the same settings and code goes on in it.
        on_step: called before every part with (i, n, None).

    Returns:
        {"environment", "settings", "passed", "checks", "summary", "edits", "speed", "memory", "notes"}, ready for JSON.

    Raises:
        InputError: a setting out of range, or a folder with a run of other settings or of other code.
        ModelError: the model cannot be loaded, or is an inpainting model.
    """
    _make_config(settings, 512 if settings.size is None else settings.size)  # checks them before the model is loaded
    pipe = load(
        settings.model, device=settings.device, dtype=settings.dtype, local_files_only=settings.local_files_only
    )
    if is_inpainting(pipe.unet):
        raise ModelError(
            "validate compares with diffusers' text-to-image pipeline, got an inpainting model (9 input channels); "
            "give the model that it was made from"
        )
    run = _Run(pipe, settings, folder)
    parts = list(run.parts())
    for i, (name, part) in enumerate(parts):
        if on_step is not None:
            on_step(i, len(parts), None)
        if name not in run.found:
            run.keep(name, part())
    if on_step is not None:
        on_step(len(parts), len(parts), None)
    return run.write()


def _make_config(settings: ValidationSettings, side: int, prompt: str = PROMPTS[0], seed: int = 0) -> GenerationConfig:
    """A source of the run. Raises InputError for a side, steps or guidance out of range."""
    return make_generation_config(
        prompt,
        seed=seed,
        negative_prompt="",
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        width=side,
        height=side,
        scheduler=SchedulerName.DDIM,
    )


class _Run:
    """The results so far, in memory and in the folder."""

    def __init__(self, pipe: Model, settings: ValidationSettings, folder: Path) -> None:
        self._pipe, self._settings, self._folder = pipe, settings, folder
        self._editor = Editor(pipe)
        self._side = self._editor.native_size if settings.size is None else settings.size
        self.found: Row = {}
        self._report: Row = {
            "environment": environment.describe(str(pipe.unet.dtype).removeprefix("torch."))
            | {"command": "fisedit validate"},
            "settings": self._settings_row(),
        }
        if (folder / REPORT).is_file():
            self._go_on()

    def _settings_row(self) -> Row:
        settings, unet = self._settings, self._pipe.unet
        return {
            "weights": weights_digest(self._pipe),
            "unet_parameters": sum(weight.numel() for weight in unet.parameters()),
            "prediction_type": self._pipe.scheduler.config.prediction_type,
            "pixels": self._side,
            "num_inference_steps": settings.num_inference_steps,
            "guidance_scale": settings.guidance_scale,
            "scheduler": SchedulerName.DDIM.value,
            "device": unet.device.type,
            "dtype": str(unet.dtype).removeprefix("torch."),
            "quick": settings.quick,
            "compiled": settings.compiled,
            "repeats": settings.repeats,
        }

    def _go_on(self) -> None:
        path = self._folder / REPORT
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            same, self.found = earlier["settings"] == self._report["settings"], dict(earlier["found"])
            code, now = _code_name(earlier["environment"]), _code_name(self._report["environment"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is no report of fisedit validate; name another folder, or delete it") from error
        if not same:
            raise InputError(f"{path} is of another model or other settings; name another folder, or delete it")
        if code != now:
            raise InputError(f"{path} is of {code}, this is {now}; name another folder, or delete it")

    def keep(self, name: str, value: Any) -> None:
        """Keep what a part found, in the folder as well."""
        self.found[name] = value
        files.write_json(self._report | {"found": self.found}, self._folder / REPORT)

    def parts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Name and call of every part, the timings first, while nothing else is in memory."""
        yield "speed", self._time
        yield "all rows active", self._deviation
        for i in QUICK_EDITS if self._settings.quick else range(len(EDITS)):
            yield f"edit {i}", partial(self._check, i)

    def _config(self, prompt: str, seed: int) -> GenerationConfig:
        return _make_config(self._settings, self._side, prompt, seed)

    def _generate(self, config: GenerationConfig) -> EditResult:
        self._editor = self._editor.beside()
        return self._editor.generate(
            config.prompt,
            seed=config.seed,
            num_inference_steps=config.num_inference_steps,
            guidance_scale=config.guidance_scale,
            width=config.width,
            height=config.height,
        )

    def _case(self, i: int, config: GenerationConfig) -> EditCase:
        source = self._generate(config)
        return EditCase(self._editor, BenchmarkEdit(*EDITS[i]), source, get_trajectory(self._editor, source))

    @torch.inference_mode()
    def _deviation(self) -> float:
        """Return the deviation of an edit's latents with all rows active from diffusers' (E1)."""
        fp32 = self._pipe.unet.dtype == torch.float32
        config = replace(self._config(PROMPTS[0], 0), num_inference_steps=FULL_STEPS)
        case = self._case(0, config if fp32 else replace(config, guidance_scale=1.0))
        engine, config = case.engine, case.config
        everything = LatentEdit(
            config, engine.encode(config), {}, ActiveCells(case.everywhere), EditMode((0,) * config.num_timesteps)
        )
        ours = denoise.run_sparse(engine, case.trajectory, [everything], lambda *_: None)[0].latents[-1].float()
        latents: list[torch.Tensor] = []

        def keep(_: int, after: torch.Tensor) -> torch.Tensor:
            latents.append(after)
            return after

        case.dense([config.prompt], keep)
        theirs = latents[-1].float()
        difference = ours - theirs
        if fp32:
            return float(difference.abs().max() / theirs.std())
        return float(difference.norm() / theirs.norm())

    def _check(self, i: int) -> Row:
        """Everything about the i-th edit."""
        kind, source_prompt, prompt = EDITS[i]
        case = self._case(i, self._config(source_prompt, 100 + i))
        editor, source = self._editor, case.source
        same = editor.edit(source_prompt)
        calls = same.stats.unet_evaluations_dense + same.stats.unet_evaluations_sparse
        unchanged = same.image.tobytes() == source.image.tobytes() and not calls
        editor.checkout(source.id)
        result = editor.edit(prompt)
        dense = case.dense([prompt])
        grid, inside = result.latent_cells, metrics.cells_to_pixels(result.latent_cells)
        sparse = result.stats.unet_evaluations_sparse > 0
        blended = case.blended(grid) if sparse else None
        columns = [
            (source_prompt, source.image),
            (f"{result.diff}: {result.mask.area:.0%}", overlay(source.image, result.mask.image())),
            (prompt, result.image),
            ("dense, of the whole picture", dense),
        ]
        name = f"pictures/{i:02d}.jpg"
        images.write_image(
            make_sheet([*columns, ("dense, blended", blended)] if blended else columns), self._folder / name
        )
        return asdict(
            Checked(
                kind=kind,
                source_prompt=source_prompt,
                prompt=prompt,
                unchanged=unchanged,
                exact=self._is_exact(case, result) if sparse else None,
                area=result.mask.area,
                confidence=result.mask.confidence,
                fallback=result.stats.fallback,
                covered=metrics.change_covered(source.image, dense, inside),
                psnr=metrics.psnr(result.image, blended, inside) if blended else None,
                ssim=metrics.ssim(result.image, blended, inside) if blended else None,
                macs_ratio=result.stats.macs_dense / result.stats.macs,
                picture=name,
            )
        )

    def _is_exact(self, case: EditCase, result: EditResult) -> bool:
        """Return whether latents of every step, and pixels, are the source's outside what the edit may change (E3)."""
        outside = ~torch.from_numpy(result.latent_cells.copy()).to(self._pipe.unet.device)
        edited = get_trajectory(case.editor, result)
        pairs = zip(edited.latents, case.trajectory.latents, strict=True)
        return result.changed_outside(case.source) == 0 and all(
            torch.equal(ours[..., outside], theirs[..., outside]) for ours, theirs in pairs
        )

    def _time(self) -> Row:
        """Seconds of whole runs in turns: diffusers eager, compiled and by others, our source, and edits of squares."""
        dtype = next(name for name, kind in DTYPES.items() if kind == self._pipe.unet.dtype)
        compiled = self._settings.compiled and has_compiler(self._pipe.unet.device)
        eager = DenseVariant(dtype, channels_last=True, compiled=False)
        variants = [eager, replace(eager, compiled=True)] if compiled else [eager]
        config = self._config(PROMPTS[0], 0)
        dense = DensePipelines(self._pipe, config)
        others = [replace(eager, runtime=DEEPCACHE)]
        if self._pipe.unet.device.type == "cpu":
            others.append(replace(eager, runtime=OPENVINO))
        refusals = {variant: dense.refusal(variant) for variant in others}
        variants += [variant for variant, reason in refusals.items() if not reason]
        calls: Calls = {f"diffusers, {variant.name}": partial(dense.run, variant) for variant in variants}
        calls["source"] = partial(self._generate, config)
        calls |= {f"edit of {area:.0%}": partial(self._edit_square, area) for area in AREAS}
        warm_up: Calls = {f"diffusers, {variant.name}": partial(dense.run, variant, 1) for variant in variants}
        turns = seconds_by_round(calls, self._settings.repeats, warm_up)
        exact = [f"diffusers, {variant.name}" for variant in variants if variant.is_exact]
        fastest = min(exact, key=lambda name: np.median(turns[name]))
        rows = [
            {
                "run": name,
                "seconds": interval(turns[name]).as_dict(),
                "faster": ratio(turns[fastest], turns[name]).as_dict(),
            }
            for name in turns
        ]
        rows += [{"run": f"diffusers, {v.name}", "reason": reason} for v, reason in refusals.items() if reason]
        bytes_recorded = self._generate(config).stats.recorded_bytes
        peak = peak_memory(self._pipe.unet.device)
        return {"rows": rows, "fastest": fastest, "recorded_bytes": bytes_recorded, "peak_bytes": peak}

    def _edit_square(self, area: float) -> None:
        result = self._editor.edit(PROMPTS[1], mask=square_mask(area, self._side // LATENT_FACTOR))
        self._editor.delete(result.id)

    def write(self) -> Row:
        """The whole report, in the folder as well."""
        edits = [value for name, value in self.found.items() if name.startswith("edit ")]
        checks = check_rows(self.found["all rows active"], MAX_DEVIATIONS[self._pipe.unet.dtype], edits)
        speed = self.found["speed"]
        report = self._report | {
            "passed": all(row["held"] for row in checks),
            "checks": checks,
            "summary": summary_rows(edits),
            "edits": edits,
            "speed": [speed_row(row, speed["fastest"]) for row in speed["rows"]],
            "memory": {"recorded_bytes": speed["recorded_bytes"], "peak_bytes": speed["peak_bytes"]},
            "notes": NOTES,
            "found": self.found,
        }
        files.write_json(report, self._folder / REPORT)
        files.write_text(report_page(report), self._folder / PAGE)
        return report


def _code_name(described: Mapping[str, Any]) -> str:
    """The version and commit of an environment, as `environment.describe` has it."""
    version, commit = described["versions"]["fisedit"], described["commit"]
    return f"fisedit {version}{f' at commit {commit[:7]}' if commit else ''}"
