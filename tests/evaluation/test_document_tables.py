"""Figures in documents are those of a report, and no report is quoted once what it measures has changed."""

from __future__ import annotations

import ast
import json
import re
from hashlib import sha256
from pathlib import Path

import pytest

from fisedit.evaluation import document_tables
from fisedit.evaluation.environment import git

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "benchmarks/README.md", "training/README.md")),
    *sorted(path for folder in ("docs", "weights") for path in (ROOT / folder).rglob("*.md")),
]

_ENGINE = (
    "fisedit/sparse",
    "fisedit/sparse_kernels",
    "fisedit/sampling",
    "fisedit/pipeline.py",
    "fisedit/rendering.py",
    "fisedit/models/device.py",
    ":(exclude)fisedit/sparse_kernels/triton",
    ":(exclude)fisedit/sparse_kernels/xformers.py",
    ":(exclude)fisedit/sparse/cuda_graphs.py",
)
_DENSE = (
    *(f"fisedit/evaluation/{name}.py" for name in ("dense_pipelines", "dense_search", "timing", "workload")),
    "fisedit/evaluation/schedules.py",
    "fisedit/editor",
    ":(exclude)fisedit/editor/sessions.py",  # what is saved and loaded
    "fisedit/planner.py",
)
_QUALITY = (
    "fisedit/masking",
    "fisedit/planner.py",
    "fisedit/editor",
    ":(exclude)fisedit/editor/sessions.py",
    "fisedit/evaluation/scenes",
    "fisedit/evaluation/quality",
)

_REFERENCE = (
    "fisedit/adapters",
    *(
        f":(exclude)fisedit/adapters/{name}"  # adapters of other kinds, what loads them, and what trains them
        for name in (
            *(
                "checkpoints.py",
                "control_net.py",
                "control_pictures.py",
                "drive_adapter.py",
                "drive_files.py",
                "drive_networks.py",
            ),
            *("ip_adapter.py", "loading.py", "lora.py", "motion_*", "pose_picture.py", "t2i_adapter.py", "training"),
        )
    ),
)
"""What a reference adapter needs."""

MEASURES = {
    "bench edit": (*_ENGINE, *_DENSE, "fisedit/evaluation/speed.py"),
    "bench fidelity": (
        *_ENGINE,
        *_DENSE,
        "fisedit/evaluation/fidelity.py",
        "fisedit/evaluation/quality/edit_case.py",
        "fisedit/evaluation/quality/metrics.py",
        "weights/demo",
    ),
    "bench records": (
        *_ENGINE,
        *(
            f"fisedit/evaluation/{name}.py"
            for name in ("record_encodings", "fidelity", "schedules", "timing", "workload")
        ),
        "fisedit/evaluation/quality/edit_case.py",
        "fisedit/evaluation/quality/metrics.py",
        "weights/demo",
    ),
    "bench tiers": (
        *_ENGINE,
        *(f"fisedit/evaluation/{name}.py" for name in ("record_tiers", "timing", "workload")),
        "fisedit/editor",
        "fisedit/planner.py",
        "fisedit/storage/pages.py",
        "fisedit/storage/session_store.py",
    ),
    "bench costs": (
        *_ENGINE,
        *(f"fisedit/evaluation/{name}.py" for name in ("cost_predictions", "timing", "workload")),
        "fisedit/diagnosis/calibration.py",
        "fisedit/diagnosis/transfer_rates.py",
        "fisedit/masking/region.py",
        "fisedit/planner.py",
    ),
    "bench adapters": (
        *_ENGINE,
        *_REFERENCE,
        *(f"fisedit/evaluation/{name}.py" for name in ("adapter_speed", "speed", "timing", "workload")),
    ),
    "bench drive": (
        *_ENGINE,
        "fisedit/editor",
        ":(exclude)fisedit/editor/sessions.py",
        *(
            f"fisedit/adapters/{name}.py"
            for name in ("base", "drive_adapter", "drive_networks", "insertion_points", "pose_picture", "references")
        ),
        "fisedit/evaluation/drive_quality.py",
        "fisedit/evaluation/scenes",
        "weights/demo",
        "weights/demo-pose",
    ),
    "bench masks": (*_QUALITY, *_ENGINE, "weights/demo"),
    "bench picks": (*_QUALITY, *_ENGINE, "fisedit/evaluation/picks.py", "weights/demo"),
    "bench erase": (
        *_ENGINE,
        *(f"fisedit/masking/{name}.py" for name in ("region", "masks")),  # the cells are given: nothing is looked for
        *_QUALITY[1:],
        "fisedit/evaluation/erasing.py",
        "weights/demo",
    ),
    "bench quality": (
        *_QUALITY,
        *_ENGINE,
        "fisedit/evaluation/classifier.py",
        *_REFERENCE,
        "weights/demo",
        "weights/demo-look",
    ),
}
"""Command -> paths of what it measures, as git's pathspecs. Of Python only code counts, no comments or docstrings."""

