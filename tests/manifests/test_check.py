"""`tuneyard verify` finds every way in which a downloaded result is not the one the service made."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner, Result

from app.cli import cli
from app.manifests import signing
from tests.conftest import configured

CONTENTS = {"adapter/adapter_model.safetensors": b"weights", "adapter/README.md": b"card"}


@pytest.fixture(autouse=True)
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from configured(monkeypatch, {"TUNEYARD_DATA_DIR": str(tmp_path / "data")}, None)


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A result as it is downloaded."""
    folder = tmp_path / "result"
    files = {}
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    manifest = json.dumps({"version": 1, "files": files}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "manifest.json.sig").write_bytes(signing.sign(manifest))
    return folder


def verify(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["verify", str(folder), *options])


def test_a_result_as_it_was_made_is_good(result: Path) -> None:
    shown = verify(result)
    assert shown.output == "good: the signature and all 2 files\n"
    assert shown.exit_code == 0


def _change_a_byte(folder: Path) -> None:
    (folder / "adapter/adapter_model.safetensors").write_bytes(b"weightz")


def _cut_a_file(folder: Path) -> None:
    (folder / "adapter/adapter_model.safetensors").write_bytes(b"weight")


def _lose_a_file(folder: Path) -> None:
    (folder / "adapter/README.md").unlink()


def _add_a_file(folder: Path) -> None:
    (folder / "adapter/loader.py").write_bytes(b"import os")


def _change_the_manifest(folder: Path) -> None:
    """As somebody would who changed a file and its hash."""
    _change_a_byte(folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"]["adapter/adapter_model.safetensors"]["sha256"] = hashlib.sha256(b"weightz").hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _change_the_signature(folder: Path) -> None:
    (folder / "manifest.json.sig").write_text("no base64!\n")


def _lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _lose_the_signature(folder: Path) -> None:
    (folder / "manifest.json.sig").unlink()


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (_change_a_byte, "adapter/adapter_model.safetensors was changed: its SHA-256 is another one"),
        (_cut_a_file, "adapter/adapter_model.safetensors has 6 bytes, not 7"),
        (_lose_a_file, "adapter/README.md is missing"),
        (_add_a_file, "adapter/loader.py is not in the manifest"),
        (_change_the_manifest, "manifest.json is not signed by this key: it was changed, or another service made it"),
        (_change_the_signature, "manifest.json is not signed by this key: it was changed, or another service made it"),
        (_lose_the_manifest, "manifest.json is missing: nothing can be checked"),
        (_lose_the_signature, "manifest.json.sig is missing: nothing can be checked"),
    ],
)
def test_every_way_to_tamper_is_one_line_and_status_1(result: Path, tamper: Callable[[Path], None], said: str) -> None:
    tamper(result)
    shown = verify(result)
    assert shown.output == f"bad: {said}\n"
    assert shown.exit_code == 1


def test_another_services_key_does_not_vouch_for_it(result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in configured(monkeypatch, {"TUNEYARD_DATA_DIR": str(tmp_path / "other")}, None):
        key = tmp_path / "other.pem"
        key.write_text(signing.public_key_pem())
        shown = verify(result, "--public-key", str(key))
    assert shown.exit_code == 1
    assert "not signed by this key" in shown.output


def test_without_any_key_nothing_is_called_good(result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in configured(monkeypatch, {"TUNEYARD_DATA_DIR": str(tmp_path / "nowhere")}, None):
        shown = verify(result)
    assert shown.exit_code == 2
    assert "GET /v1/signing_key" in shown.output
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("content", ["", "{}", "[1]", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"])
def test_a_file_that_is_no_key_is_refused_in_one_line(result: Path, tmp_path: Path, content: str) -> None:
    key = tmp_path / "key"
    key.write_text(content)
    shown = verify(result, "--public-key", str(key))
    assert shown.exit_code == 2
    assert shown.output.count("\n") == 1


def test_the_private_key_is_read_by_its_owner_only_and_stays_the_same(result: Path) -> None:
    assert signing.key_path().stat().st_mode & 0o777 == 0o600
    assert signing.public_key_pem() == signing.public_key_pem()


def test_a_key_of_the_wrong_size_in_the_setting_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TUNEYARD_SIGNING_KEY": "dG9vIHNob3J0", "TUNEYARD_DATA_DIR": str(tmp_path)}
    for _ in configured(monkeypatch, environment, None):
        with pytest.raises(ValueError, match="openssl rand -base64 32"):
            signing.sign(b"")


class TestRetrieveSigningKey:
    def test_the_answer_is_a_key_that_verify_takes(self, http: httpx2.Client, result: Path, tmp_path: Path) -> None:
        answer = http.get("/v1/signing_key").raise_for_status()
        (tmp_path / "key.json").write_bytes(answer.content)
        key = signing.parse_public_key((tmp_path / "key.json").read_text())
        manifest = (result / "manifest.json").read_bytes()
        # The test process shares the service's data directory here, and so its key.
        assert signing.is_signed(manifest, signing.sign(manifest), key)
        assert os.environ["TUNEYARD_DATA_DIR"] not in answer.text

    def test_no_private_part_is_shown(self, http: httpx2.Client) -> None:
        answer = http.get("/v1/signing_key").json()
        assert answer["public_key"].startswith("-----BEGIN PUBLIC KEY-----")
        assert set(answer) == {"object", "algorithm", "public_key"}
