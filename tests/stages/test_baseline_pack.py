"""BF16's answers travel in a file, are used where they fit, and refused by name where they do not."""

import gzip
import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.errors import GateError, InputError
from quantize.host.files import read_json, write_json
from quantize.recipe.sections import Evaluation, Gate
from quantize.recovery.samples import Completion, Finished, Waiting
from quantize.recovery.sequential import Plan
from quantize.recovery.spot_check import SpotCheck
from quantize.reports.provenance import baseline_lines
from quantize.reports.scores import read_scoring
from quantize.runs.folder import RunDir
from quantize.runtime.gpu.placement import CPU
from quantize.stages.evaluate import (
    answers,
    baseline_pack,
    compared_models,
    evaluate,
    spot_check,
)
from quantize.stages.evaluate import local_model as answerer
from quantize.stages.evaluate.baseline_pack import (
    Pack,
    _digest,
    export_pack,
    find_pack,
    import_pack,
    imports,
    read_pack,
)
from quantize.stages.evaluate.compared_models import ModelOptions
from quantize.stages.evaluate.local_model import Answerer
from quantize.stages.report.report import _imported
from tests.support.quick_run import TASK, command

SETTINGS = Evaluation(tasks=[TASK], limit={TASK: 24}, batch_size=2)
GATE = Gate(estimand="such_questions", margin_pp={TASK: 30}, max_step_inflation=None)


class Scripted(Answerer):
    """Answers at once: BF16 knows every other answer; what was asked of whom is counted."""

    asked: ClassVar[list[str]] = []

    def __init__(self, folder: Path, digest: str, *more: Any, **settings: Any) -> None:
        super().__init__(folder, digest, *more, **settings)
        self.digest = digest

    def __call__(self, requests: Waiting) -> Iterator[Finished]:
        for request in requests:
            self.asked.append(self.digest)
            right = (self.digest == "source") + request.seed % 2
            yield request, Completion(f"#### {right}", 3, [2], False)

    def record(self, requests: object) -> dict[str, Any]:
        return {"vocabulary": {}, "samples": []}


def score(folder: Path, **more: Any) -> RunDir:
    """Evaluate in a folder of runs."""
    run = RunDir(folder / "run")
    run.path.mkdir(parents=True, exist_ok=True)
    if not run.checkpoint.exists():
        run.checkpoint.symlink_to(CHECKPOINT)
        tool = {"version": "1.0", "commit": None, "modified": None}
        source = {"fingerprint": "source", "commit": None, "folder": "/home/somebody/bf16"}
        write_json(run.manifest_json, {"source": source, "tool": tool})
    Scripted.asked.clear()
    settings = SETTINGS.model_copy(update=more.pop("settings", {}))
    evaluate.evaluate(run, CHECKPOINT, "source", settings, **{"gate": GATE, "go_on": True} | more)
    return run


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of another machine: its threads, batch and torch are other ones."""
    versions = answerer.package_versions()
    with pytest.MonkeyPatch.context() as elsewhere:
        for module in (answers, compared_models, evaluate):
            elsewhere.setattr(module, "Answerer", Scripted)
        elsewhere.setattr(answerer, "package_versions", lambda: versions | {"torch": "1.0"})
        elsewhere.setattr(answerer.torch, "get_num_threads", lambda: 99)
        return score(tmp_path_factory.mktemp("there"), settings={"batch_size": 3})


@pytest.fixture
def pack(there: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its pack, on a machine whose models are scripted too."""
    for module in (answers, compared_models, evaluate):
        monkeypatch.setattr(module, "Answerer", Scripted)
    export_pack(there, tmp_path / "bf16.jsonl.gz")
    return tmp_path / "bf16.jsonl.gz"


def test_an_imported_baseline_gives_the_scores_of_the_run_that_made_it(
    pack: Path, there: RunDir, tmp_path: Path
) -> None:
    text = gzip.decompress(pack.read_bytes()).decode()
    questions = [json.loads(line)["question"] for line in HELDOUT.read_text().splitlines()[:24]]
    assert not [each for each in [*questions, "somebody"] if each in text]
    import_pack(pack, tmp_path / "here")
    here = score(tmp_path / "here")
    assert set(Scripted.asked) != {"source"}
    assert "source" not in Scripted.asked
    for side in ("bf16", "quantized"):
        ours, theirs = (read_scoring(run.evaluation / side, TASK) for run in (here, there))
        assert ours.rows == theirs.rows
        assert ours.conditions == theirs.conditions
    score(tmp_path / "here")
    assert Scripted.asked == []  # nor is it made again
    origin = _imported(here, [TASK])
    (said,) = baseline_lines({"baseline": origin})
    assert "on cpu with torch 1.0, by diffusiongemma-quantize 1.0 (commit unknown)" in said
    assert _imported(there, [TASK]) is None
    with pytest.raises(InputError, match=r"missing; BF16's answers .* imported or removed"):
        export_pack(here, tmp_path / "again.gz")
    score(tmp_path / "here", options=ModelOptions(noise_floor=True))
    assert Scripted.asked == ["source"] * 24


