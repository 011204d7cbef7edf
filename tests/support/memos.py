"""What one process of tests computes again and again from the same text, kept.

A run compiles the chat template four times and parses each shipped recipe; hundreds of tests run one.
An error is not kept: what is wrong with a text is found anew each time.
"""

from typing import Any

import jinja2
import yaml


def keep_templates(stock: Any = jinja2.Environment.compile) -> None:
    """Compile a template's text once for all environments that would compile it alike."""
    kept: dict[Any, Any] = {}

    def compile_once(self: jinja2.Environment, source: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(source, str) or callable(self.autoescape) or self.finalize:
            return stock(self, source, *arguments, **named)
        settings = {k: v for k, v in vars(self).items() if isinstance(v, str | bool | None)}
        names = (*self.filters, *self.tests, *self.extensions)  # a name unknown is an error
        key = (type(self), source, *settings.items(), names, arguments, *named.items())
        if key not in kept:
            kept[key] = stock(self, source, *arguments, **named)
        return kept[key]

    jinja2.Environment.compile = compile_once  # type: ignore[assignment, method-assign]


def keep_yaml(loader: type[yaml.SafeLoader]) -> None:
    """Parse a text once; its values are made anew of its nodes, which a merge (`<<`) would change."""
    kept: dict[tuple[type, str], Any] = {}

    def get_single_node(self: Any, *, stock: Any = loader.get_single_node) -> Any:
        text = self.buffer
        if "<<" in text:
            return stock(self)
        if (type(self), text) not in kept:
            kept[type(self), text] = stock(self)
        return kept[type(self), text]

    loader.get_single_node = get_single_node  # type: ignore[method-assign]
