"""Malformed inputs: each ends in one clear line that names the file, and leaves no artifact."""

import json
import math
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quantize.checkpoints.reader import INDEX, SINGLE, Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.errors import InputError, QuantizeError
from quantize.stages.convert.convert import convert
from tests.support.conversions import recipe_for

RECIPE = recipe_for("NVFP4A16")
EXPERTS = "model.decoder.layers.2.experts.gate_up_proj"
QUERY = "model.decoder.layers.1.self_attn.q_proj.weight"
NORM = "model.decoder.layers.0.input_layernorm.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 32170070\n"
Edit = Callable[[Path], None]


def attempt(folder: Path, out: Path) -> None:
    source = Checkpoint.open(folder)
    convert(source, plan_targets(source.tensors, RECIPE.quantization), out, recipe=RECIPE)


# Ways to damage a file, each a function of the checkpoint's folder.


def data(change: Callable[[bytes], bytes], name: str = SINGLE) -> Edit:
    """Change the bytes of a file."""

    def edit(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return edit


def raw_header(text: bytes) -> Edit:
    """Replace the header of the shard by `text`, its length right."""

    def change(old: bytes) -> bytes:
        length = int.from_bytes(old[:8], "little")
        return len(text).to_bytes(8, "little") + text + old[8 + length :]

    return data(change)


def header(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Change the header of the shard as JSON."""

    def edit(folder: Path) -> None:
        old = (folder / SINGLE).read_bytes()
        length = int.from_bytes(old[:8], "little")
        entries = json.loads(old[8 : 8 + length])
        change(entries)
        raw_header(json.dumps(entries).encode())(folder)

    return edit


def entry(name: str, **fields: object) -> Edit:
    """Change fields of a tensor's header entry."""
    return header(lambda entries: entries[name].update(fields))


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    """Change the tensors themselves; the file stays well-formed."""

    def edit(folder: Path) -> None:
        loaded = load_file(folder / SINGLE)
        change(loaded)
        save_file(loaded, folder / SINGLE, metadata={"format": "pt"})

    return edit


def json_file(name: str, change: Callable[[dict[str, Any]], object]) -> Edit:
    """Change a JSON file."""

    def edit(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return edit


def text_config(**fields: object) -> Edit:
    return json_file("config.json", lambda config: config["text_config"].update(fields))


def shard(folder: Path) -> None:
    """Split the checkpoint in two shards with an index."""
    loaded = load_file(folder / SINGLE)
    names = sorted(loaded)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in parts.items():
        save_file({n: loaded[n] for n in part}, folder / file, metadata={"format": "pt"})
    weight_map = {n: file for file, part in parts.items() for n in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / SINGLE).unlink()


FIRST = "model-00001-of-00002.safetensors"


def sharded(edit: Edit) -> Edit:
    def both(folder: Path) -> None:
        shard(folder)
        edit(folder)

    return both


def index(change: Callable[[dict[str, Any]], object]) -> Edit:
    return sharded(json_file(INDEX, lambda value: change(value["weight_map"])))


def first_name(weight_map: dict[str, str]) -> str:
    return next(iter(weight_map))


def replace(name: str, make: Callable[[Path], object]) -> Edit:
    """Replace a file by something else."""

    def edit(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return edit


def write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"model.decoder.norm.weight": [1.0] * 100}))


def write_torch_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"x": 1}))


def doubled(file: str, key: str) -> Edit:
    """Repeat the entry `key` of a JSON file, or of a shard's header, behind itself."""
    once = re.compile(rb'("%s"\s*:\s*(\{[^}]*\}|"[^"]*"|\d+))' % key.encode())

    def edit(folder: Path) -> None:
        content = (folder / file).read_bytes()
        length = int.from_bytes(content[:8], "little") if file == SINGLE else 0
        if length:
            raw_header(once.sub(rb"\1, \1", content[8 : 8 + length], count=1))(folder)
        else:
            (folder / file).write_bytes(once.sub(rb"\1, \1", content, count=1))

    return edit


def link_outside(path: Path) -> None:
    outside = path.parent.parent / "outside.safetensors"
    shutil.copyfile(path.parent / FIRST, outside)
    path.symlink_to(outside)


