"""Turns the config.json of any transformers version into one form: that of Google's release.

transformers 5.11 to 5.14 state the sizes of full-attention layers as `global_head_dim` and
`num_global_key_value_heads`, as Google does. From 5.15 on `per_layer_config` states them, by layer;
from 5.17 on the vision tower's `rope_type` is "axial". Google's form is read by all of them, and by
vLLM 0.26 to 0.33; `per_layer_config` is not (docs/folders.md). So all code reads Google's form, and
all that is written has it. Nothing is assumed: a missing key, or a value that the kernels do not
compute, is an error that names the key. transformers would fill in the sizes of some other model.
"""

import json
from collections.abc import Iterable, Mapping
from textwrap import shorten
from typing import Any, NoReturn

from quantize.errors import InputError

FIX = "download or write the checkpoint again"
SIZES = {  # section -> its sizes, numbers above 0
    "": ("canvas_length",),
    "text_config": (
        "hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts", "top_k_experts",
        "num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "head_dim",
        "global_head_dim", "num_hidden_layers", "vocab_size", "sliding_window",
        "max_position_embeddings",
    ),
    "vision_config": (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_hidden_layers", "patch_size", "pooling_kernel_size", "position_embedding_size",
    ),
}  # fmt: skip
LARGEST = (1 << 24) - 1  # of a size
MAX_LAYERS, MAX_EXPERTS = 1000, 4096
NUMBERS = ("rms_norm_eps", "final_logit_softcapping")  # of the text, above 0
COMPUTED = {  # key of the text -> the only value that the kernels compute
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": "vision",
    "rope_parameters.sliding_attention.rope_type": "default",
    "rope_parameters.full_attention.rope_type": "proportional",
}
INERT = {  # key of other models -> the values with which transformers builds this one, beside null
    "num_kv_shared_layers": (0,),
    "rope_scaling": ({},),
    "attention_k_eq_v": (True,),
}
PLAIN: dict[str, tuple[tuple[type, ...], tuple[str, ...]]] = {
    # What decides nothing here, but must be of these types or transformers builds no model.
    "text": ((str,), ("transformers_version", "problem_type", "hidden_activation")),
    "true or false": ((bool,), ("output_hidden_states", "return_dict", "is_encoder_decoder",
                                "attention_bias", "tie_word_embeddings")),
    "a whole number": ((int,), ("pad_token_id", "bos_token_id", "chunk_size_feed_forward",
                                "num_labels", "max_position_embeddings")),
    "an id or a list of ids": ((int, list), ("eos_token_id",)),
    "a list of names": ((list,), ("architectures",)),
    "an object": ((dict,), ("id2label", "label2id")),
    "a number": ((int, float), ("initializer_range", "attention_dropout", "rms_norm_eps")),
}  # fmt: skip
ATTENTION = ("eager", "sdpa")  # that need no other package
FLOATS = ("bfloat16", "float16", "float32", "float64")
ROPES = ("rope_parameters.sliding_attention.rope_theta", "rope_parameters.full_attention.rope_theta",
         "rope_parameters.full_attention.partial_rotary_factor")  # fmt: skip
