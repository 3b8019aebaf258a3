"""The service the demo runs on: `tuneyard up` as a child, which ends when the demo does, however that ends."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
# `up` gives a running job its grace period to save and stop; past this it is not coming back.
STOP_TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG = 1


class CannotStart(Exception):
    """The service did not start; the message says why, in the service's own words."""


@dataclass
class Service:
    """A running `tuneyard up`."""

    process: subprocess.Popen[str]
    port: int
    data_dir: Path

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def key_file(self) -> Path:
        return self.data_dir / "api-key"

    @property
    def key(self) -> str:
        try:
            return self.key_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise CannotStart(
                f"{self.key_file} cannot be read ({error.strerror}): remove {self.data_dir}, or put a key there."
            ) from error

    def wait_until_ready(self) -> None:
        """Return when it says that it can take jobs; CannotStart when it ends instead, which it does where it cannot."""
        assert self.process.stdout is not None
        last = "the service did not start."
        for line in self.process.stdout:
            if "is ready at" in line:
                return
            last = line.strip() or last
        raise CannotStart(last)

    def stop(self) -> None:
        """Stop it and all it started; returns when they are gone."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(data_dir: Path, models: Path, port: int) -> Service:
    """Start the service; jobs may name base models below `models`."""
    command = [sys.executable, "-m", "app.cli", "up", "--port", str(port), "--data-dir", str(data_dir)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TUNEYARD_MODEL_ROOTS": json.dumps([str(models.resolve())])},
        start_new_session=True,  # a Ctrl-C reaches the demo only, which then stops the service in order
        preexec_fn=_stop_with_parent,
    )
    return Service(process, port, data_dir)


def free_port(wanted: int) -> int:
    """The wanted port, or one that is free where it is taken."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise CannotStart("No port is free on this machine.")


def _stop_with_parent() -> None:
    """Let the kernel send SIGTERM to the service if the demo is killed (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
