"""What other programs say of a picture's making, in every container, and what theirs make of what is written here."""

from __future__ import annotations

import gzip
import json
from io import BytesIO

import numpy as np
import pytest
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo
from sd_parsers import ParserManager
from sd_parsers.extractors import Eagerness
from sd_prompt_reader.format.base_format import BaseFormat
from sd_prompt_reader.image_data_reader import ImageDataReader

from fisedit.errors import InputError
from fisedit.metadata import provenance
from fisedit.metadata.image_metadata import Metadata, read_metadata
from fisedit.storage.canvas import to_editable
from fisedit.storage.images import decode, encode
from fisedit.values import SchedulerName, make_generation_config

OLD, NO = "an old harbour", "blurry"
CONFIG = {
    "width": 512,
    "height": 768,
    "scheduler": "ddim",
    "num_inference_steps": 20,
    "guidance_scale": 7.0,
    "negative_prompt": "",
}
ORIGIN = provenance.Origin("demo", "fp32", "cpu", make_generation_config("a new\nharbour, at dusk", seed=5, **CONFIG))

LINE = "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 42, Size: 512x768"
SD_NEXT = "Steps: 20, Size: 512x768, Sampler: DPM++ 2M, Seed: 42, CFG scale: 7, App: SD.Next, Operations: txt2img"
FLAT = {"prompt": OLD, "negative_prompt": NO, "steps": 20, "guidance_scale": 7.0}
FOOOCUS = FLAT | {"seed": "42", "resolution": "(512, 768)", "metadata_scheme": "fooocus", "version": "Fooocus v2.5.5"}
SWARM = {"prompt": OLD, "negativeprompt": NO, "seed": 42, "steps": 20, "cfgscale": 7, "width": 512, "height": 768}
INVOKE = {"positive_prompt": OLD, "negative_prompt": NO, "seed": 42, "steps": 20, "cfg_scale": 7}
INVOKE |= {"width": 512, "height": 768, "scheduler": "euler"}
INVOKE_2 = {"prompt": [{"prompt": f"{OLD} [{NO}]", "weight": 1}], "seed": 42, "steps": 20, "cfg_scale": 7}
INVOKE_2 |= {"width": 512, "height": 768}
NOVELAI = {"uc": NO, "seed": 42, "steps": 20, "scale": 7, "sampler": "k_euler", "width": 512, "height": 768}
DRAW_THINGS = {"c": OLD, "uc": NO, "seed": 42, "steps": 20, "scale": 7, "size": "512x768", "sampler": "DDIM"}
EASY = {"prompt": OLD, "negative_prompt": NO, "seed": 42, "num_inference_steps": 20, "guidance_scale": 7}
EASY |= {"width": 512, "height": 768, "sampler_name": "euler_a"}
TENSOR = {"prompt": OLD, "negativePrompt": NO, "seed": 42, "steps": 20, "cfgScale": 7, "width": 512, "height": 768}


def graph(**changes):
    """ComfyUI's usual graph, with nodes replaced."""
    sampler = {"seed": 42, "steps": 20, "cfg": 7, "sampler_name": "dpmpp_2m", "scheduler": "karras"}
    sampler |= {"positive": ["6", 0], "negative": ["7", 0], "latent_image": ["5", 0], "denoise": 1}
    nodes = {
        "3": ("KSampler", sampler),
        "5": ("EmptyLatentImage", {"width": 512, "height": 768, "batch_size": 1}),
        "6": ("CLIPTextEncode", {"text": OLD, "clip": ["4", 1]}),
        "7": ("CLIPTextEncode", {"text": ["8", 0], "clip": ["4", 1]}),
        "8": ("PrimitiveString", {"value": NO}),
    } | {key.removeprefix("n"): node for key, node in changes.items()}
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


