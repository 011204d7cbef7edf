"""Opens the models that evaluation compares (`quantize.runs.models` names them).

Baseline and candidate may run behind OpenAI-compatible servers instead of in this process.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from quantize.checkpoints.layout import check_mode
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.host.progress import say
from quantize.recipe.controls import JUDGED, SETTINGS
from quantize.recipe.sections import Evaluation, OperatingPoint
from quantize.recovery.samples import Finished, Waiting
from quantize.recovery.served import Servers
from quantize.runs.manifest import fingerprint, package_versions
from quantize.runs.models import AT_POINT, BASELINE, BASELINE_AGAIN, CANDIDATE, EXPORTED, in_mode
from quantize.runtime import Placement, Sampler
from quantize.runtime.gpu.placement import CPU
from quantize.schemes.modes import ActivationMode
from quantize.stages.evaluate.local_model import Answerer, ExportedAnswerer


class Backend(Protocol):
    """A model that answers batches of requests; `made_with` says what its samples depend on."""

    sampler_settings: dict[str, Any]
    made_with: dict[str, Any]  # everything besides their requests that its samples depend on
    loading_seconds: float  # seconds spent so far on loading the model

    def __call__(self, requests: Waiting) -> Iterator[Finished]:
        """Yield each request that it takes, once answered; no answer depends on other requests."""
        ...

    def release(self) -> None:
        """Free the model's memory after its last request."""
        ...


class ServedModel:
    """A model behind servers: requests go to free servers, `in_flight` to each server at once.

    `digest` is the fingerprint of the checkpoint that the servers should serve. `revision` is the
    user's name for the weights; it is needed if a server reports no fingerprint.

    Raises:
        InputError: a server has other weights than `digest`; it reports none and `revision` is
            None; two servers differ in what they serve. ServerError: as in `Servers`.
    """

    loading_seconds = 0.0

    def __init__(
        self, urls: Sequence[str], in_flight: int, digest: str, revision: str | None
    ) -> None:
        self.servers = Servers(urls, in_flight=in_flight, api_key=os.environ.get("OPENAI_API_KEY"))
        # Template, sampler and precision are the server's own, so both models must be served.
        self.sampler_settings: dict[str, Any] = {"sampler": "the server's"}
        about = [self._described(server, digest, revision) for server in self.servers.all]
        for server, entry in zip(self.servers.all, about, strict=True):
            if entry != about[0]:
                key = next(key for key in entry if entry[key] != about[0][key])
                raise InputError(
                    f"{server.url}: its {key} is {entry[key]!r}, and that of {self.servers.all[0].url} "
                    f"is {about[0][key]!r}; name servers of one model"
                )
        self.made_with: dict[str, Any] = {"model": about[0], "versions": package_versions()}

    @staticmethod
    def _described(server: Any, digest: str, revision: str | None) -> dict[str, Any]:
        weights = server.about.get("fingerprint")
        if weights is None and revision is None:
            raise InputError(
                f"{server.url}: this server does not say which weights it serves; name them with "
                f"--server-revision and --base-server-revision"
            )
        if weights not in (digest, None):
            raise InputError(
                f"{server.url}: serves other weights ({weights}) than the run's ({digest})"
            )
        served = {"served": server.model, "weights": weights, "revision": revision}
        return served | {"activations": server.about.get("activations")}

    def __call__(self, requests: Waiting) -> Iterator[Finished]:
        """Yield each request with its answer; requests are sent one by one, several in flight."""
        return self.servers(requests)

    def release(self) -> None:
        """Do nothing: the servers keep their model."""


@dataclass(frozen=True)
class ComparedModel:
    """One model that is scored: the folder of its scores, its backend, the seed of its noise."""

    name: str
    backend: Backend
    seed: int
    free: Collection[str] = ()  # sampler settings in which it may differ from the baseline


def candidates(
    judged: ActivationMode, more: Sequence[ActivationMode]
) -> list[tuple[str, ActivationMode]]:
    """Return (folder name, activation mode) of each candidate; the gate judges the first."""
    modes = dict.fromkeys((judged, *more))
    return [(CANDIDATE if mode == judged else in_mode(mode), mode) for mode in modes]


@dataclass(frozen=True)
class ModelOptions:
    """Which models an evaluation scores besides baseline and candidate, and where they run."""

    modes: Sequence[ActivationMode] = ()  # activation modes to score besides the recipe's
    noise_floor: bool = False  # whether BF16 is scored once more, with another seed
    servers: Sequence[str] = ()  # URLs of servers with the quantized model
    base_servers: Sequence[str] = ()  # URLs of servers with the BF16 model
    server_revision: str | None = None  # weights that `servers` serve, if they do not report them
    base_server_revision: str | None = None  # weights that `base_servers` serve, likewise
    in_flight: int = 8  # requests in flight at each server
    gguf: Path | None = None  # a GGUF file of the quantized checkpoint, to score too
    llama_cpp: Path | None = None  # llama.cpp's server program, which runs the GGUF file
    place: Placement = CPU  # where models that are not served run
    # Operating points of the candidate, to score too.
    points: Mapping[str, OperatingPoint] = field(default_factory=dict[str, OperatingPoint])
    # Whether candidates answer at the settings of their own checkpoint, as a server of it would, in
    # place of the BF16 model's.
    as_served: bool = False

    def check(self) -> None:
        """Raise InputError if an option lacks one that it needs, or excludes one that is set."""
        if bool(self.servers) != bool(self.base_servers):
            raise InputError("--server and --base-server go together: both models are served alike")
        if (self.gguf is None) != (self.llama_cpp is None) or (self.gguf and self.servers):
            raise InputError("--gguf and --llama-cpp go together, and without --server")
        if self.points and self.servers:
            raise InputError("operating points go without --server: a server has its own sampler")


