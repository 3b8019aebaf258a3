"""A trainer without a model, for tests of all that is around one: it keeps the workspace's protocol in steps of 50 ms.

    python -S stand_in.py train DIR
    python -S stand_in.py verify DIR EXPORT_DIR

It comes in the place of `worker.trainer` by the same command line, for jobs whose base model is named `stand-in...`. Its state
is a number that each step changes; every loss tells whether a resumed run went on from the right one.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.chaos.stamps import keep_stamping, stamp
from worker.workspace import (
    CHECKPOINT_MARKER,
    CheckpointLine,
    Failure,
    LogLine,
    MetricsLine,
    Result,
    Verification,
    Workspace,
    append_line,
    read_json,
    write_json,
)

NAME = "stand-in"
POISON = "stand-in-poison"
"""Kills itself in every attempt."""
BROKEN = "stand-in-broken"
"""Fails with a cause that has a name."""
FAILURE_CODE = "loss_not_finite"
LAST_STEP_OF_BAD_ONES = 3
STEP_S = 0.05
MODULUS = 1_000_003
ADAPTER = Path("adapter") / "adapter_model.safetensors"


def take_over(command: list[str]) -> None:
    """Become the stand-in where `command` starts a trainer or verifier of its jobs; stamp the life of a real one's ranks."""
    for task in ("train", "verify"):
        module = f"worker.trainer.{task}"
        if module in command:
            arguments = command[command.index(module) + 1 :]
            workspace = Workspace(Path(arguments[0]))
            if _model(workspace).startswith(NAME):
                os.execv(sys.executable, [sys.executable, "-S", __file__, task, *arguments])
            if task == "train" and "RANK" in os.environ:
                keep_stamping(workspace.root)


def losses(seed: int, steps: int) -> list[float]:
    """What an undisturbed run of so many steps tells."""
    state, told = seed, []
    for _ in range(steps):
        state = _next(state)
        told.append(state / MODULUS)
    return told


def train(workspace: Workspace) -> None:
    """From the newest checkpoint, if there is one, to the last step or to a request to stop."""
    stamp(workspace.root)
    spec = read_json(workspace.spec)
    total, every, keep = spec["training"]["max_steps"], spec["checkpoints"]["save_steps"], spec["checkpoints"]["keep"]
    step, state = _resume_point(workspace, spec["seed"])
    append_line(workspace.log, LogLine(f"Training from step {step}"))
    while step < total:
        time.sleep(STEP_S)
        step, state = step + 1, _next(state)
        stamp(workspace.root)
        append_line(workspace.metrics, MetricsLine(step, total, step / total, {"loss": state / MODULUS}, step * 10, 200.0))
        stopped = workspace.stop.exists()
        if stopped or step % every == 0 or step == total:
            _save(workspace, step, state, keep)
        if stopped:
            return _finish(workspace, "stopped", step, total, state)
        if step == LAST_STEP_OF_BAD_ONES:
            _misbehave(workspace)
    write_json(workspace.export / ADAPTER, state)
    unknown = {"base": {"name": NAME, "revision": None}, "chat_template_sha256": None, "libraries": {}, "hardware": {}}
    write_json(workspace.facts, unknown)
    _finish(workspace, "finished", step, total, state)


def verify(workspace: Workspace, export: Path) -> None:
    """Whether what was stored is what an undisturbed run makes."""
    spec = read_json(workspace.spec)
    expected = losses(spec["seed"], spec["training"]["max_steps"])[-1]
    found = json.loads((export / ADAPTER).read_text()) / MODULUS
    message = f"stored {found}, expected {expected}"
    write_json(workspace.verification, Verification(found == expected, message, abs(found - expected), 1.0, 0.0, 1))


def _finish(workspace: Workspace, outcome: str, step: int, total: int, state: int) -> None:
    result = Result("finished" if outcome == "finished" else "stopped", step, total, step * 10, state / MODULUS)
    stamp(workspace.root)
    write_json(workspace.result, result)


def _misbehave(workspace: Workspace) -> None:
    if _model(workspace) == POISON:
        os.kill(os.getpid(), signal.SIGKILL)
    if _model(workspace) == BROKEN:
        write_json(workspace.failure, Failure(FAILURE_CODE, "The loss became nan: lower the learning rate.", "training"))
        sys.exit(1)


def _save(workspace: Workspace, step: int, state: int, keep: int) -> None:
    folder = workspace.checkpoints / f"checkpoint-{step}"
    write_json(folder / "state.json", state)
    write_json(folder / CHECKPOINT_MARKER, {"step": step})
    append_line(workspace.checkpoint_lines, CheckpointLine(step, str(folder.relative_to(workspace.root)), {}))
    for old in _complete(workspace)[:-keep]:
        (old / CHECKPOINT_MARKER).unlink()
        shutil.rmtree(old)


def _resume_point(workspace: Workspace, seed: int) -> tuple[int, int]:
    """The step to go on after, and the state then."""
    found = _complete(workspace)
    return (_step_of(found[-1]), read_json(found[-1] / "state.json")) if found else (0, seed)


def _complete(workspace: Workspace) -> list[Path]:
    """Checkpoints that are whole, oldest first."""
    return sorted((marker.parent for marker in workspace.checkpoints.glob(f"*/{CHECKPOINT_MARKER}")), key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def _next(state: int) -> int:
    return (state * 48_271 + 11) % MODULUS


def _model(workspace: Workspace) -> str:
    return Path(read_json(workspace.spec)["model"]["name_or_path"]).name


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(Workspace(Path(sys.argv[2])))
    else:
        verify(Workspace(Path(sys.argv[2])), Path(sys.argv[3]))
