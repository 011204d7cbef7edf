"""Turns report.json into JUnit XML: test cases for static checks, fidelity, tasks and gate."""

from typing import Any
from xml.etree import ElementTree

from quantize.reports.table import cell

OUTCOME_TAGS = {"FAIL": "failure", "INCONCLUSIVE": "skipped", "NOT COMPARABLE": "error"}


NOT_JUDGED = "replayed, and not judged: the recipe has no gate.max_kl_nats of a replayed mode"


def _fidelity(content: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Return the test case of the replay: passed and failed only where the distance has a limit."""
    fidelity = content["fidelity"]
    if not fidelity:
        return "fidelity", "INCONCLUSIVE", [f"not reached: {content['verdict']['reason']}"]
    if fidelity["faults"]:
        return "fidelity", "FAIL", fidelity["faults"]
    judged = fidelity["max_kl_nats"].keys() & fidelity["activations"].keys()
    return ("fidelity", "PASS", []) if judged else ("fidelity", "INCONCLUSIVE", [NOT_JUDGED])


def junit(content: dict[str, Any]) -> str:
    """Return junit.xml: a test case for each static check and gated task, for fidelity and the gate."""
    verdict, not_reached = content["verdict"], ""
    if content.get("not_reached"):
        not_reached = f"not reached: {verdict['reason']}"
    cases = [
        (f"verification: {check['name']}", "PASS" if check["passed"] else "FAIL", check["faults"])
        for check in content["verification"]["checks"]
    ]
    cases += [_fidelity(content)] if content["fidelity"] or not_reached else []
    for task in (task for task in content["tasks"] if task["gated"]):
        outcome = task["outcome"] or "NOT COMPARABLE"
        text = task["not_comparable"] or (
            f"{cell(task, 'difference_pp', '+.2f', ' pp')}, margin {task['margin_pp']:g} pp"
        )
        cases.append((f"task {task['task']}", outcome, [text]))
    certain = not_reached or "not asked: the verdict was certain, or the budget spent"
    cases += [(f"task {task}", "INCONCLUSIVE", [certain]) for task in content["not_asked"]]
    cases.append(("gate", verdict["outcome"], [verdict["reason"]]))
    # The time of a single check is not known: a stage makes several.
    seconds = {name: facts.get("seconds", 0.0) for name, facts in content["stages"].items()}
    tags = [OUTCOME_TAGS.get(outcome) for _, outcome, _ in cases]
    suite = ElementTree.Element(
        "testsuite", name=f"quantize {content['recipe']['name']}", tests=str(len(cases)),
        failures=str(tags.count("failure")), errors=str(tags.count("error")),
        skipped=str(tags.count("skipped")), time=f"{sum(seconds.values()):.3f}",
    )  # fmt: skip
    for name, outcome, details in cases:
        case = ElementTree.SubElement(suite, "testcase", name=name, classname="quantize")
        if name in seconds:
            case.set("time", f"{seconds[name]:.3f}")
        if outcome in OUTCOME_TAGS:
            message = "; ".join(details) or "looked at nothing"
            ElementTree.SubElement(case, OUTCOME_TAGS[outcome], message=message)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