def open_models(
    source: Path,
    digest: str,
    checkpoint: Path,
    settings: Evaluation,
    options: ModelOptions,
    context: int,
    imported: Callable[[Backend], Backend | None] = lambda _: None,
) -> list[ComparedModel]:
    """Return the models, first the baseline, second the candidate; no weights are loaded.

    `digest` is the fingerprint of the BF16 checkpoint `source`. `context` is how many positions the
    longest prompt and its answer take. `imported` gets the first candidate's backend; it returns a
    backend of imported answers for the baseline, or None if there are none.

    Raises:
        InputError: a server or GGUF file has another model, a mode does not fit the checkpoint, or
            an operating point allows more denoising steps than the baseline's sampler.
        ResourceError: not one sample fits the GPU. ServerError: as in `ServedModel`.
    """
    bf16_sampler, artifact = Sampler.from_checkpoint(source), Checkpoint.open(checkpoint)
    sampler, free = bf16_sampler, frozenset[str]()
    if options.as_served:
        sampler, free = Sampler.from_checkpoint(checkpoint), frozenset(SETTINGS)
    named = candidates(settings.activations, options.modes)
    for _, mode in named:
        check_mode(artifact, mode)
    quantized = fingerprint(artifact)
    weights = quantized if options.as_served else fingerprint(artifact, settings_of=source)

    def local(
        folder: Path, identity: str, mode: ActivationMode, sampler: Sampler = sampler
    ) -> Answerer:
        place = replace(options.place, activations=mode, max_context=context)
        return Answerer(folder, identity, sampler, place, settings.batch_size)

    def served(urls: Sequence[str], identity: str, revision: str | None) -> ServedModel:
        return ServedModel(urls, options.in_flight, identity, revision)

    models: list[ComparedModel] = []
    for name, mode in named:
        candidate: Backend = (
            served(options.servers, quantized, options.server_revision)
            if options.servers
            else local(checkpoint, weights, mode)
        )
        models.append(ComparedModel(name, candidate, settings.seed, free))
    pack = None if options.base_servers else imported(models[0].backend)
    bf16: Backend | None = None
    if options.base_servers:
        bf16 = served(options.base_servers, digest, options.base_server_revision)
    elif pack is None or options.noise_floor or options.gguf:
        bf16 = local(source, digest, "none", bf16_sampler)
    baseline = pack or bf16
    assert baseline is not None
    models.insert(0, ComparedModel(BASELINE, baseline, settings.seed))
    if options.noise_floor and bf16:
        models.append(ComparedModel(BASELINE_AGAIN, bf16, settings.seed + 1))
    if options.gguf and options.llama_cpp and isinstance(bf16, Answerer):
        exported = ExportedAnswerer(checkpoint, quantized, options.gguf, options.llama_cpp, bf16)
        models.append(ComparedModel(EXPORTED, exported, settings.seed))
    for name, point in options.points.items():
        settings_of_point = point.settings()
        steps = settings_of_point.get("max_denoising_steps", 0)
        if steps > bf16_sampler.max_denoising_steps:
            raise InputError(
                f"operating point {name}: {steps} steps of a canvas are more than "
                f"the baseline's {bf16_sampler.max_denoising_steps}, so it would be slower; name fewer"
            )
        mode = point.activations or settings.activations
        check_mode(artifact, mode)
        backend = local(checkpoint, weights, mode, replace(sampler, **settings_of_point))
        models.append(ComparedModel(AT_POINT + name, backend, settings.seed, free or JUDGED))
    return models


def warn_of_servers(models: Sequence[ComparedModel], token_limit: int, canvas_length: int) -> None:
    """Warn of servers that may encode finished canvases wrongly, if answers may exceed a canvas."""
    if token_limit <= canvas_length:
        return
    served = [model.backend.servers for model in models if isinstance(model.backend, ServedModel)]
    unsaid = {s.url for servers in served for s in servers.all if s.commit_pass is None}
    for url in sorted(unsaid):
        say(
            f"warning: {url} does not say how it encodes finished canvases: vLLM up to 0.33 does it "
            f"wrong, and answers longer than {canvas_length} tokens get worse. Install the plugin in "
            f"quantize/serve/vllm_plugin there, with its --middleware"
        )
