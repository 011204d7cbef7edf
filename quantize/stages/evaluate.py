"""Score BF16 and quantized alike: same harness, prompts, seeds and sampler.

Sides, each a folder of `evaluation/`:

    bf16                 the base
    quantized            what the gate judges, activations rounded as the recipe says
    quantized-<mode>     further ways to round activations, when asked for
    quantized-gguf       the GGUF file that was exported of it, in llama.cpp, when given
    bf16-again           BF16 with a second seed: the noise floor, when asked for

Either model may sit behind an OpenAI-compatible server instead of in this process. A task is done on
a side when its conditions file names the model and settings of this run; finished samples of an
unfinished task are kept beside it. BF16 scores do not depend on the recipe, so runs share their
samples in `.bf16/` beside the runs, under a hash of everything they depend on.

Under `torchrun --nproc-per-node N` the processes share each task's batches, one GPU each where there
are GPUs (recovery.samples.Share); every batch is what one process would have made of it, so the scores
are the same. The first process writes what they have found.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from recovery.gate import out_of_reach
from recovery.own import Definition
from recovery.samples import Batch, Finished, SampleStore, Share
from recovery.scoring import Scoring, local_data, score, size
from recovery.served import Server, ServerError

from quantize.bundled import HELDOUT
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError, ResourceError
from quantize.locks import locked
from quantize.manifest import fingerprint, package_versions
from quantize.processes import Processes, joined
from quantize.progress import metered, say
from quantize.recipe import ActivationMode, Evaluation, Gate
from quantize.run_dir import RunDir, read_json, write_json, write_text
from quantize.runtime import Sampler
from quantize.stages.answerer import Answerer, ExportedAnswerer
from quantize.stages.recording import leave_questions, record_differing

BF16, BF16_AGAIN, QUANTIZED = "bf16", "bf16-again", "quantized"
EXPORTED = "quantized-gguf"
BUNDLED_TASKS = ("word_problems", "word_problems_thinking")


class Backend(Protocol):
    """A model that answers batches, and what its samples depend on."""

    sampler_settings: dict[str, Any]
    made_with: dict[str, Any]
    one_by_one: bool  # whether samples are asked for on their own, not in fixed batches

    def __call__(self, batches: Sequence[Batch]) -> Iterator[Finished]:
        """Yield each batch as it is finished."""
        ...

    def release(self) -> None:
        """Give the model's memory back: its jobs are done."""
        ...


class ServedModel:
    """A model behind a server.

    Args:
        url: of the server.
        in_flight: requests at once.
        digest: fingerprint of the checkpoint that it should serve.
        revision: what the user says that it serves, for a server that tells no fingerprint.

    Raises:
        InputError: it serves something else, or nobody says what.
    """

    one_by_one = True

    def __init__(self, url: str, in_flight: int, digest: str, revision: str | None) -> None:
        self.server = Server(url, in_flight=in_flight, api_key=os.environ.get("OPENAI_API_KEY"))
        # Its template, sampler and precision are the server's own; both sides must be served then.
        self.sampler_settings: dict[str, Any] = {"sampler": "the server's"}
        weights = self.server.about.get("fingerprint")
        if weights is None and revision is None:
            raise InputError(
                f"{url}: this server does not say which weights it serves; name them with "
                f"--server-revision and --base-server-revision"
            )
        if weights not in (digest, None):
            raise InputError(f"{url}: serves other weights ({weights}) than the run's ({digest})")
        model = {"served": self.server.model, "weights": weights, "revision": revision}
        model["activations"] = self.server.about.get("activations")
        self.made_with: dict[str, Any] = {"model": model, "versions": package_versions()}

    def __call__(self, batches: Sequence[Batch]) -> Iterator[Finished]:
        """Ask for every sample on its own, several at a time."""
        return self.server(batches)

    def release(self) -> None:
        """Do nothing: the server stays."""


@dataclass(frozen=True)
class Side:
    """One thing that is scored: the folder of its scores, its model, the seed of its noise."""

    name: str
    backend: Backend
    seed: int


