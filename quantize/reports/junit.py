"""Turns report.json into JUnit XML: a case for each check, for fidelity, tasks and gate."""

from typing import Any
from xml.etree import ElementTree

from quantize.reports.table import interval_text

OUTCOME_TAGS = {"FAIL": "failure", "INCONCLUSIVE": "skipped", "NOT COMPARABLE": "error"}


def junit(content: dict[str, Any]) -> str:
    """Return junit.xml: a test case for each static check, for fidelity, each task and the gate."""
    verdict = content["verdict"]
    cases = [
        (f"verification: {check['name']}", "PASS" if check["passed"] else "FAIL", check["faults"])
        for check in content["verification"]["checks"]
    ]
    if content["fidelity"]:
        faults = content["fidelity"]["faults"]
        cases.append(("fidelity", "FAIL" if faults else "PASS", faults))
    for task in (task for task in content["tasks"] if task["gated"]):
        outcome = task["outcome"] or "NOT COMPARABLE"
        cases.append((f"task {task['task']}", outcome, [task["not_comparable"] or task_text(task)]))
    certain = "not asked: the verdict was certain before"
    cases += [(f"task {task}", "INCONCLUSIVE", [certain]) for task in content["not_asked"]]
    cases.append(("gate", verdict["outcome"], [verdict["reason"]]))
    counted = {
        tag: sum(OUTCOME_TAGS.get(c[1]) == tag for c in cases) for tag in OUTCOME_TAGS.values()
    }
    suite = ElementTree.Element(
        "testsuite",
        name=f"quantize {content['recipe']['name']}",
        tests=str(len(cases)),
        failures=str(counted["failure"]),
        errors=str(counted["error"]),
        skipped=str(counted["skipped"]),
        time=f"{sum(_seconds(content).values()):.3f}",
    )
    for name, outcome, details in cases:
        case = ElementTree.SubElement(suite, "testcase", name=name, classname="quantize")
        if name in (seconds := _seconds(content)):
            case.set("time", f"{seconds[name]:.3f}")
        if outcome in OUTCOME_TAGS:
            message = "; ".join(details) or "looked at nothing"
            ElementTree.SubElement(case, OUTCOME_TAGS[outcome], message=message)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _seconds(content: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of every stage, by its name; what one check of several took is not known."""
    return {name: facts.get("seconds", 0.0) for name, facts in content["stages"].items()}


def task_text(task: dict[str, Any]) -> str:
    """Return a gated task's result in one line."""
    interval = interval_text(task["difference_interval"], "+.2f")
    return f"{task['difference_pp']:+.2f} pp {interval}, margin {task['margin_pp']:g} pp"
