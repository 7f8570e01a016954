"""Settings of the studies: frozen values without torch, so that a command's help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fisedit.bench.settings import EvaluationSettings

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class FidelitySettings(EvaluationSettings):
    """Settings of `benchmarks.fidelity`.

    Args:
        compiled: whether the search for the fastest dense run tries torch.compile, which takes minutes.
    """

    edits: int = 40
    compiled: bool = True


@dataclass(frozen=True, kw_only=True)
class EditQualitySettings(EvaluationSettings):
    """Settings of `benchmarks.quality`.

    Args:
        kinds: The kinds of drawn edits, of `scenes.layout.CHANGE_KINDS`; () for all that the model has words for.
        methods: names in `quality.methods.METHODS`; () for all.
        classifier: the scene classifier's weights; None for those in the model's folder, if it has some.
        pie_bench: folder of PIE-Bench, whose edits replace the drawn ones.
        html: folder for report.html, with pictures of the edits that this run makes.
        results_log: file with one line an edit; edits that it holds are not made again.
        cache_dtype: what recorded features are kept in, as in `Editor`.
    """

    edits: int = 200
    kinds: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    classifier: Path | None = None
    pie_bench: Path | None = None
    html: Path | None = None
    results_log: Path | None = None
    cache_dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class ReferenceQualitySettings(EvaluationSettings):
    """Settings of `benchmarks.quality --adapter`.

    Args:
        adapter: name or folder, as in `Editor.load_adapter`.
        scale: the adapter's strength.
        classifier: the scene classifier's weights; None for those in the model's folder.
        html: folder for references.png: a row each of the first edits, with source, reference, the edit without and
            with the reference, and the drawn target.
    """

    adapter: str
    scale: float = 1.0
    edits: int = 60
    classifier: Path | None = None
    html: Path | None = None


@dataclass(frozen=True, kw_only=True)
class DriveQualitySettings(EvaluationSettings):
    """Settings of `benchmarks.drive`.

    Args:
        adapter: a control network that reads poses: name or folder, as in `Editor.load_adapter`.
    """

    adapter: str
    edits: int = 60
