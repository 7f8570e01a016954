"""The options of the studies' commands, each defined once."""

from pathlib import Path
from typing import Annotated

from typer import Option

Families = Annotated[str, Option(help="Families of adapters, with commas between.")]
EditArea = Annotated[float, Option("--area", min=0.1, max=100, help="Share of the picture that the edit covers, in %.")]
Edits = Annotated[int, Option(min=1, max=700, help="How many word swaps to measure.")]
QualityEdits = Annotated[int, Option("--edits", min=1, max=5000, help="How many edits to make and measure.")]
Kinds = Annotated[str, Option(help="Kinds of drawn edits, with commas between; all without it, as delete or swap.")]
Methods = Annotated[
    str, Option(help="Methods to compare, with commas between; all without it. An unknown name lists them.")
]
ReferenceAdapter = Annotated[
    str | None, Option("--adapter", help="Measure edits with a reference by this adapter instead.")
]
PoseAdapter = Annotated[str, Option("--adapter", help="Control network that reads poses: a folder or hub id.")]
EditsSeed = Annotated[
    str,
    Option("--seed", help="Of the drawn edits: development, reported (for published figures) or a number."),
]
Judge = Annotated[Path | None, Option(help="Weights of the classifier of drawn scenes; the model folder's without it.")]
PieBench = Annotated[Path | None, Option(help="Make the edits of your own copy of PIE-Bench instead of drawn ones.")]
BenchJournal = Annotated[
    Path | None, Option("--journal", help="File that stores every measured edit; run again to continue from it.")
]
Html = Annotated[Path | None, Option(help="Folder to write report.html and its pictures into.")]
