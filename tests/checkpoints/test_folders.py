"""Folders as people have them: read as transformers' own class reads them, or refused with a name.

`tests/support/saved_by.py` makes VARIANTS with any version of transformers. Here the installed one
makes them, and each version's config.json stands beside them.
"""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.config_form import SIZES, google_form
from quantize.checkpoints.inspect import inspect
from quantize.checkpoints.layout import model_config
from quantize.checkpoints.reader import TEMPLATE, Checkpoint, known_config, read_config
from quantize.cli import cli
from quantize.errors import InputError
from quantize.pipeline.run import check_source
from quantize.runtime.gpu.memory import cache_bytes
from quantize.runtime.prompt import chat
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer, sound_tokenizer
from quantize.runtime.weights.beside import INSPECTED, LOOKS, load
from tests.support.conversions import recipe_for, run
from tests.support.folder_matrix import EQUAL, NOT_SAVED, PAGE, RECORD, page, save
from tests.support.folder_matrix import REFUSED as REFUSED_ALIKE
from tests.support.saved_by import SINGLE, VARIANTS, logits

SAVED = Path(__file__).parents[1] / "data" / "saved_configs"
VERSIONS = ("5.11.0", "5.13.0", "5.15.0", "5.17.0", "5.20.0", "5.24.0")
REAL: dict[str, Any] = known_config("google/diffusiongemma-26B-A4B-it") or {}
TIED = "model.encoder.language_model.layers.1.self_attn.q_proj.weight"
READ = ("single", "sharded", "as many full heads", "all layers alike", "copies",
        "copies, said to be untied", "quantization null")  # fmt: skip
REFUSED = {
    "fp32": "' is F32; only BF16 weights are read: cast the model to bfloat16",
    "fp16": "' is F16; only BF16 weights are read: cast the model to bfloat16",
    "seen by all": "text_config.use_bidirectional_attention is 'all'; only 'vision' is computed here",
    "said to be untied": "`tie_word_embeddings: false`, and tensor 'lm_head.weight' is missing (128",
    "merged into the decoder": f"tensor {TIED!r} differs from 'model.decoder.layers.1.self_attn",
    "merged into the encoder": f"tensor {TIED!r} differs from 'model.decoder.layers.1.self_attn",
    "merged, said to be untied": f"tensor {TIED!r} differs from 'model.decoder.layers.1.self_attn",
    "own head": "tensor 'lm_head.weight' differs from 'model.decoder.embed_tokens.weight'",
    "own head, said to be untied": "tensor 'model.encoder.language_model.embed_tokens.weight' is miss",
    "under encoder names": "is missing (125 in all); it is there under the encoder's name",
    "text only": "embedding_projection.weight' is missing (18 in all); a text-only export?",
    "text only, said so": "vision_config is missing, as in a text-only export",
    "base model": "is missing (161 in all); they are there without `model.`",
    "two sets": "two sets of weights, model.safetensors and the shards of model.safetensors.index",
    "adapter beside": "adapter_config.json is there: transformers would load this adapter",
    "samples": "generation_config.json: 'do_sample' is not supported here",
    "wrong total": "bytes; write this number there, or remove total_size",
}


def test_every_variant_is_read_or_refused() -> None:
    assert VARIANTS.keys() == {*READ, *REFUSED}


def test_the_matrix_of_versions_holds_what_is_tested_here() -> None:
    """Made by six versions, and read as those that the installed one makes."""
    record = json.loads(RECORD.read_text("utf-8"))
    assert (*record,) == VERSIONS
    expected = dict.fromkeys(READ, EQUAL) | dict.fromkeys(REFUSED, REFUSED_ALIKE)
    for version, found in record.items():
        assert found.keys() == VARIANTS.keys()
        saved = {name: said for name, said in found.items() if said != NOT_SAVED}
        assert saved == {name: expected[name] for name in saved}, version
        assert len(saved) >= len(VARIANTS) - 1
    assert PAGE.read_text("utf-8") == page(), "run python -m tests.support.folder_matrix"