@dataclass(frozen=True)
class Job:
    """One task on one side that is not scored yet, and how many samples it takes."""

    side: Side
    task: str
    data_file: Path | None
    made_with: dict[str, Any]
    samples: int
    token_limit: int
    definition: Definition | None = None


def evaluate(
    run: RunDir,
    source: Path,
    digest: str,
    settings: Evaluation,
    *,
    gate: Gate | None = None,
    modes: Sequence[ActivationMode] = (),
    noise_floor: bool = False,
    data_dir: Path | None = None,
    server: str | None = None,
    base_server: str | None = None,
    server_revision: str | None = None,
    base_server_revision: str | None = None,
    in_flight: int = 8,
    gguf: Path | None = None,
    llama_cpp: Path | None = None,
    device: str = "cpu",
    gpu_memory: float | None = None,
) -> None:
    """Score every task of the recipe on every side; write evaluation/<side>/<task>.jsonl.

    Args:
        run: where the quantized checkpoint is and the scores go.
        source: folder of the BF16 checkpoint.
        digest: its fingerprint.
        settings: tasks, limits, repeats, seed.
        gate: what the scores will be judged by; where PASS cannot be reached, that is said first.
        modes: activation modes to score besides the recipe's.
        noise_floor: whether BF16 is scored once more, with another seed.
        data_dir: folder with <task>.jsonl or .csv files in place of data sets on the Hub.
        server: URL of a server with the quantized model.
        base_server: URL of a server with the BF16 model; both are served, or neither.
        server_revision: what the server serves, where it does not tell.
        base_server_revision: the same of the server with the BF16 model.
        in_flight: requests at once to a server.
        gguf: a GGUF file of the quantized checkpoint, to be scored too.
        llama_cpp: the program that computes its logits; both are given, or neither.
        device: where the models run that are not served.
        gpu_memory: bytes of a GPU that may be used, None for what is free.

    Raises:
        InputError: a task's own file that cannot be read, one server of two, or a GGUF file of another
            checkpoint.
        ResourceError: a data set or a server that cannot be had.
    """
    if (server is None) != (base_server is None):
        raise InputError("--server and --base-server go together: both models are served alike")
    if (gguf is None) != (llama_cpp is None) or (gguf and server):
        raise InputError("--gguf and --llama-cpp go together, and without --server")
    data = {task: data_file(task, data_dir, settings) for task in settings.tasks}
    sampler = Sampler.from_checkpoint(source)

    quantized = fingerprint(Checkpoint.open(run.checkpoint))

    def base_model() -> Backend:
        if base_server:
            return ServedModel(base_server, in_flight, digest, base_server_revision)
        return local(source, digest, "none")

    def quantized_model(mode: ActivationMode) -> Backend:
        if server:
            return ServedModel(server, in_flight, quantized, server_revision)
        return local(run.checkpoint, quantized, mode)

    def local(folder: Path, identity: str, mode: ActivationMode) -> Backend:
        return Answerer(
            folder, identity, mode, sampler, device, settings.dtype, settings.batch_size,
            gpu_memory=gpu_memory,
        )  # fmt: skip

    with joined() as processes:
        try:
            base = base_model()
            sides = [Side(BF16, base, settings.seed)]
            if noise_floor:
                sides.append(Side(BF16_AGAIN, base, settings.seed + 1))
            for name, mode in quantized_sides(settings.activations, modes):
                sides.append(Side(name, quantized_model(mode), settings.seed))
            if gguf and llama_cpp and isinstance(base, Answerer):
                exported = ExportedAnswerer(run.checkpoint, quantized, gguf, llama_cpp, base)
                sides.append(Side(EXPORTED, exported, settings.seed))
            jobs = _jobs(run, sides, settings, data)
            if gate is not None:
                _announce_limits(jobs, gate)
            _warn_of_servers(jobs, int(read_json(run.checkpoint / "config.json")["canvas_length"]))
            _score_all(run, jobs, settings, processes)
        except ServerError as error:
            raise ResourceError(str(error)) from error
        if processes.rank == 0:
            _leave_for_the_report(run, data, settings, sides)
            write_json(run.evaluation / "done.json", {"tasks": settings.tasks})


