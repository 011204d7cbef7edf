"""Recipes: what to quantize, how to calibrate, how to judge, in a strictly checked YAML file.

The keys `scheme`, `targets` and `ignore` are those of llm-compressor's QuantizationModifier. An unknown
key is an error. `reading` reads the files.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

from quantize.errors import InputError
from quantize.recipe.controls import JUDGED, optional
from quantize.recovery.catalog import known_tasks, notes, shipped, token_limit
from quantize.recovery.estimands import Estimand
from quantize.recovery.health import SIGNS
from quantize.recovery.own import Definition, at_limit, from_lm_eval, from_questions
from quantize.recovery.terms import Terms
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import SCHEMES, refusal
from quantize.schemes.rounding import Observer

if TYPE_CHECKING:
    SchemeName = str
    SignName = str
else:
    SchemeName = Literal[*SCHEMES]
    SignName = Literal[*SIGNS]
Rounding = Literal["nearest", "gptq"]
# Bounds on what a recipe may ask for: a number that is beyond them is a slip, and would be found when
# memory ends.
MOST_AT_ONCE, MOST_REPEATS, MOST_TOKENS = 65_536, 10_000, 1_000_000
AT_ONCE = 16  # samples that evaluation denoises together by default, or fewer if a GPU holds fewer


def _valid_pattern(entry: str) -> str:
    try:
        re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
    except re.error as error:
        raise ValueError(f"{entry!r} is not a regular expression: {error}") from error
    return entry


TaskName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
PointName = Annotated[str, Field(pattern=r"^[a-z0-9_.]+$", max_length=40)]
FilePath = Annotated[str, AfterValidator(lambda path: str(Path(path).expanduser().absolute()))]
Pattern = Annotated[str, AfterValidator(_valid_pattern)]
LEAST = 2  # fewest questions of a task: a comparison needs the variance of differences
Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Points = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]  # of all answers, in percent
Share = Annotated[float, Field(gt=0, le=1)]
# Optional keys that digests cover even at their defaults: all keys of an earlier version. A later key
# is covered only if a recipe sets it, so that its addition renames no run and repeats no answer.
FIRST_KEYS = {
    "activations", "batch_size", "bundled", "calibration", "confidence", "confidence_threshold",
    "data", "entropy_bound", "evaluation", "extract", "fixed", "gate", "health_pp", "limit",
    "lm_eval", "margin_pp", "max_denoising_steps", "max_kl_nats", "max_prompt_tokens",
    "max_step_inflation", "max_tokens", "min_tokens_per_expert", "observer", "operating_points",
    "own_tasks", "private", "prompt", "repeats", "revision", "rounding", "seed",
    "stability_threshold", "target", "targets", "thinking",
}  # fmt: skip


def nearest(word: str, known: Any) -> str:
    """Return " (did you mean 'NAME'?)" for the known word nearest to `word`, "" if none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