IDS = ("image_token_id", "boi_token_id", "eoi_token_id")
REFUSED_VALUES = [
    ("text_config.rope_parameters", 5),
    ("text_config.layer_types", ["full_attention"]),
    ("text_config.hidden_size", "x"),
    ("id2label", 5),
    ("num_labels", "x"),
    ("architectures", 5),
    ("attn_implementation", "nope"),
    ("text_config._attn_implementation", "nope"),
    ("pad_token_id", "x"),
    ("text_config.pad_token_id", [1]),
    ("vision_config.label2id", "x"),
    ("vision_config.initializer_range", "small"),
    ("problem_type", 5),
    ("eos_token_id", {}),
    ("return_dict", "yes"),
]


@pytest.mark.parametrize(("key", "value"), REFUSED_VALUES, ids=[key for key, _ in REFUSED_VALUES])
def test_what_transformers_refuses_in_a_config_is_refused_by_its_key(
    key: str, value: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Where no model is built, too: at `inspect`, the start of `run`, and before a server loads."""
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    *section, name = key.split(".")
    (config[section[0]] if section else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    for read in (load, Checkpoint.open, read_config, lambda place: inspect(place, LOOKS)):
        with pytest.raises(InputError) as error:
            read(folder)
        assert str(error.value).startswith(f"{folder / 'config.json'}: {key} is ")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("section", ["", "text_config", "vision_config"])
def test_no_field_that_transformers_checks_passes_unchecked(section: str) -> None:
    """Each field of its classes gets what no field takes."""
    whole = copy.deepcopy(REAL)
    built: Any = model_config(copy.deepcopy(whole))  # which changes what it is given
    unchecked: list[str] = []
    for field in fields(getattr(built, section) if section else built):
        wrong = 5 if "dict" in str(field.type) else {"a": [1]}
        config = copy.deepcopy(whole)
        (config[section] if section else config)[field.name] = wrong
        if field.name in IDS and not section:  # `check_ids` looks at them
            continue
        if _is_refused(model_config, copy.deepcopy(config)) and not _is_refused(
            google_form, config
        ):
            unchecked.append(field.name)
    assert unchecked == []


def _is_refused(read: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> bool:
    try:
        read(config)
    except InputError:
        return True
    return False


def test_other_values_that_transformers_refuses_end_in_its_reason() -> None:
    with pytest.raises(InputError) as error:
        model_config(copy.deepcopy(REAL) | {"id2label": 5})
    said = r"config\.json: transformers cannot build this model \((\w+Error: .*)\); download"
    assert (reason := re.match(said, str(error.value)))
    assert "id2label" in reason[1] or "'items'" in reason[1]  # which 5.24 asks it for first
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("failing", ["pip", "saved_by.py"])
def test_the_matrix_takes_no_folder_that_a_failed_try_left(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def program(command: list[str], **_: Any) -> None:
        """Make the folder that pip or saved_by.py would make; the first time with nothing in it."""
        name = "pip" if "pip" in command else "saved_by.py"
        folder = Path(command[command.index("--target") + 1] if name == "pip" else command[-1])
        folder.mkdir(parents=True, exist_ok=True)
        tries.append(name)
        if name == failing and tries.count(name) == 1:
            raise subprocess.CalledProcessError(1, command)
        (folder / "whole").touch()
        stated = folder / "transformers-5.11.0.dist-info" / "METADATA"
        stated.parent.mkdir(exist_ok=True)
        needs = "".join(
            f"Requires-Dist: {need}\n" for need in ("tokenizers", "huggingface-hub", "kernels")
        )
        stated.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: 5.11.0\n{needs}")

    monkeypatch.setattr(subprocess, "run", program)
    with pytest.raises(subprocess.CalledProcessError):
        save("5.11.0", tmp_path)
    saved = save("5.11.0", tmp_path)
    assert (saved / "whole").exists()
    assert (tmp_path / "5.11.0" / "whole").exists()
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["5.11.0", "saved-5.11.0"]
    before = len(tries)
    assert save("5.11.0", tmp_path) == saved
    assert len(tries) == before


@pytest.mark.parametrize("variant", READ)
def test_what_is_read_answers_as_its_own_class(variant: str, tmp_path: Path) -> None:
    folder = tmp_path / variant
    VARIANTS[variant](folder)
    check_source(Checkpoint.open(folder))
    assert inspect(folder, LOOKS).problems == []
    theirs: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(logits(load(folder, dtype=torch.bfloat16)), logits(theirs.eval()))


@pytest.mark.parametrize("variant", REFUSED)
def test_what_is_refused_is_refused_at_the_start_and_by_inspect(
    variant: str, tmp_path: Path
) -> None:
    folder = tmp_path / variant
    VARIANTS[variant](folder)
    with pytest.raises(InputError) as error:
        check_source(Checkpoint.open(folder))
    assert REFUSED[variant] in str(error.value)
    assert "\n" not in str(error.value)
    try:
        problems = inspect(folder, LOOKS).problems
    except InputError as error:
        problems = [str(error)]
    assert [problem for problem in problems if REFUSED[variant] in problem]
    with pytest.raises(InputError) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_a_recipe_is_not_blamed_for_a_checkpoint(tmp_path: Path) -> None:
    """A text-only export ended with "recipe: `re:.*vision.*` matches no module; mend it"."""
    VARIANTS["text only"](tmp_path / "bf16")
    for command in ("plan", "run"):
        asked = [command, "--model", str(tmp_path / "bf16"), "--recipe", "fp8_dynamic"]
        done = CliRunner().invoke(cli, asked)
        assert "a text-only export?" in str(done.exception)
        assert not str(done.exception).startswith("recipe")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_config_of_every_version_is_one_record(version: str, tiny_checkpoint: Path) -> None:
    saved = json.loads((SAVED / f"{version}.json").read_text())
    ours = json.loads((tiny_checkpoint / "config.json").read_text())
    assert saved["transformers_version"] == version
    for config in (saved, ours):
        config.pop("transformers_version")
    form = google_form(saved)
    assert google_form(form) == form
    for section, keys in SIZES.items():
        one, other = (c[section] if section else c for c in (form, google_form(ours)))
        assert {key: one[key] for key in keys} == {key: other[key] for key in keys}
    assert "per_layer_config" not in form["text_config"]
    assert form["text_config"]["global_head_dim"] == 32
    assert form["text_config"]["num_global_key_value_heads"] == 1
    assert form["vision_config"]["rope_parameters"] == {"rope_theta": 100.0, "rope_type": "default"}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_written_is_in_googles_form(
    version: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    shutil.copyfile(SAVED / f"{version}.json", folder / "config.json")
    run(folder, tmp_path / "out", recipe_for("FP8_DYNAMIC"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == google_form(written)
    assert written["text_config"]["global_head_dim"] == 32


def newer(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 5.15 and later save it."""
    config = json.loads(json.dumps(config))
    text = config["text_config"]
    own = {"head_dim": text.pop("global_head_dim")}
    own |= {"num_key_value_heads": text.pop("num_global_key_value_heads")}
    kinds = enumerate(text["layer_types"])
    text["per_layer_config"] = {str(i): own for i, kind in kinds if kind == "full_attention"}
    config["vision_config"]["rope_parameters"]["rope_type"] = "axial"
    return config


@pytest.mark.parametrize(
    "options", [[], ["--serve"], ["--gpu", "4090"], ["--serve", "--gpu", "4090"]], ids=str
)
def test_plan_says_the_same_of_both_notations(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the newer one a 4090 needed 34 days where it needs 20, and keys took twice the bytes."""
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    for config in (REAL, newer(REAL)):
        Path("config.json").write_text(json.dumps(config))
        done = CliRunner().invoke(cli, ["plan", "--model", "config.json", *options])
        assert done.exit_code == 0, done.exception
        told.append(done.stdout)
    assert told[0] == told[1]
    assert google_form(newer(REAL)) == REAL


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "NVFP4"])
def test_both_notations_make_the_same_bytes(
    scheme: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Weights, index, configs and the memory of caches; config.json had its keys in another order."""
    digests: list[dict[str, str]] = []
    needed: list[int] = []
    for form in (
        lambda config: config,
        newer,
        lambda config: dict(reversed(newer(config).items())),
    ):
        folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / f"bf16-{len(digests)}"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(form(config)))
        out = tmp_path / f"out-{len(digests)}"
        run(folder, out, recipe_for(scheme))
        files = sorted(path for path in out.iterdir() if path.is_file())
        digests.append({path.name: sha256(path.read_bytes()).hexdigest() for path in files})
        needed.append(cache_bytes(Checkpoint.open(folder).config, 4096))
    assert digests[0] == digests[1] == digests[2]
    assert "config.json" in digests[0]
    assert any(name.endswith(".safetensors") for name in digests[0])
    assert len({*needed}) == 1


def without(path: str) -> Callable[[dict[str, Any]], object]:
    *parents, last = path.split(".")

    def change(config: dict[str, Any]) -> None:
        for key in parents:
            config = config[key]
        del config[last]

    return change


def changed(path: str, value: object) -> Callable[[dict[str, Any]], object]:
    *parents, last = path.split(".")

    def change(config: dict[str, Any]) -> None:
        for key in parents:
            config = config[key]
        config[last] = value

    return change


DECIDES = [
    *(f"{section}.{key}".lstrip(".") for section, keys in SIZES.items() for key in keys),
    "text_config.layer_types", "text_config.rms_norm_eps", "text_config.final_logit_softcapping",
    "text_config.rope_parameters.full_attention.rope_theta", "text_config.attention_bias",
    "text_config.rope_parameters.full_attention.partial_rotary_factor", "tie_word_embeddings",
    "text_config.rope_parameters.sliding_attention.rope_type", "text_config.hidden_activation",
    "text_config.use_bidirectional_attention", "vision_config.standardize",
    "vision_config.use_clipped_linears", "vision_config.model_type",
    "vision_config.rope_parameters.rope_type", "vision_config.rope_parameters.rope_theta",
]  # fmt: skip


@pytest.mark.parametrize("key", DECIDES)
def test_a_missing_key_is_named(key: str) -> None:
    """transformers fills in another model's size, 512 for `global_head_dim`."""
    config = json.loads(json.dumps(REAL))
    without(key)(config)
    with pytest.raises(InputError, match=f"^config.json: {key} is missing"):
        google_form(config)
    if key != "text_config.num_global_key_value_heads":  # of which null means num_key_value_heads
        changed(key, None)(config)
        with pytest.raises(InputError, match=f"^config.json: {key} is null"):
            google_form(config)
    changed(key, "x")(config)
    with pytest.raises(InputError, match=f"^config.json: {key} is 'x'"):
        google_form(config)


FULL = {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in (5, 11, 17, 23, 29)}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("text_config.per_layer_config", FULL | {"5": {"head_dim": 256}}, "one value for all full"),
        ("text_config.per_layer_config", FULL | {"4": {"head_dim": 512}}, "one value for all full"),
        (
            "text_config.per_layer_config",
            FULL | {"30": {}},
            r'per_layer_config\["30"\] is .* layer from 0 to 29',
        ),
        ("text_config.per_layer_config", FULL | {"x": {}}, r'per_layer_config\["x"\] is'),
        ("text_config.per_layer_config", FULL | {"5": {"sliding_window": 3}}, "only head_dim and"),
        ("text_config.per_layer_config", [FULL], "and an object is needed"),
        ("text_config.global_head_dim", 256, "is '256', and 512, as per_layer_config says"),
        (
            "text_config.pad_token_id",
            None,
            "text_config.pad_token_id is null, and an id of the v",
        ),
        (
            "text_config.pad_token_id",
            262144,
            "pad_token_id is '262144', and an id of the vocabulary",
        ),
        ("text_config.pad_token_id", -1, "pad_token_id is '-1'"),
        (
            "canvas_length",
            262144,
            "less than text_config.max_position_embeddings, 262,144, is need",
        ),
        ("text_config.top_k_experts", 129, "at most num_experts, 128"),
        ("text_config.num_experts", 4097, "a whole number from 1 to 4,096"),
        ("text_config.num_hidden_layers", 1001, "a whole number from 1 to 1,000"),
        ("text_config.num_hidden_layers", True, "a whole number from 1 to 1,000"),
        ("text_config.num_hidden_layers", 31, "the kind of each of num_hidden_layers layers"),
        ("text_config.layer_types", ["full_attention"] * 29 + ["sliding_attention"], "last layer"),
        ("text_config.layer_types", ["mamba"] * 30, "sliding_attention or full_attention"),
        (
            "text_config.layer_types",
            ["mamba"] * 29,
            r"is a list of 29, \['mamba', .*'mamba', \.\.\., and",
        ),
        ("text_config.rms_norm_eps", float("inf"), "a number above 0"),
        ("text_config.attention_bias", 0, "only False is computed here"),
        ("vision_config.rope_parameters.rope_type", "yarn", "'default'"),
        ("text_config.quantization_config", {"quant_method": "fp8"}, "only one of the whole model"),
        ("text_config.rope_scaling", {"factor": 8}, "^config.json: text_config.rope_scaling is"),
        ("text_config.num_kv_shared_layers", 2, "text_config.num_kv_shared_layers is '2'"),
        ("text_config.num_kv_shared_layers", False, "text_config.num_kv_shared_layers is 'False'"),
        ("text_config.attention_k_eq_v", False, "text_config.attention_k_eq_v is 'False'"),
        ("dtype", "auto", "^config.json: dtype is 'auto', and one of bfloat16"),
        ("text_config.torch_dtype", "int8", "text_config.torch_dtype is 'int8'"),
        ("vision_config.dtype", 16, "vision_config.dtype is '16'"),
        ("quantization_config", [], "quantization_config is '\\[\\]', and an object"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(key: str, value: Any, message: str) -> None:
    config = newer(REAL) if "per_layer" in key or "global" in key else json.loads(json.dumps(REAL))
    changed(key, value)(config)
    with pytest.raises(InputError, match=message):
        google_form(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text_config.rope_scaling", None), ("text_config.num_kv_shared_layers", 0),
        ("dtype", None), ("torch_dtype", "torch.bfloat16"), ("vision_config.dtype", "float32"),
    ],
)  # fmt: skip
def test_keys_that_change_nothing_are_taken(key: str, value: object) -> None:
    config = json.loads(json.dumps(REAL))
    changed(key, value)(config)
    assert google_form(config)


def test_an_empty_quantization_config_is_a_plain_model(tmp_path: Path) -> None:
    """transformers reads it so."""
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "bf16"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    assert inspect(folder, LOOKS).problems == []
    assert "quantization_config" not in read_config(folder)


def test_null_full_heads_are_as_many_as_the_others() -> None:
    config = json.loads(json.dumps(REAL))
    changed("text_config.num_global_key_value_heads", None)(config)
    assert google_form(config)["text_config"]["num_global_key_value_heads"] == 8
    config = newer(REAL)
    changed("text_config.per_layer_config", {})(config)
    form = google_form(config)["text_config"]
    assert (form["global_head_dim"], form["num_global_key_value_heads"]) == (256, 8)


@pytest.mark.parametrize("where", [0, -1])
def test_one_bit_of_a_copy_counts(where: int, tmp_path: Path, monkeypatch: Any) -> None:
    """In whichever block of the comparison it is, and though an equal folder was read before."""
    monkeypatch.setattr("quantize.checkpoints.reader.BLOCK", 1000)
    VARIANTS["copies"](tmp_path / "a")
    check_source(Checkpoint.open(tmp_path / "a"))
    tensors = load_file(tmp_path / "a" / SINGLE)
    tensors["lm_head.weight"].view(torch.int16).view(-1)[where] ^= 1
    save_file(tensors, tmp_path / "a" / SINGLE, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"'lm_head\.weight' differs from"):
        check_source(Checkpoint.open(tmp_path / "a"))


def test_a_head_in_float32_is_equal_by_value(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("quantize.checkpoints.reader.BLOCK", 1000)
    VARIANTS["copies"](tmp_path / "a")
    tensors = load_file(tmp_path / "a" / SINGLE)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    save_file(tensors, tmp_path / "a" / SINGLE, metadata={"format": "pt"})
    check_source(Checkpoint.open(tmp_path / "a"))
    assert inspect(tmp_path / "a").problems == []
    tensors["lm_head.weight"].view(torch.int32).view(-1)[-1] ^= 1
    save_file(tensors, tmp_path / "a" / SINGLE, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"'lm_head\.weight' differs from"):
        check_source(Checkpoint.open(tmp_path / "a"))


def test_an_index_of_the_single_file_names_one_set_of_weights(tmp_path: Path) -> None:
    """As mlx-lm writes it; what it lists beyond the file, or lacks, is refused as in any index."""
    VARIANTS["single"](tmp_path)
    names = [*load_file(tmp_path / SINGLE)]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))
    assert {*Checkpoint.open(tmp_path).tensors} == {*names}
    check_source(Checkpoint.open(tmp_path))
    for listed in ([*names, "more"], names[1:]):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(listed, SINGLE)}))
        with pytest.raises(InputError, match=r"\(1 in all\) is (not )?listed"):
            Checkpoint.open(tmp_path)
    index.write_text(json.dumps({"weight_map": {names[0]: SINGLE, names[1]: "a.safetensors"}}))
    with pytest.raises(InputError, match="two sets of weights"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "[1.0, NaN]"])