READ_BY = {
    "TRITON_ROWS": (),  # for GPUs alone
    "NOTES": (),  # text
    **dict.fromkeys(("seam", "_boundary_step", "_score_mask"), ("bench quality",)),
    **dict.fromkeys(("EditMixin.edit_frames", "EditPipeline.render_clip", "Engine.run_clip"), ()),  # clips
    "EditMixin.transaction": (),  # what becomes of a failed block
    "EditorBase.beside": (),  # what it gives an editor is told by EditPipeline.beside
}
"""Functions, tables and members of classes -> the commands whose reports alone age with them."""

SAME_BYTES: dict[str, tuple[str, ...]] = dict.fromkeys(
    (  # units of blocks in 4 bits: in 8 bits as before, `test_in_8_bits_every_byte_is_that_of_the_published_reports`
        "12576587f06f 2203e21813d6 565302ae9cc5 5a64f6300a59 5e682c5bee9b 5f6717fcbd88 664f36eb159e 720c94a6362a "
        "ac8ad6b46aeb b732db281a7f bde01f2c4d66 "
        "0f8b0e9a5a7d 4d24ce22910f 52eb38df9011 5d79e022e786 64131db38a28 7abeedfa35d5 8882c8ecf697 8e1aa00dbcd3 "
        "9c8f89f7170a afa9799ccafb b263d8b3c494 b2f9daff8acd c2a32d37e267 c3745278770c c6bdbbb094dc c703f0cebf11 "
        "c9cb12a2ea0c d764dc9fc9c1 dc7009e5438e dd983b218612 e81f85df66fe ebda71465660 "
    ).split(),
    ("bench records",),
)
"""Digests of statements, those before and those that took their place, which give reports of other commands every byte
that they read, as a test shows -> the commands whose reports age."""

FIELDS = {"command", "commit", "clean", "date", "cpu", "cores", "threads", "dtype"}


def quoted(path: Path) -> set[str]:
    """Names of the reports that a document quotes, in tables or by links."""
    return set(re.findall(r"results/([\w.-]+\.json)", path.read_text(encoding="utf-8")))


def published() -> dict[str, dict]:
    """Reports that documents quote."""
    names = set().union(*map(quoted, DOCUMENTS))
    return {name: json.loads((RESULTS / name).read_text()) for name in sorted(names) if (RESULTS / name).exists()}


def test_tables_are_those_of_the_reports():
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert text == document_tables.fill_tables(text), f"python -m fisedit.evaluation.document_tables {path.name}"


def test_reports_say_where_they_were_measured_at_a_clean_commit():
    for name, report in published().items():
        environment = report["environment"]
        assert environment.keys() >= FIELDS and environment["clean"] is True, name
        assert kind(environment["command"]) in MEASURES, name


def test_every_report_is_quoted():
    texts = "".join(path.read_text(encoding="utf-8") for path in [*DOCUMENTS, ROOT / "benchmarks/LOG.md"])
    assert not [path.name for path in RESULTS.iterdir() if path.name not in texts]


