"""A push to the Hub: private, with the token in headers only, and with a code for whatever fails. Against a stand-in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.jobs.spec import HubSection, TrainingSpec
from tests.hub import Hub, Repository, running_hub
from worker import hub as hub_push
from worker.trainer.export import model_card
from worker.workspace import HubPush

REPO = "acme/support"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in, and a client that neither pauses between tries nor has Xet: the stand-in speaks LFS."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    monkeypatch.setattr(hub_push, "PAUSES_S", (0.0, 0.0))
    with running_hub() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text(model_card(TrainingSpec(), is_adapter=True), encoding="utf-8")
    return tmp_path


def push(hub: Hub, folder: Path, token: str = "", **wanted: object) -> HubPush:
    section = HubSection.model_validate({"repo_id": REPO} | wanted)
    return hub_push.push(folder, section, token or hub.token, "The result of a job", hub.url)


def test_a_new_repository_is_private_and_has_the_files(hub: Hub, folder: Path) -> None:
    pushed = push(hub, folder)
    assert pushed.ok, pushed
    repository = hub.repositories[REPO]
    assert repository.private
    assert repository.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert (pushed.commit, pushed.url) == (repository.commits[-1], f"{hub.url}/{REPO}/commit/{repository.commits[-1]}")


def test_the_token_travels_in_headers_only(hub: Hub, folder: Path) -> None:
    pushed = push(hub, folder)
    assert hub.requests
    assert hub.token not in repr(hub.requests) + repr(pushed)


def test_the_same_push_again_makes_no_commit(hub: Hub, folder: Path) -> None:
    first, second = push(hub, folder), push(hub, folder)
    assert second.ok
    assert second.commit == first.commit
    assert len(hub.repositories[REPO].commits) == 2


def test_a_public_repository_is_made_only_where_that_was_asked(hub: Hub, folder: Path) -> None:
    assert push(hub, folder, private=False).ok
    assert not hub.repositories[REPO].private


def test_a_repository_that_is_public_already_is_left_alone(hub: Hub, folder: Path) -> None:
    hub.repositories[REPO] = Repository(private=False)
    assert push(hub, folder).code == "hub_repository_public"
    assert hub.repositories[REPO].files == {}


def test_a_branch_is_made_and_the_main_one_left_alone(hub: Hub, folder: Path) -> None:
    assert push(hub, folder, branch="try/1").ok
    assert push(hub, folder, branch="try/1").ok
    branches = hub.repositories[REPO].branches
    assert set(branches["try/1"]) == {"adapter_model.safetensors", "README.md"}
    assert branches["main"] == {}


@pytest.mark.parametrize(
    ("path", "status", "code", "says"),
    [
        ("/api/repos/create", 403, "hub_forbidden", "write access to `acme`"),
        ("/api/repos/create", 500, "hub_unavailable", "answered 500"),
        ("/api/repos/create", 418, "hub_refused", "answered 418"),
        ("/preupload/", 503, "hub_unavailable", "answered 503"),
        ("/lfs/objects/batch", 403, "hub_forbidden", "write access"),
        ("/upload/", 502, "hub_unavailable", "answered 502"),
        ("/commit/", 409, "hub_conflict", "someone else"),
        ("/commit/", 412, "hub_conflict", "someone else"),
        ("/commit/", 504, "hub_unavailable", "answered 504"),
        ("/commit/", 0, "hub_unavailable", "in time"),
    ],
)
def test_whatever_the_hub_answers_has_a_code_and_a_reason(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, status: int, code: str, says: str
) -> None:
    monkeypatch.setattr(hub_push, "TIMEOUT_S", 1.0 if status == 0 else hub_push.TIMEOUT_S)
    hub.failures[path] = status
    pushed = push(hub, folder)
    assert (pushed.ok, pushed.code) == (False, code)
    assert says in pushed.message
    hub.failures.clear()
    assert push(hub, folder).ok  # what failed half-way is no hindrance


def test_a_token_that_the_hub_does_not_know_is_said_without_showing_it(hub: Hub, folder: Path) -> None:
    pushed = push(hub, folder, token="hf_another_token")
    assert pushed.code == "hub_unauthorized"
    assert "hf_another_token" not in repr(pushed)


def test_a_hub_that_is_not_there_is_told(hub: Hub, folder: Path) -> None:
    hub.url = "http://127.0.0.1:9"
    assert push(hub, folder).code == "hub_unavailable"


def test_the_model_card_has_the_hubs_metadata_and_no_secrets() -> None:
    spec = {"model": {"name_or_path": "openai/gpt-oss-20b"}, "secrets": {"HF_TOKEN": "name-of-a-secret"}}
    card = model_card(TrainingSpec.model_validate(spec), is_adapter=True)
    assert card.startswith("---\nbase_model: openai/gpt-oss-20b\nlibrary_name: peft\npipeline_tag: text-generation\n")
    assert "name-of-a-secret" not in card
    merged = model_card(TrainingSpec.model_validate({"model": {"name_or_path": "/models/a"}}), is_adapter=False)
    assert "base_model:" not in merged  # the Hub would refuse a path
    assert "library_name: transformers" in merged
