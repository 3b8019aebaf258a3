"""The scheduler's decisions, on snapshots made by hand: who is served, where, and who waits for whom."""

import itertools
import random
from typing import Any

import pytest

from app.nodes import planning
from app.nodes.demand import Demand
from app.nodes.planning import Line, Machine, Plan, Rules, Running, Share, Snapshot, Waiting

NOW = 1_000_000.0
HOUR = 3600.0


def machine(name: str, free: int = 8, capacity: int = 8, **values: Any) -> Machine:
    gpus = [{"uuid": f"{name}-{i}", "name": "NVIDIA H200", "memory_bytes": 141e9} for i in range(capacity)]
    return Machine(name, "gpu", capacity, free, **{"gpus": gpus} | values)


def job(name: str, slots: int = 8, nodes: int = 1, *, project: str = "p", limit_s: float = 24 * HOUR, **values: Any) -> Waiting:
    asked = {"gpu_memory_gb": None, "gpu_model": None, "labels": ()} | values.pop("asked", {})
    demand = Demand("gpu", nodes, slots, **asked)
    return Waiting(name, project, values.pop("priority", 0), values.pop("created_at", NOW), demand, limit_s, **values)


def running(name: str, *machines: str, slots: int = 8, ends_in: float = HOUR, **values: Any) -> Running:
    about: dict[str, Any] = {"project_id": "p", "priority": 0, "started_at": NOW - HOUR} | values
    return Running(name, accelerator="gpu", ends_at=NOW + ends_in, slots=slots, machines=list(machines), **about)


def plan(
    machines: list[Machine],
    waiting: list[Waiting],
    jobs: list[Running] | None = None,
    shares: dict[str, Share] | None = None,
    **rules: Any,
) -> Plan:
    return planning.plan(Snapshot(NOW, machines, jobs or [], waiting, shares or {"p": Share()}, Rules(**rules)))


def started(made: Plan) -> dict[str, list[str]]:
    return {decision.job_id: decision.node_ids for decision in made.decisions}


def line(made: Plan, name: str) -> Line:
    return next(line for line in made.lines if line.job_id == name)


class TestWhere:
    def test_a_gang_gets_all_its_nodes_or_none(self) -> None:
        three = [machine("a"), machine("b"), machine("c", free=4)]
        made = plan(three, [job("gang", nodes=3)])
        assert started(made) == {}
        assert "each of 3 nodes; 2 have that now" in line(made, "gang").reason
        assert sorted(started(plan(three, [job("gang", nodes=2)]))["gang"]) == ["a", "b"]

    def test_a_gang_never_takes_two_parts_of_one_node(self) -> None:
        assert started(plan([machine("a")], [job("gang", slots=4, nodes=2)])) == {}

    def test_the_fullest_node_that_fits_is_taken(self) -> None:
        made = plan([machine("a"), machine("b", free=3), machine("c", free=1)], [job("small", slots=2)])
        assert started(made) == {"small": ["b"]}

    @pytest.mark.parametrize(
        "asked",
        [{"gpu_memory_gb": 100.0}, {"gpu_model": "h200"}, {"labels": (("zone", "b"),)}],
        ids=["memory", "model", "label"],
    )
    def test_a_job_runs_only_where_all_it_asks_for_is(self, asked: dict[str, Any]) -> None:
        old = [{"uuid": "old", "name": "NVIDIA A100", "memory_bytes": 80e9}]
        machines = [machine("a", gpus=old), machine("b", labels={"zone": "b"})]
        assert started(plan(machines, [job("picky", slots=1, asked=asked)])) == {"picky": ["b"]}
        made = plan(machines[:1], [job("picky", slots=1, asked=asked)])
        assert line(made, "picky").blocking_resource == "nodes"

    def test_a_node_that_did_not_start_a_job_is_left_out_while_another_could_take_it(self) -> None:
        bad, busy = machine("a", is_trusted=False), machine("b", free=0)
        assert started(plan([bad, busy], [job("any")], [running("other", "b")])) == {}
        assert started(plan([machine("a", is_trusted=False)], [job("any")])) == {"any": ["a"]}


