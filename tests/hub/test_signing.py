"""Signed releases: what was changed after the signature is found and named, in one line."""

import base64
import importlib.util
import json
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if not importlib.util.find_spec("model_signing"):  # importing it takes a second
    pytest.skip("pip install '.[sign]'", allow_module_level=True)

from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from quantize.cli import cli
from quantize.errors import GateError, InputError, QuantizeError, ResourceError
from quantize.hub import signing
from quantize.hub.release import ReleaseRequest, prepare
from quantize.hub.signing import SIGNATURE, sign, verify
from tests.support.finished_run import finished_run


def new_key(folder: Path, name: str, key: Any = None) -> Path:
    """A private key; its public half beside it as NAME.pub."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / name).write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    public = key.public_key()
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    (folder / f"{name}.pub").write_bytes(public.public_bytes(pem, spki))
    return folder / name


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        new_key(folder, name)
    return folder


@pytest.fixture(scope="module")
def published(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release as `push --sign` would upload it."""
    made = tmp_path_factory.mktemp("run")
    run = finished_run(made, judged=True)
    (made / "bf16" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    manifest = json.loads(run.manifest_json.read_text())
    manifest["versions"]["python"] = "3.11.7"
    run.manifest_json.write_text(json.dumps(manifest))
    request = ReleaseRequest("org/model", sign=str(keys / "ours"))
    release = prepare(run, request, lambda *_: None)
    again = prepare(run, request, lambda *_: None)
    assert [file.sha256 for file in again.card] == [file.sha256 for file in release.card]
    folder = tmp_path_factory.mktemp("published")
    for file in (*release.weights, *release.card):
        (folder / file.path).parent.mkdir(exist_ok=True)
        content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
        (folder / file.path).write_bytes(content)
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """A download of it: with what the Hub and its client add, and with links as in its cache."""
    shutil.copytree(published, tmp_path / "model")
    (tmp_path / "model" / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (tmp_path / "model" / ".cache").mkdir()
    (tmp_path / "model" / ".cache" / "x.metadata").write_text("x")
    shutil.move(tmp_path / "model" / "config.json", tmp_path / "blob")
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "blob")
    return tmp_path / "model"


def test_what_was_signed_is_all_there_is(folder: Path, keys: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts]
    assert verify(folder, keys / "ours.pub") == len(files) - 2  # itself and .gitattributes
    done = CliRunner().invoke(
        cli, ["verify-signature", str(folder), "--key", str(keys / "ours.pub")]
    )
    assert f"{len(files) - 2} files are what was signed by" in done.output
    card = (folder / "README.md").read_text()
    assert signing.fingerprint(keys / "ours") in card
    assert "quantize verify-signature model --key PUBLIC.pem" in card
    report = json.loads((folder / "evidence" / "report.json").read_text())
    assert (report["verdict"]["outcome"], report["model"]["folder"]) == ("PASS", None)


def test_the_bill_names_what_the_model_is_made_of(folder: Path) -> None:
    """It is valid by CycloneDX's schema, and names base model, revision, data, recipe, versions."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = (folder / "bom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    told = json.loads(text)
    model = told["metadata"]["component"]
    assert (model["name"], model["licenses"]) == ("org/model", [{"license": {"id": "Apache-2.0"}}])
    (origin,) = model["pedigree"]["ancestors"]
    assert origin["version"] == "0f28bc42f588fbd8f71e08102b1c3960298a1358"
    parts = {part["name"]: part for part in told["components"]}
    assert parts["torch"]["purl"] == "pkg:pypi/torch@2.13.0"
    assert parts["python"]["purl"] == "pkg:generic/python@3.11.7"  # PyPI has another of this name
    assert parts["openai/gsm8k"]["licenses"] == [{"license": {"id": "MIT"}}]
    (digest,) = parts["recipe.yaml"]["hashes"]
    assert (digest["alg"], len(digest["content"])) == ("SHA-256", 64)
    said = [each["value"] for part in parts.values() for each in part.get("properties", ())]
    assert {"calibration", "evaluation: gsm8k"} <= set(said)
    assert str(folder) not in text


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def flip(folder: Path) -> None:
    data = bytearray(shard(folder).read_bytes())
    data[-1] ^= 1
    shard(folder).write_bytes(data)


def truncate(folder: Path) -> None:
    shard(folder).write_bytes(shard(folder).read_bytes()[:-1])


def swap(folder: Path) -> None:
    one, two = sorted(folder.glob("*.safetensors"))[:2]
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


def rename(folder: Path) -> None:
    shard(folder).rename(folder / "other.safetensors")


def edit(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        (folder / name).write_text(text + "\n")

    return change


def payload(folder: Path) -> None:
    """The signed statement itself names another digest."""
    signature = json.loads((folder / SIGNATURE).read_text())
    told = json.loads(base64.b64decode(signature["dsseEnvelope"]["payload"]))
    told["predicate"]["resources"][0]["digest"] = "0" * 64
    signature["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(told).encode()).decode()
    (folder / SIGNATURE).write_text(json.dumps(signature))


def of_nothing(folder: Path) -> None:
    (folder / SIGNATURE).write_text('{"dsseEnvelope": {}}')


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (flip, "changed model-00001"),
        (truncate, "changed model-00001"),
        (swap, "changed model-00001-of-00003.safetensors, model-00002-of-00003.safetensors"),
        (rename, "added other.safetensors; gone model-00001"),
        (lambda folder: shard(folder).unlink(), "gone model-00001"),
        (lambda folder: (folder / "extra.safetensors").write_bytes(b"x"), "added extra.safetensors"),
        (edit("config.json"), "changed config.json"),
        (edit("README.md"), "changed README.md"),
        (edit("evidence/report.json"), "changed evidence/report.json"),
        (edit("bom.cdx.json"), "changed bom.cdx.json"),
        (edit(".eval_results/gsm8k.yaml"), "changed .eval_results/gsm8k.yaml"),
        (payload, "not a signature of"),
        (of_nothing, "cannot be read as a signature"),
        (lambda folder: (folder / SIGNATURE).write_text("x"), "cannot be read as a signature"),
        (lambda folder: (folder / SIGNATURE).unlink(), "missing; this folder is not signed"),
    ],
)  # fmt: skip
def test_tampering_is_found(
    folder: Path, keys: Path, tamper: Callable[[Path], None], says: str
) -> None:
    tamper(folder)
    with pytest.raises(GateError, match=says) as caught:
        verify(folder, keys / "ours.pub")
    assert "\n" not in str(caught.value)


def test_another_key_is_not_the_signers(folder: Path, keys: Path) -> None:
    with pytest.raises(GateError, match=r"not a signature of .*theirs.pub"):
        verify(folder, keys / "theirs.pub")
    sign(folder, keys / "theirs")  # somebody else signs the same files
    with pytest.raises(GateError, match=r"not a signature of .*ours.pub"):
        verify(folder, keys / "ours.pub")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "no such private key"),
        ("x", "no private key of an elliptic curve"),
        (ed25519.Ed25519PrivateKey.generate(), "no private key of an elliptic curve"),
        (ec.generate_private_key(ec.SECP256K1()), "a key on secp256k1; make one on secp256r1"),
    ],
)
def test_keys_that_cannot_sign(folder: Path, tmp_path: Path, made: Any, says: str) -> None:
    key = tmp_path / "key"
    if isinstance(made, str):
        key.write_text(made)
    elif made is not None:
        new_key(tmp_path, "key", made)
    with pytest.raises(InputError, match=says):
        sign(folder, key)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give --key, or"),
        (["--identity", "me"], "give --key, or"),
        (["--key", "nowhere.pub"], "no such public key"),
    ],
)
def test_a_question_that_is_not_one(folder: Path, options: list[str], says: str) -> None:
    done = CliRunner().invoke(cli, ["verify-signature", str(folder), *options])
    told = str(done.exception) if isinstance(done.exception, QuantizeError) else done.output
    assert says in told
    assert done.exit_code != 0


def test_without_the_package_it_is_named(folder: Path, keys: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "model_signing.signing", None)
    with pytest.raises(ResourceError, match=r"pip install 'diffusiongemma-quantize\[sign\]'"):
        sign(folder, keys / "ours")


ACCOUNT = {"identity": "release@example.org", "issuer": "https://accounts.example.org"}


@pytest.fixture
def sigstore(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Sigstore's client in model-signing without a network: it signs by saying who signs."""
    from model_signing._signing import sign_sigstore

    known = SimpleNamespace(
        trusted_root=None, signing_config=SimpleNamespace(get_oidc_url=lambda: ACCOUNT["issuer"])
    )
    found = SimpleNamespace(online=True, ambient="token of " + ACCOUNT["identity"])

    class Bundle:
        def __init__(self, told: dict[str, Any]) -> None:
            self.told = told

        @classmethod
        def from_json(cls, text: str) -> "Bundle":
            return cls(json.loads(text))

        def to_json(self) -> str:
            return json.dumps(self.told)

    class Context:
        @classmethod
        def from_trust_config(cls, config: Any) -> "Context":
            assert config is known
            return cls()

        @contextmanager
        def signer(self, token: str) -> Generator[SimpleNamespace]:
            def sign_dsse(statement: Any) -> Bundle:
                payload = base64.b64encode(statement._contents).decode()
                return Bundle({"dsseEnvelope": {"payload": payload}, "by": token})

            yield SimpleNamespace(sign_dsse=sign_dsse)

    class Checks:
        def __init__(self, trusted_root: Any) -> None:
            assert trusted_root is None

        def verify_dsse(self, bundle: Bundle, policy: Any) -> tuple[str, bytes]:
            if bundle.told["by"] != f"token of {policy._identity}":
                raise ValueError("Certificate's SANs do not match")
            envelope = bundle.told["dsseEnvelope"]
            return "application/vnd.in-toto+json", base64.b64decode(envelope["payload"])

    def production() -> SimpleNamespace:
        if not found.online:
            raise OSError("Failed to refresh TUF metadata")
        return known

    def ask(**_: Any) -> str:
        raise AssertionError("a browser would be opened")

    models = SimpleNamespace(
        ClientTrustConfig=SimpleNamespace(production=production), Bundle=Bundle
    )
    oidc = SimpleNamespace(
        Issuer=lambda _: SimpleNamespace(identity_token=ask),
        detect_credential=lambda _: found.ambient,
        IdentityToken=lambda token, _: token,
    )
    policy = sign_sigstore.sigstore_verifier.policy
    monkeypatch.setattr(sign_sigstore, "sigstore_models", models)
    monkeypatch.setattr(sign_sigstore, "sigstore_oidc", oidc)
    monkeypatch.setattr(sign_sigstore, "sigstore_signer", SimpleNamespace(SigningContext=Context))
    monkeypatch.setattr(
        sign_sigstore, "sigstore_verifier", SimpleNamespace(Verifier=Checks, policy=policy)
    )
    return found


def test_an_account_signs_by_sigstore(folder: Path, sigstore: SimpleNamespace) -> None:
    """The account is the one that CI is logged in as: no browser is opened there."""
    (folder / SIGNATURE).unlink()
    assert sign(folder, None) == folder / SIGNATURE
    assert verify(folder, **ACCOUNT) > 10
    with pytest.raises(GateError, match="not a signature of other@example"):
        verify(folder, **(ACCOUNT | {"identity": "other@example.org"}))
    flip(folder)
    with pytest.raises(GateError, match="changed model-00001"):
        verify(folder, **ACCOUNT)


def test_without_a_network_sigstore_is_named(folder: Path, sigstore: SimpleNamespace) -> None:
    sigstore.online = False
    for ask in (lambda: sign(folder, None), lambda: verify(folder, **ACCOUNT)):
        with pytest.raises(ResourceError, match="Sigstore: Failed to refresh TUF metadata"):
            ask()
