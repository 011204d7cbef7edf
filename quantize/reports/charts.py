"""Draws the report's plots as SVG text, for a column 420 units wide that a phone can show.

No plotting library is used, so that the page's CSS can set the plots' light and dark colours.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

WIDTH = 420
LEFT, RIGHT = 128, 12
CLASSES = ("attention", "mlp", "experts")


def all_charts(content: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> SVG of every plot that report.json has data for."""
    again = [task | {"activations": None} for task in content["noise_floor"]]
    plots = {"difference": difference([*content["tasks"], *again])}
    if content["operating_points"]:
        plots["points"] = operating_points(content)
    if content["fidelity"]:
        replays = content["fidelity"]["activations"].items()
        kl = {
            mode: [(e["step"], e["kl_nats"]) for e in figures["by_step"]]
            for mode, figures in replays
        }
        plots["kl"] = lines(kl, "denoising step", "KL from BF16, nats")
        others = {
            mode: [(i, 100 - 100 * share) for i, share in enumerate(figures["routing_overlap"])]
            for mode, figures in replays
        }
        plots["routing"] = lines(others, "layer", "other experts than BF16's, %")
    if layers := content["layers"]:
        errors = {
            kind: [(e["layer"], 100 * e["error"][kind]) for e in layers if kind in e["error"]]
            for kind in CLASSES
        }
        shown = {kind: points for kind, points in errors.items() if points}
        plots["error"] = lines(shown, "layer", "relative error, %")
    return plots


def difference(tasks: Sequence[dict[str, Any]]) -> str:
    """Return an SVG of entries' differences from BF16 in points, with one-sided bounds and margin."""
    rows = [task for task in tasks if not task["not_comparable"]]
    bounds = [task["difference_bounds"] for task in rows]
    ends = [0.0, *(end for interval in bounds for end in interval.values())]
    ends += [-float(task["margin_pp"]) for task in rows]
    room = max(1.0, 0.05 * (max(ends) - min(ends)))
    x = _Scale(min(ends) - room, max(ends) + room)
    height = 30 + 34 * len(rows)
    body = "".join(_path("grid", f"M{x(tick):.1f} 4V{height}") for tick in x.ticks())
    body += "".join(_text(x(tick), height + 14, f"{tick:g}", "tick middle") for tick in x.ticks())
    body += _path("hundred", f"M{x(0):.1f} 4V{height}")
    for i, (task, bound) in enumerate(zip(rows, bounds, strict=True)):
        y, mode = 22 + 34 * i, task["activations"]
        line, point = ("interval", "a") if mode else ("interval again", "hollow")
        body += _text(0, y - 6, f"{task['task']}, {mode or 'BF16 again'}", "label")
        body += _path("margin", f"M{x(-task['margin_pp']):.1f} {y - 4}V{y + 16}")
        body += _path(line, f"M{x(bound['low']):.1f} {y + 6}H{x(bound['high']):.1f}")
        body += _circle(point, x(task["difference_pp"]), y + 6, 4.5)
        value = f"{task['difference_pp']:+.1f} [{bound['low']:+.1f}, {bound['high']:+.1f}]"
        body += _text(0, y + 10, value.replace("-", "\u2212"), "value")
    title = "Accuracy minus BF16's in points, with one-sided bounds and margin"
    return _svg(height + 22, title, body)