def test_no_report_is_older_than_what_it_measures():
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the repository's history is not here (a shallow clone or a source archive)")
    for name, report in published().items():
        commit = report["environment"]["commit"]
        assert git("cat-file", "-e", f"{commit}^{{commit}}") is not None, f"{name} is of a commit that is not here"
        changed = changes(commit, kind(report["environment"]["command"]))
        assert not changed, f"{name} is older than {changed}: measure it again, or take it out of the documents"


def kind(command: str) -> str:
    """Such as "bench edit"."""
    return " ".join(command.split()[1:3])


def changes(commit: str, command: str) -> list[str]:
    """Files whose content changed since a commit, but documents; of Python files those whose statements did."""
    paths = MEASURES[command]
    names = [
        name for name in (git("diff", "--name-only", commit, "--", *paths) or "").split() if not name.endswith(".md")
    ]
    python = [name for name in names if name.endswith(".py")]
    before = {name: statements(git("show", f"{commit}:{name}") or "", command) for name in python}
    now = {name: statements(text_of(ROOT / name), command) for name in python}
    differ = set().union(*before.values()) ^ set().union(*now.values())
    differ = {part for part in differ if command in SAME_BYTES.get(digest(part), (command,))}
    return [name for name in names if name not in python or differ & (before[name] | now[name])]


def text_of(path: Path) -> str:
    """Of a file, or "" where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def statements(text: str, command: str = "") -> set[str]:
    """A module's statements and its classes' members without comments, docstrings, types' imports and imports from this
    package: what stays when it is moved to another module or class. Without those that a command does not read."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not (is_text(line) or is_own_import(line) or is_for_types(line))]
    return {part for line in tree.body if is_read(line, command) for part in parts(line, command)}


def digest(part: str) -> str:
    """Of a statement."""
    return sha256(part.encode()).hexdigest()[:12]


def parts(line: ast.stmt, command: str) -> list[str]:
    """A class's decorators and the members that a command reads, an import's names, or the statement."""
    if isinstance(line, ast.ClassDef):
        members = [part for part in line.body if is_read(part, command, f"{line.name}.")]
        return [ast.unparse(part) for part in (*line.decorator_list, *members)]
    return names(line) if isinstance(line, ast.Import | ast.ImportFrom) else [ast.unparse(line)]


def names(line: ast.Import | ast.ImportFrom) -> list[str]:
    """Of an import, each with its module."""
    return [f"{getattr(line, 'module', '')}.{ast.unparse(name)}" for name in line.names]


def is_own_import(line: ast.stmt) -> bool:
    """Whether a statement imports names from this package."""
    return isinstance(line, ast.ImportFrom) and (line.module or "").split(".")[0] == "fisedit"


def is_for_types(line: ast.stmt) -> bool:
    """Whether a statement runs for a type checker alone."""
    return isinstance(line, ast.If) and isinstance(line.test, ast.Name) and line.test.id == "TYPE_CHECKING"


def is_read(line: ast.stmt, command: str, owner: str = "") -> bool:
    """Whether a command's reports depend on a statement, by `READ_BY`; of a class's member, the class is the owner."""
    target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
    name = owner + getattr(line, "name", getattr(target, "id", ""))
    return command in READ_BY.get(name, (command,))


