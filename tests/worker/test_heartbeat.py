"""The lease's end comes for a supervisor whose renewal hangs, too."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from app.config import get_settings
from worker import launch
from worker.heartbeat import Heartbeat, Renewal
from worker.workspace import Run, Workspace, read_json

PATIENCE_S = 30


def test_ranks_do_not_outlive_the_lease_while_its_renewal_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cut connection, which says nothing for as long as the system waits for it."""
    run, workspace, mended = Run("ftjob-hanging", 1), Workspace(tmp_path), threading.Event()

    def hang(*_: object, **__: object) -> None:
        mended.wait(PATIENCE_S)

    monkeypatch.setattr(Renewal, "_renew", hang)
    monkeypatch.setattr(get_settings(), "lease_s", 2.0)
    monkeypatch.setattr(get_settings(), "heartbeat_s", 0.1)
    with (
        subprocess.Popen(["sleep", "600"], env={launch.MARK: run.mark, "PATH": os.environ["PATH"]}) as rank,
        Heartbeat(run, workspace) as heartbeat,
    ):
        try:
            rank.wait(PATIENCE_S)
            assert not mended.is_set()
            assert heartbeat.reason == "unreachable"
            assert read_json(workspace.stop)["reason"] == "unreachable"  # it could have saved
        finally:
            mended.set()
            rank.kill()