def test_more_than_a_pack_holds_is_not_asked_of_another_bf16(pack: Path, tmp_path: Path) -> None:
    import_pack(pack, tmp_path / "here")
    with pytest.raises(InputError, match=r"lacks 6 answers.*remove this file to ask BF16 here"):
        score(tmp_path / "here", settings={"limit": {TASK: 30}})
    assert score(tmp_path / "here", settings={"limit": {TASK: 20}}).evaluation.exists()


@pytest.mark.parametrize("command_line", ["plan", "run"])
def test_too_few_answers_are_refused_before_any_work(
    command_line: str, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantize.pipeline.run.fingerprint", lambda _: "source")
    here = tmp_path / "here"
    import_pack(pack, here)
    words = [command_line, "--recipe", "fp8_dynamic", "--out", here, "--limit"]
    done = command(monkeypatch, *words, 200)
    assert done.code == 2
    assert (
        "word_problems: its 24 answers lack some of the 40 that the first of 8 looks" in done.last
    )
    assert "`quantize evaluate RUN --all`" in done.last
    assert done.redone() == []
    until = ["--until", "plan"] if command_line == "run" else []
    assert command(monkeypatch, *words, 24, *until).code == 4  # PASS is out of reach of so few


def test_a_pack_of_an_early_verdict_reaches_looks_of_its_own_plan(pack: Path) -> None:
    whole = read_pack(pack)
    few = dict(list(whole.answers[TASK].items())[:22])
    early = replace(whole, answers={TASK: few})
    plan = Plan(**whole.made_with[TASK]["planned"])
    assert [look.questions for look in plan.looks] == [20, 21, 24]
    assert early.answered(TASK) == plan.parts[0].answers | plan.parts[1].answers
    assert early.lacks(TASK, plan) is None
    assert replace(early, answers={TASK: {}}).lacks(TASK, plan)
    assert early.lacks("another", plan)


@pytest.mark.parametrize("full_first", [False, True])
def test_the_fullest_pack_is_taken_whatever_its_name(
    full_first: bool, pack: Path, tmp_path: Path
) -> None:
    """Packs are found by the names of their files, which say nothing of what is in them."""
    head, *answers = gzip.decompress(pack.read_bytes()).decode().split("\n")
    header = {k: v for k, v in json.loads(head).items() if k != "sha256"}
    packs: list[bytes] = []
    for kept in (answers, answers[:5]):
        whole = header | {"sha256": _digest(header, kept)}
        packs.append(gzip.compress("\n".join([json.dumps(whole), *kept]).encode()))
    folder = imports(tmp_path / "here")
    folder.mkdir(parents=True)
    for name, content in zip(("0", "1") if full_first else ("1", "0"), packs, strict=True):
        (folder / f"{name}.jsonl.gz").write_bytes(content)
    here = score(tmp_path / "here")
    assert len(read_scoring(here.evaluation / "bf16", TASK).rows) == 24
    assert "source" not in Scripted.asked


@pytest.mark.parametrize(
    ("counts", "best"),
    [
        ([(3, 4), (9, 3)], 0),  # a task's answers beyond the plan complete no other
        ([(0, 4), (2, 3)], 0),  # a whole task before more answers
        ([(1, 2), (2, 3)], 1),
        ([(2, 3), (2, 3)], 0),
    ],
)
def test_a_pack_is_fuller_by_whole_tasks_then_by_answers(
    counts: list[tuple[int, int]], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {task: {"planned": {"questions": 2, "repeats": n}} for task, n in (("a", 2), ("b", 2))}
    made = {"model": {"weights": "source"}}
    packs: dict[str, Any] = {}
    for number, each in enumerate(counts):
        kept: Any = {
            task: dict.fromkeys(map(str, range(n))) for task, n in zip("ab", each, strict=True)
        }
        packs[f"{number}.jsonl.gz"] = Pack(tmp_path, "", {}, {"a": made, "b": made}, kept)
    for name in packs:
        (tmp_path / name).touch()
    monkeypatch.setattr(baseline_pack, "read_pack", lambda path: packs[path.name])
    monkeypatch.setattr(baseline_pack, "_unfit", lambda *_: None)
    found = find_pack(tmp_path, "source", here)
    assert found is packs[f"{best}.jsonl.gz"]


Edit = Callable[[Any, list[Any]], object]  # of the first line and of the answers
ABOUT = "NOT COMPARABLE: word_problems was answered with "


def made(header: Any) -> Any:
    return header["tasks"][TASK]


# what is edited: (how, whether the sha256 is mended, what the one line says)
EDITS: dict[str, tuple[Edit, bool, str]] = {
    "an answer": (lambda _, a: a[0].update(text="#### 7"), False, "sha256 is of other content"),
    "the device": (lambda h, _: made(h).update(device="gpu"), False, "sha256 is of other content"),
    "an answer less": (lambda _, a: a.pop(), True, "lacks 1 answers"),
    "an answer twice": (lambda _, a: a.__setitem__(1, a[0]), True, "a second answer to a request"),
    "another task's": (lambda _, a: a[0].update(task="gsm8k"), True, "or one of no task"),
    "its format": (lambda h, _: h.update(format="2"), True, "format"),
    "a key more": (lambda h, _: h.update(note=""), True, "note"),
    "no tool": (lambda h, _: h["origin"].pop("tool"), True, "origin.tool"),
    "no version": (lambda h, _: h["origin"]["tool"].pop("version"), True, "tool.version"),
    "another's digest": (lambda h, _: h["origin"].update(pack="0" * 64), True, "origin.pack"),
    "tokens": (lambda _, a: a[0].update(tokens=-1), True, "tokens"),
    "a request": (lambda _, a: a[0].update(key="What is 1 + 1?"), True, "key"),
    "the sampler": (
        lambda h, _: made(h)["sampler"].update(max_denoising_steps=7), True,
        f"{ABOUT}sampler.max_denoising_steps 7, and here it is 48",
    ),
    "the data": (lambda h, _: made(h).update(data="ab"), True, f"{ABOUT}data ab, and here"),
    "the seed": (lambda h, _: made(h).update(seed=3), True, f"{ABOUT}seed 3, and here it is 0"),
    "the dtype": (lambda h, _: made(h).update(dtype="torch.half"), True, f"{ABOUT}dtype torch.half"),
    "the code": (
        lambda h, _: made(h)["versions"].update(transformers="4"), True,
        f"{ABOUT}versions.transformers 4",
    ),
    "activations": (
        lambda h, _: made(h)["model"].update(activations="fp8"), True, f"{ABOUT}model.activations"
    ),
    "its task": (
        lambda h, a: (h["tasks"].update(x=h["tasks"].pop(TASK)), [r.update(task="x") for r in a]),
        True, "it has no answers to word_problems",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "mended", "said"), EDITS.values(), ids=EDITS)
def test_an_edited_pack_is_refused_by_name(
    edit: Edit, mended: bool, said: str, pack: Path, tmp_path: Path
) -> None:
    head, *answers = map(json.loads, gzip.decompress(pack.read_bytes()).decode().split("\n"))
    edit(head, answers)
    lines = [json.dumps(each) for each in answers]
    if mended:
        head["sha256"] = _digest({k: v for k, v in head.items() if k != "sha256"}, lines)
    pack.write_bytes(gzip.compress("\n".join([json.dumps(head), *lines]).encode()))

    def use() -> None:
        import_pack(pack, tmp_path / "here")
        score(tmp_path / "here")

    with pytest.raises(InputError) as error:
        use()
    assert said in str(error.value)
    assert ".gz" in str(error.value)


def planned_as(pack: Path, changes: dict[str, Any], answer: dict[str, Any]) -> None:
    """Let a pack say of its plan, and of its first answer, what it likes, under a right sha256."""
    head, first, *rest = map(json.loads, gzip.decompress(pack.read_bytes()).decode().split("\n"))
    head["tasks"][TASK]["planned"].update(changes)
    lines = [json.dumps(each) for each in (first | answer, *rest)]
    head["sha256"] = _digest({k: v for k, v in head.items() if k != "sha256"}, lines)
    pack.write_bytes(gzip.compress("\n".join([json.dumps(head), *lines]).encode()))


@pytest.mark.parametrize(
    ("plan", "answer"),
    [
        ({"questions": 0}, {}), ({"repeats": -1}, {}), ({"more": 1}, {}), ({"seed": None}, {}),
        ({"questions": 10**12}, {}), ({"estimand": "all"}, {}), ({"questions": 24.0}, {}),
        ({}, {"tokens": 10**400}), ({}, {"denoising_steps": [10**400]}),
    ],
)  # fmt: skip
def test_a_pack_of_a_plan_that_cannot_be_is_refused(
    plan: dict[str, Any], answer: dict[str, Any], pack: Path, tmp_path: Path
) -> None:
    planned_as(pack, plan, answer)
    with pytest.raises(InputError, match="no baseline pack as it was exported"):
        import_pack(pack, tmp_path)


@pytest.mark.parametrize("changes", [{"questions": 10**8}, {"repeats": 10**8}])
def test_a_plan_as_large_as_it_likes_takes_no_memory(
    changes: dict[str, int], pack: Path, tmp_path: Path
) -> None:
    planned_as(pack, changes, {})
    imported = import_pack(pack, tmp_path / "here")
    tracemalloc.start()
    assert imported.answered(TASK) == set()
    assert "first of" in str(imported.lacks(TASK, Plan("such_questions", 24, 1, 0)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


def test_what_is_no_pack_is_refused(pack: Path, tmp_path: Path) -> None:
    whole = pack.read_bytes()
    for content in (whole[:-20], gzip.decompress(whole), b"", gzip.compress(b"\xff")):
        pack.write_bytes(content)
        with pytest.raises(InputError, match="no baseline pack as it was exported"):
            import_pack(pack, tmp_path)
    with pytest.raises(InputError, match="No such file"):
        import_pack(tmp_path / "nowhere", tmp_path)
    assert not list(tmp_path.rglob("imported"))


def test_a_bomb_is_not_unpacked(pack: Path, tmp_path: Path) -> None:
    """It would be 64 MB of one answer's text, and its sha256 is right."""
    head, answer, *_ = gzip.decompress(pack.read_bytes()).decode().split("\n")
    header = {k: v for k, v in json.loads(head).items() if k != "sha256"}
    lines = [json.dumps(json.loads(answer) | {"text": "a" * (64 << 20)})]
    whole = header | {"sha256": _digest(header, lines)}
    pack.write_bytes(gzip.compress("\n".join([json.dumps(whole), *lines]).encode(), 1))
    tracemalloc.start()
    with pytest.raises(InputError, match="it unpacks to more than 64 times its size"):
        import_pack(pack, tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    limit = 64 * pack.stat().st_size + (1 << 20)
    assert most < 3 * limit < 64 << 20  # Python 3.13 reads pieces and joins them: twice the limit


@pytest.mark.parametrize("line", [0, 1])
def test_a_key_that_stands_twice_is_refused(line: int, pack: Path, tmp_path: Path) -> None:
    """Readers differ on which one counts; the sha256 is over the last one."""
    lines = gzip.decompress(pack.read_bytes()).decode().split("\n")
    header = {k: v for k, v in json.loads(lines[0]).items() if k != "sha256"}
    if line:
        lines[line] = lines[line].replace('"text": ', '"text": "#### 7", "text": ')
        lines[0] = json.dumps(header | {"sha256": _digest(header, lines[1:])})
    else:
        lines[0] = lines[0].replace('"origin": ', '"origin": {}, "origin": ')
    pack.write_bytes(gzip.compress("\n".join(lines).encode()))
    with pytest.raises(InputError, match=r"'(text|origin)' stands there twice"):
        import_pack(pack, tmp_path)


def test_a_pack_nested_too_deeply_is_refused(pack: Path, tmp_path: Path) -> None:
    for levels in (100, 900, 100_000):
        text = '{"format": ' + '{"a": ' * levels + "1" + "}" * levels + "}"
        pack.write_bytes(gzip.compress(text.encode(), 1) + gzip.compress(b""))
        with pytest.raises(InputError, match="no baseline pack as it was exported"):
            import_pack(pack, tmp_path)


def test_a_pack_of_another_model_is_left_alone(pack: Path, tmp_path: Path) -> None:
    import_pack(pack, tmp_path / "here")
    run = RunDir(tmp_path / "here" / "run")
    run.path.mkdir()
    run.checkpoint.symlink_to(CHECKPOINT)
    Scripted.asked.clear()
    evaluate.evaluate(run, CHECKPOINT, "another", SETTINGS, gate=GATE)
    assert "another" in Scripted.asked
    assert read_json(run.evaluation / "done.json")["tasks"] == [TASK]


def forge(pack: Path, step: int) -> None:
    """Replace every `step`-th answer, and mend the digest."""
    head, *lines = gzip.decompress(pack.read_bytes()).decode().split("\n")
    replaced = [json.loads(line) for line in lines]
    for answer in replaced[::step]:
        answer["text"] = "#### 99"
    lines = [json.dumps(answer) for answer in replaced]
    header = {k: v for k, v in json.loads(head).items() if k != "sha256"}
    header["sha256"] = _digest(header, lines)
    pack.write_bytes(gzip.compress("\n".join([json.dumps(header), *lines]).encode()))


def check(run: RunDir, count: int, seed: int | None = None) -> SpotCheck:
    return spot_check.spot_check(run, CHECKPOINT, "source", SETTINGS, GATE, count, seed, place=CPU)


@pytest.fixture
def made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack of a run under the conditions of this machine."""
    for module in (answers, compared_models, evaluate, spot_check):
        monkeypatch.setattr(module, "Answerer", Scripted)
    export_pack(score(tmp_path / "made"), tmp_path / "here.jsonl.gz")
    return tmp_path / "here.jsonl.gz"


def test_a_spot_check_of_an_honest_pack(made_here: Path, tmp_path: Path) -> None:
    import_pack(made_here, tmp_path / "here", "org/x@abc")
    run = score(tmp_path / "here")
    (said,) = baseline_lines({"baseline": _imported(run, [TASK])})
    assert said.endswith("pulled from org/x@abc. No spot check was made of them.")
    Scripted.asked.clear()
    checked = check(run, 10)
    assert Scripted.asked == ["source"] * 10
    assert (checked.conditions_equal, checked.answers) == (True, 10)
    assert (checked.differing, checked.fault) == (0, None)
    assert "10 of 10 answers are equal in every byte; had 25.9% of the pack been" in str(checked)
    (said,) = baseline_lines({"baseline": _imported(run, [TASK])})
    assert said.endswith(f"Spot check: {checked}.")
    assert check(run, 99).answers == 24
    assert checked.seed != check(run, 10).seed  # nobody knows what is drawn
    with pytest.raises(InputError, match="its BF16 answers were made here"):
        check(RunDir(tmp_path / "made" / "run"), 4)


def test_a_forged_share_is_found_at_the_stated_power(made_here: Path, tmp_path: Path) -> None:
    forge(made_here, 4)
    import_pack(made_here, tmp_path / "here")
    run = score(tmp_path / "here")
    caught = 0
    for seed in range(12):
        try:
            check(run, 4, seed)
        except GateError:
            caught += 1
    assert 5 <= caught <= 11  # a sample of 4 lacks all 6 forged answers in 28.8 % of draws
    with pytest.raises(GateError, match="6 of 24 answers are not those"):
        check(run, 24)
    (said,) = baseline_lines({"baseline": _imported(run, [TASK])})
    assert "Spot check: 6 of 24 answers are not those that BF16 gives here" in said


def test_answers_of_another_machine_are_compared_by_their_scores(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spot_check, "Answerer", Scripted)
    import_pack(pack, tmp_path / "here")
    run = score(tmp_path / "here")
    checked = check(run, 24)
    assert (checked.conditions_equal, checked.fault) == (False, None)
    right = int(sum(row.score for row in read_scoring(run.evaluation / "bf16", TASK).rows))
    forge(pack, 1)  # BF16 would be wrong everywhere, and any candidate as good
    import_pack(pack, tmp_path / "forged")
    checked = check(score(tmp_path / "forged"), 24)
    assert (checked.only_here_right, checked.only_pack_right) == (right, 0)
    assert checked.differing == 24
    assert right > 0


@pytest.mark.parametrize(
    ("pack_right", "here_right", "fault"),
    [(0, 8, True), (0, 7, False), (8, 0, True), (5, 9, False)],
)
def test_a_sign_test_of_answers_that_only_one_side_solved(
    pack_right: int, here_right: int, fault: bool
) -> None:
    """Of 8 such answers all on one side happen by chance in 2 / 2^8 = 0.8 %, of 7 in 1.6 %."""
    checked = SpotCheck("ab", 1, False, 40, 30, pack_right, here_right)
    assert bool(checked.fault) == fault
    assert "of questions better or worse would have been found in 80% of checks" in str(checked)
