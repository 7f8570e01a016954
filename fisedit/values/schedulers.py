"""Names of samplers: our own, diffusers' and those of web UIs; and how often each evaluates the UNet."""

from __future__ import annotations

from enum import StrEnum


class SchedulerName(StrEnum):
    """Samplers, each run by diffusers' own class. Web UIs' names, such as "DPM++ 2M Karras", are understood as well."""

    DDIM = "ddim"
    DDIM_TRAILING = "ddim_trailing"
    DPM_SOLVER = "dpmsolver++"
    DPM_SOLVER_KARRAS = "dpmsolver++_karras"
    DPM_SOLVER_SDE = "dpmsolver++_sde"
    DPM_SOLVER_SDE_KARRAS = "dpmsolver++_sde_karras"
    DPM_SOLVER_SDE_EXPONENTIAL = "dpmsolver++_sde_exponential"
    DPM_SDE = "dpm_sde"
    DPM_SDE_KARRAS = "dpm_sde_karras"
    EULER = "euler"
    EULER_TRAILING = "euler_trailing"
    EULER_ANCESTRAL = "euler_a"
    HEUN = "heun"
    PNDM = "pndm"
    UNIPC = "unipc"
    LCM = "lcm"
    TCD = "tcd"

    @classmethod
    def _missing_(cls, value: object) -> SchedulerName | None:
        return _SCHEDULER_OF_LABEL.get(value.casefold()) if isinstance(value, str) else None

    @property
    def label(self) -> str:
        """Its name in web UIs."""
        return SCHEDULER_LABELS[self]


SCHEDULER_LABELS = {
    SchedulerName.DDIM: "DDIM",
    SchedulerName.DDIM_TRAILING: "DDIM trailing",
    SchedulerName.DPM_SOLVER: "DPM++ 2M",
    SchedulerName.DPM_SOLVER_KARRAS: "DPM++ 2M Karras",
    SchedulerName.DPM_SOLVER_SDE: "DPM++ 2M SDE",
    SchedulerName.DPM_SOLVER_SDE_KARRAS: "DPM++ 2M SDE Karras",
    SchedulerName.DPM_SOLVER_SDE_EXPONENTIAL: "DPM++ 2M SDE Exponential",
    SchedulerName.DPM_SDE: "DPM++ SDE",
    SchedulerName.DPM_SDE_KARRAS: "DPM++ SDE Karras",
    SchedulerName.EULER: "Euler",
    SchedulerName.EULER_TRAILING: "Euler trailing",
    SchedulerName.EULER_ANCESTRAL: "Euler a",
    SchedulerName.HEUN: "Heun",
    SchedulerName.PNDM: "PLMS",
    SchedulerName.UNIPC: "UniPC",
    SchedulerName.LCM: "LCM",
    SchedulerName.TCD: "TCD",
}
"""Names of the schedulers in web UIs."""


_SCHEDULER_OF_LABEL = {label.casefold(): name for name, label in SCHEDULER_LABELS.items()} | {
    "ddimscheduler": SchedulerName.DDIM,
    "dpmsolvermultistepscheduler": SchedulerName.DPM_SOLVER,
    "eulerdiscretescheduler": SchedulerName.EULER,
    "eulerancestraldiscretescheduler": SchedulerName.EULER_ANCESTRAL,
    "heundiscretescheduler": SchedulerName.HEUN,
    "pndmscheduler": SchedulerName.PNDM,
    "unipcmultistepscheduler": SchedulerName.UNIPC,
    "lcmscheduler": SchedulerName.LCM,
    "tcdscheduler": SchedulerName.TCD,
}
"""Names of web UIs and of diffusers' classes, without case -> the scheduler."""


AUTOMATIC_SCHEDULES = {"dpm++ 2m": "Karras", "dpm++ sde": "Karras", "dpm++ 2m sde": "Exponential"}
"""Sampler of a web UI, in lower case -> its noise schedule where "Automatic" or none is chosen. Automatic1111's UI has
them since version 1.9. The schedules of other samplers are uniform."""

_AUTOMATIC, _UNIFORM = ("", "automatic"), ("uniform", "normal", "default")


def web_ui_scheduler(sampler: str, schedule: str) -> str:
    """Return a scheduler's name as `SchedulerName` takes it, for the two names that web UIs have since version 1.9.

    Args:
        sampler: a web UI's name, such as "DPM++ 2M" or "DPM++ 2M Karras"; the latter has its schedule already.
        schedule: a web UI's name of a noise schedule, such as "Karras"; "" for none.
    """
    name, noise = sampler.strip(), schedule.strip()
    if noise.casefold() in _AUTOMATIC:
        noise = AUTOMATIC_SCHEDULES.get(name.casefold(), "")
    is_told = noise.casefold() in _UNIFORM or name.casefold().endswith(noise.casefold())
    return name if is_told else f"{name} {noise}"


def num_timesteps(scheduler: SchedulerName, steps: int) -> int:
    """Evaluations of the UNet in so many steps of a sampler.

    Args:
        scheduler: the sampler.
        steps: 1 or more.
    """
    if scheduler is SchedulerName.HEUN:
        return 2 * steps - 1
    return steps + (scheduler is SchedulerName.PNDM and steps > 1)