def test_a_number_that_json_lacks_is_named_at_the_start(number: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "bf16"))
    text = (folder / "config.json").read_text()
    stated = text.replace('"initializer_range": 0.02', f'"initializer_range": {number}')
    assert stated != text
    (folder / "config.json").write_text(stated)
    with pytest.raises(InputError, match=r"config.json: .*key 'initializer_range' has"):
        Checkpoint.open(folder)


def without_turns(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<|turn>"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "tokenizer_config.json").unlink(),
            "tokenizer_config.json: tokenizer_class is missing",
        ),
        (
            lambda f: (f / "tokenizer_config.json").write_text("{}"),
            "tokenizer_config.json: tokenizer_class is missing",
        ),
        (without_turns, r"the chat template writes <\|turn>, which is no token of tokenizer.json"),
        (
            lambda f: (f / TEMPLATE).write_text(" \n"),
            "chat_template.jinja: the chat template is emp",
        ),
        (
            lambda f: (f / TEMPLATE).write_text("{{ bos_token }}"),
            "make '' of 'Tom has 9 pens.'",
        ),
    ],
    ids=["no settings", "empty settings", "no turns", "empty template", "no messages"],
)
def test_prompts_that_would_lose_text_or_markup_are_refused_at_the_start(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "bf16"))
    damage(folder)
    refused_alike(folder, message)
    with pytest.raises(InputError):  # as `serve` and `generate` do
        sound_tokenizer(folder)


