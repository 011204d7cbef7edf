"""Finds questions that two models answered differently, and their recorded canvases.

A question differs if in one of its repeats only one model is right, or both are wrong with
different answers. A private task's question is shown as its hash, without text, answer or target.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quantize.host.files import read_json
from quantize.recovery.rows import Row, Scoring
from quantize.runs.digests import sha256_of
from quantize.runs.folder import RunDir
from quantize.runs.models import BASELINE, CANDIDATE

EXAMPLES = 3  # answers without a final value that a report shows of each model
QUESTION_COLUMNS = ("question", "outcome", "target", "BF16", "quantized", "steps")


def differing(base: Scoring, other: Scoring) -> list[dict[str, Any]]:
    """Return an entry for each question that differs between the models, in data set order.

    Keys: question (its index), hash, repeats (how many), repeat (the first that differs), outcome
    (lost, won or other answer), text (None: the caller adds it), target, `bf16` (from `base`) and
    `quantized` (from `other`). For each model: how many repeats are right; answer, steps and tokens
    of the first repeat that differs. Target and answers of a private task are None.
    """
    theirs = {(row.doc_id, row.repeat): row for row in other.rows}
    pairs: dict[int, list[tuple[Row, Row]]] = {}
    for row in base.rows:
        if (row.doc_id, row.repeat) in theirs:
            pairs.setdefault(row.doc_id, []).append((row, theirs[row.doc_id, row.repeat]))
    return [
        _entry(rows, hidden=base.private)
        for _, rows in sorted(pairs.items())
        if any(_differ(*pair) for pair in rows)
    ]


def unread(scoring: Scoring) -> list[str]:
    """Return the first EXAMPLES answers in which no final value was found, each with its question.

    Of a private task's answer only hashes of the document are given, of another the answer's end.
    """
    rows = [row for row in scoring.rows if not row.answered][:EXAMPLES]
    ends = ["" if scoring.private else " ".join(row.text[-200:].split()) for row in rows]
    return [
        f"question {row.doc_id} ({row.doc_hash[:12]})" + (f": {end}" if end else "")
        for row, end in zip(rows, ends, strict=True)
    ]


def _differ(ours: Row, theirs: Row) -> bool:
    same = ours.score == theirs.score
    return not same or (ours.score < 1 and ours.answer != theirs.answer)


def _entry(rows: Sequence[tuple[Row, Row]], *, hidden: bool) -> dict[str, Any]:
    shown = next(pair for pair in rows if _differ(*pair))
    right = [sum(row.score for row in side) for side in zip(*rows, strict=True)]
    outcome = "lost" if right[1] < right[0] else "won" if right[1] > right[0] else "other answer"
    first = shown[0]
    return {
        "question": first.doc_id,
        "hash": first.doc_hash,
        "repeat": first.repeat,
        "repeats": len(rows),
        "outcome": outcome,
        "text": None,
        "target": None if hidden else first.target,
        **{
            side: {
                "right": count,
                "answer": None if hidden else row.answer,
                "steps": row.denoising_steps,
                "tokens": row.tokens,
            }
            for side, count, row in zip((BASELINE, CANDIDATE), right, shown, strict=True)
        },
    }


def recorded_canvases(run: RunDir, task: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return (vocabulary: id -> text, questions recorded for both models); both may be empty."""
    files = [run.evaluation / side / f"{task}.canvases.json" for side in (BASELINE, CANDIDATE)]
    if not all(file.exists() for file in files):
        return {}, []
    ours, theirs = (read_json(file, "vocabulary", "samples") for file in files)
    scores = [run.evaluation / side / f"{task}.jsonl" for side in (BASELINE, CANDIDATE)]
    for recorded, path in zip((ours, theirs), scores, strict=True):
        # An older version's recordings do not name their answers; others may be of earlier scores.
        if recorded.get("of", {}).get("scores") != sha256_of(path)[:16]:
            return {}, []
    vocabulary = ours["vocabulary"] | theirs["vocabulary"]
    others = {(sample["question"], sample["repeat"]): sample for sample in theirs["samples"]}
    problems = [
        {
            "task": task,
            "question": recorded["question"],
            "repeat": recorded["repeat"],
            "text": recorded["prompt"],
            "sides": {
                side: {"steps": sample["steps"], "text": sample["text"]}
                for side, sample in ((BASELINE, recorded), (CANDIDATE, others[key]))
            },
        }
        for recorded in ours["samples"]
        if (key := (recorded["question"], recorded["repeat"])) in others
    ]
    return vocabulary, problems


