"""OpenAI's fields that block diffusion lacks; `serve` ignores or refuses each, and says what to do.

IGNORABLE parameters steer token-by-token sampling, or ask for something besides the answer. Without
them the question is the same. Most clients send some, so they are ignored and named in a header;
`--strict` refuses them. NEUTRAL_ONLY parameters would change what the answer says; they are refused
unless the value is neutral. So are FOREIGN ones, whose neutral values are ignored by name, and not
known with `--strict`. Fields that nothing reads are ignored likewise (`unread`): those whose value is
`nothing`, and what other servers put into messages and tools, unless it is TO_BE_READ. REFUSED
parameters and PARTS are refused whatever their value.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any

SAMPLING = "canvases are denoised, not sampled token by token; set"
UNCERTAINTY = f"{SAMPLING} entropy_bound, how much uncertainty a step may accept"
PENALTY = "a canvas' tokens are chosen at once;"

# name -> (values that ask for nothing, why not and the way out)
IGNORABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "temperature": ((1,), f"{SAMPLING} t_min and t_max, the range it falls over"),
    "top_p": ((1,), UNCERTAINTY),
    "top_k": ((0, -1), UNCERTAINTY),
    "min_p": ((0,), UNCERTAINTY),
    "frequency_penalty": ((0,), f"{PENALTY} leave it out"),
    "presence_penalty": ((0,), f"{PENALTY} leave it out"),
    "repetition_penalty": ((1,), f"{PENALTY} leave it out"),
    "length_penalty": ((1,), f"{PENALTY} leave it out"),
    "verbosity": (("medium",), "the model has no such setting; ask for it in the prompt"),
    "service_tier": (("auto", "default"), "there is one queue; leave it out"),
    "store": ((False,), "nothing is stored; leave it out"),
    "name": ((), "the chat template has no place for a speaker; name it in the text"),
    "detail": (("auto",), "set image_tokens, the most that each picture may take"),
}
# the same for parameters that are refused with any other value
NEUTRAL_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "logit_bias": (({},), f"{PENALTY} hold the answer to a form by guided_regex, or leave it out"),
    "best_of": ((1,), "an answer has no likelihood to compare; set n, and choose"),
    "echo": ((False,), "an answer holds no prompt; put it before the text yourself"),
    "modalities": ((["text"],), "the model writes text alone; leave it out"),
}
IDLE: dict[str, tuple[Any, ...]] = {  # known fields -> values that ask for nothing
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), (-1,)),
    "stop": ("", [""]), "truncation": ("auto",),
}  # fmt: skip
ANY = object()  # stands for every value: what the field asks for has no part in an answer
OFF = object()  # stands for false, for `nothing`, and for an object of these
MOST_UNREAD = 32  # fields of one object that no table names and that are ignored
LEVELS = 8  # of objects within which nothing may be asked for


class Fields(dict[str, Any]):
    """Stands for every object that has these fields, whatever its other fields are."""


# Fields of other servers, which some clients always send. A value that asks for nothing is ignored,
# and refused with --strict, as any field that this server does not know; any other is refused.
_FOREIGN: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("ignore_eos", (False,), "an answer ends where the model ends it; set max_tokens"),
    ("min_tokens min_new_tokens",
     (0,), "an answer ends where the model ends it; hold it to guided_regex"),
    ("bad_words", ([],), f"{PENALTY} hold the answer to a form by guided_regex, or leave it out"),
    ("allowed_token_ids", ([],), f"{PENALTY} hold the answer to guided_regex, or leave it out"),
    ("logits_processors", ([],), f"{PENALTY} leave it out"),
    ("use_beam_search", (False,), "an answer has no likelihood to compare; set n, and choose"),
    ("early_stopping", (False,), "there is no beam search; leave it out"),
    ("stop_token_ids", ([],), "set stop, with the text of these tokens"),
    ("include_stop_str_in_output no_stop_trim", (False,), "a stop string is cut off; add it yourself"),
    ("skip_special_tokens", (True,), "special tokens are left out; use logprobs to see them"),
    ("spaces_between_special_tokens", (True, False), "special tokens are left out; leave it out"),
    ("add_generation_prompt", (True,), "the model answers next; use /v1/completions"),
    ("continue_final_message", (False,), "use /v1/completions, or pin the beginning with pinned"),
    ("documents", ([],), "the chat template has no place for them; put them into a message"),
    ("mm_processor_kwargs", ({},), "set image_tokens, the most that each picture may take"),
    ("priority", (0,), "there is one queue; leave it out"),
    ("functions", ([],), "this is the older form; set tools"),
    ("function_call", ("none", "auto"), "this is the older form; set tool_choice"),
    ("guided_choice", ([],), "this is another server's name; set guided_regex to (one|other)"),
    ("format json_schema", ("", {}),
     "this is another server's name; set response_format or guided_json, in /v1/responses text.format"),
    ("regex", ("",), "this is another server's name; set guided_regex"),
    ("guided_grammar grammar ebnf", ("",), "grammars are not read; set guided_json or guided_regex"),
    ("structured_outputs", ({},), "this is another server's name; set guided_json or guided_regex"),
    ("repeat_penalty rep_pen", (1,), f"{PENALTY} leave it out"),
    ("no_repeat_ngram_size dry_multiplier penalty_alpha repetition_penalty_range",
     (0,), f"{PENALTY} leave it out"),
    ("typical_p tfs_z typ_p tfs", (1,), UNCERTAINTY),
    ("top_a xtc_probability mirostat min_keep mirostat_mode", (0,), UNCERTAINTY),
    ("include_reasoning separate_reasoning stream_reasoning",
     (True,), "thoughts come in reasoning_content; leave it out"),
    ("return_token_ids return_tokens_as_token_ids return_prompt_token_ids",
     (False,), "set logprobs, which names the tokens"),
    ("n_probs", (0,), "set logprobs and top_logprobs"),
    ("detokenize", (True,), "an answer is text; set logprobs, which names the tokens"),
    ("return_hidden_states", (False,), "an answer is text; leave it out"),
    ("truncate_prompt_tokens", (-1,), "a prompt is taken whole; shorten it yourself"),
    ("cache_prompt use_cache",
     (True, False), "prompts share their beginnings by themselves; leave it out"),
    ("models", ([],), "one model is served; set model"),
    ("provider", ({}, {"allow_fallbacks": True}), "nothing is routed; leave it out"),
    ("plugins", ([],), "there are none; leave it out"),
    ("transforms", ([],), "a prompt is taken whole; leave it out"),
    ("usage", ({}, {"include": True}), "usage is in every answer; leave it out"),
    ("thinking", (Fields(type="disabled"), False), "set reasoning_effort"),
    ("reasoning",
     ({}, Fields(enabled=False), Fields(effort="none"), Fields(max_tokens=0), {"exclude": False}),
     "set reasoning_effort"),
    # of a plain prompt the other value asks for nothing (`Service`)
    ("add_special_tokens",
     (False,), "a chat's are its template's, a plain prompt's its tokenizer's; send token ids"),
    ("enable_thinking", (False,), "set reasoning_effort, or chat_template_kwargs.enable_thinking"),
    ("think", (False,), "set reasoning_effort"),
    ("thinking_budget", (0,), "the model has no such setting; set reasoning_effort or max_tokens"),
    ("reasoning_format",
     ("auto", "deepseek", "parsed"), "thoughts come in reasoning_content; leave it out"),
    ("safe_prompt", (False,), "no prompt is added; put it into a message"),
    ("prompt_mode", (), "no prompt is added; put it into a message"),
    ("options", ({},), "this is another server's name; set its fields by themselves"),
    ("extra_body", ({},), "send its fields by themselves"),
    ("vllm_xargs", ({},), "there are none; leave it out"),
    ("lora_path", ("",), "one model is served; set model"),
    ("route", ("fallback",), "nothing is routed; leave it out"),
    ("do_sample", (True, False), f"{SAMPLING} t_min and t_max, the range it falls over"),
    ("watermark", (False,), "the model has no such setting; leave it out"),
    ("return_full_text", (False,), "an answer holds no prompt; put it before the text yourself"),
    ("negative_prompt", ("",), "the model has no such setting; ask for it in the prompt"),
    ("guidance_scale", (1,), "the model has no such setting; leave it out"),
    ("dynatemp_range", (0,), f"{SAMPLING} t_min and t_max, the range it falls over"),
    ("top_n_sigma", (-1, 0), UNCERTAINTY),
    ("t_max_predict_ms", (0,), "an answer ends where the model ends it; set max_tokens"),
    ("id_slot", (-1,), "samples take the slots that are free; leave it out"),
    ("request_id rid session_id trace trace_id client_metadata generation_name langfuse_trace_id",
     (ANY,), "nothing is kept by such a name; leave it out"),
    ("keep_alive", (ANY,), "the model stays loaded; leave it out"),
    ("timeout", (ANY,), "the server's own limit is --request-timeout; leave it out"),
    ("cache_salt", (ANY,), "all requests share a prefix cache, if there is one; leave it out"),
    ("timings_per_token return_progress", (ANY,), "times are in /metrics; leave it out"),
    ("max_tool_calls", (ANY,), "the server itself calls no tools; leave it out"),
    # of clients and proxies, which forward what was meant for themselves
    ("id chat_id conversation_id user_id tags model_item background_tasks litellm_metadata "
     "custom_llm_provider num_retries max_retries caching drop_params ttl cache_control cache "
     "prompt_cache_options disable_fallbacks",
     (ANY,), "it is the client's own; leave it out"),
    # shapes of samplers that other fields switch on
    ("dynatemp_exponent xtc_threshold dry_base dry_allowed_length samplers dry_penalty_last_n "
     "dry_sequence_breakers repeat_last_n mirostat_tau mirostat_eta",
     (ANY,), f"{SAMPLING} t_min and t_max, the range it falls over"),
    ("guided_decoding_backend", (ANY,), "forms have one backend; leave it out"),
    ("citation_options", (ANY,), "an answer has no citations; leave it out"),
    ("raw details decoder_input_details post_sampling_probs reasoning_in_content return_meta_info "
     "perf_metrics_in_response raw_output deferred enable_search disable_tool_validation "
     "return_images return_related_questions ban_eos_token features background web_search "
     "image_generation auto_max_new_tokens temperature_last",
     (OFF,), "the server has nothing that this could switch on; leave it out"),
    ("parse_tool_calls", (True,), "calls come in tool_calls; leave it out"),
    ("incremental_output", (True,), "a stream holds what is new; leave it out"),
    ("result_format", ("message",), "an answer is a message; leave it out"),
    ("mode", ("instruct",), "this is another server's name; leave it out"),
    ("n_predict", (-1,), "this is another server's name; set max_tokens"),
    ("n_keep", (0, -1), "a prompt is taken whole; leave it out"),
    ("context_length_exceeded_behavior", ("error",), "a prompt is taken whole; shorten it yourself"),
    ("echo_last", (0,), "an answer holds no prompt; put it before the text yourself"),
    ("search_parameters", ({"mode": "off"},), "this server fetches nothing; leave it out"),
    ("thinking_config", ({"thinking_budget": 0},), "set reasoning_effort"),
    ("max_thinking_tokens", (0,), "the model has no such setting; set reasoning_effort"),
    ("num_beams", (1,), "there is no beam search; leave it out"),
    ("random_seed", (), "this is another server's name; set seed"),
)  # fmt: skip
FOREIGN = {name: (neutral, why) for names, neutral, why in _FOREIGN for name in names.split()}
# Names of what a model has to read: where this server reads no such field of a message, a part, a call
# or a tool, it refuses it. MEDIA may stand in an answer, which is what another server made of them.
MEDIA = (
    "images", "image", "videos", "video", "files", "file", "file_id", "attachments", "documents",
    "parts",
)  # fmt: skip
TO_BE_READ = (
    *MEDIA, "text", "tools", "tool_calls", "tool_call_id", "tool_use", "tool_result", "tool_results",
    "tool_responses", "reasoning_content", "arguments", "args", "input", "parameters", "properties",
    "input_schema", "inputSchema", "description", "prefill",
)  # fmt: skip
ECHO = "nothing is done with it here; leave it out"
NAME = re.compile(r"[A-Za-z_][\w.\-]{0,63}", re.ASCII)  # what a header may name
STRICT = (
    "this server runs with --strict; without it, the default, {} is ignored and named in a header"
)
# name -> why not, and the way out; the parameter's value is never read
REFUSED = {
    "function_call": "this is the older form; set tool_choice",
    "suffix": "a chat has none; pin text with pinned, or use /v1/completions",
    "image_url": "only messages of the user hold pictures; put it into one of them",
    "audio": "the model writes text alone; leave it out",
    "prediction": "nothing is speculated; leave it out",
    **dict.fromkeys(("input_schema", "inputSchema"), "this is another API's name; set parameters"),
    "web_search_options": "this server fetches nothing; put what it should know into the prompt",
}
# parts of a message's content -> why not, and the way out
PARTS = {
    "video_url": "the model takes no video; send some of its frames as image_url",
    "input_audio": "the model takes no audio; send what is said as text",
    "audio_url": "the model takes no audio; send what is said as text",
    "file": "files are not read; send their text, or pictures of their pages as image_url",
}


def nothing(value: Any, levels: int = LEVELS, *, off: bool = False) -> bool:
    """Return whether a value asks for nothing: null, an empty text or list, an object of these.

    With `off`, false asks for nothing too.
    """
    if isinstance(value, dict):
        return levels > 0 and all(nothing(part, levels - 1, off=off) for part in value.values())
    return value is None or value in ("", []) or (off and value is False)


def asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether a field's value is one of the `neutral` ones of its table; false is no 0."""
    if isinstance(value, dict):
        value = {name: part for name, part in value.items() if not nothing(part)}
    for one in neutral:
        if one is ANY or (one is OFF and nothing(value, off=True)):
            return True
        if isinstance(one, Fields):
            if isinstance(value, dict) and all(_same(value.get(k), v) for k, v in one.items()):
                return True
        elif one is not OFF and _same(value, one):
            return True
    return False


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def unread(
    given: Mapping[str, Any], known: frozenset[str], to_be_read: Collection[str] | None
) -> list[str]:
    """Return the names of the fields of `given` that nothing reads and that change no answer.

    Those ask for nothing, as do IDLE ones, which are known. In what clients echo (`to_be_read` is not
    None), so do those that repeat a known field's text, and all with a name that is neither
    `to_be_read` nor nearly a known one.
    """
    unknown = islice((name for name in given if name not in known), MOST_UNREAD)
    taken = [name for name in unknown if name not in REFUSED and NAME.fullmatch(name)]
    if to_be_read is None:
        idle = [name for name in known & IDLE.keys() if given.get(name) in IDLE[name]]
        return [name for name in taken if nothing(given[name])] + sorted(idle)
    texts = [value for name, value in given.items() if name in known and isinstance(value, str)]
    return [
        name
        for name in taken
        if nothing(given[name])
        or given[name] in texts
        # a name of one letter is no server's, but a slip
        or (len(name) > 1 and name not in to_be_read and near_miss(name, known) is None)
    ]


