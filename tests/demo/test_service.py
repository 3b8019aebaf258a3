"""The demo's service: its port, and what it says when it cannot start."""

import socket
from pathlib import Path

import pytest

from demo import service


def test_a_taken_port_is_replaced_by_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind((service.HOST, 0))
        taken.listen()
        wanted = taken.getsockname()[1]
        assert service.free_port(wanted) not in (0, wanted)


def test_a_free_port_is_used_as_wanted() -> None:
    with socket.socket() as probe:
        probe.bind((service.HOST, 0))
        wanted = probe.getsockname()[1]
    assert service.free_port(wanted) == wanted


@pytest.mark.slow
def test_a_service_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, where a folder should be")
    running = service.start(tmp_path / "taken", tmp_path, service.free_port(0))
    with pytest.raises(service.CannotStart) as caught:
        running.wait_until_ready()
    assert "--data-dir" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert running.process.wait(30) == 1
