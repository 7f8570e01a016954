"""Rendering a clip: edits of one source, one for every drive, in one region and with the same noise.

A frame is kept in a folder beside the clip until the clip is written, under a name of all that it depends on. A run
that was stopped goes on with the frames that are there. Knows the editor and files; not how drives are read.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from PIL import Image

from fisedit import __version__
from fisedit.adapters import textual_inversion
from fisedit.clips.frames import FrameRenderer
from fisedit.errors import InputError, MaskError, SessionError
from fisedit.features.sites import loras
from fisedit.machine.device import weights_digest
from fisedit.masking.region import Region
from fisedit.sessions.folder import lock
from fisedit.storage.canvas import to_editable, to_srgb
from fisedit.storage.files import check_file_path, write_bytes, write_file
from fisedit.storage.images import check_size, encode

if TYPE_CHECKING:
    from fisedit.editor import Editor
    from fisedit.history import EditResult
    from fisedit.values import EditMask, OnStep
    from fisedit.values.drive import Drive

ENDINGS = (".webp", ".png", ".gif", ".mp4")

_RATES: dict[str, tuple[float, float]] = {".gif": (0.1, 50.0)}
_RATE = (0.1, 60.0)
"""Frames a second, at least and at most: of a GIF, whose delays are hundredths of a second, and of other clips."""

_MAX_PIXELS = 1_000_000_000
"""Pixels of all frames of an animation at most, as these are in memory when it is written."""


_FRAME = re.compile(r"\d{5}-[0-9a-f]{16}\.png|\.\d{5}-[0-9a-f]{16}-\w*\.part")
"""Names of frames, and of their unfinished copies; see `files.write_file`."""


@dataclass(frozen=True, eq=False)
class ClipFrames:
    """The frames of a clip.

    Args:
        folder: where they lie until the clip is written.
        paths: files of the frames, in order.
        rendered: how many were rendered now, not found there.
        seconds: seconds that those took.
        area: area of the region, as a share of the picture.
        notes: what a clip cannot hold of the source.
    """

    folder: Path
    paths: Sequence[Path]
    rendered: int
    seconds: float
    area: float
    notes: tuple[str, ...] = ()


def check_clip_path(path: Path, frames_per_second: float) -> Path:
    """Check, before any work, that a clip of so many frames a second can be written to a path. Raises InputError."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise InputError(f"a clip must end in {', '.join(ENDINGS)}, got {path}")
    if ending == ".mp4" and shutil.which("ffmpeg") is None:
        raise InputError(f"an .mp4 needs the program ffmpeg, which is not here; install it, or write {path.stem}.webp")
    low, high = _RATES.get(ending, _RATE)
    if not low <= frames_per_second <= high:
        raise InputError(f"frames per second must be {low:g} to {high:g} in {ending}, got {frames_per_second:g}")
    check_file_path(path)
    if (folder := frames_folder(path)).exists() and not folder.is_dir():
        raise InputError(f"frames are kept in the folder {folder}, got a file of that name; rename it")
    return path


def frames_folder(output: Path) -> Path:
    """Return the folder of a clip's frames until it is written."""
    return output.with_name(f"{output.name}.frames")