TEXTS = {
    "AUTOMATIC1111": {"parameters": f"{OLD}\nNegative prompt: {NO}\n{LINE}"},
    "Dynamic Prompts": {
        "parameters": f"{OLD}\nNegative prompt: {NO}\n{LINE}\nTemplate: {{old|new}}\nNegative Template: b"
    },
    "SD.Next": {"parameters": f"{OLD}\nNegative prompt: {NO}\n{SD_NEXT}"},
    "Fooocus": {"parameters": json.dumps(FOOOCUS), "fooocus_scheme": "fooocus"},
    "SwarmUI": {"parameters": json.dumps({"sui_image_params": SWARM}, indent=2)},
    "InvokeAI": {"invokeai_metadata": json.dumps(INVOKE), "invokeai_graph": "{}"},
    "InvokeAI 2": {"sd-metadata": json.dumps({"app_id": "invoke-ai/InvokeAI", "image": INVOKE_2}), "Dream": '"x" -s 1'},
    "InvokeAI 1": {"Dream": f'"{OLD} [{NO}]" -s 20 -S 42 -W 512 -H 768 -C 7.0 -A k_lms'},
    "NovelAI": {
        "Software": "NovelAI",
        "Title": "AI",
        "Description": OLD,
        "Source": "S 1",
        "Comment": json.dumps(NOVELAI),
    },
    "Easy Diffusion": {key: str(value) for key, value in EASY.items()},
    "TensorArt": {"generation_data": json.dumps(TENSOR)},
    "ComfyUI": {"prompt": json.dumps(graph()), "workflow": '{"nodes": []}'},
    "ComfyUI with a web UI's text": {
        "parameters": f"{OLD}\nNegative prompt: {NO}\n{LINE}",
        "workflow": '{"nodes": []}',
    },
}
COMMENTS = {
    "AUTOMATIC1111": TEXTS["AUTOMATIC1111"]["parameters"],
    "Fooocus": json.dumps(FOOOCUS),
    "SwarmUI": json.dumps({"sui_image_params": SWARM}),
    "Easy Diffusion": json.dumps(EASY),
}


def png(texts, mode="RGB"):
    file, chunks = BytesIO(), PngInfo()
    for key, text in texts.items():
        chunks.add_text(key, text)
    Image.new(mode, (64, 64), "grey").save(file, "PNG", pnginfo=chunks)
    return file.getvalue()


def other(kind, **options):
    file = BytesIO()
    Image.new("RGB", (64, 64), "grey").save(file, kind, **options)
    return file.getvalue()


def commented(text, encoding="utf-16-be"):
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = b"UNICODE\0" + text.encode(encoding)
    return exif


def windows_exif():
    exif = Image.Exif()
    exif[ExifTags.Base.XPComment] = COMMENTS["AUTOMATIC1111"].encode("utf-16-le") + b"\0\0"
    return exif


def comfy_exif():
    exif = Image.Exif()
    exif[ExifTags.Base.Make], exif[ExifTags.Base.Model] = 'workflow:{"nodes": []}', f"prompt:{json.dumps(graph())}"
    return exif


def draw_things():
    return (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        '<rdf:Description xmlns:exif="http://ns.adobe.com/exif/1.0/" xmlns:xmp="http://ns.adobe.com/xap/1.0/" '
        'xmlns:dc="http://purl.org/dc/elements/1.1/" xmp:CreatorTool="Draw Things" dc:rights="mine">'
        f"<dc:description><rdf:Alt><rdf:li>{OLD}</rdf:li></rdf:Alt></dc:description><exif:UserComment><rdf:Alt>"
        f"<rdf:li>{json.dumps(DRAW_THINGS)}</rdf:li></rdf:Alt></exif:UserComment></rdf:Description></rdf:RDF></x:xmpmeta>"
    ).encode()


def stealth(text, magic=b"stealth_pngcomp"):
    """A picture whose alpha hides a text, as NovelAI writes it."""
    data = gzip.compress(text.encode()) if magic.endswith(b"comp") else text.encode()
    bits = np.unpackbits(np.frombuffer(magic + (8 * len(data)).to_bytes(4) + data, np.uint8))
    alpha = np.full(64 * 64, 255, np.uint8)
    alpha[: bits.size] = 254 + bits
    file, picture = BytesIO(), Image.new("RGBA", (64, 64), "grey")
    picture.putalpha(Image.fromarray(alpha.reshape(64, 64).T))
    picture.save(file, "PNG")
    return file.getvalue()


