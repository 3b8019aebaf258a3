"""A stand-in of the Weights & Biases server: its client opens a run, finds it again, and streams its history."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.standin import serving

TEAM = "team-of-a-test"


@dataclass
class WandbServer:
    """What clients have told so far."""

    url: str = ""
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Per run its rows, in the order of their arrival."""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per run what it was last opened with."""
    bodies: list[bytes] = field(default_factory=list)

    def answer(self, method: str, path: str, authorization: str, body: bytes) -> tuple[int, Any]:
        self.bodies.append(body)
        if path == "/graphql":
            asked = json.loads(body)
            return 200, {"data": self._graphql(asked["query"], asked.get("variables") or {})}
        if path.endswith("/file_stream"):
            self._stream(path.split("/")[-2], json.loads(body))
        return 200, {}

    def _graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "RunResumeStatus" in query:
            name = variables["name"]
            project = {"id": "project", "name": variables["project"], "entity": {"id": "team", "name": TEAM}}
            return {"model": project | {"bucket": self._resumed(name) if name in self.runs else None}}
        if "UpsertBucket" in query:
            return {"upsertBucket": {"inserted": True, "bucket": self._opened(variables)}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        return {}

    def _opened(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        self.history.setdefault(name, [])
        self.runs.setdefault(name, {}).update({key: value for key, value in variables.items() if value is not None})
        project = {"id": "project", "name": variables["project"], "entity": {"id": "team", "name": TEAM}}
        lines = {"historyLineCount": len(self.history[name])}
        return {"id": name, "name": name, "displayName": name, "config": "{}", "sweepName": "", "project": project} | lines

    def _resumed(self, name: str) -> dict[str, Any]:
        rows = [json.dumps(row) for row in self.history[name]]
        tails = {"historyTail": json.dumps(rows[-1:]), "eventsTail": "[]", "wandbConfig": json.dumps({"t": 1})}
        counts = {"historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0}
        summary = rows[-1] if rows else "{}"
        return (
            {"id": name, "name": name, "displayName": name, "config": "{}", "tags": [], "summaryMetrics": summary}
            | tails
            | counts
        )

    def _stream(self, name: str, told: dict[str, Any]) -> None:
        chunk = (told.get("files") or {}).get("wandb-history.jsonl")
        if chunk is not None:
            self.history[name][chunk["offset"] :] = [json.loads(line) for line in chunk["content"]]


@contextlib.contextmanager
def running_wandb() -> Iterator[WandbServer]:
    """The stand-in, on a port of its own."""
    server = WandbServer()
    with serving(server.answer) as server.url:
        yield server