class Section(BaseModel):
    """Base class of every section: it is frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_no_yes_for_a_number(cls, stated: Any) -> Any:
        """Refuse true and false where they would count as 1 and 0; YAML reads `yes` as true."""
        for key, value in stated.items() if isinstance(stated, dict) else ():
            field = cls.model_fields.get(key)
            if field is None or field.annotation is bool:
                continue
            named = isinstance(value, dict) and "dict[" in str(field.annotation)
            given = {f"{key}.{name}": v for name, v in value.items()} if named else {key: value}
            if wrong := next((name for name, v in given.items() if isinstance(v, bool)), None):
                raise ValueError(f"{wrong} is no yes or no")
        return stated

    def counted(self) -> dict[str, Any]:
        """Return a JSON object of the fields that hashes of recipes, tasks and recordings cover."""
        stated = self.model_dump(mode="json", exclude_defaults=True)
        return _counted(self.model_dump(mode="json"), stated)


def _counted(value: Any, stated: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: _counted(inner, stated.get(key, {}))
        for key, inner in value.items()
        if key in stated or key in FIRST_KEYS
    }


class Model(Section):
    """The model that the recipe was made for: a Hub id and, to pin it, a revision."""

    id: str
    revision: str | None = None


class Quantization(Section):
    """The modules that are quantized, and the scheme that each of them gets.

    `scheme` is one scheme for all `targets`, or maps each scheme to its own targets. An entry of
    `targets` or `ignore` is `Linear` (all Linears), a module's name, or `re:PATTERN`. The regular
    expression PATTERN must match from the start of a name. An entry that matches nothing is an error,
    except an entry `optional:...` of `ignore`. A scale covers the largest magnitude of its weights.
    With `observer: memoryless_mse` it covers the range of least error. `rounding: nearest` uses no
    activations. `rounding: gptq` needs the default observer. GPTQ then rounds weights and chooses
    NVFP4's block scales. Its Hessians are summed while the calibration prompts are denoised.
    """

    scheme: SchemeName | dict[SchemeName, list[Pattern]]
    targets: list[Pattern] = ["Linear"]
    ignore: list[Pattern]
    observer: Observer = "memoryless_minmax"
    rounding: Rounding = "nearest"

    @model_validator(mode="after")
    def _gptq_chooses_scales(self) -> "Quantization":
        if (observer := self.observer) != "memoryless_minmax" and self.rounding == "gptq":
            raise ValueError(f"observer: rounding gptq chooses scales itself, not by {observer}")
        return self

    def targets_by_scheme(self) -> dict[SchemeName, list[str]]:
        """Return scheme -> its targets, whether `scheme` is one scheme or a mapping."""
        return self.scheme if isinstance(self.scheme, dict) else {self.scheme: self.targets}


class Calibration(Section):
    """The prompts on which the BF16 model's input ranges, and Hessians for GPTQ, are measured.

    An entry of `datasets` is `bundled`, the path of a jsonl file of chats, or the name of a Hub data
    set. The model answers `prompts` chats, `batch_size` at a time, with at most `canvases` canvases
    each. `thinking` is the share of chats with the thinking channel on. If fewer than
    `min_tokens_per_expert` tokens reach an expert, the expert takes the widest range of its layer.
    Chats of more than `max_prompt_tokens` tokens are skipped.
    """

    datasets: list[str] = Field(min_length=1)
    prompts: int = Field(gt=0, le=1_000_000)
    canvases: int = Field(gt=0, le=1024)
    thinking: float = Field(ge=0, le=1)
    seed: int = Field(default=0, ge=0, lt=1 << 31)  # a prompt's seed: (seed << 32) + its index
    batch_size: int = Field(default=16, gt=0, le=MOST_AT_ONCE)
    min_tokens_per_expert: int = Field(default=64, gt=0)
    max_prompt_tokens: int = Field(default=2048, gt=0, le=MOST_TOKENS)


class Verification(Section):
    """The largest relative error |W - W'| / |W| allowed for a quantized source tensor, by scheme.

    A single Linear of it, such as an expert's, may err twice as much. `gptq` needs about 1.5 times the
    limits of `nearest`: its weights err more, its outputs less.
    """

    max_relative_error: dict[SchemeName, Limit]


class OwnTask(Section):
    """A task of your own: a file of questions (`data`), or an lm-eval task of generate_until type; or a
    task that ships (`of`), with fewer tokens for an answer.

    `data` is a jsonl file with one question per line. `prompt` and `target` are Jinja templates over a
    question's fields; they make the user's message and the right answer. `extract` is a regular
    expression with one group, which finds the answer in the model's text; the last match counts. Case,
    commas, $ and a full stop at the end are ignored when answer and target are compared. An answer has
    at most `max_tokens` tokens; `thinking` turns the thinking channel on. An `lm_eval` file states all
    these settings itself. If `private` is set here or in such a file's `metadata`, no question, answer
    or target is written. Scores and reports hold hashes instead; samples hold only what `extract`
    found. With `of` only `max_tokens` is stated. Paths are relative to the folder in which the command
    runs.
    """

    data: FilePath | None = None
    lm_eval: FilePath | None = None
    of: str | None = None
    prompt: str = "{{question}}"
    target: str = "{{answer}}"
    extract: str = r"#### (.+)"
    max_tokens: int = Field(default=512, gt=0, le=MOST_TOKENS)
    thinking: bool = False
    private: bool = False

    @model_validator(mode="after")
    def _is_one_of_three(self) -> "OwnTask":
        if [self.data, self.lm_eval, self.of].count(None) != 2:
            raise ValueError(
                "name `data`, a jsonl file of questions, `lm_eval`, a task's YAML, or `of`, a task "
                "that ships"
            )
        if self.of is not None:
            self._shortens(self.of)
        return self

    def _shortens(self, task: str) -> None:
        """Raise ValueError unless `task` ships, and all that is stated is a lower limit of tokens."""
        if task not in known_tasks():
            raise ValueError(f"of: no task named {task!r} ships{nearest(task, known_tasks())}")
        if more := self.model_dump(exclude_defaults=True).keys() - {"of", "max_tokens"}:
            raise ValueError(
                f"{min(more)}: {task} states it; beside `of` only max_tokens may stand"
            )
        if self.max_tokens >= (most := token_limit(shipped(task))):
            raise ValueError(f"max_tokens: {task} itself ends answers at {most:,}; name fewer")

    def definition(self) -> Definition:
        """Return the task's lm-eval fields; raise InputError if its file is missing or not a task."""
        if self.of is not None:
            return at_limit(self.of, self.max_tokens)
        options = self.model_dump(exclude={"data", "lm_eval", "of"})
        try:
            if self.lm_eval is not None:
                return from_lm_eval(Path(self.lm_eval), private=self.private)
            return from_questions(Path(self.data or ""), **options)
        except ValueError as error:
            raise InputError(str(error)) from error

    def digest(self) -> str:
        """Return 16 hex digits of a hash over the task's fields and the bytes of its file."""
        file = self.lm_eval or self.data
        data = Path(file).read_bytes() if file else b""
        return hashlib.sha256(json.dumps(self.counted()).encode() + data).hexdigest()[:16]