HIDDEN = json.dumps({"Software": "NovelAI", "Description": OLD, "Comment": json.dumps(NOVELAI)})
FILES = {
    **{f"{name}, PNG": png(texts) for name, texts in TEXTS.items()},
    **{f"{name}, JPEG": other("JPEG", exif=commented(text)) for name, text in COMMENTS.items()},
    **{f"{name}, WebP": other("WEBP", exif=commented(text, "utf-16-le")) for name, text in COMMENTS.items()},
    "Civitai, JPEG": other(
        "JPEG", exif=commented(json.dumps(graph() | {"extra": {}, "extraMetadata": json.dumps(TENSOR)}))
    ),
    "AUTOMATIC1111, Windows' comment": other("JPEG", exif=windows_exif()),
    "Fooocus, comment of a JPEG": other("JPEG", comment=json.dumps(FOOOCUS)),
    "ComfyUI, WebP": other("WEBP", exif=comfy_exif()),
    "Draw Things, JPEG": other("JPEG", xmp=draw_things()),
    "NovelAI, hidden": stealth(HIDDEN),
    "AUTOMATIC1111, hidden": stealth(COMMENTS["AUTOMATIC1111"], b"stealth_pnginfo"),
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
class TestOthers:
    def test_they_are_read_as_they_are_meant(self, data):
        config = provenance.parse_origin(read_metadata(decode(data).image)).config
        found = (config.prompt, config.negative_prompt, config.seed, config.num_inference_steps, config.guidance_scale)
        assert found == (OLD, NO, 42, 20, 7)

    @pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
    def test_without_metadata_nothing_of_it_is_left(self, data, suffix):
        written, _ = encode(to_editable(decode(data).image), suffix)
        assert read_metadata(decode(written).image) == Metadata()
        assert not any(word.encode(code) in written for word in (OLD, "nodes") for code in ("utf-8", "utf-16-be"))

    @pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
    def test_what_is_written_instead_is_ours_and_keeps_it(self, data, suffix):
        picture = to_editable(decode(data).image)
        before = provenance.parameters_before(picture)
        origin = provenance.Origin("demo", "fp32", "cpu", ORIGIN.config, before=before)
        written, _ = encode(picture, suffix, provenance.to_metadata(origin))
        found = ParserManager(eagerness=Eagerness.EAGER).parse(BytesIO(written))
        assert [prompt.value for prompt in found.prompts] == ["a new\nharbour, at dusk"]
        again = provenance.parse_origin(read_metadata(decode(written).image))
        assert again.before == before and provenance.parse_origin(Metadata(before)).config.prompt == OLD


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_it_is_read_by_sd_prompt_reader(suffix):
    written, _ = encode(Image.new("RGB", (64, 64)), suffix, provenance.to_metadata(ORIGIN))
    found = ImageDataReader(BytesIO(written))
    assert found.status is BaseFormat.Status.READ_SUCCESS and found.positive == "a new\nharbour, at dusk"
    assert (found.parameter["seed"], found.parameter["steps"], found.parameter["cfg"]) == ("5", "20", "7")


def test_it_is_read_by_the_parsers_of_others_with_every_setting():
    written, _ = encode(Image.new("RGB", (64, 64)), ".png", provenance.to_metadata(ORIGIN))
    (sampler,) = ParserManager().parse(BytesIO(written)).samplers
    assert sampler.name == "DDIM" and (sampler.parameters["steps"], sampler.parameters["seed"]) == ("20", "5")


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ({"parameters": '{"a": 1}'}, "must name its prompt, got a"),
        ({"parameters": "[1]"}, "must be whole JSON"),
        ({"parameters": '{"prompt": "a cat"'}, "must be whole JSON"),
        ({"parameters": json.dumps({"sui_image_params": {"prompt": ["a"]}})}, "SwarmUI says"),
        ({"workflow": '{"nodes": []}'}, "must name its prompt"),
        ({"prompt": json.dumps(graph(n3=("SaveImage", {})))}, "must have one prompt, got none"),
        ({"prompt": json.dumps(graph(n6=("ConditioningCombine", {"a": ["7", 0], "b": ["7", 0]})))}, "in one node"),
        ({"prompt": json.dumps(graph(n6=("CLIPTextEncode", {"text": ["6", 0]})))}, "in one node"),
        ({"prompt": json.dumps(graph(n6=("CLIPTextEncode", {"text": ["99", 0]})))}, "link to nowhere"),
        (
            {"sd-metadata": json.dumps({"image": {"prompt": [{"prompt": "a"}, {"prompt": "b"}]}})},
            "must name one prompt",
        ),
        ({"Dream": "a cat"}, "must begin with its prompt"),
    ],
)
def test_what_is_not_understood_is_refused(texts, why):
    with pytest.raises(InputError, match=why):
        provenance.parse_origin(read_metadata(decode(png(texts)).image))


