"""Why an attempt ended, from the log and the record that torch elastic leaves: its own words, as it printed them."""

import json
from pathlib import Path

import pytest

from worker import failures
from worker.failures import JobFailed, Stopped, failure_of, oom_kills
from worker.workspace import Workspace

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:39341"
LATE = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete"
FORCED = "Unable to shutdown process 77 via 15, forcefully exiting via 9\n"


def rank(number: int, ended: str) -> str:
    return f"""
[{number}]:
  time      : 2026-12-01_04:49:34
  host      : localhost
  rank      : {number + 2} (local_rank: {number})
  exitcode  : {ended}
  error_file: <N/A>"""


def summary(*, others: str, first: str) -> str:
    return f"worker.trainer.train FAILED\n---\nFailures:{others}\n---\nRoot Cause (first observed failure):{first}\n===\n"


KILLED_1 = rank(1, "-9 (pid: 77)  (SIGKILL)")
FAULT_1 = rank(1, "-11 (pid: 77)  (SIGSEGV)")
ERROR_0 = rank(0, "1 (pid: 76) ")
TERMINATED_0 = rank(0, "-15 (pid: 76)  (SIGTERM)")
RANK_1_KILLED = summary(others=TERMINATED_0, first=KILLED_1)


def ending(folder: Path, log: str, error: str | None = None) -> Exception:
    workspace = Workspace(folder)
    workspace.trainer_log.write_text(log)
    if error is not None:
        workspace.error.write_text(json.dumps({"message": {"message": error, "extraInfo": {"timestamp": "1"}}}))
    return failure_of(workspace)


@pytest.mark.parametrize(
    ("log", "error", "reason", "why"),
    [
        pytest.param(RANK_1_KILLED, None, "crashed", "of local rank 1 was killed by SIGKILL", id="killed"),
        pytest.param(summary(others="", first=FAULT_1), None, "crashed", "of local rank 1 was killed by SIGSEGV", id="fault"),
        pytest.param(
            summary(others=KILLED_1, first=ERROR_0),
            LOST,
            "crashed",
            "of local rank 1 was killed by SIGKILL",
            id="lost it first",
        ),
        pytest.param(
            FORCED + summary(others=KILLED_1, first=ERROR_0), LATE, "timeout", "Timed out waiting 10000ms", id="stopped"
        ),
        pytest.param(FORCED + summary(others=KILLED_1, first=ERROR_0), LOST, "broken", "was lost", id="left behind"),
        pytest.param(summary(others=TERMINATED_0, first=ERROR_0), LOST, "broken", "was lost", id="on another node"),
        pytest.param(
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)\n"
            + summary(others="", first=rank(0, "-6 (pid: 76)  (SIGABRT)")),
            None,
            "timeout",
            "collective operation timeout",
            id="ended by NCCL",
        ),
        pytest.param("", "RendezvousTimeoutError: ", "unmet", "did not all meet within 300 s", id="a node never came"),
        pytest.param("", None, "crashed", "", id="nothing is known"),
    ],
)
def test_what_happened_first_decides(tmp_path: Path, log: str, error: str | None, reason: str, why: str) -> None:
    stopped = ending(tmp_path, log, error)
    assert isinstance(stopped, Stopped)
    assert stopped.reason == reason
    assert why in stopped.why


def test_an_error_of_a_rank_is_the_cause_also_where_its_end_had_others_killed(tmp_path: Path) -> None:
    failed = ending(tmp_path, FORCED + summary(others=KILLED_1, first=ERROR_0), "ValueError: no such thing")
    assert isinstance(failed, JobFailed)
    assert failed.code == "internal_error"
    assert "no such thing" in failed.message


def test_what_the_kernel_killed_is_counted_for_the_host_and_for_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, container = tmp_path / "vmstat", tmp_path / "memory.events"
    host.write_text("nr_free_pages 12\noom_kill 3\n")
    container.write_text("oom 9\noom_kill 1\noom_group_kill 5\n")
    monkeypatch.setattr(failures, "OOM_COUNTERS", (str(host), str(container), str(tmp_path / "not there")))
    assert oom_kills() == 4
