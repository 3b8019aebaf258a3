"""What it costs to lose a part of a job over two hosts: seconds until both are down, and what comes out in the end.

    python benchmarks/gang_failures.py [ddp|fsdp2 ...]        as root: hosts are network namespaces on one bridge

Two hosts of two CPU ranks each, every host with a disk of its own, train one job through the API while ranks, supervisors,
hosts and links are lost, on the first node of the job and on the other. The base line is the same job on one host of four
ranks, never disturbed: its losses are what the disturbed job must end with.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import tiny
from tests.gangs.cluster import HEARTBEAT_S, LEASE_S, Cluster, cluster
from tests.gangs.disasters import attempt_of, cut_link, kill_node, kill_rank, kill_supervisor, strike

DISASTERS = [(kill_rank, 1), (kill_rank, 0), (kill_supervisor, 1), (kill_node, 1), (kill_node, 0), (cut_link, 1), (cut_link, 0)]
FSDP2_DISASTERS = [(kill_node, 1)]
EVERY = 20  # steps between two blows


def main() -> None:
    print(f"lease {LEASE_S:g} s, heartbeat {HEARTBEAT_S:g} s")
    for strategy in sys.argv[1:] or ["ddp", "fsdp2"]:
        blows = DISASTERS if strategy == "ddp" else FSDP2_DISASTERS
        with running() as (service, model, file):
            spec = make_spec(strategy, EVERY * (len(blows) + 2))
            expected = finish(service, create(service, model, file, spec, nnodes=1))
            job_id = create(service, model, file, spec, nnodes=2)
            print(f"\n{strategy:<30}{'struck host down':>20}{'the other down':>18}{'next attempt':>16}")
            for number, (disaster, node_rank) in enumerate(blows):
                victim, other = service.node_ranks()[node_rank], service.node_ranks()[1 - node_rank]
                outcome = strike(service, job_id, disaster, victim, step=EVERY * number + EVERY // 2)
                name = f"{disaster.__name__} (node rank {node_rank})"
                down = f"{outcome.down[victim.name]:>18.1f} s{outcome.down[other.name]:>16.1f} s"
                print(f"{name:<30}{down}{outcome.queued:>14.1f} s", flush=True)
            losses = finish(service, job_id)
            largest = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
            print(
                f"succeeded in attempt {attempt_of(service, job_id)}; largest difference of {len(losses)} losses: {largest:g}"
            )


@contextlib.contextmanager
def running() -> Iterator[tuple[Cluster, Path, str]]:
    """A cluster of two hosts, a tiny base model, and a data set."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny.build_llama(folder / "models" / "tiny-llama")
        rows = tiny.write_rows(folder / "train.jsonl", tiny.chat_rows(64))
        (folder / "cluster").mkdir()
        with cluster(folder / "cluster", folder / "models", TUNEYARD_MAX_ATTEMPTS="20") as service:
            yield service, model, service.upload(rows)


def make_spec(strategy: str, steps: int) -> dict[str, Any]:
    return {
        "model": {"dtype": "float32"},
        "adapter": {"r": 4, "alpha": 8},
        "data": {"max_length": 256, "packing": "off"},
        "training": {"learning_rate": 0.01, "per_device_train_batch_size": 4, "max_steps": steps},
        "checkpoints": {"save_steps": 5},
        "parallelism": {"strategy": strategy},
    }


def create(service: Cluster, model: Path, file: str, spec: dict[str, Any], *, nnodes: int) -> str:
    parallelism = spec["parallelism"] | {"nnodes": nnodes, "nproc_per_node": 4 // nnodes}
    return service.create_job(model, file, spec | {"parallelism": parallelism}, seed=1).id


def finish(service: Cluster, job_id: str) -> list[float]:
    """The losses of a job that must succeed."""
    job = service.wait_for_end(job_id)
    assert job.status == "succeeded", job.error
    return service.losses(job_id)


if __name__ == "__main__":
    main()