KINDS = ("sliding_attention", "full_attention")
PER_LAYER = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def google_form(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Return a DiffusionGemma's config.json in Google's form; `where` begins the messages of errors.

    Raise InputError, which names the key, if a key that decides something is missing, is of a wrong
    type, contradicts another, or describes a model that this package does not compute.
    """
    form = {key: value for key, value in config.items() if key != "quantization_config"}
    quantization = config.get("quantization_config")
    if quantization not in (None, {}):  # transformers reads both as: not quantized
        form["quantization_config"] = _object(quantization, where, "quantization_config")
    text = dict(_object(_at(config, "text_config"), where, "text_config"))
    if config.get("vision_config") is None:
        raise InputError(
            f"{where}: vision_config is missing, as in a text-only export: DiffusionGemma has a vision "
            f"tower, without which transformers builds no model; export the whole model"
        )
    vision = dict(_object(config["vision_config"], where, "vision_config"))
    form |= {"text_config": text, "vision_config": vision}
    for section in ("text_config", "vision_config"):
        if form[section].get("quantization_config") is not None:
            raise InputError(
                f"{where}: {section}.quantization_config is there: only one of the whole model is "
                f"read; move it to the top if the weights are quantized, or remove it"
            )
    for section in ("", "text_config", "vision_config"):
        _check_inert(form[section] if section else form, where, section)
    _name_full_layers(text, where)
    for section, keys in SIZES.items():
        _check_sizes(form[section] if section else form, keys, where, section)
    _check_text(text, where)
    if form["canvas_length"] >= (most := text["max_position_embeddings"]):
        wanted = f"less than text_config.max_position_embeddings, {most:,},"
        _refuse(where, "canvas_length", form["canvas_length"], wanted)
    _check_vision(vision, where)
    if type(tied := _at(form, "tie_word_embeddings")) is not bool:  # `layout` looks at the tensors
        _refuse(where, "tie_word_embeddings", tied, "true or false")
    for section in ("", "text_config", "vision_config"):
        _check_plain(form[section] if section else form, where, section)
    # Keys in transformers' order, so that both notations of a config are written as equal bytes.
    return json.loads(json.dumps(form, sort_keys=True))


def _object(value: Any, where: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(where, key, value, "an object")
    return value


def _refuse(where: str, key: str, value: Any, wanted: str) -> NoReturn:
    raise InputError(f"{where}: {key} {_said(value)}, and {wanted} is needed; {FIX}")


def _check_inert(section: Mapping[str, Any], where: str, name: str) -> None:
    """Check keys with which transformers fails to build the model, or builds another one."""
    for key, values in INERT.items():
        value = section.get(key)
        if value is not None and not any(value == v and type(value) is type(v) for v in values):
            raise InputError(
                f"{where}: {f'{name}.{key}'.lstrip('.')} {_said(value)}, which is not "
                f"DiffusionGemma's; remove it if the weights do not need it"
            )
    for key in ("dtype", "torch_dtype"):
        value = section.get(key)
        if value is not None and str(value).removeprefix("torch.") not in FLOATS:
            _refuse(where, f"{name}.{key}".lstrip("."), value, f"one of {', '.join(FLOATS)}")


def _check_plain(section: Mapping[str, Any], where: str, name: str) -> None:
    """Check the types of keys that decide nothing, as far as no other check has done it."""
    for wanted, (types, keys) in PLAIN.items():
        for key in keys:
            if section.get(key) is not None and type(section[key]) not in types:
                _refuse(where, f"{name}.{key}".lstrip("."), section[key], wanted)
    for key in ("attn_implementation", "_attn_implementation"):
        if (value := section.get(key)) is not None and value not in ATTENTION:
            wanted = f"{' or '.join(ATTENTION)}, or no such key,"
            _refuse(where, f"{name}.{key}".lstrip("."), value, wanted)


def _check_sizes(section: Mapping[str, Any], keys: Iterable[str], where: str, name: str) -> None:
    most = {"num_hidden_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS}
    for key in keys:
        largest, value = most.get(key, LARGEST), _at(section, key)
        if type(value) is not int or not 0 < value <= largest:
            wanted = f"a whole number from 1 to {largest:,}"
            _refuse(where, f"{name}.{key}".lstrip("."), value, wanted)


def _check_text(text: Mapping[str, Any], where: str) -> None:
    kinds = _at(text, "layer_types")
    if not isinstance(kinds, list) or len(kinds) != text["num_hidden_layers"]:
        _refuse(
            where, "text_config.layer_types", kinds, "the kind of each of num_hidden_layers layers"
        )
    if odd := [kind for kind in kinds if kind not in KINDS]:
        _refuse(where, "text_config.layer_types", odd[0], f"{' or '.join(KINDS)} for each layer")
    if kinds[-1] != "full_attention":
        _refuse(
            where, "text_config.layer_types[-1]", kinds[-1], "full_attention for the last layer"
        )
    if text["top_k_experts"] > text["num_experts"]:
        most = f"at most num_experts, {text['num_experts']},"
        _refuse(where, "text_config.top_k_experts", text["top_k_experts"], most)
    pad = text.get("pad_token_id", 0)  # in place of pictures' tokens, so null ends every forward
    if type(pad) is not int or not 0 <= pad < text["vocab_size"]:
        wanted = f"an id of the vocabulary, 0 to {text['vocab_size'] - 1:,},"
        _refuse(where, "text_config.pad_token_id", pad, wanted)
    _object(_at(text, "rope_parameters"), where, "text_config.rope_parameters")
    for key in (*NUMBERS, *ROPES):
        if type(value := _at(text, key)) not in (int, float) or not 0 < value < float("inf"):
            _refuse(where, f"text_config.{key}", value, "a number above 0")
    for key, computed in COMPUTED.items():
        if (value := _at(text, key)) != computed or type(value) is not type(computed):
            raise InputError(
                f"{where}: text_config.{key} {_said(value)}; only {computed!r} is computed here"
            )


def _at(section: Any, path: str) -> Any:
    """Return what stands at a path of keys, `...` if nothing does."""
    for key in path.split("."):
        section = section.get(key, ...) if isinstance(section, Mapping) else ...
    return section


def _said(value: Any) -> str:
    if value is ...:
        return "is missing"
    if isinstance(value, list) and len(str(value)) > 60:
        return f"is a list of {len(value)}, {shorten(str(value), 60, placeholder=' ...')}"
    return "is null" if value is None else f"is {str(value)[:60]!r}"


def _check_vision(vision: dict[str, Any], where: str) -> None:
    """Check the tower's config, and call its rotary embedding as Google does."""
    if (kind := _at(vision, "model_type")) != "gemma4_vision":
        _refuse(where, "vision_config.model_type", kind, "'gemma4_vision'")
    for key in ("standardize", "use_clipped_linears"):
        if type(value := _at(vision, key)) is not bool:
            _refuse(where, f"vision_config.{key}", value, "true or false")
    rope = _object(_at(vision, "rope_parameters"), where, "vision_config.rope_parameters")
    if (kind := _at(rope, "rope_type")) not in ("default", "axial"):
        _refuse(where, "vision_config.rope_parameters.rope_type", kind, "'default' (or 'axial')")
    if type(theta := _at(rope, "rope_theta")) not in (int, float) or not 0 < theta < float("inf"):
        _refuse(where, "vision_config.rope_parameters.rope_theta", theta, "a number above 0")
    vision["rope_parameters"] = {**rope, "rope_type": "default"}


def _name_full_layers(text: dict[str, Any], where: str) -> None:
    """Replace `per_layer_config` in `text` by the two keys that state the sizes of all full layers."""
    overrides = text.pop("per_layer_config", None)
    if overrides is None:
        if "num_global_key_value_heads" in text and text["num_global_key_value_heads"] is None:
            text["num_global_key_value_heads"] = text.get("num_key_value_heads")  # as transformers
        return
    key = "text_config.per_layer_config"
    stated: Mapping[Any, Any] = _object(overrides, where, key)
    kinds = _at(text, "layer_types")
    if not isinstance(kinds, list):
        _refuse(where, "text_config.layer_types", kinds, "the kind of each layer")
    layers = dict[int, Mapping[str, Any]]()
    for index, layer in stated.items():
        is_layer = str(index).isdecimal() and int(index) < len(kinds)
        if not is_layer or not isinstance(layer, Mapping) or layer.keys() - PER_LAYER:
            wanted = f"only {' and '.join(PER_LAYER)} of a layer from 0 to {len(kinds) - 1}"
            _refuse(where, f'{key}["{index}"]', layer, wanted)
        layers[int(index)] = layer
    for name, whole in PER_LAYER.items():
        sizes = [(layers.get(i) or {}).get(name, text.get(name)) for i in range(len(kinds))]
        full = {
            repr(v): v for v, kind in zip(sizes, kinds, strict=True) if kind == "full_attention"
        }
        others = [v for v, kind in zip(sizes, kinds, strict=True) if kind != "full_attention"]
        if len(full) != 1 or any(value != text.get(name) for value in others):
            _refuse(
                where, f"{key}: {name}", overrides, "one value for all full layers and no other"
            )
        (value,) = full.values()
        if text.setdefault(whole, value) not in (value, None):
            _refuse(
                where, f"text_config.{whole}", text[whole], f"{value}, as per_layer_config says,"
            )
        text[whole] = value