def questions_and_canvases(
    run: RunDir, scorings: Mapping[str, tuple[Scoring, Scoring]]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return report.json's (`questions`, `canvases` or None); `scorings`: task -> (BF16, candidate)."""
    vocabulary: dict[str, str] = {}
    problems: list[dict[str, Any]] = []
    questions: dict[str, Any] = {}
    for task, (base, other) in scorings.items():
        shown = not base.private  # there may be files from when the task was not private
        words, canvases = recorded_canvases(run, task) if shown else ({}, [])
        vocabulary |= words
        entries, asked = differing(base, other), run.evaluation / "questions" / f"{task}.json"
        prompts = read_json(asked, "prompts")["prompts"] if shown and asked.exists() else {}
        by_index = {(entry["question"], entry["repeat"]): entry for entry in entries}
        for problem in canvases:
            _describe(problem, base, other, by_index)
        for entry in entries:
            entry["text"] = prompts.get(str(entry["question"]))
        problems += canvases
        questions[task] = {"private": base.private, "differ": entries}
    problems.sort(key=lambda problem: problem["outcome"] is None)
    return questions, {"vocabulary": vocabulary, "problems": problems} if problems else None


def _describe(
    problem: dict[str, Any],
    base: Scoring,
    other: Scoring,
    entries: Mapping[tuple[int, int], dict[str, Any]],
) -> None:
    """Add both models' answers and scores, and the target and outcome, to a recorded question."""
    key = (problem["question"], problem["repeat"])
    for side, scoring in ((BASELINE, base), (CANDIDATE, other)):
        row = next(row for row in scoring.rows if (row.doc_id, row.repeat) == key)
        recorded = problem["sides"][side]
        recorded |= {"answer": row.answer, "scores": row.scores}
        recorded["as_scored"] = row.text.startswith(recorded.pop("text"))
    problem["target"] = row.target
    problem["outcome"] = entries[key]["outcome"] if key in entries else None


def question_counts(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return counts of outcomes: "21 lost, 15 won, 4 wrong with another answer"."""
    counts = Counter(entry["outcome"] for entry in entries)
    other = counts["other answer"]
    return f"{counts['lost']} lost, {counts['won']} won, {other} wrong with another answer"


def question_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return an entry's cells for `QUESTION_COLUMNS`; a private entry shows no target or answer."""
    hidden = entry["target"] is None
    name = f"hash {entry['hash'][:12]}" if hidden else str(entry["question"])
    sides = (BASELINE, CANDIDATE)
    return (
        name,
        entry["outcome"],
        "-" if hidden else entry["target"],
        *(_answer(entry, side) for side in sides),
        " / ".join(str(sum(entry[side]["steps"]) or "-") for side in sides),
    )


def _answer(entry: Mapping[str, Any], side: str) -> str:
    """Return an answer and, if there are several repeats, how many are right."""
    answer = entry[side]
    right = f"{answer['right']:g} of {entry['repeats']} right"
    if answer["answer"] is None:
        return right
    return answer["answer"] if entry["repeats"] == 1 else f"{answer['answer']} ({right})"


def watched(canvases: Mapping[str, Any] | None, task: str, entry: Mapping[str, Any]) -> list[int]:
    """Return the indices in `canvases["problems"]` of a question's recordings for the viewer."""
    problems = canvases["problems"] if canvases else []
    return [
        i for i, p in enumerate(problems) if (p["task"], p["question"]) == (task, entry["question"])
    ]