def near_miss(name: str, known: frozenset[str]) -> str | None:
    """Return the known name from which `name` differs by case, by `_` or by one letter, else None."""
    meant = _by_spelling(known)
    return next((meant[spelling] for spelling in _spellings(name) if spelling in meant), None)


@cache
def _by_spelling(known: frozenset[str]) -> dict[str, str]:
    return {spelling: name for name in sorted(known) for spelling in _spellings(name)}


def _spellings(name: str) -> list[str]:
    """Return a name without case and `_`, and, unless it is short or huge, without each letter too."""
    plain = name.replace("_", "").lower()
    shorter = range(len(plain)) if 3 < len(plain) < 66 else ()
    return [plain, *(plain[:n] + plain[n + 1 :] for n in shorter)]


def message(name: str, reason: str) -> str:
    """Return the error message that parameter `name` is not supported; `reason` says why."""
    return f"{name}: not supported by block diffusion: {reason}"


def counted(name: str) -> str:
    """Return the name by which an ignored field is counted: clients may make up names at will."""
    tables = NEUTRAL_ONLY, IGNORABLE, FOREIGN
    return name if any(name in table for table in tables) else "other"


def asked(
    given: Mapping[str, Any], echoes: Iterable[str], *, strict: bool
) -> Iterator[tuple[str, str, bool]]:
    """Yield (name, message, whether refused) of each parameter that is ignored or refused.

    `given` are a request's parameters and their values, `echoes` names of fields that were echoed.
    """
    for name, (neutral, reason) in (NEUTRAL_ONLY | IGNORABLE).items():
        value = given.get(name)
        if value is None or value in neutral or (name == "logit_bias" and not any(value.values())):
            continue
        ignored = name in IGNORABLE and not strict
        why = f"{reason}; {STRICT.format(name)}" if name in IGNORABLE and strict else reason
        yield name, message(name, why), not ignored
    for name, (neutral, reason) in FOREIGN.items():
        if (value := given.get(name)) is not None:
            ignored = asks_for_nothing(value, neutral)
            why = f"{reason}; {STRICT.format(name)}" if ignored and strict else reason
            yield name, message(name, why), strict or not ignored
    for name in echoes:
        why = f"{ECHO}; {STRICT.format(name)}" if strict else ECHO
        yield name, message(name, why), strict