LOOPS = (
    "{% set l = range(9999) | list %}{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (LOOPS + "{% endfor %}{% endfor %}", "the chat template takes over 0.2 s for 'Tom has"),
        (
            "{% for a in range(10**9) %}{% endfor %}",
            "the chat template fails .OverflowError: Range too",
        ),
        ("{{ 1 / 0 }}", "the chat template fails .ZeroDivisionError: division by zero.; mend it"),
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "the chat template fails .RecursionError",
        ),
    ],
)
def test_a_chat_template_that_never_ends_or_fails_is_refused_at_the_start(
    written: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if written.startswith(LOOPS):  # the others fail by themselves
        monkeypatch.setattr(chat, "LONGEST", 0.2)
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "bf16"))
    (folder / TEMPLATE).write_text((folder / TEMPLATE).read_text() + written)
    refused_alike(folder, message)
    with pytest.raises(InputError, match=r"the chat template (takes|refuses)") as refused:
        sound_tokenizer(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"t_max": "0.8"}, "t_max is '0.8', which is no number"),
        ({"max_denoising_steps": 4.5}, "max_denoising_steps is 4.5"),
        (
            {"max_denoising_steps": 10**9},
            "max_denoising_steps must be at most 1000, not 1000000000",
        ),
        ({"max_denoising_steps": True}, "max_denoising_steps is True"),
        ({"eos_token_id": ["1"]}, "eos_token_id '1' is no token id"),
        ({"eos_token_id": {}}, "eos_token_id {} is no token id"),
        ({"sampler_config": 3}, "sampler_config is 3, not an object"),
        ({"top_k": 64}, "generation_config.json: 'top_k' is not supported here"),
        ({"eos_token_id": [5000]}, "generation_config.json: eos_token_id is '5000', and the voc"),
        ({"pad_token_id": -1}, "generation_config.json: pad_token_id is '-1'"),
        ({"cache_implementation": "static"}, "cache_implementation 'static' is not supported"),
    ],
)
def test_settings_that_a_later_stage_refuses_are_found_at_the_start(
    stated: dict[str, Any], message: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    (folder / "generation_config.json").write_text(json.dumps(stated))
    with pytest.raises(InputError, match=message):
        check_source(Checkpoint.open(folder))
    assert any(message in problem for problem in inspect(folder, LOOKS).problems)


@pytest.mark.parametrize("name", ["processor_config.json", "special_tokens_map.json"])
def test_a_damaged_file_that_is_carried_is_found_at_the_start(
    name: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    (folder / name).write_text("{")
    with pytest.raises(InputError, match=f"{name}: not readable as JSON"):
        check_source(Checkpoint.open(folder))
    assert any(name in problem for problem in inspect(folder, LOOKS).problems)


WRAPPED = "is missing (161 in all); it is there as '%s.embed_tokens.weight': save the model itself"
ADAPTER = "' (1 in all) is an adapter's; merge the adapter into the weights"
RENAMED: dict[str, tuple[Callable[[str], str], str]] = {
    "DataParallel": (lambda name: f"module.{name}", WRAPPED % "module.model.decoder"),
    "FSDP": (
        lambda name: re.sub(r"(decoder|layers\.\d+)\.", r"\1._fsdp_wrapped_module.", name),
        "it is there as 'model.decoder._fsdp_wrapped_module.embed_tokens.weight': save the model",
    ),
    "torch.compile": (lambda name: f"_orig_mod.{name}", WRAPPED % "_orig_mod.model.decoder"),
    "one layer wrapped": (
        lambda name: name.replace("layers.0.self_attn.q_proj", "layers.0.self_attn.inner.q_proj"),
        "is missing (2 in all); it is there as 'model.decoder.layers.0.self_attn.inner.q_proj",
    ),
    "unmerged": (lambda name: name.replace("layers.0.self_attn.q_proj.weight",
                                           "layers.0.self_attn.q_proj.lora_B.default.weight"), ADAPTER),
    "unmerged scales": (lambda name: name.replace("layers.0.self_attn.q_proj.weight",
                                                  "layers.0.self_attn.q_proj.ia3_l"), ADAPTER),
}  # fmt: skip


@pytest.mark.parametrize("case", RENAMED)
def test_what_training_wrapped_around_the_weights_is_named(
    case: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    rename, message = RENAMED[case]
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    saved = load_file(folder / SINGLE)
    renamed = {rename(name): tensor for name, tensor in saved.items()}
    save_file(renamed, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(InputError, match=re.escape(message)):
        check_source(Checkpoint.open(folder))
    assert [problem for problem in inspect(folder, LOOKS).problems if message in problem]


def test_a_chat_template_that_is_no_text_is_found_at_the_start(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    (folder / TEMPLATE).write_bytes((folder / TEMPLATE).read_bytes() + b"\xff")
    with pytest.raises(InputError, match=f"{TEMPLATE}: not readable as text .*0xff"):
        check_source(Checkpoint.open(folder))
    assert len([p for p in inspect(folder, LOOKS).problems if "not readable as text" in p]) == 1


def test_a_problem_is_said_once(tmp_path: Path) -> None:
    VARIANTS["wrong total"](tmp_path / "bf16")
    problems = inspect(tmp_path / "bf16", LOOKS).problems
    assert len(problems) == 1
    assert "total_size" in problems[0]


@pytest.mark.parametrize(
    "template", [None, '{"chat_template": ""}', '{"chat_template": "{{ messages }}"}']
)
def test_a_chat_template_may_be_in_either_file(
    template: str | None, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        stated = json.loads((folder / "tokenizer_config.json").read_text()) | json.loads(template)
        (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    problems = inspect(folder, LOOKS).problems
    assert [p for p in problems if "no chat can become tokens" in p] == (
        [] if template and "{{" in template else problems
    )
    assert bool(problems) == (template is None or "{{" not in template)


def refused_alike(folder: Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_source(Checkpoint.open(folder))
    problems = inspect(folder, LOOKS).problems
    assert len(problems) == 1
    assert re.search(message, problems[0])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% if x %}", r"chat_template.jinja: line 2: the chat template is not valid Jinja"),
        ("{{ x | nothing }}", "No filter named 'nothing'"),
        ("{% generation %}{{ m }}", "Unexpected end of template"),
    ],
)
def test_a_template_that_is_no_jinja_is_found_at_the_start(
    template: str, message: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "bf16"))
    (folder / TEMPLATE).write_text(template)
    refused_alike(folder, message)
    (folder / TEMPLATE).unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refused_alike(folder, message.replace("chat_template.jinja", "tokenizer_config.json"))


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (
            [{"name": "default", "template": "{{ messages }}"}, {"name": "tools", "template": "b"}],
            None,
        ),
        (
            [{"name": "chat", "template": "a"}],
            r"lists \['chat'\], and one must be named \"default\"",
        ),
        ([{"name": "default", "template": "a"}] * 2, "one must be named"),
        (
            [{"name": "default", "template": "a"}, {"name": "tools", "template": "{% if x %}"}],
            "Jinja",
        ),
        ([{"name": "default"}], "chat_template lists what is not"),
        (["a"], "chat_template lists what is not"),
    ],
)
def test_templates_listed_by_name_are_read_or_refused_at_the_start(
    listed: list[Any], message: str | None, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "bf16"))
    (folder / TEMPLATE).unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = listed
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if message:
        refused_alike(folder, f"tokenizer_config.json: .*{message}")
    else:
        check_source(Checkpoint.open(folder))
        assert encode_chat(
            load_tokenizer(folder), [{"role": "user", "content": "hi"}], thinking=False
        )


def test_transformers_own_tags_are_taken_in_a_template(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "bf16"))
    tags = "{%- generation -%}{{ m }}{%- endgeneration -%}{% break %}"
    (folder / TEMPLATE).write_text("{% for m in messages %}" + tags + "{% endfor %}")
    assert inspect(folder, LOOKS).problems == []


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", without("image_token_id"), "config.json: image_token_id is missing"),
        ("config.json", changed("image_token_id", 1024), "image_token_id is '1024', and the voc"),
        ("config.json", changed("boi_token_id", "1"), "boi_token_id is '1'"),
        ("config.json", changed("eoi_token_id", 1024), "eoi_token_id is '1024'"),
    ],
)
def test_an_id_beyond_the_vocabulary_is_found_at_the_start(
    file: str, change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "bf16"))
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    refused_alike(folder, message)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["added_tokens"].append(t["added_tokens"][-1] | {"id": 1024}),
        changed("model.vocab", [["a", 0.0]] * 1025),
    ],
)
def test_inspect_finds_a_tokenizer_with_more_ids_than_rows(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "bf16"))
    assert inspect(folder, INSPECTED).problems == []
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (problem,) = [p for p in inspect(folder, INSPECTED).problems if "the largest id" in p]
    assert "tokenizer.json: the largest id is '1024', and the vocabulary has" in problem