def moved(old: str, new: str) -> Edit:
    return tensors(lambda loaded: loaded.__setitem__(new, loaded.pop(old)))


def poked(name: str, value: float) -> Edit:
    return tensors(lambda loaded: loaded[name].view(-1).__setitem__(3, value))


# name of the case -> (damage, what the message must say)
CASES: dict[str, tuple[Edit, str]] = {
    # the file
    "0-byte shard": (data(lambda b: b""), "header too small"),
    "7-byte shard": (data(lambda b: b[:7]), "header too small"),
    "header only": (data(lambda b: b[: 8 + int.from_bytes(b[:8], "little")]), "truncated"),
    "one byte short": (data(lambda b: b[:-1]), "truncated"),
    "one byte long": (data(lambda b: b + b"\0"), "overlong"),
    "half a header": (data(lambda b: b[:2000]), "invalid header length"),
    "header length 2^63": (
        data(lambda b: (1 << 63).to_bytes(8, "little") + b[8:]),
        "header too large",
    ),
    "header length 0": (data(lambda b: bytes(8) + b[8:]), "invalid JSON in header"),
    "header one short": (
        data(lambda b: (int.from_bytes(b[:8], "little") - 9).to_bytes(8, "little") + b[8:]),
        "model.safetensors",
    ),
    "pickle as shard": (replace(SINGLE, write_pickle), "not a safetensors file"),
    "torch zip as shard": (replace(SINGLE, write_torch_zip), "not a safetensors file"),
    "a pickle alone": (
        lambda p: (p / SINGLE).rename(p / "pytorch_model.bin"),
        "pickles as pytorch_model.bin are not read: convert the weights to safetensors with the tool",
    ),
    "folder as shard": (replace(SINGLE, Path.mkdir), "neither model.safetensors nor"),
    "pipe as shard": (replace(SINGLE, os.mkfifo), "neither model.safetensors nor"),
    "link to itself": (replace(SINGLE, lambda p: p.symlink_to(p)), "neither model.safetensors"),
    # the header
    "header not UTF-8": (raw_header(b"\xff\xfe{}"), "not a safetensors file"),
    "header a list": (raw_header(b"[]"), "expected struct HashMetadata"),
    "header a number": (raw_header(b"1"), "expected struct HashMetadata"),
    "header empty": (raw_header(b"{}"), "truncated or overlong"),
    "header of 100,000 brackets": (raw_header(b"[" * 100_000), "not a safetensors file"),
    "name twice": (
        raw_header(b'{"a":{"dtype":"U8"},"a":{"dtype":"U8"}}'),
        "missing field `shape`",
    ),
    "tensor twice, alike": (doubled(SINGLE, NORM), f"key '{NORM}' stands there twice"),
    "dtype twice": (doubled(SINGLE, "dtype"), "duplicate field `dtype`"),
    "__metadata__ a list": (
        header(lambda h: h.update(__metadata__=["pt"])),
        "invalid type: sequence, expected a map",
    ),
    "entry null": (header(lambda h: h.update({NORM: None})), "expected struct TensorInfo"),
    "entry a text": (header(lambda h: h.update({NORM: "BF16"})), "expected struct TensorInfo"),
    "entry without dtype": (header(lambda h: h[NORM].pop("dtype")), "missing field `dtype`"),
    "dtype unknown": (entry(NORM, dtype="F7"), "unknown variant `F7`"),
    "dtype that torch lacks": (entry(NORM, dtype="U16"), f"{NORM}' has the unsupported dtype"),
    "dtype a list": (entry(NORM, dtype=["BF16"]), "invalid type: sequence"),
    "dtype another size": (entry(NORM, dtype="F32"), "invalid shape, data type"),
    "shape another size": (entry(NORM, shape=[65]), "invalid shape, data type"),
    "shape negative": (entry(NORM, shape=[-64]), "integer `-64`"),
    "shape of two negatives": (entry(NORM, shape=[-8, -8]), "integer `-8`"),
    "shape a number": (entry(NORM, shape=64), "integer `64`, expected a sequence"),
    "shape of floats": (entry(NORM, shape=[64.0]), "floating point `64.0`"),
    "shape of booleans": (entry(NORM, shape=[64, True]), "boolean `true`"),
    "shape enormous": (entry(NORM, shape=[10**30]), "floating point `1e+30`"),
    "offsets swapped": (header(lambda h: h[NORM]["data_offsets"].reverse()), "invalid offset"),
    "offsets three": (header(lambda h: h[NORM]["data_offsets"].append(0)), "invalid length 3"),
    "offsets infinite": (entry(NORM, data_offsets=[0, math.inf]), "expected value"),
    "offsets beyond the file": (
        header(lambda h: h[NORM].update(data_offsets=[10**9, 10**9 + 128])),
        "invalid offset",
    ),
    "offsets overlapping": (
        header(lambda h: h[NORM].update(data_offsets=[o - 2 for o in h[NORM]["data_offsets"]])),
        f"invalid offset for tensor `{NORM}`",
    ),
    # names
    "unknown tensor": (
        tensors(lambda t: t.update({"model.decoder.extra.weight": torch.ones(2).bfloat16()})),
        "unknown tensor 'model.decoder.extra.weight'",
    ),
    "empty name": (tensors(lambda t: t.update({"": torch.ones(1)})), "unknown tensor ''"),
    "tensor missing": (tensors(lambda t: t.pop(QUERY)), f"'{QUERY}' is missing"),
    "layer 2 called 7": (
        moved(EXPERTS, EXPERTS.replace("layers.2", "layers.7")),
        f"'{EXPERTS}' is missing",
    ),
    "layer 1 called 01": (
        moved(QUERY, QUERY.replace("layers.1", "layers.01")),
        f"'{QUERY}' is missing",
    ),
    "expert unfused": (
        moved(EXPERTS, EXPERTS.replace("gate_up_proj", "0.gate_proj.weight")),
        "unknown tensor 'model.decoder.layers.2.experts.0.gate_proj.weight'",
    ),
    # dtypes, shapes and values
    "weights in FP16": (tensors(lambda t: t.update({QUERY: t[QUERY].half()})), f"{QUERY} is F16"),
    "norm in FP32": (tensors(lambda t: t.update({NORM: t[NORM].float()})), f"'{NORM}' is F32"),
    "weights transposed": (
        tensors(lambda t: t.update({EXPERTS: t[EXPERTS].mT.contiguous()})),
        f"'{EXPERTS}' is BF16",
    ),
    "one expert fewer": (
        tensors(lambda t: t.update({EXPERTS: t[EXPERTS][:-1].clone()})),
        f"'{EXPERTS}' is BF16",
    ),
    "no experts at all": (
        tensors(lambda t: t.update({EXPERTS: t[EXPERTS][:0].clone()})),
        EXPERTS,
    ),
    "scalar for a matrix": (
        tensors(lambda t: t.update({QUERY: torch.tensor(1.0).bfloat16()})),
        QUERY,
    ),
    "NaN weight": (poked(QUERY, math.nan), f"{QUERY}' holds NaN"),
    "infinite weight": (poked(EXPERTS, math.inf), f"{EXPERTS}' holds NaN or infinity in expert 0"),
    "NaN norm": (poked(NORM, math.nan), f"{NORM}' holds NaN"),
    # the index
    "shard missing": (sharded(lambda f: (f / FIRST).unlink()), f"{FIRST}: this shard is missing"),
    "shard empty": (sharded(data(lambda b: b"", FIRST)), FIRST),
    "shards exchanged": (
        sharded(lambda f: shutil.copyfile(f / FIRST, f / FIRST.replace("1-of", "2-of"))),
        "is listed in model.safetensors.index.json and missing in the shard",
    ),
    "tensor not in index": (index(lambda m: m.pop(first_name(m))), "is not listed for this shard"),
    "tensor only in index": (
        index(lambda m: m.update({"ghost": FIRST})),
        "'ghost' (1 in all) is listed",
    ),
    "third shard in index": (
        index(lambda m: m.update({"ghost": "model-00003-of-00002.safetensors"})),
        "model-00003-of-00002.safetensors: this shard is missing",
    ),
    "path traversal": (index(lambda m: m.update({first_name(m): "../up.safetensors"})), "plain"),
    "absolute path": (index(lambda m: m.update({first_name(m): "/etc/x.safetensors"})), "plain"),
    "bin file in index": (index(lambda m: m.update({first_name(m): "pytorch_model.bin"})), "plain"),
    "number in index": (index(lambda m: m.update({first_name(m): 5})), "plain"),
    "null in index": (index(lambda m: m.update({first_name(m): None})), "plain"),
    "NUL in shard name": (index(lambda m: m.update({first_name(m): "a\0.safetensors"})), INDEX),
    "link out of the folder": (
        sharded(replace(FIRST.replace("1-of", "2-of"), link_outside)),
        "leads out of the checkpoint folder",
    ),
    "weight_map empty": (index(lambda m: m.clear()), "no weight_map"),
    "weight_map a list": (
        sharded(json_file(INDEX, lambda v: v.update(weight_map=[]))),
        "weight_map",
    ),
    "metadata a list": (
        sharded(json_file(INDEX, lambda v: v.update(metadata=[]))),
        "metadata is not an object; download",
    ),
    "total_size of another model": (
        sharded(json_file(INDEX, lambda v: v["metadata"].update(total_size=7))),
        "total_size is 7, and the tensors, which are all there, have ",
    ),
    "total_size as text": (
        sharded(json_file(INDEX, lambda v: v["metadata"].update(total_size="14706200"))),
        "total_size is '14706200', which is no number, and the tensors",
    ),
    "index not JSON": (sharded(data(lambda b: b[:50], INDEX)), "not readable as JSON"),
    "index of 100,000 brackets": (sharded(data(lambda b: b"[" * 100_000, INDEX)), "as JSON"),
    "tensor twice in index": (
        sharded(doubled(INDEX, NORM)),
        f"key '{NORM}' stands there twice",
    ),
    # what cloning leaves
    **{
        f"pointer of Git LFS, {name}": (
            data(lambda b: POINTER, name),
            f"{name}: a pointer of Git LFS, not the file itself; run `git",
        )
        for name in (SINGLE, "config.json", "tokenizer.json", "chat_template.jinja")
    },
    "pointer of Git LFS, a shard": (
        sharded(data(lambda b: POINTER, FIRST)),
        f"{FIRST}: a pointer of Git",
    ),
    # the config
    "key twice in config": (
        doubled("config.json", "hidden_size"),
        "key 'hidden_size' stands there twice",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config not JSON": (data(lambda b: b[:-5], "config.json"), "not readable as JSON"),
    "config a list": (data(lambda b: b"[]", "config.json"), "not a JSON object; download"),
    "config not UTF-8": (data(lambda b: b"\xff" + b, "config.json"), "not readable as JSON"),
    "another model": (
        json_file("config.json", lambda c: c.update(model_type="llama")),
        "model_type is 'llama'",
    ),
    "no text_config": (
        json_file("config.json", lambda c: c.pop("text_config")),
        "text_config is missing, and",
    ),
    "text_config a text": (
        json_file("config.json", lambda c: c.update(text_config="x")),
        "is 'x', and an object is needed",
    ),
    "hidden size disagrees": (text_config(hidden_size=128), "config.json calls for"),
    "hidden size a text": (text_config(hidden_size="64"), "config"),
    "hidden size negative": (text_config(hidden_size=-64), "config"),
    "hidden size enormous": (text_config(hidden_size=10**18), "config"),
    "experts disagree": (text_config(num_experts=16), "config.json calls for"),
    "one layer fewer": (
        text_config(
            num_hidden_layers=5, layer_types=["sliding_attention"] * 4 + ["full_attention"]
        ),
        "config.json",
    ),
    "a billion layers": (text_config(num_hidden_layers=10**9), "config"),
    "layer types unknown": (text_config(layer_types=["mamba"] * 6), "config"),
    "vocabulary disagrees": (text_config(vocab_size=600), "config.json calls for"),
    "vision_config null": (
        json_file("config.json", lambda c: c.update(vision_config=None)),
        "vision_config is missing, as in a text-only",
    ),
    "no vision_config": (
        json_file("config.json", lambda c: c.pop("vision_config")),
        "vision_config is missing, as in a text-only",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(20)
def test_malformed_input_ends_in_one_clear_line(case: str, tiny_checkpoint: Path, tmp_path: Path):
    damage, message = CASES[case]
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    damage(folder)
    with pytest.raises(InputError) as caught:
        attempt(folder, tmp_path / "out")
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert len(text) < 600
    assert not (tmp_path / "out").exists()


def test_there_are_enough_cases():
    assert len(CASES) >= 60


def test_the_undamaged_checkpoint_converts_whole_and_sharded(tiny_checkpoint: Path, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    attempt(folder, tmp_path / "one")
    shard(folder)
    attempt(folder, tmp_path / "two")
    one, two = (load_file(tmp_path / name / SINGLE) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n].view(torch.uint8), two[n].view(torch.uint8)) for n in one)


def test_zero_rows_blocks_and_experts_convert(tiny_checkpoint: Path, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))

    def change(loaded: dict[str, torch.Tensor]) -> None:
        loaded[QUERY][3] = 0
        loaded[EXPERTS][4] = 0
        loaded[EXPERTS][5, 2, :16] = 0

    tensors(change)(folder)
    attempt(folder, tmp_path / "out")
    written = load_file(tmp_path / "out" / SINGLE)
    scales = [t for n, t in written.items() if n.endswith("scale") and n.count("weight")]
    assert all((t.float() > 0).all() and t.float().isfinite().all() for t in scales)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=4,
)
FUZZ = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def scratch(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))