# pyrefly: ignore[invalid-inheritance]
class OperatingPoint(create_model("Judged", __base__=Section, **optional(JUDGED, "bounds"))):
    """Sampler settings under which the candidate is judged too; a setting left out stays the model's.

    A canvas takes at most `max_denoising_steps` steps, and exactly that many if `fixed` is set.
    docs/runtime.md explains the other settings. `activations` is by default the mode of `evaluation`.
    """

    fixed: bool = False
    activations: ActivationMode | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "OperatingPoint":
        stated = self.model_dump(exclude_defaults=True)
        if not stated:
            raise ValueError("names no setting, so it would be the model's own")
        if self.fixed and ("max_denoising_steps" not in stated or "stability_threshold" in stated):
            raise ValueError("fixed needs max_denoising_steps, and no stability_threshold")
        return self

    def settings(self) -> dict[str, Any]:
        """Return sampler field -> value for the fields set here; `fixed` adds stability_threshold."""
        stated = self.model_dump(exclude={"fixed", "activations"}, exclude_none=True)
        # A canvas never stops early if its argmax must be stable over more steps than there are.
        return stated | (
            {"stability_threshold": stated["max_denoising_steps"]} if self.fixed else {}
        )


class Evaluation(Section):
    """What is scored, how often, and from which seed.

    `tasks` are names that `quantize tasks` lists, or keys of `own_tasks`. `limit` maps a task to the
    number of its first questions that are asked (at least two). `repeats` maps a task to the number of
    answers per question. No look begins once BF16's and the candidate's answers to all tasks have
    `token_budget` tokens; what is undecided then stays so. At most `batch_size` samples are answered
    together (16 by default). `activations` is the activation mode in which a quantized model is scored.
    `none` keeps activations in BF16. With NVFP4 weights, `per_expert` and `per_layer` round activations
    to NVFP4, with one input scale per expert or per layer. `fp8` rounds to FP8 (W4A8), which vLLM does
    not do. With 8-bit weights, all three modes round to 8 bits. With --operating-points,
    `operating_points` are scored too. The report names the fastest point whose loss by quantization and
    settings fits the margin.
    """

    tasks: list[str] = Field(min_length=1)
    own_tasks: dict[TaskName, OwnTask] = {}
    limit: dict[str, Annotated[int, Field(ge=LEAST)]] = {}
    repeats: dict[str, Annotated[int, Field(gt=0, le=MOST_REPEATS)]] = {}
    token_budget: int | None = Field(default=None, gt=0)
    seed: int = 0
    batch_size: int | None = Field(default=None, gt=0, le=MOST_AT_ONCE)
    activations: ActivationMode = "per_layer"
    operating_points: dict[PointName, OperatingPoint] = {}

    @model_validator(mode="before")
    @classmethod
    def _computes_in_bf16(cls, fields: Any) -> Any:
        """Leave out `dtype`, which recipes had while CPUs had an engine of their own."""
        if isinstance(fields, dict):
            fields = {key: value for key, value in fields.items() if key != "dtype"}
        return fields

    @model_validator(mode="after")
    def _every_task_exists(self) -> "Evaluation":
        if taken := sorted(self.own_tasks.keys() & set(known_tasks())):
            raise ValueError(f"own_tasks: {taken[0]!r} is a task that ships; choose another name")
        self.check_names([*self.tasks, *self.limit, *self.repeats])
        for name, own_task in self.own_tasks.items():
            for numbers in (self.limit, self.repeats):
                if own_task.of in numbers:
                    numbers.setdefault(name, numbers[own_task.of])
        if twice := [task for task in self.tasks if self.tasks.count(task) > 1]:
            raise ValueError(f"tasks: {twice[0]!r} stands there twice")
        return self

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ValueError for the first name that is no task; the message names the nearest task."""
        there = [*self.own_tasks, *known_tasks()]
        for name in names:
            if name not in there:
                raise ValueError(
                    f"no task named {name!r}{nearest(name, there)}; there are: {', '.join(there)}"
                )

    def family(self, task: str) -> str:
        """Return what tasks share that differ only in their limit of tokens: for `of`, its name."""
        if (own_task := self.own_tasks.get(task)) is None:
            return task
        return own_task.of or own_task.model_dump_json(exclude={"max_tokens"})

    def questions(self, task: str) -> int | None:
        """Return how many questions a task has, or None if that is not known beforehand."""
        own_task = self.own_tasks.get(task)
        return notes(task, own_task.definition() if own_task else None).get("questions")

    def answer_tokens(self, task: str) -> int:
        """Return the most tokens that an answer to a task may take."""
        own_task = self.own_tasks.get(task)
        return token_limit(own_task.definition() if own_task else shipped(task))


class Gate(Section):
    """The release gate: how much a quantized model may lose and still pass.

    `estimand` says for which questions the loss is judged (recovery.estimands). `these_questions` are
    exactly the benchmark's questions. `such_questions` are all questions of their kind: the benchmark
    is a sample. `estimand` has no default, because a margin means nothing without it.
    `margin_pp` maps a task to the allowed loss of accuracy in percentage points; every task that ships,
    except SVAMP, has a default in its file (`recovery/tasks`). `max_kl_nats` maps an activation mode to
    the largest mean KL from BF16 allowed on replayed trajectories; a mode without a limit is not
    judged. `min_routing_overlap` maps a mode to the smallest mean share of BF16's experts that the
    routers of any layer may choose on these trajectories. `max_step_inflation` is the share by which
    denoising steps per token may exceed BF16's (0.1 is 10 %); a run that is shown to exceed this share
    fails. Null turns the limit off. A run with
    served models needs null, since servers report no steps. `health_pp` maps a sign of ill health to
    the points by which it may be more frequent than in BF16's answers. `recovery.health` lists
    signs and defaults; null turns a sign off. `confidence` is the level of all intervals and tests.
    """

    estimand: Estimand
    margin_pp: dict[str, Points] = {}
    max_kl_nats: dict[ActivationMode, Limit] = {}
    min_routing_overlap: dict[ActivationMode, Share] = {}
    max_step_inflation: Limit | None = None
    health_pp: dict[SignName, Points | None] = {}
    confidence: float = Field(default=0.95, gt=0.5, lt=1)

    @property
    def replayed(self) -> set[ActivationMode]:
        """The activation modes that a limit of the replay names."""
        return {*self.max_kl_nats, *self.min_routing_overlap}

    def terms(self, task: str) -> Terms:
        """Return the terms on which a task is judged."""
        stated: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Terms)}
        stated["margin_pp"] = self.margin_pp[task]
        return Terms(**stated)


class Bundled(Section):
    """Sections that replace the recipe's own sections if the model is the bundled one."""

    calibration: Calibration | None = None
    evaluation: Evaluation | None = None
    gate: Gate | None = None


