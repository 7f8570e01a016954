"""The command line's options, each defined once. Names and meanings are those of diffusers."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, echo

from fisedit import __version__
from fisedit.batch.values import ExecutorKind, OnError, OutputFormat


def _print_version(requested: bool) -> None:
    if requested:
        echo(f"fisedit {__version__}")
        raise Exit


_SCHEDULERS = (
    "ddim, ddim_trailing, dpmsolver++, dpmsolver++_karras, dpmsolver++_sde, dpmsolver++_sde_karras, "
    "dpmsolver++_sde_exponential, dpm_sde, dpm_sde_karras, euler, euler_trailing, euler_a, heun, pndm, unipc, lcm or "
    "tcd; or as web UIs say, such as 'DPM++ 2M Karras'."
)

Version = Annotated[bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]
Debug = Annotated[bool, Option("--debug", help="Show tracebacks; may be given anywhere.")]
Prompt = Annotated[str, Argument(help="What the picture shows.")]
NewPrompt = Annotated[
    str | None, Option("--prompt", help="The changed prompt; its changed words decide where the picture may change.")
]
SourcePrompt = Annotated[
    str | None, Option(help="Generate a source from this prompt first; with --picture, what that shows.")
]
Picture = Annotated[Path | None, Option(help="Edit this picture: it is inverted first.")]
Inversion = Annotated[str, Option(help="How a --picture is inverted: ddim, or ddpm.")]
From = Annotated[
    Path | None, Option("--from", help="Make this picture again from its metadata, and edit it; see fisedit show.")
]
Shown = Annotated[Path, Argument(metavar="PICTURE", help="A picture that fisedit or a web UI wrote.")]
Metadata = Annotated[bool, Option(help="Write into the picture's file how it was made.")]
CaptionModel = Annotated[
    str | None, Option(help="Image-to-text model (BLIP or alike) that captions a --picture: a folder or hub id.")
]
Strength = Annotated[float, Option(help="Above 0, to 1: share of the steps to run; less keeps more of the picture.")]
Quality = Annotated[str, Option(help="fast, balanced or close: the trade-off of speed and fidelity.")]
EditSeed = Annotated[
    int | None, Option(help="Seed of other noise inside the mask: with a mask or words the prompt may stay the same.")
]
Seed = Annotated[int, Option(help="Of the first latents and of every later noise.")]
NegativePrompt = Annotated[str, Option(help="What the picture should not show.")]
Steps = Annotated[int, Option("--num-inference-steps", help="Denoising steps.")]
Guidance = Annotated[float, Option("--guidance-scale", help="Classifier-free guidance; 1 switches it off.")]
Width = Annotated[int | None, Option(help="Pixels that are painted, divisible by 8; what suits the model without it.")]
Height = Annotated[int | None, Option(help="Pixels that are painted, divisible by 8; what suits the model without it.")]
Scheduler = Annotated[str, Option(help=_SCHEDULERS)]
ClipSkip = Annotated[int, Option(help="Layers of the text encoder to leave out; one less than web UIs' clip skip.")]
Sizes = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=HEIGHT,WIDTH",
        help="Of Stable Diffusion XL: original_size, target_size, crops_coords_top_left; may be repeated.",
    ),
]
Vae = Annotated[Path | None, Option(help="Another autoencoder than the model's: a folder or a .safetensors file.")]
PreviewVae = Annotated[
    Path | None, Option(help="Folder with an AutoencoderTiny (TAESD) that decodes previews while a picture is made.")
]
Model = Annotated[str, Option(help='"demo", a diffusers folder, a hub id, or one .safetensors file.')]
ValidatedModel = Annotated[
    str, Argument(metavar="MODEL", help="A diffusers folder, a hub id, one .safetensors file, or demo.")
]
Quick = Annotated[
    bool, Option("--quick", help="A third of the edits, one turn of timings, no torch.compile: for a CPU.")
]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N; CUDA where there is some without it.")]
Dtype = Annotated[
    str | None, Option(help="fp32, bf16 or fp16; without it fp16 on CUDA, and on a CPU the faster of bf16 and fp32.")
]
CacheDtype = Annotated[
    str,
    Option(help="Of recorded features: int8, int4 for the least memory, or model for the model's own."),
]
Features = Annotated[
    bool,
    Option(
        "--features", help="Save what was recorded too: the next edit of the session need not make the source again."
    ),
]
LocalFilesOnly = Annotated[bool, Option("--local-files-only", help="Never reach for the network.")]
Output = Annotated[Path, Option(help="Image to write: .png, .webp, .jpg or .tif.")]
Folder = Annotated[Path, Option("--output", help="Folder to write into.")]
Mask = Annotated[Path | None, Option(help="Image, white where the edit may change the picture.")]
Soft = Annotated[
    bool, Option("--soft", help="Grey of the --mask says how much may change: from so early a step on, white from all.")
]
Boxes = Annotated[
    list[str] | None,
    Option("--box", metavar="L,T,R,B", help="Pixels where the edit may change the picture; may be repeated."),
]
Points = Annotated[
    list[str] | None,
    Option("--point", metavar="X,Y", help="Pixel of a thing that the edit may paint, all of it; may be repeated."),
]
PointsOutside = Annotated[
    list[str] | None,
    Option("--point-outside", metavar="X,Y", help="Pixel of what a --point took too much; may be repeated."),
]
Context = Annotated[
    float,
    Option(
        "--context",
        help="Of a large --picture the part around the given region is edited, and so much on every side as a ratio of "
        "its longer side.",
    ),
]
Detect = Annotated[
    str | None,
    Option(
        metavar="DETECTOR",
        help="Edit what this finds in a picture: a folder or hub id of a detector or segmentation model of "
        "transformers, a .json file (COCO's layout) or .csv file with boxes, or alpha for what is transparent.",
    ),
]
Labels = Annotated[
    list[str] | None, Option("--label", metavar="<str>", help="Label of what --detect shall find; may be repeated.")
]
Threshold = Annotated[float, Option(help="Score from 0 to 1 from which a detection counts.")]
Detected = Annotated[str, Option("--instance", help="all, largest, or a number counted from the left and from 0.")]
RegionFile = Annotated[
    Path | None, Option("--region", help="JSON of a region, where the edit may change the picture; see the guide.")
]
RegionsFile = Annotated[
    Path | None,
    Option("--regions", help='JSON of several regions, [{"region": ..., "prompt": ...}], edited in one run.'),
]
Extend = Annotated[
    str | None, Option("--extend", metavar="L,T,R,B", help="Pixels to add at the sides of the picture, and to paint.")
]
Erase = Annotated[bool, Option("--erase", help="Let what is around the mask grow into it; needs no --prompt.")]
Protect = Annotated[Path | None, Option(help="Image, white where the picture must stay.")]
Grow = Annotated[int, Option(help="Latent cells (8 pixels) to grow the mask by; negative shrinks it.")]
Words = Annotated[
    list[str] | None, Option("--word", metavar="<str>", help="A word to find the mask by, instead of the changed ones.")
]
Instance = Annotated[int | None, Option(help="Edit one piece of the mask alone, counted from the left and from 0.")]
MaskMethod = Annotated[str, Option(help="things, cross, cross-self, new-words, two-way or latents (by --probe-steps).")]
ProbeSteps = Annotated[
    int | None, Option(help="Dense steps to find the mask with; without it one, where an object is inserted, or none.")
]
Lora = Annotated[
    list[str] | None,
    Option(
        metavar="<str>",
        help="LoRA that changes what is painted: demo-fast, a .safetensors file or a folder; may be repeated.",
    ),
]
LoraScale = Annotated[
    list[float] | None, Option(metavar="<float>", help="Weight of the LoRAs, one for all or one for each; 1 without.")
]
Adapter = Annotated[
    list[str] | None,
    Option(
        "--adapter",
        "--ip-adapter",
        "--control-net",
        "--t2i-adapter",
        metavar="<str>",
        help="Adapter of any kind that reads a --reference, a --control or poses: demo-look, demo-pose, a folder, "
        ".safetensors file, hub id or file on the hub; may be repeated.",
    ),
]
AdapterScale = Annotated[
    list[float] | None,
    Option(metavar="<float>", help="Weight of the adapters, one for all or one for each; 1 without."),
]
ControlStart = Annotated[
    float, Option("--control-guidance-start", metavar="<float>", help="Share of the steps before which adapters rest.")
]
ControlEnd = Annotated[
    float, Option("--control-guidance-end", metavar="<float>", help="Share of the steps after which adapters rest.")
]
GuessMode = Annotated[
    bool, Option("--guess-mode", help="ControlNets take part in the branch with the prompt alone, and more faintly.")
]
ImageEncoder = Annotated[Path | None, Option(help="Image encoder of an IP-Adapter, if it is not beside its file.")]
Reference = Annotated[Path | None, Option(help="Picture whose appearance is taken; needs an --adapter.")]
Control = Annotated[
    Path | None,
    Option(
        help="Picture that says where things are, or canny for the edges of the picture that is opened; needs a "
        "--control-net or the like.",
    ),
]
DriveFile = Annotated[
    Path | None,
    Option(
        "--drive",
        help="File with a head's pose and expression, .json or .csv with one line; needs an --adapter that is one of "
        "HelloMeme's control networks.",
    ),
]
DrivenPicture = Annotated[
    Path, Argument(metavar="SOURCE", help="Picture of every frame; made again from its metadata if it has some.")
]
Poses = Annotated[
    Path, Argument(metavar="POSES", help="File with a pose and an expression for every frame, .json or .csv.")
]
ClipOutput = Annotated[Path, Option("--output", help="Clip to write: .webp, .png, .gif, or .mp4 where ffmpeg is.")]
FramesPerSecond = Annotated[float, Option("--fps", help="Frames a second.")]
ShownWords = Annotated[
    str | None, Option("--source-prompt", help="What SOURCE shows; it is inverted then, whatever its metadata say.")
]
FramePrompt = Annotated[str | None, Option("--prompt", help="What the frames show; as SOURCE without it.")]
Structure = Annotated[float, Option(help="0 to 1: how long what is inside the mask keeps its structure.")]
Verify = Annotated[
    bool, Option(help="Check once whether the change reaches beyond the mask, and dilate the mask then.")
]
PreviewOnly = Annotated[bool, Option("--preview", help="Write the source with the mask laid over it; edit nothing.")]
SaveSession = Annotated[Path | None, Option("--session", help="Save the session into this folder, to edit it later.")]
Session = Annotated[
    Path | None,
    Option(
        help="Edit the session saved in this folder, and save the edit there; --picture and --from start one there."
    ),
]
Host = Annotated[str, Option(help="Address to listen on; any that others can reach needs a --token.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")]
Token = Annotated[
    str, Option(envvar="FISEDIT_TOKEN", help="Secret of every request: 16 or more letters, digits, - and _.")
]
AllowedHosts = Annotated[
    list[str] | None, Option("--allowed-host", help="Another name that this machine is reached by.")
]
Models = Annotated[
    list[str] | None, Option("--model", help="As in other commands, demo without it; if repeated, the page offers all.")
]
Loaded = Annotated[int, Option(min=1, help="Models in memory at once; the one idle longest makes room for another.")]
Loras = Annotated[
    list[Path] | None,
    Option("--lora", help="LoRA to choose on the page; may be repeated. Without --model too: demo-fast."),
]
PageAdapters = Annotated[
    list[str] | None,
    Option("--adapter", metavar="<str>", help="Adapter for references, control pictures or poses; may be repeated."),
]
PageDetector = Annotated[
    str | None,
    Option(
        "--detector",
        metavar="<str>",
        help="Folder or hub id of a detector or segmentation model of transformers; the page offers what it finds.",
    ),
]
OverwriteSession = Annotated[bool, Option("--overwrite", help="Replace the session that --session holds already.")]
Sessions = Annotated[Path | None, Option(help="Folder to keep sessions in; without it they end with the app.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object on stdout, and nothing else.")]
Profiled = Annotated[bool, Option("--profile", help="Print what each kind of layer took.")]
Trace = Annotated[Path | None, Option(help="JSON file to write for Chrome's trace viewer.")]
PlanSize = Annotated[int | None, Option("--size", help="Side of the picture in pixels; the model's own without.")]
PlanMemory = Annotated[
    str | None,
    Option("--memory", help="For weights and records, such as 900M or 4G; what is free on the device without."),
]
PlanDtype = Annotated[
    str | None, Option("--dtype", help="fp32, bf16 or fp16, to plan for; without it the fastest that was calibrated.")
]
CalibrationSeconds = Annotated[float, Option("--seconds", min=0, help="What measuring takes, about.")]
CalibrationSize = Annotated[
    int | None, Option("--size", help="Side of the measured pictures in pixels; the model's own, at most 256, without.")
]
Areas = Annotated[str, Option(help="Edited areas in percent, with commas between.")]
Size = Annotated[int, Option(help="Side of the square picture in pixels.")]
BenchModel = Annotated[
    str | None,
    Option("--model", help="A model; sdxl for random weights of Stable Diffusion XL, those of 1.5 without."),
]
BenchOutput = Annotated[Path | None, Option("--output", help="JSON file to write the figures to.")]
Repeats = Annotated[
    int, Option(min=1, max=100, help="Turns of all that is compared, whose median and range are printed.")
]
Compiled = Annotated[
    bool,
    Option("--compiled/--no-compiled", help="Try torch.compile too for the fastest dense run, which takes minutes."),
]
BatchIn = Annotated[Path, Argument(metavar="IN", help="Folder of pictures; none of them is ever changed.")]
BatchOut = Annotated[Path, Argument(metavar="OUT", help="Folder to write into; run again to continue.")]
BatchPrompt = Annotated[
    str | None, Option("--prompt", help='What every picture shall show; "{source}" stands for its source prompt.')
]
BatchSourcePrompt = Annotated[
    str | None, Option("--source-prompt", help="What every picture shows; else a .txt beside it may say so.")
]
Captions = Annotated[
    Path | None, Option(help="Source prompts: a .csv with the columns image and caption, or .jsonl with those keys.")
]
Masks = Annotated[
    Path | None, Option(help="Folder of masks named as the pictures are; the changed words decide for the rest.")
]
EditRows = Annotated[
    Path | None,
    Option("--edits", help="Instead of --prompt: .jsonl or .csv with image, prompt, source_prompt, mask, output."),
]
Recursive = Annotated[bool, Option("--recursive", help="Take the pictures of subfolders as well.")]
BatchFormat = Annotated[
    OutputFormat, Option("--format", help="Of the outputs; keep is PNG where the input's is not written.")
]
Workers = Annotated[int, Option(min=0, max=256, help="Processes, each with its own model; 0 works in this one.")]
Executors = Annotated[
    ExecutorKind,
    Option("--executor", help="Where workers live: this machine's processes, or a Ray cluster (RAY_ADDRESS)."),
]
OnFailure = Annotated[OnError, Option("--on-error", help="Whether to go on after a picture that cannot be edited.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace files in OUT that no batch wrote.")]
DryRun = Annotated[
    bool, Option("--dry-run", help="Print what would be done; write nothing. Status 1 tells that a picture cannot be.")
]
Report = Annotated[Path | None, Option(help="HTML page to write: before, after, mask and remarks of every picture.")]
Timeout = Annotated[float, Option(help="Seconds that one picture may take.")]
Triples = Annotated[
    Path,
    Argument(metavar="TRIPLES", help="Folder: target/NAME.png and .txt, reference/NAME.png; perhaps region/."),
]
RunFolder = Annotated[Path, Argument(metavar="OUTPUT", help="Folder of the run; the adapter is in OUTPUT/adapter.")]
Family = Annotated[
    str, Option(help="v1, v2, v3, v5 or v5b, as published; v5 is the smallest that takes any size. full, to compare.")
]
Heads = Annotated[int, Option(help="Of every attention; divides the model's channels.")]
StartAdapter = Annotated[str, Option("--start", help="Train this adapter on, instead of a fresh one.")]
TrainSize = Annotated[int, Option("--size", help="Side of the square pictures in pixels; 0 for the model's own.")]
TrainSteps = Annotated[int, Option("--steps", help="Updates of the weights; the rate falls to 0 at the last.")]
TrainBatch = Annotated[int, Option("--batch", help="Pictures of one pass, per process.")]
Accumulate = Annotated[int, Option(help="Passes of one update.")]
LearningRate = Annotated[float, Option(help="The peak, after the warm-up.")]
Warmup = Annotated[int, Option(help="Steps until the rate is at its peak.")]
RegionWeight = Annotated[float, Option(help="Weight of errors within a triple's region; 1 outside.")]
Dropout = Annotated[float, Option(help="Share of pictures without prompt and reference.")]
SnrCap = Annotated[float, Option(help="Of min-SNR weights; 0 counts all noise levels alike.")]
Ema = Annotated[float, Option(help="Decay of the average of the weights, which is what is saved.")]
TrainSeed = Annotated[int, Option("--seed", help="Of the fresh weights, the order, and all noise.")]
HeldOut = Annotated[int, Option(help="The last triples, never trained on: measured, and drawn on sheets.")]
LogEvery = Annotated[int, Option(help="Steps between lines of log.csv.")]
SaveEvery = Annotated[int, Option(help="Steps between checkpoints, each with a sheet of samples.")]
MixedPrecision = Annotated[str, Option(help="no, bf16 or fp16.")]
KeepMaps = Annotated[bool, Option("--keep-maps", help="Read each reference once and keep it: more memory, less time.")]
GradientCheckpointing = Annotated[bool, Option("--gradient-checkpointing", help="Less memory for more time.")]
