"""Everything is killed at random while jobs run, and nothing is lost. benchmarks/chaos.py does the same at length."""

from pathlib import Path

import pytest

from tests.chaos import fleet as fleets
from tests.chaos.harness import Customer, Storm
from tests.chaos.judge import judge
from tests.chaos.plan import draw

NUM_JOBS = 24
SEED = 5


@pytest.mark.slow
def test_no_job_is_lost_doubled_or_left_over_while_every_process_is_killed(tmp_path: Path) -> None:
    models = fleets.models(tmp_path)
    plan = draw(SEED, NUM_JOBS, lease_s=fleets.LEASE_S)
    with fleets.cluster(tmp_path) as fleet:
        story = Storm(fleet, plan, Customer(fleet, models, tmp_path)).run()
        verdict = judge(fleet, plan, story)
    assert verdict.violations == [], f"seed {SEED}"
    assert all(story.faults[kind] for kind in ("api", "control", "node", "host", "supervisor", "trainer", "broker", "database"))
    assert max(verdict.attempts) > 1


def test_the_same_seed_is_the_same_plan() -> None:
    one, same, other = (draw(seed, 200, lease_s=20) for seed in (7, 7, 8))
    assert one == same
    assert one != other