@contextmanager
def rendering(output: Path) -> Iterator[None]:
    """Let no other run render the same clip during the block. Raises InputError."""
    folder = frames_folder(output)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(lock(folder))
        except SessionError as error:
            raise InputError(f"another run renders {output}; wait for it, or choose another name") from error
        held.callback(_remove_empty, folder)  # before the lock is released
        yield


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
    """Render a clip's frames, those that are not there yet. Whatever is raised, the editor is as it was.

    Args:
        editor: the editor whose current picture is the source; with a control network that reads drives. Loaded motion
            modules let frames attend to one another.
        drives: one for every frame.
        region: where the frames may change; words are looked for once.
        output: path of the clip; frames lie in the folder OUTPUT.frames.
        prompt: what the frames show; None for the source's prompt.
        quality: "fast", "balanced" or "close", as in `Editor.edit`.
        reference: a picture whose look the frames take, as in `Editor.edit`.
        on_step: called with (i, n, preview), counted over the clip, before every step of every frame, or of frames that
            attend to one another. It may raise `Cancelled`.

    Raises:
        InputError, MaskError, AdapterError, NumericsError: as in `Editor.edit`; and too many frames, or none.
    """
    source, words = editor.current, editor.current.prompt if prompt is None else prompt
    keeps_alpha, notes = output.suffix.lower() in (".webp", ".png"), list[str]()
    _check_count(source, len(drives), output)
    if source.image.mode not in ("RGB", "RGBA") or source.image.info.get("icc_profile"):
        notes.append("a clip has 8-bit sRGB levels: the source's own levels or colours were converted")
    if source.image.has_transparency_data and not keeps_alpha:
        notes.append("such a clip has no transparency: what is clear in the source is white")
    anew = source.config.seed ^ 1  # other noise, so that a drive of the source's own is planned as well
    mask = editor.preview(words, region=region, drive=drives[0], reference=reference, seed=anew, quality=quality).mask
    if not mask.grid.any():
        raise MaskError("the region marks nothing of the picture; mark what moves")
    options = {"reference": reference, "quality": quality}
    renderer = FrameRenderer(editor, words, drives, _fixed(mask), options)
    base, folder = _base(editor, source, mask, (words, quality), reference), frames_folder(output)
    paths, rendered, seconds, parts = list[Path](), 0, 0.0, renderer.windows()
    for done, window in enumerate(parts):
        key = hashlib.sha256(base + "".join(drive.digest for drive in renderer.drives_of(window)).encode())
        own = [folder / f"{i:05}-{key.hexdigest()[:16]}.png" for i in window.kept]
        paths += own
        if all(path.exists() for path in own):
            continue
        started = time.perf_counter()
        for path, image in zip(own, renderer.render(window, _of_clip(on_step, done, len(parts))), strict=True):
            write_bytes(encode(to_srgb(to_editable(image), alpha=keeps_alpha), ".png")[0], path)
        rendered, seconds = rendered + len(own), seconds + time.perf_counter() - started
    return ClipFrames(folder, paths, rendered, seconds, mask.area, tuple(notes))


def write_clip(frames: ClipFrames, path: Path, *, frames_per_second: float = 12.0) -> tuple[str, ...]:
    """Write a clip, whole or not at all, and remove its frames, with those that stopped runs left.

    Args:
        frames: frames of the clip.
        path: ends in one of `ENDINGS`.
        frames_per_second: rate of the clip, as `check_clip_path` takes it.

    Returns:
        What the format could not hold.

    Raises:
        InputError: as `check_clip_path`, or ffmpeg cannot write the clip.
    """
    check_clip_path(path, frames_per_second)
    ending, notes = path.suffix.lower(), list(frames.notes)
    if ending == ".mp4":
        write_file(path, lambda file: _write_mp4(frames.paths, file, frames_per_second))
        notes.append("mp4 is not exact: pixels outside the region are near the source's, not the same")
    else:
        delays = _delays(len(frames.paths), frames_per_second, 10 if ending == ".gif" else 1)
        write_file(path, lambda file: _write_animation(frames.paths, file, ending[1:].upper(), delays))
        if ending == ".gif":
            notes.append("gif has 256 colours: pixels outside the region are near the source's, not the same")
    for each in frames.paths:
        each.unlink(missing_ok=True)
    _remove_other_frames(frames.folder)
    _remove_empty(frames.folder)
    return tuple(notes)


