"""`tuneyard up`: what keeps it from starting is one line that says what to do; what is left of a killed one does not."""

import fcntl
import os
import signal
import socket
import stat
from pathlib import Path

import psutil
import pytest
from sqlalchemy.exc import DatabaseError

from app import migrate, up
from app.config import Settings
from tests import tiny
from tests.servers import free_port
from tests.service import running, wait_until


def start(data_dir: Path, port: int = 0) -> str:
    """Why it does not start."""
    with pytest.raises(up.CannotStart) as caught:
        up.run("127.0.0.1", port or free_port(), data_dir, lambda text: None)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(autouse=True)
def _same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` sets the data directory for its children; undo it after the test."""
    monkeypatch.setenv("TUNEYARD_DATA_DIR", os.environ.get("TUNEYARD_DATA_DIR", ".tuneyard"))


class TestRefusals:
    def test_a_taken_port_says_which_option_to_change(self, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            assert "--port" in start(tmp_path / "data", taken.getsockname()[1])

    def test_a_second_one_on_the_same_directory_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        with (tmp_path / "run" / "up.lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "Another `tuneyard up` serves" in start(tmp_path)

    def test_a_directory_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        message = start(tmp_path / "file" / "data")
        assert "Cannot write to" in message
        assert "--data-dir" in message

    @pytest.mark.parametrize("name", ["per%20cent", "que?stion", "ha#sh"])
    def test_a_directory_whose_name_no_url_can_hold_is_refused(self, tmp_path: Path, name: str) -> None:
        assert "--data-dir" in start(tmp_path / name)

    def test_a_database_that_cannot_be_used_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> None:
            raise DatabaseError("PRAGMA", {}, Exception("file is not a database\nmore"))

        monkeypatch.setattr(migrate, "upgrade", broken)
        with pytest.raises(up.CannotStart, match=r"\(file is not a database\): see TUNEYARD_DATABASE_URL"):
            up._migrate()

    def test_a_full_disk_says_how_much_is_needed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(up, "SMALLEST_FREE_BYTES", 1 << 60)
        assert "free at least" in start(tmp_path)


def test_a_socket_in_a_deep_directory_still_fits_the_kernels_limit(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    assert len(str(Settings(data_dir=deep).broker_socket)) <= 107


@pytest.mark.slow
def test_a_killed_service_starts_again_on_what_it_left(tmp_path: Path) -> None:
    with running(tmp_path / "data") as service:
        assert stat.S_IMODE((tmp_path / "data" / "api-key").stat().st_mode) == 0o600
        printed = service.out.read_text()
        assert service.key in printed
        file_id = service.upload(tiny.write_rows(tmp_path / "rows.jsonl", tiny.chat_rows(2)))
        assert service.process is not None
        children = psutil.Process(service.process.pid).children(recursive=True)
        service.stop(signal.SIGKILL)
        wait_until(lambda: not any(_is_alive(child) for child in children), "what it started is gone", 30)
        assert (tmp_path / "data" / "run" / "valkey.sock").exists()
        service.start()
        assert service.key not in service.out.read_text()
        assert service.client.files.retrieve(file_id).id == file_id


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