class Recipe(Section):
    """One recipe, complete and checked."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    model: Model
    quantization: Quantization
    calibration: Calibration | None = None
    verification: Verification
    evaluation: Evaluation
    gate: Gate
    bundled: Bundled = Bundled()

    @model_validator(mode="after")
    def _holds_together(self) -> "Recipe":
        """Report a missing limit or a wrong mode now, not after hours of work."""
        schemes = self.quantization.targets_by_scheme()
        if missing := schemes.keys() - self.verification.max_relative_error:
            name = min(missing)
            raise ValueError(f"verification.max_relative_error has no limit for scheme {name}")
        if self.quantization.rounding == "gptq" and self.calibration is None:
            raise ValueError("quantization.rounding gptq needs a `calibration` section")
        kernels = [SCHEMES[name].kernel for name in schemes]
        for where, part in {"": self, "bundled.": self.bundled}.items():
            evaluation, gate = part.evaluation or self.evaluation, part.gate or self.gate
            _every_task_has_a_margin(where, evaluation, gate)
            limited = ("max_kl_nats", "min_routing_overlap")
            modes = [(f"gate.{key}", mode) for key in limited for mode in getattr(gate, key)]
            for key, mode in [*modes, ("evaluation.activations", evaluation.activations)]:
                if why := refusal(mode, kernels):
                    raise ValueError(f"{where}{key}: {why}")
        return self

    def unused_on_bundled(self) -> list[str]:
        """Return the keys, as `gate.margin_pp`, that `bundled` replaces by other values."""
        replaced = self.for_bundled_model()
        return [
            f"{section}.{key}"
            for section in ("calibration", "evaluation", "gate")
            if (ours := getattr(self, section)) and (theirs := getattr(replaced, section))
            for key in sorted(ours.model_fields_set)
            if getattr(ours, key) != getattr(theirs, key)
        ]

    def for_bundled_model(self) -> "Recipe":
        """Return the recipe with its `bundled` sections; `calibration` is replaced, never added."""
        replaced = {key: section for key, section in self.bundled if section is not None}
        if self.calibration is None:
            replaced.pop("calibration", None)
        return self.model_copy(update=replaced)

    def repeatable_on_bundled(self) -> "Recipe":
        """Return the recipe with its own sections in `bundled`: `for_bundled_model` changes nothing."""
        sections = {key: getattr(self, key) or section for key, section in self.bundled if section}
        return self.model_copy(update={"bundled": self.bundled.model_copy(update=sections)})

    def asking(self, tasks: Sequence[str] = (), problems: int | None = None) -> "Recipe":
        """Return the recipe with these `tasks` (if empty, its own) and `problems` questions for each.

        If `problems` is None, limits stay. Raise InputError if a task is unknown or has no margin.
        """
        update: dict[str, Any] = {"tasks": list(dict.fromkeys(tasks)) or self.evaluation.tasks}
        if problems is not None:
            update["limit"] = dict.fromkeys(update["tasks"], problems)
        try:
            self.evaluation.check_names(update["tasks"])
            evaluation = self.evaluation.model_copy(update=update)
            _every_task_has_a_margin("", evaluation, self.gate)
        except ValueError as error:
            raise InputError(f"--task: {error}") from error
        return self.model_copy(update={"evaluation": evaluation})

    @property
    def needs_calibration(self) -> bool:
        """Whether a scheme of the recipe has calibrated input scales, as NVFP4 has."""
        return any(SCHEMES[name].calibrated for name in self.quantization.targets_by_scheme())

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML, every default written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def digest(self, *more: str) -> str:
        """Return 7 hex digits of a hash over the recipe and `more`, such as the model's fingerprint."""
        text = json.dumps([self.counted(), *more], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:7]


def _every_task_has_a_margin(where: str, evaluation: Evaluation, gate: Gate) -> None:
    evaluation.check_names(gate.margin_pp)
    for task in evaluation.tasks:
        if "margin_pp" in (metadata := notes(evaluation.family(task))):
            gate.margin_pp.setdefault(task, float(metadata["margin_pp"]))
        if task not in gate.margin_pp:
            raise ValueError(f"{where}gate.margin_pp has no margin for task {task!r}")
