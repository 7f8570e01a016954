"""`python -m benchmarks.quality`: the same edits by every method, measured and joined into one report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.classifier import load_classifier
from benchmarks.quality import pie_bench
from benchmarks.quality.global_edit_detection import GlobalEditVerdict, detect_by_text, detection_row
from benchmarks.quality.global_edit_prompts import prompt_pairs, written_pairs
from benchmarks.quality.html_report import HtmlReport
from benchmarks.quality.methods import PLAIN, select_methods
from benchmarks.quality.metric_tables import EVERYWHERE, LOCAL, artefact_rows, format_table, metric_rows
from benchmarks.quality.results_log import ResultsLog
from benchmarks.quality.scene_edits import available_kinds, known_words, sample_edits
from benchmarks.quality.scores import score_edit
from benchmarks.scenes.layout import CHANGE_KINDS
from fisedit import __version__
from fisedit.bench.edit_case import make_case
from fisedit.errors import InputError
from fisedit.models.loader import demo_folder, load
from fisedit.models.paths import expand_home
from fisedit.values import LATENT_FACTOR, OnStep

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from benchmarks.classifier import SceneClassifier
    from benchmarks.quality.methods import Method
    from benchmarks.settings import EditQualitySettings
    from fisedit.bench.edit_case import BenchmarkEdit, EditCase, MethodResult
    from fisedit.prompts.text_diff import Tokenizer

CLASSIFIER_FILE = "judge.safetensors"
"""The scene classifier's weights in a model's folder."""

NOTES = (
    "in square brackets the bootstrap's 95 % interval, in round ones the 10th percentile (90th where low is good)",
    "parts are left where more than 2 % of a removed object's visible pixels lie outside the mask",
    "IoU, precision and recall are by latent cells of 8x8 pixels; one is true if any of its pixels is",
    "inside dB and seam compare with the dense blended edit in the method's own mask, over edits that ran sparsely",
    "seam is the largest step between neighbours within 4 pixels of the mask's boundary, over the reference's own",
    "of which the source's pixels are the reference outside the mask: an opened picture is sharper than a decoder's",
    "dense dB is the same over our edits that fell back to dense runs",
    "kept dB is to the source, inside the method's own mask: structure= trades it for success",
    "gone: the classifier does not see what was removed; truth dB is to what was drawn behind it, in the true pixels",
    "artefacts: a person would see one (see `quality.artefacts`): by the drawn truth, the classifier and the border",
    "of generated sources and edits of the whole picture no truth is drawn, so that most artefacts are not seen there",
    "again dB is of the whole picture to the source: its latents decoded, or its prompt sampled again, unblended",
    "img2img and inpaint-true are diffusers' pipelines, at strength .8 and 1, inpainting with the true cells",
    "inpaint-empty is the same without words, and so is erase, by fisedit: both of edits that remove an object",
    "dense methods decode the whole picture: their background comes no nearer to an opened picture than no-edit's",
    "the true region of a generated source is unknown: its background is what lies outside fisedit's own mask",
    "FISEdit's method runs in our engine with stale GroupNorm statistics: its own kernels and cache are not measured",
)


@dataclass(frozen=True, eq=False)
class _EditSet:
    """`count` edits, and notes on their choice."""

    edits: Iterator[BenchmarkEdit]
    count: int
    notes: tuple[str, ...]


def measure_edit_quality(settings: EditQualitySettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Make edits of known truth by every method, and measure them.

    Args:
        settings: what is measured, and with which model.
        on_step: called before every edit with (i, n, None).

    Returns:
        {"settings", "notes", "summary", "classes", "artefacts", "whole", "misjudged", "rows", "edits"}, ready for JSON.
        The methods, our kinds of edit and their artefacts are in short tables. Then come the detection of global edits
        and its errors, all metrics (see `tables.metric_rows`), and every edit's prompts and scores.

    Raises:
        InputError: an unknown method, a model that knows no scene's words, a folder that is no PIE-Bench, or a results
            log of other settings.
        ModelError: the model, or a classifier that was named, cannot be loaded.
    """
    methods = select_methods(settings.methods)
    classifier, missing = find_classifier(settings.model, settings.classifier)
    if settings.pie_bench is not None:
        pie_bench.read_mapping(settings.pie_bench)  # refused before the model is loaded
    pipe = load(
        settings.model, device=settings.device, dtype=settings.dtype, local_files_only=settings.local_files_only
    )
    edit_set = _edit_set(settings, pipe)
    report_settings = _settings_dict(settings, pipe, edit_set.count, list(methods))
    sources = {"judge": settings.classifier, "pie_bench": settings.pie_bench}
    log = ResultsLog(
        settings.results_log, report_settings | {name: path and str(path) for name, path in sources.items()}
    )
    html = None if settings.html is None else HtmlReport(settings.html)
    for case, results in _run_methods(pipe, edit_set, methods, settings, len(log.edits), on_step):
        scores = {
            name: None if result is None else score_edit(case, result, classifier) for name, result in results.items()
        }
        if html is not None:
            html.add_edit(case, results, scores)
        log.append(_edit_dict(case.edit), scores)
    pairs = prompt_pairs(0 if settings.pie_bench else settings.edits // 2, settings.seed)
    report = {"settings": report_settings, "notes": [*missing, *edit_set.notes, *NOTES]}
    report |= _tables(log, pipe.tokenizer, pairs)
    if html is not None:
        html.write(report)
    return report


def find_classifier(model: str, path: Path | None) -> tuple[SceneClassifier | None, tuple[str, ...]]:
    """The scene classifier, or a note that says why there is none.

    Args:
        model: name or folder of the model, whose folder may hold the weights.
        path: file of the weights; None to look into the model's folder.

    Raises:
        ModelError: `path` holds no such weights.
    """
    if path is not None:
        return load_classifier(path), ()
    folder = demo_folder() if model == "demo" else expand_home(model)
    if (folder / CLASSIFIER_FILE).is_file():
        return load_classifier(folder / CLASSIFIER_FILE), ()
    return None, (f"success is not measured: there is no {CLASSIFIER_FILE} in {folder}, and no other was given",)


def _edit_set(settings: EditQualitySettings, pipe: StableDiffusionPipeline) -> _EditSet:
    """The dataset's edits, or edits of drawn scenes in words that the model knows."""
    side = pipe.unet.config.sample_size * LATENT_FACTOR
    if (folder := settings.pie_bench) is not None:
        entries = pie_bench.read_mapping(folder)[: settings.edits]
        return _EditSet(pie_bench.load_edits(folder, entries, side), len(entries), pie_bench.dataset_notes(side))
    words = known_words(pipe)
    kinds = available_kinds(words, settings.seed)
    if unknown := set(settings.kinds) - set(kinds):
        raise InputError(f"kinds must be of {', '.join(kinds)}, got {', '.join(sorted(unknown))}")
    missing = ", ".join(kind for kind in CHANGE_KINDS if kind not in kinds)
    notes = (f"kinds of edit left out, as the model lacks words for them: {missing}",) if missing else ()
    chosen = tuple(kind for kind in kinds if kind in settings.kinds or not settings.kinds)
    return _EditSet(sample_edits(settings.edits, side, words, chosen, settings.seed), settings.edits, notes)


def _settings_dict(
    settings: EditQualitySettings, pipe: StableDiffusionPipeline, edits: int, methods: list[str]
) -> dict[str, Any]:
    return {
        "model": settings.model,
        "pixels": pipe.unet.config.sample_size * LATENT_FACTOR,
        "edits": edits,
        "methods": methods,
        "kinds": list(settings.kinds),
        "seed": settings.seed,
        "num_inference_steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale,
        "dtype": str(pipe.unet.dtype).removeprefix("torch."),
        "cache_dtype": settings.cache_dtype,
        "fisedit": __version__,
    }


def _run_methods(
    pipe: StableDiffusionPipeline,
    edit_set: _EditSet,
    methods: Mapping[str, Method],
    settings: EditQualitySettings,
    first: int,
    on_step: OnStep | None,
) -> Iterator[tuple[EditCase, dict[str, MethodResult | None]]]:
    """Every edit from number `first` on by every method; one edit's pictures at a time are held."""
    for i, edit in enumerate(islice(edit_set.edits, first, None), first):
        if on_step is not None:
            on_step(i, edit_set.count, None)
        case = make_case(
            pipe,
            edit,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
            cache_dtype=settings.cache_dtype,
        )
        yield case, {name: method(case) for name, method in methods.items()}


def _edit_dict(edit: BenchmarkEdit) -> dict[str, Any]:
    prompts = {"kind": edit.kind, "source_prompt": edit.source_prompt, "prompt": edit.prompt}
    return prompts | {"seed": edit.seed, "drawn": edit.picture is not None, "whole": edit.is_global}


def _tables(log: ResultsLog, tokenizer: Tokenizer, pairs: Iterator[tuple[str, str, bool]]) -> dict[str, Any]:
    """The report's tables, metrics and single edits."""
    scores = {name: [edit_scores[name] for edit_scores in log.scores] for name in log.scores[0]}
    kinds = tuple(dict.fromkeys(edit["kind"] for edit in log.edits))
    rows = metric_rows(scores, kinds)
    verdicts = _verdicts(log, tokenizer, pairs)
    wrong = [asdict(v) for v in verdicts["words"] + verdicts["prompts alone"] if v.whole is not v.said]
    return {
        "summary": format_table(
            [row for row in rows if row["kind"] in (LOCAL, EVERYWHERE)], ("kind", "method", "source", "edits")
        ),
        "classes": format_table([row for row in rows if row["method"] == PLAIN], ("kind", "source", "edits")),
        "artefacts": artefact_rows(scores, kinds),
        "whole": [detection_row(name, group) for name, group in verdicts.items() if group],
        "misjudged": wrong,
        "rows": rows,
        "edits": [
            edit | {"scores": {name: score and asdict(score) for name, score in edit_scores.items()}}
            for edit, edit_scores in zip(log.edits, log.scores, strict=True)
        ],
    }


def _verdicts(
    log: ResultsLog, tokenizer: Tokenizer, pairs: Iterator[tuple[str, str, bool]]
) -> dict[str, list[GlobalEditVerdict]]:
    """Return the verdicts on global edits: by the text diff, on prompts alone, and by the editor's mask."""
    measured = [
        ((edit["source_prompt"], edit["prompt"], edit["whole"]), edit_scores.get(PLAIN))
        for edit, edit_scores in zip(log.edits, log.scores, strict=True)
        if edit["whole"] is not None
    ]
    words = detect_by_text([pair for pair, _ in measured], tokenizer)
    alone = detect_by_text(pairs, tokenizer)
    edited = [GlobalEditVerdict(*pair, score.whole) for pair, score in measured if score and score.whole is not None]
    written = detect_by_text(written_pairs("reported"), tokenizer)
    return {
        "words": words,
        "prompts alone": alone,
        "words and prompts alone": words + alone,
        "written prompts": written,
        "as edited": edited,
    }
