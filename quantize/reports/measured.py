"""Renders measured.json, which `quantize measure` writes, as one HTML page without text of prompts."""

import math
import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from quantize.host.units import duration
from quantize.reports.charts import lines
from quantize.reports.render import PAGES
from quantize.reports.sections import ReportSection
from quantize.reports.table import ENDS, in_percent

Content = Mapping[str, Any]  # measured.json
SHOWN = 20  # Linears of the table of outliers
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
CAPTIONS = {
    "hit": ("Experts that a canvas hits in a layer", "Mean over canvases, by denoising step."),
    "load": ("Largest share of a layer's tokens that one expert gets, %", "By denoising step."),
    "entropy": ("Entropy of a position, nats", "Of the distribution that tokens are drawn from."),
    "mass": ("Tokens that hold .999 of it, log10", "The most probable first; 0 is one token."),
    "ranges": ("Largest input of a Linear, log10 of |x|", "By layer; the largest of its class."),
    "routing": ("Other experts than BF16's, %", "By layer, on replayed trajectories."),
}


def measured_page(content: Content) -> str:
    """Return the text of measured.html: self-contained, light and dark, readable on a phone."""
    return PAGES.get_template("measured.html.jinja").render(
        title=f"Measured: {content['model']['model']}",
        head=_head(content),
        sections=[_kinds(content), _steps(), _inputs(content), *_routing(content)],
        captions=CAPTIONS,
        explained={},
        plots={name: Markup(svg) for name, svg in _charts(content).items()},
    )


def _head(content: Content) -> list[str]:
    hardware, speeds = content["hardware"], content["ms_a_forward"] or {}
    timed = "; ".join(
        f"{ms:.1f} ms a forward with {batch} canvases" for batch, ms in speeds.items()
    )
    return [
        f"{content['kinds']['all']['samples']} answers of at most {_canvases(content)}, "
        f"{content['prompts_a_kind']} to each kind of prompt, in {duration(content['seconds'])}.",
        timed + "." if timed else "The time of a forward was not measured.",
        f"{hardware['cpu']}, {hardware['cores']} cores; GPUs: {', '.join(hardware['gpus']) or 'none'}. "
        f"quantize {content['tool']['version']}. Model fingerprint {content['model']['fingerprint']}.",
    ]


def _kinds(content: Content) -> ReportSection:
    rows = [
        [kind, *(format(in_percent(counts)[key], form) for key, form in ENDS.values())]
        for kind, counts in content["kinds"].items()
    ]
    said = [f"Finished: the answer ended within {_canvases(content)}."]
    return ReportSection("Steps, ends and loops by kind of prompt", ("kind", *ENDS), rows, said)


def _canvases(content: Content) -> str:
    return "1 canvas" if content["canvases"] == 1 else f"{content['canvases']} canvases"


def _steps() -> ReportSection:
    said = ["At later steps only the canvases that go on are left."]
    return ReportSection("Denoising steps", (), (), said, (), ("hit", "load", "entropy", "mass"))


def _inputs(content: Content) -> ReportSection:
    ordered = sorted(content["inputs"], key=lambda e: -e["largest"] / (e["median"] or math.inf))
    rows = [
        [
            e["linear"].removeprefix("model.decoder."),
            f"{e['largest']:.4g}",
            f"{e['median']:.4g}",
            f"{e['outliers']:.0f}",
        ]
        for e in ordered[:SHOWN]
    ]
    columns = ("Linear", "largest |x|", "median channel", "channels above 8 medians")
    said = [
        f"The {len(rows)} Linears whose largest input is farthest above that of their median channel."
    ]
    return ReportSection("Inputs of Linears", columns, rows, said, (), ("ranges",))


def _routing(content: Content) -> list[ReportSection]:
    if not (routing := content["routing"]):
        return []
    shares, cost = routing["routing_overlap"], routing["cost"]
    said = [
        f"A quantized checkpoint (activations {routing['activations']}) chooses {shares[0]:.1%} of "
        f"BF16's experts in the first layer and {shares[-1]:.1%} in the last. Of the KL of "
        f"{cost['as_it_is']['mean']:.4f} nats, other choices add {cost['choices_add']['mean']:.4f}."
    ]
    return [ReportSection("Routing of a checkpoint", (), (), said, (), ("routing",))]


def _charts(content: Content) -> dict[str, str]:
    steps = content["by_step"]

    def by_step(value: Any) -> list[tuple[int, float]]:
        return [(step["step"], value(step)) for step in steps]

    def of_layers(key: str, times: float = 1) -> dict[str, list[tuple[int, float]]]:
        sides: dict[str, Any] = {"mean": lambda of: sum(of) / len(of), "most": max, "least": min}
        return {
            name: by_step(lambda step, side=side: times * side(step[key]))
            for name, side in sides.items()
        }

    mass = {
        name: by_step(lambda step, name=name: math.log10(step["tokens_of_mass"][name]))
        for name in ("mean", "p90")
    }
    x = "denoising step"
    plots = {
        "hit": lines(of_layers("experts_hit"), x, "experts hit"),
        "load": lines(of_layers("largest_share_of_load", 100), x, "largest share of load, %"),
        "entropy": lines({"mean": by_step(lambda step: step["entropy_nats"])}, x, "entropy, nats"),
        "mass": lines(mass, x, "log10 of tokens that hold .999"),
        "ranges": lines(_ranges(content), "layer", "log10 of the largest |x|"),
    }
    if routing := content["routing"]:
        others = [(i, 100 - 100 * share) for i, share in enumerate(routing["routing_overlap"])]
        plots["routing"] = lines({"quantized": others}, "layer", "other experts, %")
    return plots


def _ranges(content: Content) -> dict[str, list[tuple[int, float]]]:
    """Return class of Linears -> (layer, log10 of the largest |x| that entered one of them)."""
    largest: dict[str, dict[int, float]] = {}
    for entry in content["inputs"]:
        if match := LAYER.search(entry["linear"]):
            kinds = {".self_attn.": "attention", ".experts.": "experts", ".mlp.": "mlp"}
            kind = next((name for part, name in kinds.items() if part in entry["linear"]), "")
            layers = largest.setdefault(kind, {})
            layer = int(match[1])
            layers[layer] = max(layers.get(layer, 0.0), entry["largest"])
    return {
        kind: [(layer, math.log10(max(1.0, x))) for layer, x in sorted(layers.items())]
        for kind, layers in largest.items()
        if kind
    }
