"""Push a result to a repository on the Hugging Face Hub. A process of its own, as a training is:

    python -m worker.hub DIR JOB

DIR is the workspace; the token is HF_TOKEN of the environment. Writes DIR/hub.json; the exit status is 0 whether the push
went well or not. The same push again changes nothing: unchanged files make no commit.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import disable_progress_bars

from app.jobs.spec import HubSection, TrainingSpec
from worker.workspace import HubPush, Workspace, read_json, write_json

TIMEOUT_S = 60.0  # per answer: the client's own is to wait for ever
PAUSES_S = (5.0, 30.0)  # before the second and the third try, where a later one may go well
CONFLICTS = {409, 412}  # another commit came in between


def main() -> None:
    """Push, and say what became of it."""
    workspace = Workspace(Path(sys.argv[1]))
    spec = TrainingSpec.stored(read_json(workspace.spec))
    assert spec.export.hub is not None
    folder = workspace.export / exported(spec)
    write_json(workspace.hub, push(folder, spec.export.hub, os.environ["HF_TOKEN"], f"The result of {sys.argv[2]}"))


def exported(spec: TrainingSpec) -> str:
    """The folder of the export that the job wants on the Hub."""
    if spec.adapter.is_full:
        return "model"
    assert spec.export.hub is not None
    return "merged" if spec.export.hub.what == "merged" else "adapter"


def push(folder: Path, hub: HubSection, token: str, message: str, endpoint: str | None = None) -> HubPush:
    """Make the repository, private unless asked otherwise, and commit a folder to it; whatever fails has a code."""
    disable_progress_bars()
    set_client_factory(_client)
    api = HfApi(endpoint=endpoint, token=token)
    for pause_s in (*PAUSES_S, None):
        try:
            return _push_once(api, folder, hub, message)
        except Exception as error:  # networks and servers fail in every way there is
            code, text = explain(error, hub)
            if code not in ("hub_unavailable", "hub_conflict") or pause_s is None:
                return HubPush(False, text, code)
            time.sleep(pause_s)
    raise AssertionError


def explain(error: BaseException, hub: HubSection) -> tuple[str, str]:
    """A stable code, and what the user should change."""
    response = next((cause.response for cause in _causes(error) if isinstance(cause, HfHubHTTPError)), None)
    if response is not None:
        return _explain_answer(response.status_code, error, hub)
    if isinstance(error, OfflineModeIsEnabled):
        return "hub_offline", "The node is set to work without the Hub (HF_HUB_OFFLINE)."
    if any(isinstance(cause, httpx2.TimeoutException) for cause in _causes(error)):
        return "hub_unavailable", "The Hub did not answer in time."
    if any(isinstance(cause, httpx2.TransportError | ConnectionError) for cause in _causes(error)):
        return "hub_unavailable", "The Hub could not be reached."
    return "hub_refused", f"The Hub does not take it: {_first_line(error)}."


def _explain_answer(status: int, error: BaseException, hub: HubSection) -> tuple[str, str]:
    if status == 401:
        return "hub_unauthorized", "The Hub does not know the token: renew the secret that spec.secrets.HF_TOKEN names."
    if status in (403, 404):
        message = f"The token may not write to {hub.repo_id}: give it write access to `{hub.repo_id.partition('/')[0]}`."
        return "hub_forbidden", message
    if status in CONFLICTS:
        return "hub_conflict", f"{hub.repo_id} was being changed by someone else."
    if status == 429 or status >= 500:
        return "hub_unavailable", f"The Hub answered {status}."
    return "hub_refused", f"The Hub answered {status}: {_first_line(error)}."


def _push_once(api: HfApi, folder: Path, hub: HubSection, message: str) -> HubPush:
    api.create_repo(hub.repo_id, private=hub.private, exist_ok=True)
    if hub.private and not api.model_info(hub.repo_id).private:
        text = f"{hub.repo_id} is public: make it private, name another, or set spec.export.hub.private to false."
        return HubPush(False, text, "hub_repository_public")
    if hub.branch is not None:
        api.create_branch(hub.repo_id, branch=hub.branch, exist_ok=True)
    commit = api.upload_folder(repo_id=hub.repo_id, folder_path=folder, revision=hub.branch, commit_message=message)
    return HubPush(True, "pushed", url=str(commit.commit_url), commit=commit.oid)


def _client() -> httpx2.Client:
    client = default_client_factory()
    client.timeout = httpx2.Timeout(TIMEOUT_S)
    return client


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what lies beneath: uploads wrap the one that has the Hub's answer."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")


if __name__ == "__main__":
    main()
