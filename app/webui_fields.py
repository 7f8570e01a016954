"""The fields of Automatic1111's API, and what becomes of each. Knows names and values alone.

Looked up in `modules/api/models.py` and `modules/processing.py` of the web UI, and in what its clients send.
"""

from __future__ import annotations

from typing import Any

from app.request_fields import IDLE, OBEYED, REFUSED, TOLD, Field, FieldTable

_NO_FILES = "no files are kept; the answer has the pictures"
_NO_HIRES = "of `enable_hr`, which is refused"
_PIXELS = "an edit keeps every pixel outside the mask"
_SIZE = "an edit has its picture's size"


def _are_idle(scripts: object) -> bool:
    """Return whether no script of `alwayson_scripts` is on: without arguments, or with all of them off."""
    return not scripts or (isinstance(scripts, dict) and all(map(_is_idle, scripts.values())))


def _is_idle(script: Any) -> bool:
    values = script.get("args") if isinstance(script, dict) else script
    if not isinstance(values, list):
        return not values
    return not values or values[0] is False or all(_is_off(each) for each in values)


def _is_off(value: Any) -> bool:
    return not value or (isinstance(value, dict) and value.get("enabled", value.get("is_cnet")) is False)


OVERRIDES = FieldTable(
    (
        Field("sd_model_checkpoint", OBEYED, "a model of `sd-models`"),
        Field("CLIP_stop_at_last_layers", OBEYED, "1 for all layers; of both prompts"),
        Field("sdxl_crop_top", OBEYED, "of models such as XL, which are told it"),
        Field("sdxl_crop_left", OBEYED, "of models such as XL, which are told it"),
        Field("sd_vae", REFUSED, "the model's own VAE is used; leave it out", ("", None, "None", "Automatic")),
        Field("forge_additional_modules", REFUSED, "the model's own parts are used; leave it out"),
        Field("eta_noise_seed_delta", REFUSED, "noise is that of the seed; leave it out"),
        Field("img2img_color_correction", TOLD, _PIXELS),
        Field("samples_format", TOLD, "answers are PNG files", ("", None, "png")),
        Field("sd_model_refiner", REFUSED, "there is no refiner; leave it out"),
        Field("face_restoration_model", IDLE, "of `restore_faces`, which is refused"),
        Field("code_former_weight", IDLE, "of `restore_faces`, which is refused"),
    ),
    prefix="override_settings.",
)
"""Fields of `override_settings`."""

_BOTH = (
    Field("prompt", OBEYED, "`<lora:name:0.8>` applies an offered LoRA"),
    Field("negative_prompt", OBEYED, "of new pictures and of opened ones"),
    Field("seed", OBEYED, "up to 2**63 - 1; -1, null or none draws a new one, which `info` tells"),
    Field("sampler_name", OBEYED, "a name of `samplers`; without it DDIM"),
    Field("sampler_index", OBEYED, "as `sampler_name`, which goes first"),
    Field("scheduler", OBEYED, "Automatic or none: Karras for DPM++ 2M and SDE, exponential for 2M SDE"),
    Field("steps", OBEYED, "25 if it is not given"),
    Field("cfg_scale", OBEYED, "the model's own if it is not given; below 1 it is no guidance, which is told"),
    Field("batch_size", OBEYED, "times `n_iter` at most 8"),
    Field("n_iter", OBEYED, "times `batch_size` at most 8"),
    Field("override_settings", OBEYED, "by its own table"),
    Field("clip_skip", OBEYED, "of SD.Next, as `override_settings.CLIP_stop_at_last_layers`"),
    Field("disable_extra_networks", OBEYED, "tags of LoRAs are left out, and not applied"),
    Field("send_images", OBEYED, "false answers without pictures"),
    Field(
        "override_settings_restore_afterwards",
        TOLD,
        "settings of a request are of that request alone; choose a model by `options`",
        (None, True),
        needs="override_settings",
    ),
    Field("eta", TOLD, "samplers with noise run with 1, others with 0", (None, 0, 1)),
    Field("s_churn", REFUSED, "samplers run without it; leave it out"),
    Field("s_tmin", IDLE, "of `s_churn`, which is refused"),
    Field("s_tmax", IDLE, "of `s_churn`, which is refused"),
    Field("s_noise", REFUSED, "samplers run with 1; leave it out", (None, 1)),
    Field("s_min_uncond", REFUSED, "every step is guided; leave it out"),
    Field("styles", REFUSED, "there are no styles; write their words into the prompt", (None, [], "", ["None"], [""])),
    Field("subseed_strength", REFUSED, "there are no variations of a seed; leave it out"),
    Field("subseed", IDLE, "of `subseed_strength`, which is refused"),
    Field("seed_resize_from_w", REFUSED, "noise is of the picture's own size; leave it out", (None, 0, -1)),
    Field("seed_resize_from_h", REFUSED, "noise is of the picture's own size; leave it out", (None, 0, -1)),
    Field("restore_faces", REFUSED, "nothing restores faces; leave it out"),
    Field("tiling", REFUSED, "pictures do not tile; leave it out"),
    Field("refiner_checkpoint", REFUSED, "there is no refiner; leave it out"),
    Field("refiner_switch_at", IDLE, "of `refiner_checkpoint`, which is refused"),
    Field("token_merging_ratio", REFUSED, "no tokens are merged; leave it out"),
    Field("token_merging_ratio_hr", IDLE, _NO_HIRES),
    Field("script_name", REFUSED, "there are no scripts; leave it out"),
    Field("script_args", IDLE, "of `script_name`, which is refused"),
    Field(
        "alwayson_scripts",
        REFUSED,
        "there are no scripts, such as ControlNet and ADetailer; leave those that are on out",
        is_usual=_are_idle,
    ),
    Field("controlnet_units", REFUSED, "control pictures are given to /gradio_api; leave it out"),
    Field("firstpass_image", REFUSED, "give it to img2img"),
    Field("infotext", REFUSED, "give its values as fields"),
    Field("comments", TOLD, "pictures record how they were made and nothing else"),
    Field("force_task_id", IDLE, "names the request; `progress` tells of the one that runs"),
    Field("save_images", TOLD, _NO_FILES),
    Field("do_not_save_samples", IDLE, _NO_FILES),
    Field("do_not_save_grid", IDLE, _NO_FILES),
    Field("url", IDLE, "of SillyTavern: where it sends its request"),
    Field("auth", IDLE, "of SillyTavern: what it sends in a header"),
)

