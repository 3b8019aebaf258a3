"""The scheduler and the claim, on both databases."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app import db
from app.config import get_settings
from app.errors import Conflict
from app.jobs import attempts, service
from app.jobs.spec import TrainingSpec
from app.jobs.tables import Event, Job, Wait
from app.keys import service as keys
from app.keys.tables import Project
from app.nodes import placement, planning
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


def add_gpu_job(project_id: str, ranks: int, nodes: int = 1) -> str:
    parallelism = {"nproc_per_node": ranks, "nnodes": nodes}
    spec = TrainingSpec.model_validate({"parallelism": parallelism, "resources": {"accelerator": "gpu"}})
    return factories.create_job(project_id, accelerator="gpu", spec=spec.model_dump(mode="json"))


def running_gpu_job(project_id: str, gpus: int) -> str:
    """A job that a supervisor runs, on all GPUs of node a."""
    add_node("a", gpus, accelerator="gpu")
    job_id = add_gpu_job(project_id, gpus)
    placement.place_all()
    placement.claim(job_id, 1, 0, pid=1)
    return job_id


def add_cpu_job(project_id: str, *, max_wait_s: int | None = None, **values: object) -> str:
    spec = TrainingSpec.model_validate({"resources": {"accelerator": "cpu", "max_wait_s": max_wait_s}})
    return factories.create_job(project_id, spec=spec.model_dump(mode="json"), **values)


def placed() -> list[str]:
    with db.write() as session:
        return list(
            session.scalars(select(Placement.job_id).where(Placement.state != "released").order_by(Placement.placed_at))
        )


def job(job_id: str) -> Job:
    with db.write() as session:
        return session.get_one(Job, job_id)


def wait_of(job_id: str) -> tuple[int, str | None] | None:
    """Position and what is waited for; None where the queue does not know the job."""
    with db.write() as session:
        wait = session.get(Wait, job_id)
    return None if wait is None else (wait.position, wait.blocking_resource)


def nodes_of(job_id: str) -> list[str]:
    """Where the job was placed, attempt by attempt."""
    with db.write() as session:
        return list(session.scalars(select(Placement.node_id).where(Placement.job_id == job_id).order_by(Placement.attempt)))


def usage(project_id: str) -> float:
    with db.write() as session:
        return session.get_one(Project, project_id).usage


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
            assert "the node with the most has 0" in session.get_one(Wait, second).reason

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
            assert "No node with a CPU slot reports" in session.get_one(Wait, job_id).reason

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


class TestTurns:
    def test_on_postgresql_a_second_scheduler_leaves_the_work_to_the_first(self, project_id: str) -> None:
        if db.get_engine().dialect.name != "postgresql":
            pytest.skip("a writer of SQLite is alone anyway")
        add_node("a", 1)
        add_cpu_job(project_id)
        with placement._turn() as is_ours:
            assert is_ours
            assert placement.place_all() == 0
        assert placement.place_all() == 1

    def test_more_jobs_than_one_plan_places_are_placed_by_the_next(
        self, project_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(planning, "MOST_AT_ONCE", 2)
        add_node("a", 5)
        jobs = [add_cpu_job(project_id, created_at=float(i)) for i in range(6)]
        assert placement.place_all() == 5
        assert wait_of(jobs[-1]) == (1, "cpu_slots")


class TestQueue:
    """What the scheduler writes down for those who wait."""

    def test_every_waiting_job_says_where_it_stands_and_for_what(self, project_id: str) -> None:
        add_node("a", 1)
        jobs = [add_cpu_job(project_id, created_at=float(i)) for i in range(3)]
        placement.place_all()
        assert wait_of(jobs[0]) == (0, None)
        assert [wait_of(job_id) for job_id in jobs[1:]] == [(1, "cpu_slots"), (2, "cpu_slots")]

    def test_a_job_that_runs_or_ended_is_no_longer_in_it(self, project_id: str) -> None:
        add_node("a", 1)
        first, second, third = (add_cpu_job(project_id, created_at=float(i)) for i in range(3))
        placement.place_all()
        placement.claim(first, 1, 0, pid=1)
        service.cancel_job(project_id, second)
        placement.place_all()
        assert [wait_of(job_id) for job_id in (first, second, third)] == [None, None, (1, "cpu_slots")]

    def test_the_head_keeps_its_place_until_it_starts(self, project_id: str) -> None:
        add_node("a", 2, accelerator="gpu")
        small = add_gpu_job(project_id, 1)
        placement.place_all()
        large = add_gpu_job(project_id, 2)
        placement.place_all()
        assert job(large).reserved_at is not None
        service.cancel_job(project_id, small)
        placement.place_all()
        assert job(large).reserved_at is None
        assert wait_of(large) == (0, None)

    def test_a_job_that_waited_longer_than_it_wanted_fails(self, project_id: str) -> None:
        patient, hasty = add_cpu_job(project_id, max_wait_s=600), add_cpu_job(project_id, max_wait_s=60)
        for job_id in (patient, hasty):
            factories.update_job(job_id, queued_at=db.now() - 61)
        placement.place_all()
        assert job(patient).status == "queued"
        assert job(hasty).status == "failed"
        assert (job(hasty).error or {})["code"] == "max_wait_exceeded"

    def test_one_that_a_node_is_starting_does_not(self, project_id: str) -> None:
        add_node("a", 1)
        job_id = add_cpu_job(project_id, max_wait_s=60)
        placement.place_all()
        factories.update_job(job_id, queued_at=db.now() - 61)
        placement.place_all()
        assert job(job_id).status == "queued"


class TestGang:
    def test_a_gang_holds_a_part_of_each_node_by_its_rank(self, project_id: str) -> None:
        for name in "ab":
            add_node(name, 2, accelerator="gpu")
        job_id = add_gpu_job(project_id, 2, nodes=2)
        assert placement.place_all() == 1
        with db.write() as session:
            columns = (Placement.node_rank, Placement.node_id, Placement.gpu_uuids)
            held = session.execute(select(*columns).where(Placement.job_id == job_id).order_by(Placement.node_rank)).all()
        assert [tuple(row) for row in held] == [(0, "a", ["a-0", "a-1"]), (1, "b", ["b-0", "b-1"])]

    def test_where_one_node_is_taken_meanwhile_nothing_is_written(self, project_id: str) -> None:
        for name in "ab":
            add_node(name, 1, accelerator="gpu")
        job_id = add_gpu_job(project_id, 1, nodes=2)
        plan = planning.plan(placement._snapshot())
        with db.write() as session:
            session.execute(update(Node).where(Node.id == "b").values(free_slots=0))
        assert [placement._try_place(decision) for decision in plan.decisions] == [False]
        assert (placed(), job(job_id).attempt) == ([], 0)


class TestUsage:
    def test_a_project_is_charged_for_the_time_it_held_slots(self, project_id: str) -> None:
        job_id = running_gpu_job(project_id, 4)
        with db.write() as session:
            session.execute(update(Placement).values(placed_at=db.now() - 1000))
            attempts.cancel(session, job_id, 1)
        assert usage(project_id) == pytest.approx(4000, rel=0.02)

    def test_what_was_used_is_forgiven_by_half_in_a_half_life(self, project_id: str) -> None:
        with db.write() as session:
            keys.charge(session, project_id, 1000.0)
            half_life = get_settings().usage_half_life_s
            session.execute(update(Project).where(Project.id == project_id).values(usage_at=db.now() - half_life))
            keys.charge(session, project_id, 0.0)
        assert usage(project_id) == pytest.approx(500, rel=0.01)


class TestPreemption:
    @pytest.fixture
    def preempted(self, project_id: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
        """A running job that was asked to make room, and the one it makes room for."""
        monkeypatch.setenv("TUNEYARD_PREEMPTION", "true")
        get_settings.cache_clear()
        add_node("a", 1)
        low = add_cpu_job(project_id)
        placement.place_all()
        placement.claim(low, 1, 0, pid=1)
        high = add_cpu_job(project_id, priority=5)
        placement.place_all()
        return low, high

    def test_its_supervisor_is_asked_to_save_and_stop(self, preempted: tuple[str, str]) -> None:
        with db.write() as session:
            lease = attempts.renew_lease(session, preempted[0], 1, 1.0)
        assert lease is not None
        assert lease.pause_requested

    def test_both_tell_of_it_once(self, preempted: tuple[str, str]) -> None:
        low, high = preempted
        placement.place_all()
        with db.write() as session:
            told = select(Event.message).where(Event.message.contains("priority"))
            assert len(session.scalars(told.where(Event.job_id == low)).all()) == 1
            assert len(session.scalars(told.where(Event.job_id == high)).all()) == 1

    def test_it_waits_again_without_a_counted_try_and_the_other_starts(self, preempted: tuple[str, str]) -> None:
        low, high = preempted
        with db.write() as session:
            attempts.lose(session, low, 1, "The job was asked to pause", counts=False)
        assert (job(low).status, job(low).num_starts, job(low).preempted_by) == ("queued", 0, None)
        placement.place_all()
        assert placed() == [high]

    def test_a_pause_asked_for_by_its_owner_still_counts(self, project_id: str, preempted: tuple[str, str]) -> None:
        low, _ = preempted
        factories.update_job(low, pause_requested_at=1.0)
        with db.write() as session:
            attempts.lose(session, low, 1, "The job was asked to pause", counts=False)
        assert job(low).status == "paused"


class TestManyAtOnce:
    def test_whatever_happens_at_once_no_gpu_is_held_twice_and_no_gang_by_halves(self, project_id: str) -> None:
        """Threads place, claim, lose, cancel and give back, each with its own luck; the books must balance at the end."""
        for name in "abcd":
            add_node(name, 4, accelerator="gpu")
        jobs = [add_gpu_job(project_id, ranks, nodes=width) for ranks, width in [(1, 1), (2, 2), (4, 1), (4, 3), (1, 4)] * 6]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda seed: disturb(random.Random(seed), project_id, jobs), range(6)))
        with db.write() as session:
            held = session.scalars(select(Placement).where(Placement.state != "released")).all()
            free = {name: free_slots(session, name) for name in "abcd"}
        for name in "abcd":
            here = [placement for placement in held if placement.node_id == name]
            gpus = [uuid for placement in here for uuid in placement.gpu_uuids]
            assert len(gpus) == len(set(gpus)) == sum(placement.slots for placement in here) == 4 - free[name]
        for job_id in jobs:
            of_job = [placement for placement in held if placement.job_id == job_id]
            asked = TrainingSpec.stored(job(job_id).spec).parallelism.nnodes
            assert len({placement.node_id for placement in of_job}) == len(of_job) in (0, asked)
            assert len({placement.attempt for placement in of_job}) <= 1

    def test_in_the_end_every_slot_comes_back(self, project_id: str) -> None:
        for name in "ab":
            add_node(name, 2, accelerator="gpu")
        jobs = [add_gpu_job(project_id, 2, nodes=2), add_gpu_job(project_id, 1), add_gpu_job(project_id, 1)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: disturb(random.Random(seed), project_id, jobs), range(4)))
        for job_id in jobs:
            end(job_id)
        with db.write() as session:
            assert [free_slots(session, name) for name in "ab"] == [2, 2]


def disturb(chance: random.Random, project_id: str, jobs: list[str]) -> None:
    for _ in range(25):
        job_id = chance.choice(jobs)
        attempt = job(job_id).attempt
        match chance.choice(["place", "place", "claim", "claim", "lose", "give back", "pause"]):
            case "place":
                placement.place_all()
            case "claim":
                placement.claim(job_id, attempt, 0, pid=1)
            case "lose":
                with db.write() as session:
                    attempts.lose(session, job_id, attempt, "Bad luck", counts=False)
            case "give back":
                with db.write() as session:
                    attempts.give_back_unclaimed(session, job_id, attempt)
            case "pause" if job(job_id).status == "queued":
                with suppress(Conflict):  # another thread may have placed it just then: it stays pausing while it runs
                    service.pause_job(project_id, job_id)
                    service.resume_job(project_id, job_id)


def end(job_id: str) -> None:
    """Whatever state it is in."""
    at = job(job_id)
    if at.status == "running":
        with db.write() as session:
            attempts.cancel(session, job_id, at.attempt)
    else:
        service.cancel_job(at.project_id, job_id)


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

    def test_a_job_that_a_node_did_not_start_goes_to_another_one(self, project_id: str) -> None:
        for name in "ab":
            add_node(name, 1)
        job_id = add_cpu_job(project_id)
        placement.place_all()
        with db.write() as session:
            session.execute(update(Placement).values(placed_at=db.now() - get_settings().lease_s - 1))
        placement.resend_lost_launches()
        placement.place_all()
        assert nodes_of(job_id) == ["a", "b"]
        add_cpu_job(project_id)
        assert placement.place_all() == 0  # the other one is busy, and this one still not trusted

    def test_a_node_that_starts_a_job_is_trusted_again(self, project_id: str) -> None:
        for name in "ab":
            add_node(name, 1)
        with db.write() as session:
            session.execute(update(Node).values(distrusted_until=db.now() + 600))
        job_id = add_cpu_job(project_id)
        placement.place_all()
        placement.claim(job_id, 1, 0, pid=1)
        with db.write() as session:
            trusted = session.scalars(select(Node.id).where(Node.distrusted_until == 0)).all()
        assert trusted == nodes_of(job_id)

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
        job_id = running_gpu_job(project_id, 2)
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
