"""Checks the files beside a model's weights for what a later stage would refuse."""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantize.checkpoints.reader import (
    CONFIG,
    FIX,
    GENERATION,
    SETTINGS,
    TEMPLATE,
    TOKENIZER,
    check_tokenizer,
    read_config,
    read_json_object,
)  # fmt: skip
from quantize.errors import InputError
from quantize.runtime.prompt.chat import SENTENCE, TEMPLATE_FAULTS, check_rendered, in_time
from quantize.runtime.sampler.sampler import Sampler

if TYPE_CHECKING:
    from quantize.checkpoints.from_transformers import DiffusionGemmaForBlockDiffusion

IMAGE_ENDS = ("boi_token_id", "eoi_token_id")
GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def check_carried(folder: Path) -> None:
    """Raise InputError if a JSON file that every quantized checkpoint carries is damaged."""
    for file in sorted(folder.glob("*.json")):
        if file.name != TOKENIZER and any(fnmatch(file.name, pattern) for pattern in SETTINGS):
            read_json_object(file)  # `check_tokenizer` reads the tokenizer


def check_ids(folder: Path) -> None:
    """Raise InputError if a token id of the settings is not a row of the embedding."""
    config = read_config(folder)
    rows = config["text_config"]["vocab_size"]
    ids: list[tuple[str, str, Any]] = []
    if (folder / GENERATION).is_file():
        sampler = Sampler.from_checkpoint(folder)
        ids += [(GENERATION, "eos_token_id", token) for token in sampler.eos_token_ids]
        ids += [(GENERATION, "pad_token_id", sampler.pad_token_id)]
    if "image_token_id" not in config:  # transformers would fill in the released model's
        raise InputError(f"{folder / CONFIG}: image_token_id is missing; write it, or null, there")
    ids += [(CONFIG, key, config.get(key)) for key in ("image_token_id", *IMAGE_ENDS)]
    for file, key, token in ids:
        _check_row(folder / file, key, token, rows)


def check_tokenizer_ids(folder: Path) -> None:
    """Raise InputError if the tokenizer has an id that is not a row of the embedding.

    A run does not ask: such a model answers as long as no text holds the token.
    """
    rows = read_config(folder)["text_config"]["vocab_size"]
    _check_row(folder / TOKENIZER, "the largest id", _largest_id(folder / TOKENIZER), rows)


def _check_row(file: Path, key: str, token: Any, rows: int) -> None:
    if token is not None and (type(token) is not int or not 0 <= token < rows):
        raise InputError(
            f"{file}: {key} is {str(token)[:60]!r}, and the vocabulary has the ids 0 to "
            f"{rows - 1:,} (text_config.vocab_size); mend it"
        )


def _largest_id(path: Path) -> Any:
    """Return the largest token id of a tokenizer.json, None if it lists none."""
    stated = read_json_object(path) if path.is_file() else {}  # else `check_tokenizer` says so
    model, added = stated.get("model"), stated.get("added_tokens")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary or ()))
    others = [token.get("id") for token in added or () if isinstance(token, dict)]
    return max((token for token in (*ids, *others) if type(token) is int), default=None)


def check_template(folder: Path) -> None:
    """Raise InputError, which names file and line, if a chat template is not valid Jinja.

    tokenizer_config.json may list templates by name; transformers takes the one named "default".
    """
    path = folder / TEMPLATE
    if path.is_file():
        try:
            _check_jinja(path, path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: not readable as text ({error}); {FIX}") from error
        return
    path = folder / "tokenizer_config.json"
    stated: Any = read_json_object(path).get("chat_template") if path.is_file() else None
    if isinstance(stated, list):
        templates: list[Any] = [
            entry.get("template") for entry in stated if isinstance(entry, dict)
        ]
        names = [entry.get("name") for entry in stated if isinstance(entry, dict)]
        if not all(isinstance(t, str) for t in (*templates, *names)) or len(names) < len(stated):
            raise InputError(
                f'{path}: chat_template lists what is not {{"name": text, "template": text}}; mend it'
            )
        if names.count("default") != 1:
            raise InputError(
                f'{path}: chat_template lists {names}, and one must be named "default"; mend it'
            )
    else:  # `check_tokenizer` says that none is there
        templates = [stated] if stated and isinstance(stated, str) else []
    for template in templates:
        _check_jinja(path, template)


def _check_jinja(path: Path, template: str) -> Any:
    if not template.strip():
        raise InputError(f"{path}: the chat template is empty; download it again")
    # transformers' own tag marks what the model said; here its body is parsed as a block's.
    template = GENERATION_TAG.sub(
        lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", template
    )
    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise InputError(
            f"{path}: line {error.lineno}: the chat template is not valid Jinja ({error.message}); "
            f"mend it, or download it again"
        ) from error


_FILES = (check_tokenizer, check_carried, Sampler.from_checkpoint, check_ids, check_template)


def check_prompts(folder: Path) -> None:
    """Raise InputError if settings and template, each sound in itself, make no whole prompts.

    No tokenizer is loaded, which takes seconds; `sound_tokenizer` looks again before prompts are made.
    """
    try:
        for look in _FILES:
            look(folder)
    except InputError:
        return  # which has been said
    settings, path = folder / "tokenizer_config.json", folder / TEMPLATE
    stated = read_json_object(settings) if settings.is_file() else {}
    if not isinstance(stated.get("tokenizer_class"), str):
        raise InputError(
            f"{settings}: tokenizer_class is missing, and the class that transformers takes then loses "
            f"text; download the checkpoint again"
        )
    source: Any = path.read_text("utf-8") if path.is_file() else stated["chat_template"]
    if isinstance(source, list):
        source = next(entry["template"] for entry in source if entry["name"] == "default")
    added = read_json_object(folder / TOKENIZER).get("added_tokens") or ()
    chat = [{"role": "user", "content": SENTENCE}]
    tokens = {t["content"] for t in added if "content" in t}
    for thinking in (False, True):
        values = {"messages": chat, "add_generation_prompt": True, "enable_thinking": thinking}
        try:
            with in_time():
                prompt = _check_jinja(path, source).render(values)
            check_rendered(prompt, tokens)
        except InputError as error:
            raise InputError(f"{folder}: {error}; download the checkpoint again") from error
        except (TemplateError, TypeError):  # it asks for what only transformers gives
            return
        except TEMPLATE_FAULTS as error:
            reason = f"the chat template fails ({type(error).__name__}: {error}); mend it"
            raise InputError(f"{folder}: {reason}, or download it again") from error


LOOKS = (*_FILES, check_prompts)
INSPECTED = (*LOOKS, check_tokenizer_ids)


def check_beside(folder: Path) -> None:
    """Raise the first InputError of LOOKS: tokenizer and template, JSON files, settings, ids."""
    for look in LOOKS:
        look(folder)


def load(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> "DiffusionGemmaForBlockDiffusion":
    """Return a BF16 or quantized checkpoint as a transformers model, as `checkpoints.load` does.

    Raise InputError, too, if its generation settings are not the sampler's (`do_sample`, `top_k`):
    the model would answer otherwise than the folder says.
    """
    from quantize.checkpoints import load as weights  # transformers takes seconds

    Sampler.from_checkpoint(Path(folder))
    return weights.load(Path(folder), dtype=dtype, device=device)
