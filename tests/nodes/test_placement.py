"""The scheduler and the claim, on both databases."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app import db
from app.config import get_settings
from app.jobs import attempts, service
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Event, Job
from app.keys import service as keys
from app.nodes import placement
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from app.nodes.tables import Node, Placement
from tests import factories

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return keys.create_project(session, "test").id


def add_node(name: str, slots: int, *, accelerator: str = "cpu") -> None:
    gpus = [{"uuid": f"{name}-{i}", "name": "H200", "memory_bytes": 1} for i in range(slots)] if accelerator == "gpu" else []
    report = NodeReport(name=name, address="127.0.0.1", accelerator=accelerator, slots=slots, gpus=gpus, facts={})
    with db.write() as session:
        nodes.register(session, report)


def add_gpu_job(project_id: str, ranks: int) -> str:
    spec = TrainingSpec.model_validate({"parallelism": {"nproc_per_node": ranks}, "resources": {"accelerator": "gpu"}})
    return factories.create_job(project_id, accelerator="gpu", spec=spec.model_dump(mode="json"))


def add_cpu_job(project_id: str, **values: object) -> str:
    spec = TrainingSpec.model_validate({"resources": {"accelerator": "cpu"}})
    return factories.create_job(project_id, spec=spec.model_dump(mode="json"), **values)


def placed() -> list[str]:
    with db.write() as session:
        return list(
            session.scalars(select(Placement.job_id).where(Placement.state != "released").order_by(Placement.placed_at))
        )


def free_slots(session: Session, name: str) -> int:
    return session.scalars(select(Node.free_slots).where(Node.id == name)).one()


class TestPlace:
    def test_a_job_takes_its_slots_and_the_next_one_waits_and_says_why(self, project_id: str) -> None:
        add_node("a", 1)
        first, second = add_cpu_job(project_id, created_at=1.0), add_cpu_job(project_id, created_at=2.0)
        assert placement.place_all() == 1
        assert placed() == [first]
        with db.write() as session:
            assert free_slots(session, "a") == 0
            assert "the node with the most has 0" in (session.get_one(Job, second).wait_reason or "")

    def test_higher_priority_goes_first_then_the_older(self, project_id: str) -> None:
        old = add_cpu_job(project_id, created_at=1.0)
        new = add_cpu_job(project_id, created_at=2.0)
        urgent = add_cpu_job(project_id, created_at=3.0, priority=5)
        for name, expected in (("a", [urgent]), ("b", [urgent, old]), ("c", [urgent, old, new])):
            add_node(name, 1)
            placement.place_all()
            assert placed() == expected

    def test_a_small_job_passes_one_that_does_not_fit(self, project_id: str) -> None:
        add_node("a", 2, accelerator="gpu")
        add_gpu_job(project_id, 4)
        small = add_gpu_job(project_id, 1)
        assert placement.place_all() == 1
        assert placed() == [small]

    def test_a_job_nobody_can_read_keeps_no_one_waiting(self, project_id: str) -> None:
        add_node("a", 1)
        factories.create_job(project_id, created_at=1.0, spec={"training": {"learning_rate": "broken"}})
        good = add_cpu_job(project_id, created_at=2.0)
        assert placement.place_all() == 1
        assert placed() == [good]

    def test_a_silent_node_gets_nothing(self, project_id: str) -> None:
        add_node("a", 1)
        with db.write() as session:
            silent_for = get_settings().node_timeout_s + 1
            session.execute(update(Node).values(heartbeat_at=db.now() - silent_for))
        job_id = add_cpu_job(project_id)
        assert placement.place_all() == 0
        with db.write() as session:
            assert "No node with a CPU slot reports" in (session.get_one(Job, job_id).wait_reason or "")

    def test_two_jobs_on_a_node_never_share_a_gpu(self, project_id: str) -> None:
        add_node("a", 4, accelerator="gpu")
        for _ in range(2):
            add_gpu_job(project_id, 2)
        assert placement.place_all() == 2
        with db.write() as session:
            given = [uuid for uuids in session.scalars(select(Placement.gpu_uuids)) for uuid in uuids]
        assert sorted(given) == ["a-0", "a-1", "a-2", "a-3"]

    def test_schedulers_at_once_place_every_job_once_and_no_slot_twice(self, project_id: str) -> None:
        for name in "abcd":
            add_node(name, 2)
        jobs = [add_cpu_job(project_id) for _ in range(12)]
        with ThreadPoolExecutor(4) as pool:
            total = sum(pool.map(lambda _: placement.place_all(), range(8)))
        # Under contention a scheduler may see a node as taken; the next tick looks again.
        total += placement.place_all()
        assert total == 8
        assert len(set(placed())) == 8
        assert set(placed()) <= set(jobs)
        with db.write() as session:
            assert [free_slots(session, name) for name in "abcd"] == [0, 0, 0, 0]


class TestClaim:
    def test_a_second_delivery_finds_the_placement_claimed(self, project_id: str) -> None:
        add_node("a", 1)
        job_id = add_cpu_job(project_id)
        placement.place_all()
        assert placement.claim(job_id, 1, 0, pid=1) is not None
        assert placement.claim(job_id, 1, 0, pid=2) is None
        with db.write() as session:
            assert session.scalars(select(Placement.supervisor_pid)).one() == 1

    def test_of_many_deliveries_at_once_one_wins(self, project_id: str) -> None:
        add_node("a", 1)
        job_id = add_cpu_job(project_id)
        placement.place_all()
        with ThreadPoolExecutor(8) as pool:
            won = [claimed for claimed in pool.map(lambda pid: placement.claim(job_id, 1, 0, pid), range(8)) if claimed]
        assert len(won) == 1

    def test_an_unclaimed_placement_is_given_back_after_a_lease(self, project_id: str) -> None:
        add_node("a", 1)
        job_id = add_cpu_job(project_id)
        placement.place_all()
        with db.write() as session:
            session.execute(update(Placement).values(placed_at=db.now() - get_settings().lease_s - 1))
        placement.resend_lost_launches()
        assert placed() == []
        assert placement.place_all() == 1
        assert placement.claim(job_id, 1, 0, pid=1) is None
        assert placement.claim(job_id, 3, 0, pid=1) is not None

    def test_a_placement_that_was_given_back_starts_nothing(self, project_id: str) -> None:
        add_node("a", 1)
        job_id = add_cpu_job(project_id)
        placement.place_all()
        service.pause_job(project_id, job_id)
        service.resume_job(project_id, job_id)
        assert placement.claim(job_id, 1, 0, pid=1) is None
        with db.write() as session:
            job = session.get_one(Job, job_id)
            assert (job.status, job.num_starts) == ("queued", 0)


class TestDrain:
    def test_a_drained_node_gets_no_new_job_and_keeps_what_runs(self, project_id: str) -> None:
        add_node("a", 2)
        running = add_cpu_job(project_id)
        assert placement.place_all() == 1
        with db.write() as session:
            nodes.drain(session, "a")
        waiting = add_cpu_job(project_id)
        assert placement.place_all() == 0
        assert placed() == [running]
        with db.write() as session:
            nodes.resume(session, "a")
        assert placement.place_all() == 1
        assert placed() == [running, waiting]

    def test_a_node_that_registers_again_stays_drained(self, project_id: str) -> None:
        add_node("a", 1)
        with db.write() as session:
            nodes.drain(session, "a")
        add_node("a", 1)
        add_cpu_job(project_id)
        assert placement.place_all() == 0


class TestQuarantine:
    @pytest.fixture
    def job_id(self, project_id: str) -> str:
        """A job on both GPUs of a node of two, one of which will not give its memory back."""
        add_node("a", 2, accelerator="gpu")
        job_id = add_gpu_job(project_id, 2)
        placement.place_all()
        placement.claim(job_id, 1, 0, pid=1)
        with db.write() as session:
            attempts.quarantine(session, job_id, 1, "a", ["a-1"])
            attempts.lose(session, job_id, 1, "The worker was lost")
        return job_id

    def test_the_gpu_stays_out_of_the_pool_and_the_other_returns(self, project_id: str, job_id: str) -> None:
        service.cancel_job(project_id, job_id)
        small = [add_gpu_job(project_id, 1) for _ in range(2)]
        assert placement.place_all() == 1
        with db.write() as session:
            held = session.scalars(select(Placement.gpu_uuids).where(Placement.job_id.in_(small))).one()
            assert held == ["a-0"]
            assert free_slots(session, "a") == 0

    def test_the_job_tells_of_it(self, job_id: str) -> None:
        with db.write() as session:
            told = session.scalars(select(Event.message).where(Event.job_id == job_id, Event.level == "warn")).all()
        assert any("Memory of a-1 on a did not come back" in message for message in told)

    def test_it_outlives_a_registration_and_ends_with_resume(self, job_id: str) -> None:
        add_node("a", 2, accelerator="gpu")
        with db.write() as session:
            assert free_slots(session, "a") == 1
            nodes.resume(session, "a")
            assert free_slots(session, "a") == 2

    def test_resume_frees_no_gpu_that_a_job_holds(self, project_id: str) -> None:
        add_node("a", 1, accelerator="gpu")
        add_gpu_job(project_id, 1)
        placement.place_all()
        with db.write() as session:
            nodes.quarantine(session, "a", ["a-0"])
            nodes.resume(session, "a")
            assert free_slots(session, "a") == 0


class TestRegister:
    def test_a_node_that_comes_back_keeps_what_runs_on_it(self, project_id: str) -> None:
        add_node("a", 2)
        add_cpu_job(project_id)
        placement.place_all()
        add_node("a", 3)
        with db.write() as session:
            assert free_slots(session, "a") == 2

    def test_slots_come_back_when_the_attempt_is_lost(self, project_id: str) -> None:
        add_node("a", 1)
        job_id = add_cpu_job(project_id)
        placement.place_all()
        placement.claim(job_id, 1, 0, pid=1)
        with db.write() as session:
            attempts.lose(session, job_id, 1, "The worker was lost")
            assert free_slots(session, "a") == 1