_HIRES = (
    "hr_scale hr_upscaler hr_second_pass_steps hr_resize_x hr_resize_y hr_checkpoint_name hr_sampler_name hr_scheduler "
    "hr_prompt hr_negative_prompt hr_additional_modules hr_cfg hr_distilled_cfg"
)

TXT2IMG = FieldTable(
    (
        *_BOTH,
        Field("width", OBEYED, "the model's own if it is not given"),
        Field("height", OBEYED, "the model's own if it is not given"),
        Field("enable_hr", REFUSED, "ask for a larger width and height, or leave it out"),
        Field("denoising_strength", IDLE, _NO_HIRES),
        *(Field(name, IDLE, _NO_HIRES) for name in _HIRES.split()),
        Field("firstphase_width", REFUSED, "ask for a width; leave it out"),
        Field("firstphase_height", REFUSED, "ask for a height; leave it out"),
    )
)

IMG2IMG = FieldTable(
    (
        *_BOTH,
        Field(
            "init_images",
            OBEYED,
            "one picture in base64, also URL-safe, in lines or as a data URL; several are refused",
        ),
        Field("mask", OBEYED, "white where the picture may change; without one everywhere"),
        Field("inpainting_mask_invert", OBEYED, "1 changes where the mask is black"),
        Field("denoising_strength", OBEYED, "0.75 if it is not given"),
        Field("include_init_images", OBEYED, "`parameters` have the pictures that were sent"),
        Field("source_prompt", OBEYED, "ours: what the given picture shows"),
        Field("quality", OBEYED, "ours: fast, balanced or close"),
        Field("width", OBEYED, f"told if it is another: {_SIZE}"),
        Field("height", OBEYED, f"told if it is another: {_SIZE}"),
        Field("resize_mode", TOLD, _SIZE),
        Field("mask_blur", TOLD, _PIXELS, (None, 0, 4), "mask"),
        Field("mask_blur_x", TOLD, _PIXELS, (None, 0, 4), "mask"),
        Field("mask_blur_y", TOLD, _PIXELS, (None, 0, 4), "mask"),
        Field("mask_round", IDLE, "the mask is taken as it is"),
        Field("latent_mask", REFUSED, "give it as mask"),
        Field(
            "inpainting_fill",
            TOLD,
            "`denoising_strength` says how much of the picture's own content stays",
            (None, 0, 1),
            "mask",
        ),
        Field(
            "inpaint_full_res",
            TOLD,
            "of a picture larger than the model paints, the part around the mask is painted at full resolution",
            (None, True),
            "mask",
        ),
        Field("inpaint_full_res_padding", TOLD, "the part's own surroundings are taken", (None, 0, 32), "mask"),
        Field("initial_noise_multiplier", REFUSED, "noise is of strength 1; leave it out", (None, 1)),
        Field("image_cfg_scale", TOLD, "it is of other models", (None, 0, 1, 1.5)),
    )
)

OPTIONS = FieldTable(
    (Field("sd_model_checkpoint", OBEYED, "a model of `sd-models`, for later requests"),), prefix="options."
)
"""Fields of `POST /options`."""
