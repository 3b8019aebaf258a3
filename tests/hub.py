"""A stand-in of the Hugging Face Hub: the calls of its HTTP API that `huggingface_hub` makes to push a folder, and no more."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.standin import serving

MAIN = "main"


@dataclass
class Repository:
    """A repository: per branch its files by path."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {MAIN: {}})
    commits: list[str] = field(default_factory=lambda: ["0" * 40])

    @property
    def files(self) -> dict[str, bytes]:
        return self.branches[MAIN]


@dataclass
class Hub:
    """What was made and asked so far. `failures`: part of a path -> the status it is answered with; 0: no answer at all."""

    url: str = ""
    token: str = "hf_a_token_of_a_test"
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and body, everything but the headers."""
    over: threading.Event = field(default_factory=threading.Event)

    def answer(self, method: str, path: str, token: str | None, body: bytes) -> tuple[int, Any]:
        self.requests.append((method, path, body.decode("latin-1")))
        for part, status in self.failures.items():
            if part in path:
                if status == 0:
                    self.over.wait()
                return status, {"error": "as the test wants it"}
        if path.startswith("/upload/"):
            self.uploads[path.removeprefix("/upload/")] = body
            return 200, None
        if token != self.token:
            return 401, {"error": "Invalid username or password."}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._upload_of(one) for one in json.loads(body)["objects"]]}
        owner, name, *rest = path.removeprefix("/api/models/").split("/", 3)
        repository = self.repositories.get(f"{owner}/{name}")
        if repository is None:
            return 404, {"error": "Repository not found"}
        return self._in_repository(f"{owner}/{name}", repository, rest, body)

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        known = repo_id in self.repositories
        self.repositories.setdefault(repo_id, Repository(wanted.get("visibility") == "private" or wanted.get("private", False)))
        return 409 if known else 200, {"url": f"{self.url}/{repo_id}", "name": repo_id}

    def _in_repository(self, repo_id: str, repository: Repository, rest: list[str], body: bytes) -> tuple[int, Any]:
        what, branch = [*rest, "info", MAIN][:2] if rest else ("info", MAIN)
        branch = unquote(branch)
        if what == "branch":
            known = branch in repository.branches
            repository.branches.setdefault(branch, dict(repository.files))
            return 409 if known else 200, {}
        files = repository.branches[branch]
        if what == "preupload":
            return 200, {"files": [_mode(one["path"], files) for one in json.loads(body)["files"]]}
        if what == "commit":
            return 200, self._commit(repo_id, repository, files, body)
        return 200, {"id": repo_id, "private": repository.private, "sha": repository.commits[-1], "siblings": [], "tags": []}

    def _upload_of(self, one: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.url}/upload/{one['oid']}"
        return one if one["oid"] in self.uploads else one | {"actions": {"upload": {"href": href, "header": {}}}}

    def _commit(self, repo_id: str, repository: Repository, files: dict[str, bytes], body: bytes) -> dict[str, Any]:
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.uploads[value["oid"]]
        repository.commits.append(hashlib.sha1(body).hexdigest())
        commit = repository.commits[-1]
        return {"commitUrl": f"{self.url}/{repo_id}/commit/{commit}", "commitOid": commit, "success": True}


def _mode(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    is_lfs, content = path.endswith(".safetensors"), files.get(path)
    oid = None
    if content is not None:
        git = b"blob %d\0" % len(content) + content
        oid = hashlib.sha256(content).hexdigest() if is_lfs else hashlib.sha1(git).hexdigest()
    return {"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False, "oid": oid}


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """The stand-in, on a port of its own."""
    hub = Hub()

    def answer(method: str, path: str, authorization: str, body: bytes) -> tuple[int, Any]:
        return hub.answer(method, path, authorization.removeprefix("Bearer "), body)

    with serving(answer) as hub.url:
        yield hub
        hub.over.set()