@pytest.mark.parametrize(
    ("name", "prompt", "meant"),
    [
        ("NovelAI", "{old} [port] (x), 1.2::boats::", r"(old:1.05) (port:0.9524) \(x\), (boats:1.2)"),
        ("NovelAI", "a smile :}", "a smile :}"),
        ("InvokeAI", "(old)1.3 harbour++, (x)-- well-kept", "(old:1.3) (harbour:1.21), (x:0.81) well-kept"),
        ("ComfyUI", "(old:1.2) [x]", r"(old:1.2) \[x\]"),
    ],
)
def test_weights_are_told_in_our_syntax(name, prompt, meant):
    texts = {
        "NovelAI": {"Software": "NovelAI", "Description": prompt, "Comment": json.dumps(NOVELAI)},
        "InvokeAI": {"invokeai_metadata": json.dumps(INVOKE | {"positive_prompt": prompt})},
        "ComfyUI": {"prompt": json.dumps(graph(n6=("CLIPTextEncode", {"text": prompt})))},
    }
    assert provenance.parse_origin(read_metadata(decode(png(texts[name])).image)).prompt == meant


def test_samplers_of_a_graph():
    from fisedit.metadata.generation_parameters import parse_parameters

    _, settings = parse_parameters(json.dumps(graph()))
    assert settings["scheduler"] == SchedulerName.DPM_SOLVER_KARRAS
    assert (settings["width"], settings["height"]) == (512, 768)


def test_alpha_is_cleared_of_hidden_words_without_metadata_alone():
    picture = to_editable(decode(stealth(HIDDEN)).image)
    kept, notes = encode(picture, ".png", provenance.to_metadata(ORIGIN))
    assert np.array_equal(np.asarray(decode(kept).image), np.asarray(picture)) and notes == ()
    cleared, notes = encode(picture, ".png")
    assert (np.asarray(decode(cleared).image)[..., 3] == 255).all() and "was cleared" in notes[0]


def test_what_the_owner_wrote_stays():
    words = {"Title": "at the sea", "Software": "GIMP", "Comment": "mine", "Description": "a boat"}
    picture = to_editable(decode(png(words | TEXTS["ComfyUI"])).image)
    assert decode(encode(picture, ".png")[0]).image.info.items() >= words.items()
    xmp = to_editable(decode(FILES["Draw Things, JPEG"]).image).info["xmp"]
    assert b'dc:rights="mine"' in xmp and b"Draw Things" not in xmp


def test_a_camera_s_tags_stay_beside_ours_and_fooocus_s_go():
    for maker, software, stay in ((b"lens 5", "iOS 17", True), (b"fooocus", "Fooocus v2.5.5", False)):
        exif = commented(json.dumps(FOOOCUS))
        exif[ExifTags.Base.Software] = software
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.MakerNote] = maker
        picture = to_editable(decode(other("JPEG", exif=exif)).image)
        again = to_editable(decode(encode(picture, ".jpg", provenance.to_metadata(ORIGIN))[0]).image)
        assert [word in again.info.get("exif", b"") for word in (maker, software.encode())] == [stay, stay]


def test_iptc_s_words_on_ai_go_without_metadata():
    xmp = draw_things().replace(
        b'dc:rights="mine"', b'xmlns:i="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" i:AISystemUsed="x"'
    )
    picture = to_editable(decode(other("JPEG", xmp=xmp)).image)
    assert b"AISystemUsed" in encode(picture, ".png", provenance.to_metadata(ORIGIN))[0]
    assert b"AISystemUsed" not in encode(picture, ".png")[0]


def test_a_large_graph_leaves_room_for_the_origin_in_a_jpeg():
    workflow = json.dumps({"nodes": ["x" * 70_000]})
    picture = to_editable(decode(png(TEXTS["ComfyUI"] | {"workflow": workflow})).image)
    origin = provenance.Origin("demo", "fp32", "cpu", ORIGIN.config, before=provenance.parameters_before(picture))
    written, notes = encode(picture, ".jpg", provenance.to_metadata(origin))
    assert "what another program said of its making" in notes[0]
    assert provenance.parse_origin(read_metadata(decode(written).image)).config == ORIGIN.config
