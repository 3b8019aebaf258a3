"""The nodes of one attempt: one lease for all of them, and who may still run something."""

import pytest
from sqlalchemy import select, update

from app import db
from app.config import get_settings
from app.db import now
from app.jobs import attempts
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Job
from app.keys import service as keys
from app.nodes import gangs, placement
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from app.nodes.tables import Node, Placement
from tests import factories

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def job_id(database: str) -> str:
    """A job that two nodes have taken up. Their names and their addresses are in opposite orders."""
    spec = TrainingSpec.model_validate({"parallelism": {"nnodes": 2}, "resources": {"accelerator": "cpu"}})
    with db.write() as session:
        project_id = keys.create_project(session, "test").id
        for name, address in (("a", "10.0.0.9"), ("b", "10.0.0.10")):
            report = NodeReport(name=name, address=address, accelerator="cpu", slots=1, gpus=[], facts={})
            nodes.register(session, report)
    job_id = factories.create_job(project_id, spec=spec.model_dump(mode="json"))
    assert placement.place_all() == 1
    for node_rank in (1, 0):
        assert placement.claim(job_id, 1, node_rank, pid=1) is not None
    return job_id


def silence(job_id: str, node_rank: int, seconds: float) -> None:
    """As if the node had not been heard of for so long."""
    part = (Placement.job_id == job_id, Placement.node_rank == node_rank)
    with db.write() as session:
        session.execute(update(Placement).where(*part).values(heartbeat_at=now() - seconds))


def renew(job_id: str, *, alone: bool = False) -> attempts.Lease:
    with db.write() as session:
        lease = attempts.renew_lease(session, job_id, 1, 1.0, alone=alone)
    assert lease is not None
    return lease


def status(job_id: str) -> str:
    with db.write() as session:
        return session.get_one(Job, job_id).status


def free_slots() -> list[int]:
    with db.write() as session:
        return list(session.scalars(select(Node.free_slots).order_by(Node.id)))


class TestOneLease:
    def test_nodes_are_numbered_by_their_addresses_as_torch_elastic_does(self, job_id: str) -> None:
        with db.write() as session:
            assert [member.node for member in gangs.members(session, job_id, 1)] == ["b", "a"]

    def test_it_lasts_as_long_as_the_most_silent_node_has_left(self, job_id: str) -> None:
        assert renew(job_id).seconds_left == pytest.approx(get_settings().lease_s, abs=5)
        silence(job_id, 1, 100)
        assert renew(job_id).seconds_left == pytest.approx(get_settings().lease_s - 100, abs=5)

    def test_once_training_is_over_the_first_node_needs_no_other(self, job_id: str) -> None:
        silence(job_id, 1, 100)
        assert renew(job_id, alone=True).seconds_left == pytest.approx(get_settings().lease_s, abs=5)

    def test_the_other_node_sees_the_same_end(self, job_id: str) -> None:
        silence(job_id, 1, 100)
        renew(job_id)
        with db.write() as session:
            lease = attempts.stay(session, job_id, 1, 1)
        assert lease is not None
        assert lease.seconds_left == pytest.approx(get_settings().lease_s - 100, abs=5)

    def test_a_node_of_an_attempt_that_has_ended_may_not_stay(self, job_id: str) -> None:
        with db.write() as session:
            assert attempts.lose(session, job_id, 1, "The job's worker was lost")
        with db.write() as session:
            assert attempts.stay(session, job_id, 1, 1) is None
        assert free_slots() == [1, 1]


class TestOneEnd:
    def test_a_part_that_failed_breaks_the_gang_and_keeps_its_slot_until_the_end(self, job_id: str) -> None:
        with db.write() as session:
            assert gangs.stop(session, job_id, 1, 1, {"reason": "crashed", "why": ""})
        assert renew(job_id).is_gang_broken
        assert free_slots() == [0, 0]

    def test_a_part_that_ended_well_does_not(self, job_id: str) -> None:
        with db.write() as session:
            assert gangs.stop(session, job_id, 1, 1, None)
        assert not renew(job_id).is_gang_broken

    def test_the_first_node_ending_well_is_the_end_for_the_others(self, job_id: str) -> None:
        with db.write() as session:
            assert gangs.stop(session, job_id, 1, 0, None)
            assert gangs.is_broken(session, job_id, 1, 1)

    def test_a_supervisor_lost_on_another_node_leaves_the_end_to_the_first(self, job_id: str) -> None:
        with db.write() as session:
            attempts.lose_part(session, job_id, 1, 1, "The job's supervisor was lost")
        assert status(job_id) == "running"
        assert renew(job_id).is_gang_broken

    def test_one_lost_on_the_first_node_ends_the_attempt_once_the_others_are_down(self, job_id: str) -> None:
        with db.write() as session:
            attempts.lose_part(session, job_id, 1, 0, "The job's supervisor was lost")
        assert status(job_id) == "running"
        with db.write() as session:
            gangs.stop(session, job_id, 1, 1, {"reason": "broken", "why": ""})
            attempts.lose_part(session, job_id, 1, 0, "The job's supervisor was lost")
        assert status(job_id) == "queued"
        assert free_slots() == [1, 1]

    def test_a_node_that_has_been_silent_for_a_lease_runs_nothing_any_more(self, job_id: str) -> None:
        with db.write() as session:
            assert gangs.num_others_running(session, job_id, 1) == 1
        silence(job_id, 1, get_settings().lease_s + 1)
        with db.write() as session:
            assert gangs.num_others_running(session, job_id, 1) == 0