def _score_all(
    run: RunDir, jobs: Sequence[Job], settings: Evaluation, processes: Processes
) -> None:
    """Score jobs in order; give a model's memory back when its last job is done."""
    _announce(jobs)
    share = Share(processes.rank, processes.count, processes.wait)
    for job, following in zip_longest(jobs, jobs[1:]):
        _score(run, job, settings, share)
        if following is None or following.side.backend is not job.side.backend:
            job.side.backend.release()


def _leave_for_the_report(
    run: RunDir, data: dict[str, Path | None], settings: Evaluation, sides: Sequence[Side]
) -> None:
    """Note the questions of every task, and record canvases of those that differ."""
    models = {side.name: side.backend for side in sides if isinstance(side.backend, Answerer)}
    compared = {name: models[name] for name in (BF16, QUANTIZED) if name in models}
    for task, file in data.items():
        own = settings.own_tasks.get(task)
        requests = leave_questions(run, task, file, own.definition() if own else None)
        if requests and len(compared) == 2:
            record_differing(run, task, requests, compared)


def quantized_sides(
    gated: ActivationMode, more: Sequence[ActivationMode]
) -> list[tuple[str, ActivationMode]]:
    """Return (folder name, activation mode); the gate reads the first."""
    named: dict[ActivationMode, str] = {gated: QUANTIZED}
    for mode in more:
        named.setdefault(mode, f"{QUANTIZED}-{mode.replace('_', '-')}")
    return [(name, mode) for mode, name in named.items()]


def data_file(task: str, data_dir: Path | None, settings: Evaluation) -> Path | None:
    """Return the local file of a task, None when its data set comes from the Hub.

    Raises:
        ResourceError: `data_dir` has no such file.
    """
    own = settings.own_tasks.get(task)
    if own is not None and own.data is not None:
        return Path(own.data)
    if data_dir is None:
        return HELDOUT if task in BUNDLED_TASKS else None
    found = local_data(task, data_dir)
    if found is None and own is None:
        raise ResourceError(f"{data_dir}: no .jsonl or .csv of task {task!r}; put it there")
    return found


def _jobs(
    run: RunDir, sides: Sequence[Side], settings: Evaluation, data: dict[str, Path | None]
) -> list[Job]:
    """Load every data set before any model; return what is not scored yet, side by side.

    Raises:
        ResourceError: a data set cannot be had or read.
    """
    jobs: list[Job] = []
    try:
        used = {task: own for task, own in settings.own_tasks.items() if task in data}
        own = {task: each.definition() for task, each in used.items()}
        sizes = {task: size(task, file, own.get(task)) for task, file in data.items()}
    except ValueError as error:
        raise ResourceError(str(error)) from error
    for side in sides:
        for task, (documents, token_limit) in sizes.items():
            repeats = settings.repeats.get(task, 1)
            made_with = side.backend.made_with | {
                "task": task,
                "data": _digest(data[task]),
                "limit": settings.limit.get(task),
                "repeats": repeats,
                "seed": side.seed,
                "batch_size": settings.batch_size,
            }
            if task in own:
                made_with["definition"] = settings.own_tasks[task].digest()
            made_with = json.loads(json.dumps(made_with))  # as it is read back
            samples = repeats * min(documents, settings.limit.get(task, documents))
            if not _is_done(run.evaluation / side.name, task, made_with):
                found = Job(side, task, data[task], made_with, samples, token_limit, own.get(task))
                jobs.append(found)
    return jobs


def _warn_of_servers(jobs: Sequence[Job], canvas_length: int) -> None:
    """Name servers that may answer worse than their model, where answers take several canvases."""
    longer = [job.side.backend for job in jobs if job.token_limit > canvas_length]
    served = [backend.server for backend in longer if isinstance(backend, ServedModel)]
    for url in sorted({server.url for server in served if server.commit_pass is None}):
        say(
            f"warning: {url} does not say how it encodes finished canvases: vLLM up to 0.33 does it "
            f"wrong, and answers longer than {canvas_length} tokens get worse. Install the plugin in "
            f"quantize/serve/vllm_plugin there, with its --middleware"
        )