def is_text(line: ast.stmt) -> bool:
    """Whether a statement is a string alone."""
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def test_comments_docstrings_and_moves_age_no_report():
    assert statements('"""One."""\nX = 1\n"""Of X."""\ndef f():\n    "What."\n    return 1\n') == statements(
        "X = 1  # one\ndef f():\n    return 1\n"
    )
    assert statements("X = 1") != statements("X = 2")
    moved = "from fisedit.values import A\nfrom torch import nn\n"
    assert statements(f"{moved}X = 1\nY = 2\n") == statements("from torch import nn\nX = 1") | statements("Y = 2")
    assert statements("from torch import nn\nX = 1") != statements("X = 1")
    assert statements("def seam(): return 1\nX = 1", "bench masks") == statements("X = 1")
    assert statements("def seam(): return 1\nX = 1", "bench quality") != statements("X = 1")
    assert statements("NOTES = 1\nTRITON_ROWS: int = 1", "bench quality") == set()
    clip = "    def run_clip(self): return 1\n"
    assert statements(f"class Engine:\n{clip}    X = 1") == statements("class Engine:\n    X = 1")
    assert statements(f"class A:\n{clip}    X = 1") != statements("class A:\n    X = 1")
    member = "    def f(self): return 1\n"
    assert statements(f"class A(B):\n    X = 1\n\nclass B:\n{member}") == statements(f"class A:\n    X = 1\n{member}")


def test_a_table_is_filled_from_its_report(tmp_path):
    text = "A\n<!-- table a.json summary -->\nold\n<!-- end -->\nB\n"
    assert document_tables.fill_tables(text, tmp_path) == text.replace("old\n", document_tables.MISSING)
    environment = {
        "command": "fisedit bench edit",
        "commit": "0123456789",
        "clean": True,
        "date": "2026-01-02T03:04:05+00:00",
        "cpu": "A CPU",
        "cpu_features": ["amx_bf16"],
        "gpu": "",
        "cores": 2,
        "threads": 1,
        "dtype": "bfloat16",
    }
    report = {"environment": environment, "summary": [{"mask": "square", "step": "2.0x"}]}
    (tmp_path / "a.json").write_text(json.dumps(report))
    filled = document_tables.fill_tables(text, tmp_path)
    assert "| mask | step |\n| --- | --- |\n| square | 2.0x |\n" in filled and "old" not in filled
    assert "`fisedit bench edit`, 2026-01-02, commit `0123456`, A CPU (amx_bf16), 1 of 2 cores, bfloat16." in filled
    assert document_tables.fill_tables(filled, tmp_path) == filled
    report["summary"].append({"mask": "ragged", "step": "1.5x"})
    (tmp_path / "a.json").write_text(json.dumps(report))
    chosen = "<!-- table a.json summary where mask=ragged|none columns step, mask -->\n<!-- end -->\n"
    filled = document_tables.fill_tables(chosen, tmp_path)
    assert "| step | mask |\n| --- | --- |\n| 1.5x | ragged |\n" in filled and "square" not in filled
    assert document_tables.fill_tables(filled, tmp_path) == filled
    with pytest.raises(ValueError, match=r"a\.json must have rows in 'summary' where mask=none"):
        document_tables.fill_tables(chosen.replace("ragged|none", "none"), tmp_path)
    with pytest.raises(ValueError, match=r"columns must be of mask, step, got 'area, '; correct the mark"):
        document_tables.fill_tables(chosen.replace("step, mask", "step, area"), tmp_path)
    report["summary"][1]["step, to plain"] = "3x"
    (tmp_path / "a.json").write_text(json.dumps(report))
    filled = document_tables.fill_tables(chosen.replace("step, mask", "step, step, to plain"), tmp_path)
    assert "| step | step, to plain |\n| --- | --- |\n| 1.5x | 3x |\n" in filled
    del report["summary"][1]["step, to plain"]
    report["environment"] |= {"clean": False, "gpu": "A GPU"}
    (tmp_path / "a.json").write_text(json.dumps(report))
    assert "commit `0123456` with changes that are not committed, A GPU" in document_tables.fill_tables(text, tmp_path)


def test_the_documents_that_are_named_are_filled_in_their_place(tmp_path, monkeypatch):
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
    text = next(text for text in texts if document_tables.reports(text))
    document = tmp_path / "a.md"
    document.write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["document_tables", str(document)])
    document_tables.main()
    assert document.read_text(encoding="utf-8") == document_tables.fill_tables(text)
    assert set(document_tables.reports(text)) == set(document_tables.reports(document.read_text(encoding="utf-8")))
