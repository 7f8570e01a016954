"""How many mutants the tests kill: `python -m tests.support.mutants --count 100 --seed 0 [--tree PATH] [--out FILE]`.

Draws single changes at random over the modules of `AREAS`, as many from each area, applies one at a time to a copy of
the tree, and runs the tests that are written for its area until one fails. What is known already stands in FILE, a
JSON line for each mutant, and is not run again.

`--share 1/2` and `--share 2/2` run on two cores at once, each with a FILE of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic

from tests.support.mutations import Mutation, mutations


@dataclass(frozen=True)
class Area:
    """Some modules, and the tests written for them, quick ones first; both by globs.

    Tests whose names contain a word of `without` take too long to run for every mutant.
    """

    modules: str
    tests: str
    without: str = ""


AREAS: Mapping[str, Area] = {
    "sparse kernels": Area(
        "fisedit/sparse_kernels/{ops,torch_backend,prepacked,winograd,tuning,xformers}.py",
        "tests/sparse_kernels/test_{winograd,xformers,ops}.py tests/contract/test_e4.py "
        "tests/runners/test_cuda_graphs.py",
    ),
    "fused kernels": Area(
        "fisedit/sparse_kernels/{operands,reference,reference_group_norm}.py fisedit/sparse_kernels/triton/*.py",
        "tests/sparse_kernels/test_triton.py",
        "share_the_keys share_a_sum",
    ),
    "row plan": Area(
        "fisedit/sparse_kernels/{row_plan,buckets,dilation}.py",
        "tests/sparse_kernels/test_{row_plan,buckets,dilation}.py tests/contract/test_e4.py "
        "tests/runners/test_cuda_graphs.py tests/masking/test_masks.py tests/editor/test_editing_regions.py",
        "by_every_backend",
    ),
    "blocks": Area(
        "fisedit/sparse/{blocks,cached_rows,recording,row_source}.py fisedit/runners/deep_maps.py",
        "tests/contract/test_e4.py tests/sparse/test_*.py tests/runners/test_{deep_maps,cuda_graphs}.py "
        "tests/adapters/test_ip_adapter.py tests/editor/test_editing_memory.py",
        "by_every_backend",
    ),
    "feature cache": Area(
        "fisedit/features/{cache,codec}.py fisedit/sparse/row_layout.py",
        "tests/features/test_{cache,codec,tiers}.py tests/contract/test_e{4,6}.py tests/sampling/test_denoise.py",
    ),
    "masks": Area("fisedit/masking/masks.py", "tests/masking/test_{masks,localize}.py"),
    "trajectory": Area(
        "fisedit/sampling/{trajectory,trajectory_cache,step,step_runners}.py",
        "tests/sampling/test_{trajectory,trajectory_cache,denoise,inversion}.py tests/contract/test_e{1,3,6}.py "
        "tests/editor/test_opening.py tests/clips/test_render.py",
    ),
    "batch": Area(  # but for what needs a cluster
        "fisedit/batch/{digest,images,journal,manifest,page,pool,report,result_store,runner,tables,values,worker}.py",
        "tests/batch/test_{manifest,worker,pool,journal,report,runner}.py",
        "killed disk",
    ),
}

LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "runs", "out", "node_modules"
)
LEAST, TIMES = 60.0, 3.0
"""Seconds that any mutant's tests have; and how many times what they take without it."""


def files(tree: Path, globs: str) -> list[str]:
    """Find what globs with `{a,b}` match, in their order, each path once."""
    found = (path for glob in globs.split() for one in _braces(glob) for path in sorted(tree.glob(one)))
    return list(dict.fromkeys(str(path.relative_to(tree)) for path in found if path.name != "__init__.py"))


def _braces(glob: str) -> Iterator[str]:
    before, opened, rest = glob.partition("{")
    inside, _, after = rest.partition("}")
    yield from (f"{before}{one}{after}" for one in inside.split(",")) if opened else (glob,)


