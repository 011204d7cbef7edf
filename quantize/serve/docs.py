"""GET /docs shows the OpenAPI schema as one page, made here: nothing is loaded from elsewhere."""

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, select_autoescape

TEMPLATE = Path(__file__).parent / "static" / "docs.html.jinja"


def page(schema: dict[str, Any]) -> str:
    """Return the page of an OpenAPI schema."""
    environment = Environment(autoescape=select_autoescape(default=True), trim_blocks=True)
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        schema, refs=_refs, brief=_brief
    )


def _refs(kind: dict[str, Any]) -> list[str]:
    """Return the names of the objects that a field refers to."""
    return sorted(set(re.findall(r"#/components/schemas/(\w+)", json.dumps(kind))))


def _brief(kind: dict[str, Any]) -> str:
    """Return what a field takes, without its title and description."""
    return json.dumps({k: v for k, v in kind.items() if k not in ("title", "description")})
