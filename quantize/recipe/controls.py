"""Declares each control of the sampler once: its default, its bounds, its names in requests and GGUF.

Five things are made from these declarations: samplers, recipes' operating points, fields of requests,
options of the command line, keys of GGUF files. `fused_dequant.sampler.canvas` says what each does.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any, Literal


def _control(
    default: float,
    says: str,
    *,
    asked: dict[str, Any],
    gguf: str,  # llama.cpp's name
    alias: str | None = None,  # the name in requests
    judged: bool = True,  # whether an operating point may set it
    **bounds: Any,
) -> Any:
    """Declare a control; `bounds`, and `asked` of requests, are keywords of pydantic's `Field`."""
    about = {"says": says, "bounds": bounds, "asked": {**bounds, **asked, "alias": alias}}
    return field(default=default, metadata=about | {"gguf": gguf, "judged": judged})


@dataclass(frozen=True, kw_only=True)
class Controls:
    """How a canvas is denoised; the defaults are transformers'."""

    max_denoising_steps: int = _control(
        48, "Denoising steps of a canvas, at most.",
        ge=1, le=1000, asked={"le": 256}, alias="num_inference_steps", gguf="eb_max_steps",
    )  # fmt: skip
    entropy_bound: float = _control(
        0.1, "Largest sum of lower entropies, in nats, at which a step still accepts a token.",
        gt=0, allow_inf_nan=False, asked={"le": 1000}, gguf="eb_entropy_bound",
    )  # fmt: skip
    t_min: float = _control(
        0.4, "Temperature after the last step.", judged=False,
        ge=0, allow_inf_nan=False, asked={"le": 10}, gguf="eb_t_min",
    )  # fmt: skip
    t_max: float = _control(
        0.8, "Temperature at the first step.", judged=False,
        allow_inf_nan=False, asked={"ge": 0.01, "le": 10}, gguf="eb_t_max",
    )  # fmt: skip
    confidence_threshold: float = _control(
        0.005, "Mean entropy, in nats, below which a stable canvas is finished.",
        gt=0, allow_inf_nan=False, asked={"le": 1000}, gguf="eb_confidence_threshold",
    )  # fmt: skip
    stability_threshold: int = _control(
        1, "Steps over which a stable canvas does not change.",
        ge=0, asked={"le": 16}, gguf="eb_stability_threshold",
    )  # fmt: skip


CONTROLS = {control.name: control for control in fields(Controls)}
JUDGED = {name for name, control in CONTROLS.items() if control.metadata["judged"]}
# All settings of a sampler: the controls, and what ends a sample (`runtime.sampler.Sampler`).
SETTINGS = {*CONTROLS, "max_new_tokens", "max_length", "eos_token_ids", "pad_token_id"}
REQUEST_NAMES = [control.metadata["asked"]["alias"] or name for name, control in CONTROLS.items()]


def bounds_of(name: str) -> tuple[int, int]:
    """Return the least and the largest value of an integer control; KeyError if a bound is missing."""
    bounds = CONTROLS[name].metadata["bounds"]
    return bounds["ge"], bounds["le"]


def optional(names: Collection[str], of: Literal["bounds", "asked"]) -> dict[str, Any]:
    """Return control -> (type, optional pydantic field), bounded for recipes or requests ("asked")."""
    from pydantic import Field  # not needed for the help of the command line

    made: dict[str, Any] = {}
    for name, control in CONTROLS.items():
        if name in names:
            about = control.metadata
            kind: Any = control.type
            made[name] = kind | None, Field(None, description=about["says"], **about[of])
    return made