class TestOrder:
    def test_priority_comes_before_age(self) -> None:
        made = plan([machine("a")], [job("old", created_at=1.0), job("urgent", created_at=2.0, priority=1)])
        assert list(started(made)) == ["urgent"]

    def test_the_project_that_used_less_comes_first(self) -> None:
        shares = {"p": Share(usage=100 * HOUR), "q": Share(usage=HOUR)}
        made = plan([machine("a")], [job("first", created_at=1.0), job("poor", project="q", created_at=2.0)], shares=shares)
        assert list(started(made)) == ["poor"]

    def test_a_weight_lets_a_project_use_more(self) -> None:
        shares = {"p": Share(usage=3 * HOUR, weight=4.0), "q": Share(usage=HOUR)}
        made = plan([machine("a")], [job("poor", project="q", created_at=1.0), job("heavy", created_at=2.0)], shares=shares)
        assert list(started(made)) == ["heavy"]

    def test_of_an_empty_cluster_each_project_gets_its_weight(self) -> None:
        machines = [machine(f"n{i}") for i in range(12)]
        waiting = [job(f"{name}{i}", project=name, created_at=at) for at, name in enumerate("pq") for i in range(50)]
        made = plan(machines, waiting, shares={"p": Share(weight=2.0), "q": Share(weight=1.0)})
        assert sum(name.startswith("p") for name in started(made)) == 8
        assert sum(name.startswith("q") for name in started(made)) == 4

    def test_every_waiting_job_has_its_own_position_in_the_order_of_service(self) -> None:
        waiting = [job(f"{name}{i}", project=name, created_at=float(i)) for name in "pq" for i in range(3)]
        made = plan([machine("a", free=0)], waiting, [running("other", "a")], {"p": Share(), "q": Share()})
        assert [one.position for one in made.lines] == [1, 2, 3, 4, 5, 6]
        assert [one.job_id for one in made.lines] == ["p0", "q0", "p1", "q1", "p2", "q2"]


class TestReservation:
    """A gang of two waits: node a is busy for an hour, b is free."""

    def made(self, *others: Waiting, gang: dict[str, Any] | None = None, **rules: Any) -> Plan:
        waiting = [job("gang", nodes=2, created_at=1.0, **gang or {}), *others]
        return plan([machine("a", free=0), machine("b")], waiting, [running("other", "a")], **rules)

    def test_a_job_that_ends_before_goes_ahead(self) -> None:
        made = self.made(job("short", limit_s=HOUR / 2))
        assert started(made) == {"short": ["b"]}
        assert made.heads == ["gang"]

    def test_one_that_may_last_longer_waits_and_says_for_whom(self) -> None:
        made = self.made(job("long"))
        assert started(made) == {}
        assert (line(made, "long").blocking_resource, line(made, "gang").blocking_resource) == ("reservation", "gpus")
        assert "would delay gang" in line(made, "long").reason

    def test_the_head_is_told_when_it_will_start(self) -> None:
        assert line(self.made(), "gang").estimated_start == NOW + HOUR

    def test_what_the_head_leaves_over_is_for_everyone(self) -> None:
        made = self.made(job("long", slots=2), gang={"slots": 6})
        assert started(made) == {"long": ["b"]}
        assert started(self.made(job("long", slots=3), gang={"slots": 6})) == {}

    def test_once_first_in_line_a_job_stays_there(self) -> None:
        shares = {"p": Share(usage=100 * HOUR), "q": Share()}
        waiting = [job("gang", nodes=2, reserved_at=NOW - 60), job("long", project="q")]
        machines, busy = [machine("a", free=0), machine("b")], [running("other", "a")]
        assert started(plan(machines, waiting, busy, shares)) == {}

    def test_after_its_patience_nobody_passes_it_any_more(self) -> None:
        made = self.made(job("short", limit_s=60.0), gang={"reserved_at": NOW - 2 * HOUR}, patience_s=HOUR)
        assert started(made) == {}

    def test_jobs_that_could_never_run_on_its_nodes_have_a_head_of_their_own(self) -> None:
        zone = {"labels": (("zone", "b"),)}
        machines = [machine("a", free=0), machine("b", free=0, labels={"zone": "b"})]
        waiting = [job("one", asked={"labels": (("zone", "a"),)}), job("two", asked=zone)]
        machines[0].labels["zone"] = "a"
        assert plan(machines, waiting, [running("x", "a"), running("y", "b")]).heads == ["one", "two"]

    def test_a_job_that_no_ready_node_could_hold_keeps_nobody_waiting(self) -> None:
        made = plan([machine("a")], [job("huge", nodes=3, created_at=1.0), job("small", slots=1)])
        assert list(started(made)) == ["small"]
        assert line(made, "huge").blocking_resource == "nodes"

    @pytest.mark.parametrize("seed", range(5))
    def test_a_gang_starts_though_small_jobs_keep_coming_and_every_estimate_is_wrong(self, seed: int) -> None:
        """Jobs say they end in a minute and run up to an hour; new ones come whenever one ends."""
        chance, now, names = random.Random(seed), NOW, itertools.count()
        ends: dict[str, tuple[float, str]] = {}
        gang = job("gang", nodes=4, created_at=NOW)
        for round_number in range(1000):
            ends = {name: (at, node) for name, (at, node) in ends.items() if at > now}
            used = [node for _, node in ends.values()]
            machines = [machine(f"n{i}", free=8 - used.count(f"n{i}")) for i in range(8)]
            busy = [running(name, node, slots=1, ends_in=now - NOW + 60) for name, (_, node) in ends.items()]
            small = [job(f"s{next(names)}", slots=1, created_at=now, limit_s=60.0) for _ in range(64)]
            waiting = [gang, *small] if round_number else small  # it finds every node full
            made = planning.plan(Snapshot(now, machines, busy, waiting, {"p": Share()}))
            if "gang" in started(made):
                return
            if "gang" in made.heads and gang.reserved_at is None:
                gang.reserved_at = now
            for name, (node,) in started(made).items():
                ends[name] = now + chance.uniform(60, HOUR), node
            now += 30
        pytest.fail("the gang never started")