def check_message(error: QuantizeError) -> None:
    assert "\n" not in str(error)
    assert ".json" in str(error) or ".safetensors" in str(error)


def check_no_artifact(out: Path) -> None:
    assert not out.exists()


def opens_or_explains(folder: Path) -> None:
    """Open and plan: either it works or it is a QuantizeError of one line that names a file."""
    try:
        plan_targets(Checkpoint.open(folder).tensors, RECIPE.quantization)
    except QuantizeError as error:
        check_message(error)


@FUZZ
@given(position=st.integers(0, 20_000), byte=st.integers(0, 255))
def test_any_byte_of_the_header(scratch: Path, position: int, byte: int):
    path = scratch / SINGLE
    good = path.read_bytes()
    bad = bytearray(good)
    bad[position] = byte
    path.write_bytes(bad)
    opens_or_explains(scratch)
    path.write_bytes(good)


@FUZZ
@given(field=st.sampled_from(["dtype", "shape", "data_offsets", "other"]), value=JSON)
@example(field="dtype", value="F\n32")
def test_any_value_in_a_header_entry(scratch: Path, field: str, value: object):
    good = (scratch / SINGLE).read_bytes()
    entry(NORM, **{field: value})(scratch)
    opens_or_explains(scratch)
    (scratch / SINGLE).write_bytes(good)


@FUZZ
@given(name=st.text(max_size=20), value=JSON)
def test_any_entry_in_the_index(scratch: Path, name: str, value: object):
    if not (scratch / INDEX).exists():
        shard(scratch)
    good = (scratch / INDEX).read_bytes()
    json_file(INDEX, lambda v: v["weight_map"].update({name: value}))(scratch)
    opens_or_explains(scratch)
    (scratch / INDEX).write_bytes(good)


@settings(FUZZ, max_examples=40)
@given(
    field=st.sampled_from(
        ["hidden_size", "num_experts", "num_hidden_layers", "layer_types", "head_dim", "vocab_size"]
    ),
    value=JSON,
)
def test_any_value_in_the_config(scratch: Path, field: str, value: object):
    path = scratch / "config.json"
    good = path.read_bytes()
    text_config(**{field: value})(scratch)
    try:
        attempt(scratch, scratch.parent / "out")
    except QuantizeError as error:
        check_message(error)
        check_no_artifact(scratch.parent / "out")
    shutil.rmtree(scratch.parent / "out", ignore_errors=True)
    path.write_bytes(good)
