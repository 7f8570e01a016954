"""Rendering a clip: an edit of one source for every drive, in one region and with the same noise.

A frame is kept in a folder beside the clip, under a name of all that it depends on, until the clip is written: a run
that was stopped goes on with the frames that are there. Knows the editor and files; not how drives are read.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from PIL import Image

from fisedit.errors import InputError
from fisedit.masking.region import Region
from fisedit.models.device import weights_digest
from fisedit.storage.files import check_file_path, remove_partial, write_bytes, write_file
from fisedit.storage.images import encode

if TYPE_CHECKING:
    from fisedit.drive import Drive
    from fisedit.editor import Editor
    from fisedit.history import EditResult
    from fisedit.values import OnStep

ENDINGS = (".webp", ".png", ".gif", ".mp4")
MAX_FPS = 60.0


@dataclass(frozen=True, eq=False)
class ClipFrames:
    """The frames of a clip.

    Args:
        folder: where they lie until the clip is written.
        paths: of them, in order.
        rendered: how many were rendered now, not found there.
        seconds: that the edits of those took.
        area: of the region, as a share of the picture.
    """

    folder: Path
    paths: Sequence[Path]
    rendered: int
    seconds: float
    area: float


def check_clip_path(path: Path) -> Path:
    """Check, before any work, that a clip can be written to a path. Raises InputError."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"a clip must end in {', '.join(ENDINGS)}, got {path}")
    if path.suffix.lower() == ".mp4" and shutil.which("ffmpeg") is None:
        raise InputError(f"an .mp4 needs the program ffmpeg, which is not here; install it, or write {path.stem}.webp")
    check_file_path(path)
    return path


def render_frames(
    editor: Editor,
    drives: Sequence[Drive],
    region: Region,
    output: Path,
    *,
    prompt: str | None = None,
    quality: str = "balanced",
    reference: Image.Image | None = None,
    on_step: OnStep | None = None,
) -> ClipFrames:
    """Render a clip's frames, those that are not there yet. The editor's current picture stays the current one.

    Args:
        editor: whose current picture is the source; with a control network that reads drives.
        drives: one for every frame.
        region: where the frames may change; words are looked for once, in the first frame.
        output: of the clip; frames lie in the folder OUTPUT.frames.
        prompt: what the frames show; None for the source's prompt.
        quality: as in `Editor.edit`.
        reference: a picture whose look the frames take, as in `Editor.edit`.
        on_step: called before every step of every frame with (i, n, preview), counted over the clip; may raise
            `Cancelled`.

    Raises:
        InputError, MaskError, AdapterError, NumericsError: as in `Editor.edit`.
    """
    source, words = editor.current, editor.current.prompt if prompt is None else prompt
    mask = editor.preview(words, region=region, drive=drives[0], reference=reference, quality=quality).mask
    fixed = Region.mask(mask.grid)
    look = b"" if reference is None else reference.tobytes()
    base = _base(editor, source, mask.grid.tobytes() + look, words, quality)
    folder = output.with_name(f"{output.name}.frames")
    paths, rendered, seconds = list[Path](), 0, 0.0
    for i, drive in enumerate(drives):
        key = hashlib.sha256(base + drive.digest.encode()).hexdigest()[:16]
        paths.append(folder / f"{i:05}-{key}.png")
        if paths[-1].exists():
            continue
        made = editor.edit(
            words,
            region=fixed,
            drive=drive,
            reference=reference,
            quality=quality,
            verify=False,
            on_step=_of_clip(on_step, i, len(drives)),
        )
        write_bytes(encode(made.image, ".png")[0], paths[-1])
        rendered, seconds = rendered + 1, seconds + made.stats.seconds["total"]
        editor.checkout(source.id)
        editor.delete(made.id)
    return ClipFrames(folder, paths, rendered, seconds, mask.area)


def write_clip(frames: ClipFrames, path: Path, *, frames_per_second: float = 12.0) -> tuple[str, ...]:
    """Write a clip, whole or not at all, and remove the folder of its frames.

    Args:
        frames: of it.
        path: ends in one of `ENDINGS`.
        frames_per_second: above 0, to `MAX_FPS`.

    Returns:
        What the format could not hold.

    Raises:
        InputError: frames per second out of range, or ffmpeg cannot write the clip.
    """
    check_rate(frames_per_second)
    pictures = (_read(each) for each in frames.paths)
    ending, notes = path.suffix.lower(), tuple[str, ...]()
    if ending == ".mp4":
        write_file(path, lambda file: _write_mp4(pictures, file, frames_per_second))
        notes = ("mp4 is not exact: pixels outside the region are near the source's, not the same",)
    else:
        write_file(path, lambda file: _write_animation(pictures, file, ending[1:].upper(), frames_per_second))
        if ending == ".gif":
            notes = ("gif has 256 colours: pixels outside the region are near the source's, not the same",)
    for each in frames.paths:
        each.unlink(missing_ok=True)
    remove_partial(frames.folder, [each.name for each in frames.paths])
    if not any(frames.folder.iterdir()):
        frames.folder.rmdir()
    return notes


def check_rate(frames_per_second: float) -> None:
    """Raise InputError for frames per second out of range."""
    if not 0 < frames_per_second <= MAX_FPS:
        raise InputError(f"frames per second must be above 0, to {MAX_FPS:g}, got {frames_per_second:g}")


def _of_clip(on_step: OnStep | None, frame: int, count: int) -> OnStep | None:
    """A frame's `on_step`, counted over the clip."""
    if on_step is None:
        return None
    return lambda i, n, preview: on_step(frame * n + i, count * n, preview)


def _base(editor: Editor, source: EditResult, given: bytes, prompt: str, quality: str) -> bytes:
    """Digest of all that frames depend on but their drives."""
    adapters = sorted(f"{loaded.adapter.identity} {loaded.use}" for loaded in editor.adapters)
    named = (source.config, prompt, quality, adapters, weights_digest(editor.pipe), editor.pipe.unet.dtype)
    return hashlib.sha256(repr(named).encode() + given + source.image.tobytes()).digest()


def _read(path: Path) -> Image.Image:
    with Image.open(path) as opened:
        return opened.convert("RGB")


def _write_animation(pictures: Iterable[Image.Image], file: IO[bytes], kind: str, rate: float) -> None:
    """An animation that repeats; what the format can hold exactly, it does."""
    first, *rest = pictures
    exact: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    first.save(file, kind, save_all=True, append_images=rest, duration=1000 / rate, loop=0, **exact)


def _write_mp4(pictures: Iterable[Image.Image], file: IO[bytes], rate: float) -> None:
    command = ["ffmpeg", "-v", "error", "-f", "image2pipe", "-framerate", f"{rate:g}", "-c:v", "png", "-i", "-"]
    command += ["-c:v", "libx264", "-crf", "14", "-pix_fmt", "yuv420p", "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]
    command += ["-movflags", "frag_keyframe+empty_moov", "-f", "mp4", "-"]
    given = BytesIO()
    for picture in pictures:
        picture.save(given, "PNG")
    made = subprocess.run(command, input=given.getvalue(), capture_output=True, check=False)  # noqa: S603 (fixed words)
    if made.returncode or not made.stdout:
        lines = made.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise InputError(f"ffmpeg could not write the clip ({lines[-1]:.120}); write a .webp instead")
    file.write(made.stdout)
