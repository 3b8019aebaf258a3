"""Train one job from the directory that describes it, read top to bottom: spec, data, model, fit, export.

    torchrun --nproc-per-node 2 -m worker.trainer.train DIR

is exactly what the service runs; DIR is laid out as worker/workspace.py says. Everything a run has to tell it writes there.
If DIR/checkpoints holds a complete checkpoint, the run goes on from the newest one; a run that has finished starts over.
"""

import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import datasets
import transformers
from torch.distributed.elastic.multiprocessing.errors import record

from app.jobs.spec import PREFERENCE_METHODS, TrainingSpec
from worker.trainer.callbacks import (
    Checkpoint,
    Checkpoints,
    Progress,
    Reporter,
    Sharding,
    Stopper,
    check_same_start,
    is_first_rank,
    is_first_rank_of_node,
    resume_point,
)
from worker.trainer.data import Data, load_data
from worker.trainer.evaluation import Evaluator, load_best
from worker.trainer.export import export
from worker.trainer.failures import NOW, record_failure, reserve_room
from worker.trainer.memory import rank_bytes, require_memory
from worker.trainer.methods import build_trainer
from worker.trainer.model import (
    adapted_kinds,
    initial_weights,
    is_mxfp4,
    load_config,
    load_model,
    load_tokenizer,
    within_context,
)
from worker.trainer.space import require_space
from worker.trainer.trackers import add_trackers
from worker.trainer.trainers import Trainer
from worker.workspace import LogLine, Result, Workspace, append_line, read_json, write_json

PR_SET_PDEATHSIG = 1  # prctl(2)


@record
def train(workspace: Workspace) -> Trainer:
    """One run, from the spec to the result file. The trainer is returned so that it outlives the run; see main."""
    spec = TrainingSpec.model_validate(read_json(workspace.spec))
    NOW.spec, NOW.phase = spec, "reading the data"
    silence_progress_bars()
    if is_first_rank_of_node():
        reserve_room(workspace)

    # Data first: ranks wait for it by looking at the disk, and no process group is there yet to time out.
    tokenizer = load_tokenizer(spec)
    asked, spec = spec, within_context(spec)
    data = load_data(workspace, spec, tokenizer)
    repeats = has_finished(workspace)
    checkpoint = None if repeats else resume_point(workspace, spec, data.fingerprint)

    NOW.phase = "loading the model"
    require_memory(spec)
    model = load_model(spec, initial_weights(spec, workspace))
    trainer = build_trainer(spec, workspace, model, tokenizer, data)
    reporter, stopper = Reporter(workspace, trainer), Stopper(workspace, trainer)
    trainer.add_callback(reporter)
    trackers = add_trackers(trainer, workspace, spec)  # after the reporter, whose figures they pass on
    trainer.add_callback(stopper)
    trainer.add_callback(Progress(workspace))
    trainer.add_callback(Sharding(workspace))
    trainer.add_callback(Evaluator(workspace, spec))
    trainer.add_callback(Checkpoints(workspace, spec, trainer, reporter, data.fingerprint))
    check_same_start(checkpoint, trainer.accelerator.device)
    if repeats:
        clear(workspace, trainer)
    require_space(workspace, spec, model)
    if is_first_rank():
        log_start(workspace, spec, trainer, data, checkpoint)
        if spec != asked:
            longest = spec.data.max_length
            told = f"data.max_length is {longest}, not {asked.data.max_length}: the base model reads no more tokens at once"
            append_line(workspace.log, LogLine(told, "warn", {"max_length": longest}))

    if checkpoint is not None:
        trainer.num_trained_tokens = checkpoint.marker()["trained_tokens"]
    NOW.phase = "training"
    trainer.train(resume_from_checkpoint=str(checkpoint.folder) if checkpoint else None)

    NOW.phase = "exporting"
    if not stopper.stopped:
        if spec.evaluation.keep_best:
            load_best(trainer, workspace, is_first_rank=is_first_rank())
        export(trainer, workspace, spec, tokenizer, data)
    for tracker in trackers:
        tracker.finish()
    if is_first_rank():
        write_json(workspace.result, result(trainer, reporter, stopped=stopper.stopped))
    return trainer


