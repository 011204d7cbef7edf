"""What one process of tests computes again and again from the same text, kept.

A run compiles the chat template four times, parses each shipped recipe and plans the same tensors
before every stage; hundreds of tests run one.
An error is not kept: what is wrong with a text is found anew each time.
"""

from functools import cache
from types import ModuleType
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


def keep_plans(targets: ModuleType) -> None:
    """Choose a tensor's scheme once for all recipes with the same section `quantization`."""
    kept: dict[str, Any] = {}

    def chosen_by(quantization: Any, *, stock: Any = targets._chosen_by) -> Any:
        key = quantization.model_dump_json()
        if key not in kept:
            kept[key] = stock(quantization)
        return kept[key]

    targets._chosen_by = chosen_by
    targets._target = cache(targets._target)
    targets.linear_modules = cache(targets.linear_modules)
