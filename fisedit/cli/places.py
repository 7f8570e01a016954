"""The places in a picture that a command's options let change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fisedit.cli.inputs import options_given, read_json
from fisedit.errors import InputError

if TYPE_CHECKING:
    import typer
    from PIL.Image import Image

    from fisedit import Region
    from fisedit.storage.images import DecodedImage

N = TypeVar("N", int, float)


def edit_areas(context: typer.Context, opened: DecodedImage | None) -> tuple[Region | None, dict[str, Any]]:
    """Return the region to open a large picture at, None if words decide; and place and noise for `Editor.edit`."""
    from fisedit import Region

    given = context.params
    marked, several = marked_region(context), _read_regions(given["regions"])
    if opened is not None and given["detect"] is not None:
        marked = Region.union([*([] if marked is None else [marked]), _detected(context, opened.image)])
    areas = {"strength": given["strength"], "seed": given["edit_seed"], "quality": given["quality"]}
    areas |= {"regions": several} if several else {"region": chosen_region(context, marked)}
    place = Region.union(each for each, _ in several) if several else marked
    return (None if given["word"] or (place is not None and place.reads_attention) else place), areas


def check_marks(context: typer.Context) -> None:
    """Check that options of marks have the marks that they are of. Raises InputError."""
    explicit = options_given(context)
    if "instance" in explicit and {"mask", "box", "point", "region"} & explicit and not {"word", "detect"} & explicit:
        raise InputError("--instance is of what words find, got a mask, box, point or region; leave it out")
    of_words = [name for name in ("mask_method", "probe_steps") if name in explicit]
    if of_words and {"mask", "box", "point", "detect", "region"} & explicit and "word" not in explicit:
        option = of_words[0].replace("_", "-")
        raise InputError(f"--{option} is of what words find, got a mask, box, point, region or --detect; leave it out")
    if "detect" in explicit and not {"picture", "origin"} & explicit:
        raise InputError("--detect is of a --picture or --from, got none; give one")
    if {"label", "threshold"} & explicit and "detect" not in explicit:
        raise InputError("--label and --threshold are of --detect, got none; give one")
    if context.params["soft"] and "mask" not in explicit:
        raise InputError("--soft is of a --mask, got none; give one")
    if "point_outside" in explicit and "point" not in explicit:
        raise InputError("--point-outside is of a --point, got none; give one")


def marked_region(context: typer.Context) -> Region | None:
    """Return the region that --mask, --box, --point and --region mark; None without any."""
    from fisedit import Region
    from fisedit.integrations.region_json import parse_region
    from fisedit.storage.mask_images import read_mask

    given = context.params
    regions = [Region.box(*parse_sides("box", text, float)) for text in given["box"] or ()]
    if given["point"]:
        inside, outside = ([_point(name, text) for text in given[name] or ()] for name in ("point", "point_outside"))
        regions.append(Region.points(*inside, outside=outside))
    if given["region"] is not None:
        regions.append(parse_region(*_read_json("region", given["region"])))
    if (mask := read_mask(given["mask"])) is not None:
        regions.insert(0, Region.mask(mask, soft=given["soft"]))
    return Region.union(regions) if regions else None


def _detected(context: typer.Context, picture: Image) -> Region:
    """Return the region that --detect finds in a picture, all of it or the --instance alone."""
    from fisedit.integrations.mask_providers import ALL, check_choice, find, open_provider, union_of
    from fisedit.storage.canvas import to_editable

    given = context.params
    threshold, labels = given["threshold"], given["label"] or ()
    path, instance = given["picture"] or given["origin"], given["instance"]
    which = ALL if instance is None or given["word"] else str(instance)
    check_choice(threshold, which)
    provider = open_provider(given["detect"], threshold=threshold, local_files_only=given["local_files_only"])
    pixels = to_editable(picture)
    return union_of(find(provider, pixels, path.name, labels=labels, threshold=threshold, instance=which), labels)


def _read_regions(path: Path | None) -> list[tuple[Region, str]]:
    """The regions of --regions, with their prompts; none without it."""
    from fisedit.integrations.region_json import parse_regions

    return [] if path is None else parse_regions(*_read_json("regions", path))


def _read_json(option: str, path: Path) -> tuple[object, Callable[[str], object]]:
    """A file's JSON, and what reads the masks that it names, beside it."""
    from fisedit.storage.mask_images import read_mask

    return read_json(option, path), lambda name: read_mask(path.parent / name)


def parse_sides(option: str, text: str, kind: Callable[[str], N]) -> tuple[N, N, N, N]:
    """Four numbers with commas between. Raises InputError, which names the option."""
    try:
        left, top, right, bottom = map(kind, text.split(","))
    except ValueError as error:
        raise InputError(f"--{option} must be L,T,R,B in pixels, got {text!r:.60}") from error
    return left, top, right, bottom


def _point(name: str, text: str) -> tuple[float, float]:
    try:
        x, y = map(float, text.split(","))
    except ValueError as error:
        option = name.replace("_", "-")
        raise InputError(f"--{option} must be X,Y in pixels, got {text!r:.60}; give two numbers") from error
    return x, y


def chosen_region(context: typer.Context, marked: Region | None) -> Region:
    """Return where the picture may change: what is marked and where given words attend, or else the changed ones."""
    from fisedit import Region
    from fisedit.storage.mask_images import read_mask

    given, region = context.params, marked
    if marked is None or given["word"]:
        options = {name: given[name] for name in ("instance", "probe_steps")}
        words = Region.words(*given["word"] or (), method=given["mask_method"], **options)
        region = words if marked is None else marked | words
    assert region is not None
    region, protect = region.grow(given["grow"]), read_mask(given["protect"])
    return region if protect is None else region - Region.mask(protect)