def has_finished(workspace: Workspace) -> bool:
    """Whether a run came to its end here before: then this one is a repetition from the start."""
    return workspace.result.exists() and read_json(workspace.result)["outcome"] == "finished"


def clear(workspace: Workspace, trainer: Trainer) -> None:
    """Remove what the finished run wrote, once every rank has seen that it was finished."""
    trainer.accelerator.wait_for_everyone()
    if is_first_rank():
        for path in (workspace.metrics, workspace.checkpoint_lines, workspace.log, workspace.result, workspace.verification):
            path.unlink(missing_ok=True)
        for folder in (workspace.checkpoints, workspace.export, workspace.tensorboard):
            shutil.rmtree(folder, ignore_errors=True)


def log_start(workspace: Workspace, spec: TrainingSpec, trainer: Trainer, data: Data, checkpoint: Checkpoint | None) -> None:
    """The facts that decide whether a run is what was asked: as events, not only in the log."""
    strategy, ranks = trainer.accelerator.distributed_type.value, trainer.accelerator.num_processes
    log(
        workspace,
        f"training on {ranks} {spec.resources.accelerator} rank(s)",
        strategy=strategy,
        ranks=ranks,
        method=spec.method,
    )
    for split, counts in data.counts.items():
        log(workspace, f"{split}: {counts.rows_used} of {counts.rows_read} rows used", split=split, **vars(counts))
        for warning, times in counts.warnings.items():
            append_line(workspace.log, LogLine(f"{split}: {warning} ({times} times)", "warn", {"times": times}))
    if repeated := num_repeated(spec, len(data.train)):
        told = (
            f"{repeated} row(s) are repeated in every epoch, as {len(data.train)} rows do not fill the batches of {ranks} ranks"
        )
        append_line(workspace.log, LogLine(told, "warn", {"repeated_rows": repeated}))
    model = trainer.accelerator.unwrap_model(trainer.model)
    log(
        workspace,
        f"model {spec.model.name_or_path}",
        attention=model.config._attn_implementation,
        dtype=spec.model.dtype,
        compute_precision=f"{spec.model.dtype} (dequantized)" if is_mxfp4(load_config(spec.model)) else spec.model.dtype,
        rank_gb=rank_bytes(spec) / 1e9,
        packing=trainer.padding_free,
        adapted=adapted_kinds(model),
        trained_parameters=sum(value.numel() for value in model.parameters() if value.requires_grad),
    )
    if checkpoint is not None:
        log(workspace, f"resumed from the checkpoint at step {checkpoint.step}", step=checkpoint.step)


def num_repeated(spec: TrainingSpec, num_rows: int) -> int:
    """Rows that fill up the last batches of an epoch, where ranks learn from them: supervised ones do not."""
    if spec.method not in PREFERENCE_METHODS or spec.world_size == 1:
        return 0
    return -num_rows % (spec.training.per_device_train_batch_size * spec.world_size)


def log(workspace: Workspace, message: str, **data: object) -> None:
    """A fact for the job's events."""
    append_line(workspace.log, LogLine(message, data=data))


def result(trainer: Trainer, reporter: Reporter, *, stopped: bool) -> Result:
    """How the run ended. The loss is the mean over the steps of this attempt."""
    return Result(
        outcome="stopped" if stopped else "finished",
        step=trainer.state.global_step,
        total_steps=trainer.state.max_steps,
        trained_tokens=trainer.num_trained_tokens,
        train_loss=sum(reporter.losses) / len(reporter.losses) if reporter.losses else None,
    )


def silence_progress_bars() -> None:
    """They redraw a line many times a second, and the log is kept and streamed."""
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def die_with_parent() -> None:
    """Torch elastic starts ranks in sessions of their own: without this they would outlive a killed agent, also one that was
    killed while they were still importing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.fsencode(sys.argv[1]) not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run, and leave at once: gloo may abort or hang when the interpreter takes a finished trainer apart."""
    workspace = Workspace(Path(sys.argv[1]).resolve())
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks where a stalled rank is
    code = 1
    try:
        trainer = train(workspace)  # noqa: F841  (held until the process is gone)
        code = 0
    except BaseException as error:
        held = error  # noqa: F841  (its frames hold the trainer)
        record_failure(workspace, error)
        traceback.print_exc()
    finally:  # also where a full disk takes no more of the log
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