def operating_points(content: Mapping[str, Any]) -> str:
    """Return an SVG of operating points' differences from BF16 over speed, with one-sided bounds."""
    rates = content["speeds"] and content["speeds"]["tokens_a_second"]
    unit = f"tokens/s, {content['speeds']['device']}" if rates else "tokens a forward"
    points = [
        (_speed(t, rates), t["difference_pp"], t["difference_bounds"], t)
        for t in content["tasks"]
        if not t["not_comparable"] and (t["gated"] or t["activations"].startswith("at "))
    ]
    ends = [end for _, _, bound, _ in points for end in bound.values()]
    margins = [-float(t["margin_pp"]) for *_, t in points]
    x = _Scale(0, 1.1 * max(rates.values() if rates else (speed for speed, *_ in points)), 44)
    y = _Scale(min(*ends, *margins) - 0.5, max(ends) + 0.5, 150, 8)
    body = _axes(y, [(x(tick), f"{tick:g}") for tick in x.ticks()], unit)
    for margin in set(margins):
        body += _path("margin", f"M44 {y(margin):.1f}H{WIDTH - RIGHT}")
    for speed, difference, bound, task in points:
        at = x(speed)
        body += _path("interval", f"M{at:.1f} {y(bound['low']):.1f}V{y(bound['high']):.1f}")
        body += _circle("a", at, y(difference), 4)
        name = task["activations"].removeprefix("at ") if not task["gated"] else "own"
        body += _text(at + 6, y(difference) + 4, name, "tick")
    if rates:
        body += _circle("hollow", x(rates["bf16"]), y(0), 4)
        body += _text(x(rates["bf16"]) + 6, y(0) + 16, "BF16", "tick")
    return _svg(186, f"Accuracy minus BF16's in points, by {unit}, and the margin", body)


def _speed(task: dict[str, Any], rates: dict[str, float] | None) -> float:
    if rates is None:
        return task["quantized_counts"]["tokens_per_forward"]
    at = task["activations"].removeprefix("at ")
    return rates["quantized" if task["gated"] else f"quantized-at-{at}"]


class _Scale:
    """A linear scale from values to units of the drawing, by default along the width."""

    def __init__(
        self, low: float, high: float, start: float = LEFT, end: float = WIDTH - RIGHT
    ) -> None:
        self.low, self.high, self.start, self.end = low, max(high, low + 1e-9), start, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return two to seven round values inside the scale."""
        span = self.high - self.low
        power = 10 ** math.floor(math.log10(span))
        steps = (0.1, 0.2, 0.5, 1.0, 2.0)
        step = next(s * power for s in steps if span / (s * power) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def lines(of: Mapping[str, Sequence[tuple[int, float]]], x_name: str, y_name: str) -> str:
    """Return an SVG of up to three named lines through points (x, y), x whole and y 0 or above."""
    points = [point for line in of.values() for point in line]
    x = _Scale(min(p[0] for p in points), max(p[0] for p in points), 44)
    y = _Scale(0, max(p[1] for p in points) * 1.05, 150, 8)
    whole = [(x(tick), f"{int(tick)}") for tick in x.ticks() if tick == int(tick)]
    body = _axes(y, whole, x_name)
    for i, (name, line) in enumerate(of.items()):
        css = "abc"[i % 3]
        body += _path(f"line {css}", "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in line))
        body += "".join(_circle(css, x(a), y(b), 2.2) for a, b in line)
        body += f'<rect class="{css}" x="{44 + 125 * i}" y="187" width="10" height="10"/>'
        body += _text(58 + 125 * i, 196, name, "label")
    return _svg(202, f"{y_name}, by {x_name}", body)


def _axes(y: _Scale, x_ticks: Iterable[tuple[float, str]], x_name: str) -> str:
    """Return y's ticks at 44, texts below the drawing at places on x, and the name of x."""
    body = "".join(
        _path("grid", f"M44 {y(tick):.1f}H{WIDTH - RIGHT}")
        + _text(39, y(tick) + 4, f"{tick:.6g}", "tick end")
        for tick in y.ticks()
    )
    body += "".join(_text(at, 164, text, "tick middle") for at, text in x_ticks)
    return body + _text((44 + WIDTH - RIGHT) / 2, 178, x_name, "label middle")


def _path(css: str, way: str) -> str:
    return f'<path class="{css}" d="{way}"/>'


def _circle(css: str, x: float, y: float, radius: float) -> str:
    return f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(height: float, title: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label={quoteattr(title)}>'
        f"{body}</svg>"
    )