class TestPreemption:
    """A job of priority 5 waits for one of two nodes that jobs of lower priority hold."""

    def made(self, jobs: list[Running], **rules: Any) -> Plan:
        return plan([machine("a", free=0), machine("b", free=0)], [job("urgent", priority=5)], jobs, **rules)

    def test_it_is_off_unless_an_operator_says_so(self) -> None:
        assert self.made([running("x", "a"), running("y", "b")]).preemptions == []

    def test_the_lowest_and_newest_makes_room(self) -> None:
        jobs = [running("old", "a"), running("new", "b", started_at=NOW - 60)]
        assert self.made(jobs, preemption=True).preemptions == [("urgent", "new")]
        jobs = [running("low", "a", priority=-1), running("new", "b", started_at=NOW - 60)]
        assert self.made(jobs, preemption=True).preemptions == [("urgent", "low")]

    def test_nobody_of_the_same_priority_does(self) -> None:
        jobs = [running("x", "a", priority=5), running("y", "b", priority=6)]
        assert self.made(jobs, preemption=True).preemptions == []

    def test_nobody_more_is_asked_while_one_is_leaving(self) -> None:
        jobs = [running("x", "a", is_leaving=True), running("y", "b")]
        assert self.made(jobs, preemption=True).preemptions == []

    def test_nobody_is_asked_for_what_comes_free_anyway(self) -> None:
        assert self.made([running("x", "a", ends_in=30), running("y", "b")], preemption=True, grace_s=60).preemptions == []

    def test_no_job_is_stopped_where_that_would_not_be_enough(self) -> None:
        jobs = [running("x", "a", slots=4), running("z", "a", slots=4, priority=9), running("y", "b", priority=9)]
        assert self.made(jobs, preemption=True).preemptions == []


class TestQuota:
    def test_a_project_at_its_limit_of_jobs_waits_and_others_go_on(self) -> None:
        shares = {"p": Share(running_jobs=1, max_running_jobs=1), "q": Share(usage=99 * HOUR)}
        made = plan([machine("a")], [job("mine", created_at=1.0), job("theirs", project="q")], shares=shares)
        assert list(started(made)) == ["theirs"]
        assert line(made, "mine").blocking_resource == "quota.running_jobs"
        assert made.heads == []

    def test_gpus_count_with_those_that_start_in_the_same_moment(self) -> None:
        shares = {"p": Share(gpus=4, max_gpus=8)}
        made = plan([machine("a")], [job("one", slots=3, created_at=1.0), job("two", slots=3)], shares=shares)
        assert list(started(made)) == ["one"]
        assert line(made, "two").reason == "The project uses 7 of 8 allowed GPUs; the job needs 3."
