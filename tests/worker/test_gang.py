"""How an attempt over several nodes ends, from what each node says of its part."""

from pathlib import Path
from typing import Any

import pytest

from app.config import get_settings
from app.jobs.spec import TrainingSpec
from app.nodes.gangs import Member
from worker import gang, launch, meeting
from worker.failures import COLLATERAL, JobFailed, Stopped, failure_of
from worker.workspace import Run, Workspace

KILLED = {"reason": "crashed", "why": ""}
LEFT_BEHIND = {"reason": "broken", "why": ""}
NAMED = {"code": "loss_not_finite", "message": "loss was not finite", "param": None, "traceback": None}


def member(node_rank: int, failure: dict[str, Any] | None, stopped_at: float | None, address: str = "10.0.0.1") -> Member:
    return Member(node_rank, f"node-{node_rank}", address, None, failure, stopped_at)


def ending(*members: Member) -> gang.Ending:
    first = gang.first_failure(members)
    assert first is not None
    return gang._ending(first, members)


def test_an_error_with_a_name_comes_before_the_process_that_its_end_killed() -> None:
    result = ending(member(0, KILLED, 10.0), member(1, NAMED, 11.0))
    assert isinstance(result, JobFailed)
    assert result.code == "loss_not_finite"


def test_of_two_errors_the_earlier_one_counts_whichever_node_it_was_on() -> None:
    later = NAMED | {"code": "internal_error"}
    result = ending(member(0, later, 11.0), member(1, NAMED, 10.0))
    assert isinstance(result, JobFailed)
    assert result.code == "loss_not_finite"


def test_a_killed_process_is_told_with_its_node() -> None:
    result = ending(member(0, LEFT_BEHIND, 10.0), member(1, KILLED, 11.0))
    assert isinstance(result, Stopped)
    assert (result.reason, result.why) == ("crashed", "A training process was killed on node node-1")


def test_a_rank_that_waited_in_vain_is_told_with_its_node_and_after_one_that_was_killed() -> None:
    late = {"reason": "timeout", "why": "A rank waited in vain for the others"}
    result = ending(member(0, LEFT_BEHIND, 10.0), member(1, late, 11.0))
    assert isinstance(result, Stopped)
    assert (result.reason, result.why) == ("timeout", "On node node-1: A rank waited in vain for the others")
    result = ending(member(0, late, 10.0), member(1, KILLED, 11.0))
    assert isinstance(result, Stopped)
    assert result.reason == "crashed"


@pytest.mark.slow
def test_nodes_that_never_meet_end_within_their_limit_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_settings(), "join_timeout_s", 2.0)
    spec = TrainingSpec.model_validate({"parallelism": {"nnodes": 2}})
    workspace, run = Workspace(tmp_path), Run("ftjob-unmet", 1, 0)
    process = launch.start_trainer(workspace, run, spec, meeting.alone(), [], {})
    try:
        process.wait(60)
    finally:
        launch.kill_attempt(run)
    unmet = failure_of(workspace)
    assert isinstance(unmet, Stopped)
    assert (unmet.reason, unmet.why) == ("unmet", "The job's nodes did not all meet within 2 s (TUNEYARD_JOIN_TIMEOUT_S)")
    told = {"reason": unmet.reason, "why": unmet.why}
    result = ending(member(0, told, 10.0), member(1, told, 11.0))
    assert isinstance(result, Stopped)
    assert (result.reason, result.why) == (unmet.reason, unmet.why)


def test_a_node_that_says_nothing_is_the_one_that_was_lost() -> None:
    result = ending(member(0, KILLED, 10.0), member(1, None, None))
    assert isinstance(result, Stopped)
    assert result.why == "Node node-1 was lost"


def test_a_node_that_shuts_down_is_no_failed_try() -> None:
    result = ending(member(0, KILLED, 10.0), member(1, {"reason": "shutdown", "why": ""}, 11.0))
    assert isinstance(result, Stopped)
    assert result.reason == "shutdown"


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("10.0.0.1", "127.0.0.1")])
def test_addresses_at_which_others_do_not_reach_a_node_are_refused(addresses: tuple[str, str]) -> None:
    members = [member(rank, None, None, address) for rank, address in enumerate(addresses)]
    with pytest.raises(JobFailed, match="TUNEYARD_NODE_ADDRESS"):
        meeting.check_addresses(members)


@pytest.mark.parametrize("addresses", [("10.0.0.1", "10.0.0.2"), ("127.0.0.2", "127.0.0.3"), ("gpu-1", "gpu-2")])
def test_addresses_of_their_own_are_not(addresses: tuple[str, str]) -> None:
    meeting.check_addresses([member(rank, None, None, address) for rank, address in enumerate(addresses)])


def test_the_interface_is_the_one_that_has_the_address() -> None:
    assert meeting.interface_of("127.0.0.1") == "lo"
    assert meeting.interface_of("192.0.2.1") is None  # an address for documentation: nobody has it


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1234",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, remote process exited",
        "RuntimeError: Connection reset by peer",
    ],
)
def test_what_a_rank_says_when_another_has_gone_is_no_cause(message: str) -> None:
    assert COLLATERAL.search(message)
