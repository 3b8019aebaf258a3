"""Tell TensorBoard and Weights & Biases about a run: transformers' own reporters, with our figures, each step once.

What a checkpoint knows of earlier steps is told again when a run is resumed: TensorBoard starts its files afresh, and W&B
leaves out what it has. W&B is told from a thread, so that a server that is away neither holds up the training nor fails it.
"""

import os
import queue
import shutil
import threading
from types import SimpleNamespace
from typing import Any

import httpx2
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback, WandbCallback, rewrite_logs

from app.jobs.spec import TrainingSpec
from worker.trainer.callbacks import is_first_rank
from worker.trainer.trainers import Trainer
from worker.workspace import LogLine, Reports, Workspace, append_line, read_json

ANSWER_S = 5.0  # in which a server that is there says something
FINISH_S = 20.0  # what a run that is over waits for W&B to take the rest
PAUSE_S = 10.0  # between two tries to begin

Step = tuple[int, dict[str, Any]]


def add_trackers(trainer: Trainer, workspace: Workspace, spec: TrainingSpec) -> "list[Wandb]":
    """Add the reporters that the job asks for; those that `finish` must be called on at the end. Only one rank reports."""
    if not is_first_rank() or not workspace.reports.exists():
        return []
    reports = Reports(**read_json(workspace.reports))
    if reports.tensorboard:
        trainer.add_callback(TensorBoard(workspace))
    if reports.wandb is None:
        return []
    wandb = Wandb(workspace, reports.run_id, reports.wandb, spec)
    trainer.add_callback(wandb)
    return [wandb]


class TensorBoard(TensorBoardCallback):
    """Event files in the workspace, which become part of the result."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.folder = workspace.tensorboard

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.logging_dir = str(self.folder)
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-untyped-call]
        for step, logs in steps_of(state):
            super().on_log(args, SimpleNamespace(is_world_process_zero=True, global_step=step), control, logs=logs)  # type: ignore[no-untyped-call]


class Wandb(WandbCallback):
    """The run in W&B under the job's id, told from a thread of its own."""

    def __init__(self, workspace: Workspace, run_id: str, wanted: dict[str, Any], spec: TrainingSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.workspace = workspace
        self.run_id = run_id
        self.wanted = wanted
        self.spec = spec
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._is_away = False
        self._thread: threading.Thread | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        for step in steps_of(state):
            self._steps.put(step)
        self._thread = threading.Thread(target=self._tell, args=(args, state, model), name="wandb", daemon=True)
        self._thread.start()

    def on_log(self, args: Any, state: TrainerState, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        self._steps.put((state.global_step, dict(logs)))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._steps.put(None)
        self._is_over.set()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Checkpoints stay here."""

    def finish(self) -> None:
        """Let W&B take the rest, within bounds; not at all where it is away."""
        if self._thread is not None:
            self._thread.join(0.0 if self._is_away else FINISH_S)
            if self._thread.is_alive():
                self._say("warn", "Weights & Biases did not take all of this job's figures in time")

    def _tell(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        try:
            if not self._begin(args, state, model):
                return
            while (entry := self._steps.get()) is not None:
                step, logs = entry
                self._wandb.log(rewrite_logs(logs) | {"train/global_step": step}, step=step)  # type: ignore[no-untyped-call]
            self._wandb.finish()
        except Exception as error:  # trackers and their networks fail in every way there is
            self._is_away = True
            self._say("warn", f"Weights & Biases takes no more of this job's figures: {_reason(error)}")

    def _begin(self, args: TrainingArguments, state: TrainerState, model: Any) -> bool:
        """Open the run, or find it again; False when the training is over before that works."""
        while True:
            try:
                _refuse_silence()
                self._init()
                self.setup(args, state, model)  # type: ignore[no-untyped-call]
                break
            except Exception as error:
                if not self._is_away:
                    self._say("warn", f"Weights & Biases does not take this job's figures, it is tried again: {_reason(error)}")
                self._is_away = True
            if self._is_over.wait(PAUSE_S):
                return False
        if self._is_away:
            self._say("info", "Weights & Biases has this job's figures again")
        self._is_away = False
        self._say("info", f"Weights & Biases run: {self._wandb.run.url}", url=self._wandb.run.url)
        return True

    def _init(self) -> None:
        # What the run prints stays here: the service keeps its log.
        settings = self._wandb.Settings(console="off", silent=True, finish_timeout=FINISH_S, save_code=False)
        self._wandb.init(
            project=self.wanted["project"],
            entity=self.wanted["entity"],
            name=self.wanted["name"] or self.run_id,
            tags=self.wanted["tags"],
            id=self.run_id,
            resume="allow",
            dir=str(self.workspace.root),
            config={"spec": self.spec.model_dump(mode="json", exclude={"secrets"})},
            settings=settings,
        )

    def _say(self, level: Any, message: str, **data: Any) -> None:
        append_line(self.workspace.log, LogLine(message, level, data))


def steps_of(state: TrainerState) -> list[Step]:
    """What was logged before this attempt, as its checkpoint has it."""
    return [
        (int(entry["step"]), {name: value for name, value in entry.items() if name != "step"}) for entry in state.log_history
    ]


def _refuse_silence() -> None:
    """Raises where the server is away: the client itself would try for minutes, and a run that is over does not wait."""
    if os.environ.get("WANDB_MODE", "online") == "online":
        httpx2.get(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"), timeout=ANSWER_S)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
