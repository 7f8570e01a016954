"""The engine under a limit on its memory, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

ROOM = 96 << 20
"""Bytes of addresses beyond those held: less than a source of 768 px takes, twice what a small edit adds."""

SCRIPT = f"""
import resource
from pathlib import Path
from fisedit import Editor

def limit(size):
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))

small = dict(seed=7, guidance_scale=4, num_inference_steps=4)
editor = Editor.from_pretrained("demo", dtype="fp32")
source = editor.generate("a cat and a cake on a beach", **small)
expected = editor.edit("a dog and a cake on a beach").image.tobytes()
editor.undo()
for attempt in range(3):
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # the history keeps the edit of every attempt
    limit(pages * resource.getpagesize() + {ROOM})
    before = list(editor.history)
    try:
        editor.generate("a cat and a cake on a beach", width=768, height=768, **small)
    except (MemoryError, RuntimeError) as error:
        print(str(error).splitlines()[0])
    assert list(editor.history) == before and editor.current is before[0]
    assert editor.edit("a dog and a cake on a beach").image.tobytes() == expected
    editor.undo()
print("as before")
"""


def test_memory_that_runs_out_within_a_source_leaves_the_editor_as_it_was():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=False)
    *lines, last = run.stdout.splitlines()
    assert (run.returncode, last) == (0, "as before"), run.stderr
    refused = ("allocate memory", "could not create a primitive")  # torch's words, and those of oneDNN
    assert len(lines) == 3 and all(any(words in line for words in refused) for line in lines)
