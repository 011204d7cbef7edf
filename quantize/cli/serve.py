"""`quantize serve`: an OpenAI-compatible endpoint."""

import os
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from quantize.cli.options import ACTIVATIONS, GPU_MEMORY, served_name
from quantize.recipe.controls import REQUEST_NAMES

if TYPE_CHECKING:
    from quantize.schemes.modes import ActivationMode


HELP = """Serve a checkpoint as an OpenAI-compatible endpoint: quantize serve CHECKPOINT.

CHECKPOINT is a folder or a Hub id, BF16 or quantized; `bundled` is the model that ships. Needs
the extra: pip install 'diffusiongemma-quantize[serve]'.

\b
  quantize serve bundled                 then open http://127.0.0.1:8000/
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "bundled", "messages": [{"role": "user", "content":
    "Anna has 132 cards. Anna picks 94 more. How many cards does Anna have now?"}]}'
  answers 226.

\b
Also /v1/completions, /v1/models, /health, /metrics (Prometheus), /version, /docs.
Honoured: max_tokens, stop, seed, n, stream with stream_options.include_usage,
  image_url parts of a user's message (data URLs of PNG, JPEG or WebP; image_tokens, 70
  to 1120, is the most that one takes; nothing is fetched),
  chat_template_kwargs.enable_thinking (thoughts come back as reasoning_content),
  the sampler's CONTROLS,
  the canvas: suffix of a completion, pinned [{position, text}], initial_text,
  tools with tool_choice and parallel_tool_calls, response_format (json_object, json_schema),
  guided_json, guided_regex, logprobs with top_logprobs up to 20, reasoning_effort (none or not).
What steers sampling token by token (temperature, top_p, top_k, min_p, penalties) has no meaning
  here: it is ignored, and named in the header X-Ignored-Parameters; --strict refuses it. So are
  a message's name and a picture's detail.
  temperature 0 without a seed takes a fixed one. Anything else is refused with 400 and its name.
A stream sends finished canvases; stream_options.include_drafts shows them denoise.

Clients must send the key in the environment variable QUANTIZE_API_KEY, when there is one.
Choice j of a request with a seed has the noise of seed + j, whatever else is served meanwhile;
on a GPU roundings depend on the batch, unless --batch-invariant.
--data-parallel N serves with N GPUs, a copy of the weights each; header X-Worker says which.
SIGTERM lets running requests finish and refuses those that wait.
""".replace("CONTROLS", fill(", ".join(REQUEST_NAMES), 72, subsequent_indent="  "))


option = partial(click.option, show_default=True)
COUNT = click.IntRange(min=1)


@click.command(help=HELP)
@click.argument("checkpoint")
@option("--host", default="127.0.0.1", help="Other hosts need an API key.")
@option("--port", default=8000, type=click.IntRange(0, 65535))
@option("--model-name", help="Name that clients ask for; else the folder's.")
@option(
    "--max-num-seqs", type=click.IntRange(1, 64), default=4,
    help="Samples that are denoised together.",
)  # fmt: skip
@option(
    "--data-parallel", "workers", type=click.IntRange(1, 64), default=1,
    help="GPUs that serve, each a whole copy in a process of its own, all behind the one port.",
)  # fmt: skip
@option(
    "--max-queue",
    type=COUNT,
    default=64,
    help="Samples that may wait; more get 429 and Retry-After.",
)
@option(
    "--max-context", type=COUNT,
    help="Most tokens of prompt and answer; else what the model takes, on a GPU at most 8192.",
)  # fmt: skip
@option(
    "--prefix-cache", "prefix_mib", type=click.IntRange(min=0), default=0,
    help="MiB of the device for beginnings of prompts that are kept encoded, beside what it takes.",
)  # fmt: skip
@option(
    "--batch-invariant", is_flag=True,
    help="On a GPU: a seeded sample has the same text alone and beside others, at a full batch's cost.",
)  # fmt: skip
@option(
    "--max-prompt-tokens", type=COUNT,
    help="Most tokens of a prompt; else as many as the context leaves.",
)  # fmt: skip
@option("--max-body-bytes", type=COUNT, default=8 << 20, help="Most bytes of a request body.")
@option(
    "--request-timeout", type=click.FloatRange(min=0, min_open=True), default=600.0,
    help="Seconds a request may take, waiting included.",
)  # fmt: skip
@option(
    "--shutdown-grace", type=click.FloatRange(min=0), default=30.0,
    help="Seconds that running requests get after SIGTERM.",
)  # fmt: skip
@ACTIVATIONS
@GPU_MEMORY
@option(
    "--strict", is_flag=True,
    help="Refuse temperature, top_p, penalties and the like; else they are ignored and named.",
)  # fmt: skip
@option("--ignore-unsupported", is_flag=True, expose_value=False, hidden=True)
@option(
    "--allow-origin", "origins", multiple=True, metavar="URL",
    help="Web pages from there may ask, as https://chat.example; * for all; may be repeated.",
)  # fmt: skip
@option("--log-prompts", is_flag=True, help="Log prompts and answers; else neither is logged.")
def serve(
    checkpoint: str,
    model_name: str | None,
    activations: "ActivationMode | None",
    gpu_memory: float | None,
    prefix_mib: int,
    workers: int,
    **settings: Any,
) -> None:
    """Serve a checkpoint until SIGINT or SIGTERM."""
    from quantize.checkpoints.reader import Checkpoint, resolve
    from quantize.errors import ResourceError
    from quantize.host.processes import best_device
    from quantize.runs.manifest import fingerprint
    from quantize.runtime import Placement

    try:
        from quantize.serve.fleet import serve as serve_together
        from quantize.serve.options import KEY_VARIABLE, Options
        from quantize.serve.server import serve as serve_alone
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "prometheus_client", "starlette", "llguidance"):
            raise
        raise ResourceError(
            f"serve needs {error.name}: pip install 'diffusiongemma-quantize[serve]'"
        ) from error
    folder = resolve(checkpoint)
    name = model_name or served_name(checkpoint, folder)
    options = Options(
        name,
        api_key=os.environ.get(KEY_VARIABLE),
        fingerprint=fingerprint(Checkpoint.open(folder)),
        activations=activations or "as served",
        prefix_bytes=prefix_mib << 20,
        **settings,
    )
    place = Placement(best_device(), gpu_memory, activations)
    if workers == 1:
        serve_alone(folder, options, place)
    else:
        serve_together(folder, options, place, workers)
