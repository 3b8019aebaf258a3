"""Jobs over two hosts, each in a network namespace of its own: nothing is shared but storage, and links can be cut."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.gangs import network
from tests.gangs.cluster import Cluster, cluster
from tests.gangs.disasters import attempt_of, cut_link, kill_node, kill_rank, strike

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gangs")]

ROWS = 64
STEPS = 100
SPEC: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "adapter": {"r": 4, "alpha": 8},
    "data": {"max_length": 256, "packing": "off"},
    "training": {"learning_rate": 0.01, "per_device_train_batch_size": 4, "max_steps": STEPS},
    "checkpoints": {"save_steps": 10},
}
ONE_NODE = {"parallelism": {"nproc_per_node": 4}}
TWO_NODES = {"parallelism": {"nnodes": 2, "nproc_per_node": 2}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.build_llama(folder / "tiny-llama")
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Cluster]:
    if reason := network.why_impossible():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("cluster"), models) as service:
        yield service


@pytest.fixture(scope="module")
def create(service: Cluster, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], str]:
    file = service.upload(tiny.write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", tiny.chat_rows(ROWS)))
    return lambda parallelism: service.create_job(models / "tiny-llama", file, SPEC | parallelism, seed=1).id


@pytest.fixture(scope="module")
def expected(service: Cluster, create: Callable[[dict[str, Any]], str]) -> list[float]:
    """The losses of four ranks on one host."""
    job_id = create(ONE_NODE)
    job = service.wait_for_end(job_id)
    assert job.status == "succeeded", job.error
    return service.losses(job_id)


def test_two_hosts_of_two_ranks_train_as_one_of_four_also_when_a_rank_a_host_and_a_link_are_lost(
    service: Cluster, create: Callable[[dict[str, Any]], str], expected: list[float], tmp_path: Path
) -> None:
    first, second = service.node_ranks()
    job_id = create(TWO_NODES)
    strike(service, job_id, kill_rank, second, step=10)
    strike(service, job_id, kill_node, first, step=30)
    strike(service, job_id, cut_link, second, step=50)
    job = service.wait_for_end(job_id)
    assert job.status == "succeeded", job.error
    assert attempt_of(service, job_id) >= 4
    assert service.losses(job_id) == expected
    assert (service.download(job_id, tmp_path) / "adapter" / "adapter_model.safetensors").exists()
    told = [event.message for event in service.client.fine_tuning.jobs.list_events(job_id, limit=100)]
    # With the rank and the signal where torch elastic had the time to say them.
    killed = re.compile(r"training process .*was killed.* on node host-1: the job is queued again")
    assert any(killed.search(message) for message in told), told
    assert "Node host-1 was lost: the job is queued again" in told


def test_a_cancelled_job_leaves_no_process_on_any_host(service: Cluster, create: Callable[[dict[str, Any]], str]) -> None:
    job_id = create(TWO_NODES)
    service.wait_for_step(job_id, 2)
    service.client.fine_tuning.jobs.cancel(job_id)
    assert service.wait_for_end(job_id).status == "cancelled"
    assert [node.name for node in service.nodes if node.trainers()] == []
