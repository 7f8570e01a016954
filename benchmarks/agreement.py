"""`python -m benchmarks.agreement`: the measure of artefacts beside a person's verdicts on the same edits.

The verdicts were written down with every picture enlarged three times, before the measure was computed on it. The
thresholds of `quality.artefacts` were chosen on the sets that are not held out. Edits are made again from their seeds.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.quality.artefacts import is_seen
from benchmarks.quality.edit_quality import find_classifier
from benchmarks.quality.methods import METHODS
from benchmarks.quality.scene_edits import known_words, sample_edits
from benchmarks.quality.scores import measure_artefacts
from fisedit.bench.edit_case import make_case
from fisedit.models.loader import load
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from diffusers import StableDiffusionPipeline

    from fisedit.bench.settings import EvaluationSettings
    from fisedit.values import OnStep

    Row = dict[str, Any]

VERDICTS = Path(__file__).parent / "results" / "artefact-verdicts.json"
"""The sets of edits with a person's verdicts, by method and by the edit's number."""


def measure_agreement(
    settings: EvaluationSettings, on_step: OnStep | None = None, verdicts: Path = VERDICTS
) -> dict[str, Any]:
    """Make the judged edits again, and compare the measure's verdicts with the person's.

    Args:
        settings: The settings of the edits, whose number and seed are the sets' own.
        on_step: called before every edit with (i, n, None).
        verdicts: file of the sets.

    Returns:
        {"settings", "rows", "summary", "notes"}, ready for JSON.
    """
    sets = json.loads(verdicts.read_text(encoding="utf-8"))["sets"]
    pipe = load(
        settings.model, device=settings.device, dtype=settings.dtype, local_files_only=settings.local_files_only
    )
    rows = [row for judged in sets for row in _judged_rows(judged, pipe, settings, on_step)]
    notes = [
        "seen: visible or bad; the person's word comes first",
        "a truth is known of opened pictures that are edited in a place; of others only classifier and border speak",
    ]
    shared = ("model", "num_inference_steps", "guidance_scale", "dtype")
    return {
        "settings": {name: getattr(settings, name) for name in shared},
        "rows": rows,
        "summary": _summary(rows),
        "notes": notes,
    }


def _judged_rows(
    judged: Mapping[str, Any], pipe: StableDiffusionPipeline, settings: EvaluationSettings, on_step: OnStep | None
) -> Iterator[Row]:
    """Both verdicts on every judged edit of a set."""
    classifier, _ = find_classifier(settings.model, None)
    side, by_method = pipe.unet.config.sample_size * LATENT_FACTOR, judged["verdicts"]
    edits = sample_edits(judged["edits"], side, known_words(pipe), judged["kinds"], judged["seed"])
    for i, edit in enumerate(edits):
        methods = [name for name, said in by_method.items() if str(i) in said]
        if not methods:
            continue
        if on_step:
            on_step(i, judged["edits"], None)
        steps, guidance = settings.num_inference_steps, settings.guidance_scale
        case = make_case(pipe, edit, num_inference_steps=steps, guidance_scale=guidance)
        for name in methods:
            result = METHODS[name](case)
            assert result is not None
            found = measure_artefacts(case, result, classifier)
            yield {
                "set": judged["name"],
                "edit": i,
                "kind": edit.kind,
                "method": name,
                "truth": edit.picture is not None and not edit.is_global,
                "person": by_method[name][str(i)][0],
                "measure": found.verdict,
                "strengths": dict(found.strengths),
            }


def _summary(rows: list[Row]) -> list[Row]:
    """Count on what both agree, by set, and with the drawn truth or without."""
    table = []
    for name, truth in product(dict.fromkeys(row["set"] for row in rows), (True, False)):
        pairs = [
            (is_seen(row["person"]), is_seen(row["measure"]))
            for row in rows
            if row["set"] == name and row["truth"] is truth
        ]
        if pairs:
            counts = {
                f"{a}, {b}": pairs.count((a == "seen", b == "seen")) for a, b in product(("seen", "not"), repeat=2)
            }
            agree = sum(a == b for a, b in pairs)
            table.append({"set": name, "truth": truth, "edits": len(pairs), "agree": agree, **counts})
    return table


if __name__ == "__main__":
    from benchmarks.commands import run

    run("agreement")