def _remove_other_frames(folder: Path) -> None:
    """Remove frames that stopped runs with other options left, and unfinished ones, unless another run renders now."""
    with suppress(SessionError), lock(folder):
        for path in folder.iterdir() if folder.is_dir() else ():
            if _FRAME.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _check_count(source: EditResult, count: int, output: Path) -> None:
    width, height = source.image.size
    if not count:
        raise InputError("a clip needs a drive for every frame, got none")
    check_size(output.suffix, source.image.size)
    if output.suffix.lower() != ".mp4" and count * width * height > _MAX_PIXELS:
        limit = f"at most {_MAX_PIXELS // 10**6:,} million pixels in all"
        raise InputError(f"a clip must have {limit}, got {count} frames of {width}x{height}; make it smaller")


def _fixed(mask: EditMask) -> Region:
    """The region of all frames: cells, and how much of a soft mask's cells may change."""
    if mask.levels is None:
        return Region.mask(mask.grid)
    return Region.mask(mask, soft=True)


def _of_clip(on_step: OnStep | None, done: int, count: int) -> OnStep | None:
    """A window's `on_step`, counted over the clip."""
    if on_step is None:
        return None
    return lambda i, n, preview: on_step(done * n + i, count * n, preview)


def _base(
    editor: Editor, source: EditResult, mask: EditMask, chosen: tuple[str, ...], reference: Image.Image | None
) -> bytes:
    """Digest of all that frames depend on but their drives."""
    pipe, whole = editor.pipe, hashlib.sha256()
    adapters = sorted(f"{loaded.adapter.identity} {loaded.use}" for loaded in editor.adapters)
    parts = dict(pipe.scheduler.config), dict(pipe.vae.config), weights_digest(pipe), pipe.unet.dtype, pipe.unet.device
    loaded_now = loras(pipe.unet, pipe.text_encoder), textual_inversion.loaded(pipe)
    whole.update(repr((__version__, source.config, chosen, adapters, loaded_now, parts)).encode())
    for picture in (source.image, *([] if reference is None else [to_editable(reference)])):
        whole.update(f"{picture.mode} {picture.size}".encode() + picture.tobytes())
    whole.update(mask.grid.tobytes() + (b"" if mask.levels is None else mask.levels.tobytes()))
    return whole.digest()


def _delays(count: int, rate: float, unit: int) -> list[int]:
    """Milliseconds of every frame, in whole units, so that the clip as a whole is as fast as asked for."""
    ends = [round(1000 * i / (rate * unit)) for i in range(count + 1)]
    return [unit * max(1, after - before) for before, after in pairwise(ends)]


def _write_animation(paths: Iterable[Path], file: IO[bytes], kind: str, delays: list[int]) -> None:
    """An animation that repeats; what can be seen is exact if the format can hold it. Clear pixels of an animated WebP
    lose their colours."""
    first, *rest = map(_read, paths)
    exact: dict[str, Any] = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    first.save(file, kind, save_all=True, append_images=rest, duration=delays, loop=0, **exact)


def _read(path: Path) -> Image.Image:
    with Image.open(path) as opened:
        opened.load()
        return opened


def _write_mp4(paths: Iterable[Path], file: IO[bytes], rate: float) -> None:
    command = ["ffmpeg", "-v", "error", "-f", "image2pipe", "-framerate", f"{rate:g}", "-c:v", "png", "-i", "-"]
    command += ["-c:v", "libx264", "-crf", "14", "-pix_fmt", "yuv420p", "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]
    command += ["-movflags", "frag_keyframe+empty_moov", "-f", "mp4", "-"]
    with (
        tempfile.TemporaryFile() as told,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=told) as running,  # noqa: S603 (fixed words)
    ):
        assert running.stdin is not None
        try:
            for path in paths:
                running.stdin.write(path.read_bytes())
            running.stdin.close()
        except BrokenPipeError:  # it ended, and says why
            pass
        except BaseException:
            running.kill()
            raise
        finally:  # what is left in its buffer has no reader
            with suppress(OSError):
                running.stdin.close()
        if running.wait() or not file.seek(0, 2):
            told.seek(0)
            lines = told.read().decode(errors="replace").strip().splitlines() or ["no output"]
            raise InputError(f"ffmpeg could not write the clip ({lines[-1]:.120}); write a .webp instead")
