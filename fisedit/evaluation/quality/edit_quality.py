"""`fisedit bench quality`: the same edits by every method, measured, joined into one report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisedit import __version__
from fisedit.evaluation.classifier import load_classifier
from fisedit.evaluation.quality import global_edit_detection
from fisedit.evaluation.quality.edit_case import make_case
from fisedit.evaluation.quality.global_edit_prompts import prompt_pairs
from fisedit.evaluation.quality.html_report import HtmlReport
from fisedit.evaluation.quality.methods import OURS, named
from fisedit.evaluation.quality.results_log import ResultsLog
from fisedit.evaluation.quality.scene_edits import expressible_kinds, sample_edits, vocabulary
from fisedit.evaluation.quality.scores import score
from fisedit.evaluation.quality.tables import ALL, rows, table
from fisedit.evaluation.scenes.layout import CHANGE_KINDS
from fisedit.models.loader import demo_folder, load
from fisedit.values import LATENT_FACTOR, OnStep

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from fisedit.evaluation.classifier import SceneClassifier
    from fisedit.evaluation.quality.methods import Method
    from fisedit.evaluation.quality.scene_edits import BenchmarkEdit
    from fisedit.masking.text_diff import Tokenizer

CLASSIFIER_FILE = "judge.safetensors"
"""The judge's weights in a model's folder."""

NOTES = (
    "in brackets the 10th percentile, or the 90th where low is good",
    "IoU, precision and recall are by latent cells of 8x8 pixels; one is true if any of its pixels is",
    "inside dB and seam are to the dense blended edit with the method's own mask, of edits that ran sparsely",
    "dense dB is the same of our edits that fell back to dense runs: it tells whether those are what they should be",
    "kept dB is to the source, inside the method's own mask: structure= trades it for success",
    "again dB is of the whole picture to the source: its latents decoded, or its prompt sampled again, nothing pinned",
    "img2img and inpaint-true are diffusers' pipelines, at strength .8 and 1, inpainting with the true cells",
    "dense methods decode the whole picture: their background comes no nearer to an opened picture than no-edit's",
    "nobody knows the true region of a generated source: its background is what lies outside our own mask",
    "FISEdit's recipe runs in our engine with stale GroupNorm statistics: its own kernels and cache are not measured",
)


@dataclass(frozen=True, eq=False)
class _Asked:
    """What is to be edited: `count` edits, and what there is to know of the choice."""

    edits: Iterator[BenchmarkEdit]
    count: int
    notes: tuple[str, ...]


def run(
    *,
    model: str = "demo",
    edits: int = 200,
    methods: Sequence[str] = (),
    num_inference_steps: int = 25,
    guidance_scale: float = 4.0,
    seed: int = 0,
    judge: Path | None = None,
    pie_bench: Path | None = None,
    html: Path | None = None,
    journal: Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    local_files_only: bool = False,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Make edits whose truth is known by every method, and measure.

    Args:
        model: as in `fisedit.models.loader.load`; drawn scenes use the words that are one token to it.
        edits: how many; of a dataset the first so many. methods: names of `methods.METHODS`; all for none.
        guidance_scale: 4, which suits the demo model. seed: of the edits.
        judge: weights of the judge; None for those in the model's folder, if it has some.
        pie_bench: a folder of PIE-Bench, whose edits are made instead of drawn ones.
        html: folder for a page, with pictures of the edits that are made now.
        journal: file to go on from: edits that it holds are not made again, and it holds every edit once it is made.
        local_files_only: never reach for the network. on_step: called before every edit with (i, n, None).

    Returns:
        {"settings", "notes", "summary", "classes", "whole", "misjudged", "rows", "edits"}, ready for JSON: the methods
        and our kinds of edit in short tables, the detection of edits of the whole picture and where it erred, all
        figures (see `report.rows`), and every edit's prompts and scores.

    Raises:
        InputError: an unknown method, a model that knows no scene's words, a folder that is no PIE-Bench, or a journal
            of other settings.
        ModelError: the model, or a judge that was named, cannot be loaded.
    """
    chosen = named(methods)
    critic, verdict = find_judge(model, judge)
    entries = None if pie_bench is None else pie_bench_dataset.read_mapping(pie_bench)[:edits]
    pipe = load(model, device=device, dtype=dtype, local_files_only=local_files_only)
    side = pipe.unet.config.sample_size * LATENT_FACTOR
    if pie_bench is not None and entries is not None:
        asked = _Asked(pie_bench_dataset.edits(pie_bench, entries, side), len(entries), pie_bench_dataset.notes(side))
    else:
        asked = _drawn(pipe.tokenizer, edits, side, seed)
    how: dict[str, Any] = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale}
    settings = {"model": model, "pixels": side, "edits": asked.count, "methods": list(chosen), "seed": seed} | how
    settings |= {"dtype": str(pipe.unet.dtype).removeprefix("torch."), "fisedit": __version__}
    said = {"judge": judge and str(judge), "pie_bench": pie_bench and str(pie_bench)}
    done, page = ResultsLog(journal, settings | said), None if html is None else HtmlReport(html)
    _measure(pipe, asked, chosen, critic, page, how, done, on_step)
    told = _told(done, pipe.tokenizer, prompt_pairs(0 if entries else edits // 2, seed))
    report = {"settings": settings, "notes": [*verdict, *asked.notes, *NOTES]} | told
    if page is not None:
        page.write(report)
    return report


def find_judge(model: str, path: Path | None) -> tuple[SceneClassifier | None, tuple[str, ...]]:
    """The judge, or why there is none."""
    if path is not None:
        return load_classifier(path), ()
    folder = demo_folder() if model == "demo" else Path(model).expanduser()
    if (folder / CLASSIFIER_FILE).is_file():
        return load_classifier(folder / CLASSIFIER_FILE), ()
    return None, (f"success is not judged: there is no {CLASSIFIER_FILE} in {folder}, and no other was given",)


def _drawn(tokenizer: Tokenizer, count: int, side: int, seed: int) -> _Asked:
    """Drawn scenes in the model's words."""
    words = vocabulary(tokenizer)
    said = expressible_kinds(words, seed)
    missing = ", ".join(kind for kind in CHANGE_KINDS if kind not in said)
    notes = (f"kinds of edit left out, as the model lacks words for them: {missing}",) if missing else ()
    return _Asked(sample_edits(count, side, words, said, seed), count, notes)


def _measure(
    pipe: StableDiffusionPipeline,
    asked: _Asked,
    methods: Mapping[str, Method],
    judge: SceneClassifier | None,
    page: HtmlReport | None,
    how: Mapping[str, Any],
    done: ResultsLog,
    on_step: OnStep | None,
) -> None:
    """Every edit that is not done yet by every method; one edit's pictures at a time are held."""
    for i, edit in enumerate(islice(asked.edits, len(done.edits), None), len(done.edits)):
        if on_step is not None:
            on_step(i, asked.count, None)
        case = make_case(pipe, edit, **how)
        outcomes = {name: method(case) for name, method in methods.items()}
        scores = {name: None if made is None else score(case, made, judge) for name, made in outcomes.items()}
        if page is not None:
            page.show(case, outcomes, scores)
        drawn = edit.picture is not None
        told = {"kind": edit.kind, "source_prompt": edit.source_prompt, "prompt": edit.prompt}
        done.add(told | {"seed": edit.seed, "drawn": drawn, "whole": edit.whole}, scores)


def _told(done: ResultsLog, tokenizer: Tokenizer, pairs: Iterator[tuple[str, str, bool]]) -> dict[str, Any]:
    """The report's tables, figures and single edits."""
    scores = {name: [of[name] for of in done.scores] for name in done.scores[0]}
    found = rows(scores, tuple(dict.fromkeys(edit["kind"] for edit in done.edits)))
    verdicts = _verdicts(done, tokenizer, pairs)
    wrong = [asdict(v) for v in verdicts["words"] + verdicts["prompts alone"] if v.whole is not v.said]
    return {
        "summary": table([row for row in found if row["kind"] == ALL], ("method", "source", "edits")),
        "classes": table([row for row in found if row["method"] == OURS], ("kind", "source", "edits")),
        "whole": [global_edit_detection.row(name, some) for name, some in verdicts.items() if some],
        "misjudged": wrong,
        "rows": found,
        "edits": [
            edit | {"scores": {name: s and asdict(s) for name, s in of.items()}}
            for edit, of in zip(done.edits, done.scores, strict=True)
        ],
    }


def _verdicts(
    done: ResultsLog, tokenizer: Tokenizer, pairs: Iterator[tuple[str, str, bool]]
) -> dict[str, list[global_edit_detection.GlobalEditVerdict]]:
    """Which edits were taken for ones of the whole picture: by their words, by words alone, and by our editor."""
    pairs_ran = [
        ((edit["source_prompt"], edit["prompt"], edit["whole"]), of.get(OURS))
        for edit, of in zip(done.edits, done.scores, strict=True)
        if edit["whole"] is not None
    ]
    words = global_edit_detection.by_words([pair for pair, _ in pairs_ran], tokenizer)
    alone = global_edit_detection.by_words(pairs, tokenizer)
    ran = [
        global_edit_detection.GlobalEditVerdict(*pair, s.whole) for pair, s in pairs_ran if s and s.whole is not None
    ]
    return {"words": words, "prompts alone": alone, "words and prompts alone": words + alone, "as edited": ran}