def _announce(jobs: Sequence[Job]) -> None:
    """Say how much there is to do at most; the rate is known when a first minute has passed."""
    for job in jobs:
        say(
            f"{job.task}, {job.side.name}: {job.samples} samples of at most {job.token_limit} tokens"
        )
    if jobs:
        tokens = sum(job.samples * job.token_limit for job in jobs)
        say(f"at most {tokens:,} tokens, were no answer to end before its limit")


def _announce_limits(jobs: Sequence[Job], gate: Gate) -> None:
    """Say on which tasks PASS cannot be reached, now that the sizes of their data sets are known."""
    for job in jobs:
        if job.side.name == QUANTIZED:
            repeats = job.made_with["repeats"]
            sentence = out_of_reach(
                job.task,
                gate.estimand,
                questions=job.samples // repeats,
                repeats=repeats,
                margin_pp=gate.margin_pp[job.task],
                confidence=gate.confidence,
            )
            if sentence:
                say(sentence)


def _score(run: RunDir, job: Job, settings: Evaluation, share: Share) -> None:
    path = _store_path(run, job.side, job.task, job.made_with)
    with locked(path.with_name(f".{path.stem}.lock"), str(path)):
        try:
            store = SampleStore(path, job.made_with, share)
        except ValueError as error:
            raise InputError(str(error)) from error
        _complete(run, job, settings, store)


def _complete(run: RunDir, job: Job, settings: Evaluation, store: SampleStore) -> None:
    side, task = job.side, job.task
    scoring = score(
        task,
        store,
        side.backend,
        data_file=job.data_file,
        definition=job.definition,
        limit=settings.limit.get(task),
        repeats=settings.repeats.get(task, 1),
        seed=side.seed,
        batch_size=1 if side.backend.one_by_one else settings.batch_size,
        sampler=side.backend.sampler_settings,
        progress=lambda finished, samples: _counted(finished, samples, job),
    )
    if scoring is None:
        return
    _write(run.evaluation / side.name, scoring)
    if side.name != BF16:
        store.remove()


def _counted(finished: Iterator[Finished], samples: int, job: Job) -> Iterator[Finished]:
    """Pass finished batches on, and show how many samples and tokens there are."""
    backend = job.side.backend
    with metered(f"{job.task}, {job.side.name}", samples, "samples") as meter:
        if isinstance(backend, Answerer):
            backend.announce = meter.announce
        for batch, completions in finished:
            meter.add(len(batch), sum(completion.tokens for completion in completions))
            yield batch, completions


def _digest(file: Path | None) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file else None


def _is_done(folder: Path, task: str, made_with: dict[str, Any]) -> bool:
    conditions = folder / f"{task}.conditions.json"
    return (
        (folder / f"{task}.jsonl").exists()
        and conditions.exists()
        and read_json(conditions)["made_with"] == made_with
    )


def _store_path(run: RunDir, side: Side, task: str, made_with: dict[str, Any]) -> Path:
    """Return where finished samples are kept: in the run, or shared by runs for a local BF16."""
    key = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:12]
    if side.name == BF16 and isinstance(side.backend, Answerer):
        return run.path.parent / ".bf16" / f"{task}-{key}.jsonl"
    return run.evaluation / side.name / f"{task}-{key}.partial.jsonl"


def _write(folder: Path, scoring: Scoring) -> None:
    """Write rows, then conditions: the conditions say that the task is done, and for what."""
    rows = [json.dumps(asdict(row), ensure_ascii=False) for row in scoring.rows]
    write_text(folder / f"{scoring.task}.jsonl", "\n".join(rows) + "\n")
    conditions = {"compared": scoring.conditions, "made_with": scoring.made_with}
    write_json(folder / f"{scoring.task}.conditions.json", conditions)
