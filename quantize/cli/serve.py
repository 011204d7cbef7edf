"""`quantize serve`: an OpenAI-compatible endpoint."""

import os
from collections.abc import Callable
from dataclasses import Field, fields
from functools import partial
from textwrap import fill
from typing import Any

import click

from quantize.cli.options import served_name, with_options
from quantize.recipe.controls import REQUEST_NAMES
from quantize.schemes.modes import ActivationMode
from quantize.serve.options import KEY_VARIABLE, Options

SERVING = ("fastapi", "uvicorn", "prometheus_client", "starlette", "llguidance")
HELP = """Serve a checkpoint as an OpenAI-compatible endpoint: quantize serve CHECKPOINT.

CHECKPOINT is a folder or a Hub id, BF16 or quantized; `bundled` is the model that ships. Needs
the extra: pip install 'diffusiongemma-quantize[serve]'.

\b
  quantize serve bundled                 then open http://127.0.0.1:8000/
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "bundled", "messages": [{"role": "user", "content":
    "Anna has 132 cards. Anna picks 94 more. How many cards does Anna have now?"}]}'
  answers 226. The bundled model knows such word problems alone; JSON, a system prompt, a second turn
  and, with --chat-template tools, tools are taken, and mean nothing to it. A form that it can fill:
    "guided_regex": "#### [0-9]{1,6}", "chat_template_kwargs": {"enable_thinking": true}

\b
Also /v1/completions, /v1/responses, /v1/models, /health, /metrics (Prometheus), /version, /docs.
Honoured: max_tokens, stop, seed, n, stream with stream_options.include_usage,
  image_url parts of a user's message (data URLs of PNG, JPEG or WebP; image_tokens, 70
  to 1120, is the most tokens per picture; nothing is fetched),
  chat_template_kwargs.enable_thinking (thoughts come back as reasoning_content),
  the sampler's CONTROLS,
  known text: suffix of a completion, pinned [{position, text}], initial_text,
  tools with tool_choice and parallel_tool_calls, response_format (json_object, json_schema),
  guided_json, guided_regex, logprobs with top_logprobs up to 20, reasoning_effort (none or other).
Ignored: temperature, top_p, top_k, min_p and penalties, which steer sampling token by token;
  verbosity, service_tier, store; a message's name, a picture's detail. The header
  X-Ignored-Parameters names those that a request has; --strict refuses them.
  usage.ignored_parameters repeats them. Without max_tokens an answer has at most as many as the
  checkpoint's generation_config.json says (128 with the bundled model); /v1/models lists them as
  default_max_tokens. A max_tokens above what there is room for gives what there
  is, and the header X-Max-Tokens says how much.
  temperature 0 without a seed takes a fixed seed. Any other field is refused with 400, by name.
A stream sends finished canvases; with stream_options.include_drafts also every denoising step.

If the environment variable QUANTIZE_API_KEY is set, clients must send its value as the API key.
Choice j of a request with a seed has the noise of seed + j, whatever else is served meanwhile;
on a GPU rounding depends on the batch, unless --batch-invariant is given.
--data-parallel N serves with a copy of the weights on each of N GPUs, by Ray Serve (the extra
`cluster`); the header X-Worker says which GPU answered.
SIGTERM lets running requests finish and refuses waiting ones.
""".replace("CONTROLS", fill(", ".join(REQUEST_NAMES), 72, subsequent_indent="  "))


def _option(setting: Field[Any]) -> Callable[[Any], Any]:
    name = f"--{setting.name.replace('_', '-')}"
    return click.option(name, default=setting.default, show_default=True, **setting.metadata)


@click.command(help=HELP)
@with_options(
    "checkpoint",
    click.option("--model-name", help="Name in requests; by default the Hub id, run or folder."),
    click.option(
        "--data-parallel", "workers", type=click.IntRange(1, 64), default=1, show_default=True,
        help="Number of GPUs that serve behind one port; each has a process and a copy of the weights.",
    ),
    click.option(
        "--prefix-cache", "prefix_mib", type=click.IntRange(min=0), default=0, show_default=True,
        help="MiB of device memory that keep encoded beginnings of prompts for later requests.",
    ),
    *(_option(setting) for setting in fields(Options) if setting.metadata),
    "activations",
    "gpu-memory",
    click.option("--ignore-unsupported", is_flag=True, expose_value=False, hidden=True),
    click.option(
        "--allow-origin", "origins", multiple=True, metavar="URL",
        help="Let pages of this origin send requests: https://chat.example; * for all; repeatable.",
    ),
)  # fmt: skip
def serve(
    checkpoint: str, model_name: str | None, activations: ActivationMode | None,
    gpu_memory: float | None, prefix_mib: int, workers: int, **settings: Any,
) -> None:  # fmt: skip
    """Serve a checkpoint until SIGINT or SIGTERM."""
    from quantize.checkpoints.reader import resolve
    from quantize.errors import ResourceError
    from quantize.host.processes import best_device
    from quantize.runtime import Placement

    try:
        from quantize.serve.server import serve as serve_here

        if workers > 1:
            from quantize.serve.cluster import serve as serve_together

            serve_here = partial(serve_together, count=workers)
    except ModuleNotFoundError as error:
        if error.name not in (*SERVING, "ray"):
            raise
        extra = "cluster" if error.name == "ray" else "serve"
        raise ResourceError(
            f"serve needs {error.name}: pip install 'diffusiongemma-quantize[{extra}]'"
        ) from error
    folder = resolve(checkpoint)
    name = model_name or served_name(checkpoint, folder)
    options = Options(
        name,
        api_key=os.environ.get(KEY_VARIABLE),
        prefix_bytes=prefix_mib << 20,
        **settings,
    )
    place = Placement(best_device(), gpu_memory, activations)
    serve_here(folder, options, place)
