"""Whether anything is lost when everything is killed: jobs through the API while every kind of process dies at random.

    python benchmarks/chaos.py [--jobs 200] [--seed N] [--sqlite]

Two APIs, three control workers, four node workers on PostgreSQL and Valkey, or with --sqlite one `tuneyard up`. The same seed
is the same plan. What must hold is in tests/chaos/judge.py; the base line is an undisturbed run, whose states and losses are
known. Prints one line a seed; the exit status is the number of violations, 99 at most.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chaos import fleet as fleets
from tests.chaos.harness import Customer, Storm, Story
from tests.chaos.judge import Verdict, judge
from tests.chaos.plan import Plan, draw


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--sqlite", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder that stays, for a look at what went wrong")
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    plan = draw(asked.seed, asked.jobs, lease_s=fleets.LEASE_S, embedded=asked.sqlite)
    with tempfile.TemporaryDirectory() as name:
        folder = asked.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        story, verdict = run(plan, folder, embedded=asked.sqlite)
    show(plan, story, verdict)
    sys.exit(min(len(verdict.violations), 99))


def run(plan: Plan, folder: Path, *, embedded: bool) -> tuple[Story, Verdict]:
    """One storm, and the verdict on it."""
    models = fleets.models(folder)
    with (fleets.embedded if embedded else fleets.cluster)(folder) as fleet:
        story = Storm(fleet, plan, Customer(fleet, models, folder)).run()
        return story, judge(fleet, plan, story)


def show(plan: Plan, story: Story, verdict: Verdict) -> None:
    starts = verdict.attempts
    print(f"jobs        {len(plan.jobs)}: " + ", ".join(f"{count} {state}" for state, count in sorted(verdict.states.items())))
    print(f"cancels     {len(story.cancels)}; pauses {sum(job.pause_at is not None for job in plan.jobs)}")
    print(f"attempts    at most {max(starts)}, {sum(starts) / len(starts):.2f} on average")
    print("faults      " + ", ".join(f"{count} {kind}" for kind, count in sorted(story.faults.items())))
    print(f"duration    {story.seconds:.0f} s")
    print(f"violations  {len(verdict.violations)}")
    for violation in verdict.violations:
        print(f"  {violation}")


if __name__ == "__main__":
    main()