def draw(tree: Path, count: int, seed: int) -> list[tuple[str, str, Mutation]]:
    """Draw `count` mutants, areas by turns: their area, file and change; the same for the same tree and seed."""
    shuffled = {}
    for name, area in AREAS.items():
        every = [(name, f, m) for f in files(tree, area.modules) for m in mutations((tree / f).read_text("utf-8"))]
        shuffled[name] = iter(random.Random(f"{seed} {name}").sample(every, len(every)))
    rounds = (next(some, None) for _ in range(count) for some in shuffled.values())
    return list(islice((one for one in rounds if one), count))


def run_tests(copy: Path, area: str, limit: float | None) -> tuple[str, float, str]:
    """Run an area's tests until one fails: "survived", "killed" or "timeout", the seconds, and what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "--durations=0", *PLAIN]
    began = monotonic()
    process = subprocess.Popen(
        [
            *command,
            "-k",
            " and ".join(f"not {word}" for word in AREAS[area].without.split()),
            *files(copy, AREAS[area].tests),
        ],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return "timeout", monotonic() - began, ""
    if process.returncode > 2:  # not passed, failed, not collected or, below zero, crashed
        raise RuntimeError(f"pytest must run, got status {process.returncode}:\n{told[-3000:]}")
    return ("killed" if process.returncode else "survived"), monotonic() - began, told


PLAIN = ("-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is not known yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--share", default="1/1", metavar="I/N")
    asked = parser.parse_args(arguments)
    part, parts = map(int, asked.share.split("/"))
    lines = asked.out.read_text("utf-8").splitlines() if asked.out.exists() else []
    known = {line["mutant"]: line for line in map(json.loads, lines)}
    drawn = draw(asked.tree, asked.count, asked.seed)[part - 1 :: parts]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(asked.tree, copy, ignore=LEFT_OUT)
        for area, file, change in drawn:
            name = f"{file}:{change.line}:{change.column} {change.before[:80]} -> {change.after[:80]}"
            for mutant in (f"none in {area}", name):
                if mutant not in known:
                    known[mutant] = _run(copy, area, mutant, known, None if mutant != name else (file, change))
                    with asked.out.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(known[mutant]) + "\n")
                    sys.stdout.write(f"{known[mutant]['result']:9} {known[mutant]['seconds']:6.1f} s  {mutant}\n")
                    sys.stdout.flush()
    sys.stdout.write(table([line for line in known.values() if not line["mutant"].startswith("none in ")]))


def _run(
    copy: Path, area: str, mutant: str, known: Mapping[str, dict[str, object]], change: tuple[str, Mutation] | None
) -> dict[str, object]:
    if change is None:  # the tests themselves: they must pass, and say how long they take
        result, seconds, told = run_tests(copy, area, None)
        if result != "survived":
            raise RuntimeError(f"the tests of {area} must pass without a mutant, got:\n{told[-3000:]}")
    else:
        path = copy / change[0]
        source = path.read_text("utf-8")
        path.write_text(change[1].applied(source), "utf-8")
        limit = max(LEAST, TIMES * float(str(known[f"none in {area}"]["seconds"])))
        result, seconds, _ = run_tests(copy, area, limit)
        path.write_text(source, "utf-8")
    return {"mutant": mutant, "area": area, "result": result, "seconds": round(seconds, 1)}


def table(lines: Sequence[Mapping[str, object]]) -> str:
    """Lay out how many were killed, survived and ran out of time: a row for each area, and their sums."""
    rows = [f"{'':16} {'mutants':>8} {'killed':>8} {'timeout':>8} {'survived':>8}"]
    for name in (*AREAS, "all"):
        counts = Counter(str(line["result"]) for line in lines if name in (line["area"], "all"))
        told = (counts.total(), counts["killed"], counts["timeout"], counts["survived"])
        rows.append(f"{name:16} " + " ".join(f"{count:8}" for count in told))
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
