"""Two ranks under torchrun, by the line that the service uses."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from worker.trainer.trainers import Trainer
from worker.workspace import Workspace, read_json, write_json

from .conftest import EXPERTS, REPOSITORY, TIMEOUT_S, TORCHRUN, MakeWorkspace, exported, lines, losses, run, torchrun, verify

pytestmark = pytest.mark.slow

FSDP2 = {"strategy": "fsdp2", "nproc_per_node": 2}


def finished(workspace: Workspace, ranks: int = 2, **environment: str) -> Workspace:
    done = torchrun(workspace, ranks, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert read_json(workspace.result)["outcome"] == "finished"
    return workspace


def strategy(workspace: Workspace) -> str:
    return str(lines(workspace.log)[0]["data"]["strategy"])


def resumed_from(workspace: Workspace, step: int, other: Workspace) -> Workspace:
    """`other`, going on from a checkpoint of `workspace`: what is left after a kill at any later step."""
    name = f"checkpoint-{step}"
    shutil.copytree(workspace.checkpoints / name, other.checkpoints / name)
    return finished(other)


@contextmanager
def training(workspace: Workspace) -> Iterator[subprocess.Popen[str]]:
    """The agent of a run that has made its first step."""
    with subprocess.Popen(
        [*TORCHRUN, "2", "-m", "worker.trainer.train", str(workspace.root)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as agent:
        assert agent.stdout is not None
        assert any("'loss'" in line for line in agent.stdout), "it ended before it trained"
        yield agent


def run_changed(workspace: Workspace, program: str) -> None:
    """Run the trainer with a part of it changed by `program`, on 2 ranks."""
    path = workspace.root / "changed.py"
    path.write_text(program, encoding="utf-8")
    done = run([*TORCHRUN, "2", str(path), str(workspace.root)], PYTHONPATH=str(REPOSITORY))
    assert done.returncode == 0, done.stderr[-4000:]


class TestRecipes:
    def test_ddp_lora_on_mxfp4_gives_a_proven_adapter(self, make_workspace: MakeWorkspace, gpt_oss_mxfp4: Path) -> None:
        evaluation = {"prompts": [[{"role": "user", "content": "Hi"}]], "max_new_tokens": 4}
        workspace = make_workspace("w", gpt_oss_mxfp4, ranks=2, model={"dtype": "bfloat16"}, evaluation=evaluation)
        finished(workspace)
        assert strategy(workspace) == "MULTI_CPU"
        assert "bfloat16 (dequantized)" in [line["data"].get("compute_precision") for line in lines(workspace.log)]
        curve = list(losses(workspace).values())
        assert curve[-1] < 0.8 * curve[0]
        verification = verify(workspace)
        assert verification["ok"], verification["message"]
        assert len(verification["answers"]) == 1

    def test_fsdp2_lora_on_experts_is_fsdp2_and_learns_as_ddp_does(
        self, make_workspace: MakeWorkspace, gpt_oss_mxfp4: Path
    ) -> None:
        ddp = finished(make_workspace("ddp", gpt_oss_mxfp4, ranks=2, adapter=EXPERTS))
        fsdp = finished(make_workspace("fsdp", gpt_oss_mxfp4, parallelism=FSDP2, adapter=EXPERTS))
        assert (strategy(ddp), strategy(fsdp)) == ("MULTI_CPU", "FSDP")
        # Rounding grows with the steps, as routing turns on the last digit; the first ones are equal to it.
        for step in (1, 2, 3):
            assert losses(fsdp)[step] == pytest.approx(losses(ddp)[step], rel=1e-3 if step == 1 else 2e-2)
        verification = verify(fsdp)
        assert verification["ok"], verification["message"]
        assert {name: value.shape for name, value in exported(fsdp).items()} == {
            name: value.shape for name, value in exported(ddp).items()
        }

    @pytest.mark.parametrize("kind", ["lora", "full"])
    def test_fsdp2_in_bfloat16_with_recomputed_activations_gives_a_proven_artifact(
        self, make_workspace: MakeWorkspace, llama: Path, kind: str
    ) -> None:
        training = {"activation_checkpointing": True, "max_steps": 4}
        model, adapter = {"dtype": "bfloat16"}, {"type": kind}
        workspace = make_workspace("w", llama, parallelism=FSDP2, training=training, model=model, adapter=adapter)
        verification = verify(finished(workspace))
        assert verification["ok"], verification["message"]


class TestSameNumbers:
    def test_two_ranks_of_two_rows_learn_as_one_rank_of_four_and_as_two_again(
        self, make_workspace: MakeWorkspace, llama: Path
    ) -> None:
        two = finished(make_workspace("two", llama, ranks=2))
        assert losses(finished(make_workspace("again", llama, ranks=2))) == losses(two)
        one = finished(make_workspace("one", llama, training={"per_device_train_batch_size": 4}), ranks=1)
        assert losses(two) == pytest.approx(losses(one), rel=1e-3)
        assert read_json(two.result)["trained_tokens"] == read_json(one.result)["trained_tokens"]


def test_rows_that_do_not_fill_the_last_step_are_learned_from_once(
    make_workspace: MakeWorkspace, llama: Path, run_here: Callable[[Workspace], Trainer]
) -> None:
    """Five rows, four a step."""
    rows = tiny.chat_rows(5)
    two = finished(make_workspace("two", llama, rows=rows, ranks=2))
    one = make_workspace("one", llama, rows=rows, training={"per_device_train_batch_size": 4})
    run_here(one)
    assert losses(two) == pytest.approx(losses(one), rel=1e-3)
    assert read_json(two.result)["trained_tokens"] == read_json(one.result)["trained_tokens"]


def test_evaluation_on_two_ranks_gives_the_loss_of_one(make_workspace: MakeWorkspace, llama: Path) -> None:
    """Five rows do not fill the batches of two ranks: what fills them up must not count."""
    found = []
    for ranks in (1, 2):
        workspace = make_workspace(f"w{ranks}", llama, ranks=ranks, evaluation={"per_device_eval_batch_size": 2})
        spec = read_json(workspace.spec)
        spec["training"] |= {"per_device_train_batch_size": 4 // ranks, "max_steps": 1}
        write_json(workspace.spec, spec)
        tiny.write_rows(workspace.validation_data, tiny.chat_rows(5))
        finished(workspace, ranks)
        found.append(next(line["values"]["eval_loss"] for line in lines(workspace.metrics) if "eval_loss" in line["values"]))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(("method", "strategy"), [("kto", "ddp"), ("orpo", "fsdp2")])
def test_the_other_preference_methods_train_on_two_ranks_too(
    make_workspace: MakeWorkspace, llama: Path, method: str, strategy: str
) -> None:
    workspace = make_workspace(
        "w",
        llama,
        rows=tiny.labelled_rows(16) if method == "kto" else tiny.preference_rows(16),
        method=method,
        parallelism={"strategy": strategy, "nproc_per_node": 2},
        training={"num_train_epochs": 1},
    )
    finished(workspace)
    curve = losses(workspace)
    assert list(curve) == [1, 2, 3, 4]
    assert curve[4] < curve[1]
    (in_the_data,) = (line["data"]["trained_tokens"] for line in lines(workspace.log) if "trained_tokens" in line["data"])
    assert read_json(workspace.result)["trained_tokens"] == in_the_data
    assert any(value.any() for name, value in exported(workspace).items() if "lora_B" in name)


class TestResume:
    @pytest.mark.parametrize("kind", ["lora", "full"])
    @pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
    @pytest.mark.parametrize("method", ["supervised", "dpo"])
    def test_from_the_middle_of_an_epoch_differs_by_nothing(
        self, make_workspace: MakeWorkspace, llama: Path, method: str, strategy: str, kind: str
    ) -> None:
        def make(name: str) -> Workspace:
            return make_workspace(
                name,
                llama,
                rows=tiny.chat_rows(24) if method == "supervised" else tiny.preference_rows(24),
                method=method,
                parallelism={"strategy": strategy, "nproc_per_node": 2},
                adapter={"type": kind, "dropout": 0.1},
                training={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
                checkpoints={"save_steps": 4, "keep": 10},
            )

        whole = finished(make("whole"))
        again = resumed_from(whole, 4, make("again"))
        later = {step: loss for step, loss in losses(whole).items() if step > 4}
        assert losses(again) == later
        assert lines(again.metrics)[-1]["trained_tokens"] == lines(whole.metrics)[-1]["trained_tokens"]
        for name, tensor in exported(whole).items():
            assert torch.equal(exported(again)[name], tensor)

    def test_on_another_number_of_ranks_is_refused(self, make_workspace: MakeWorkspace, llama: Path) -> None:
        workspace = finished(make_workspace("w", llama, training={"max_steps": 2}), ranks=1)
        workspace.result.unlink()  # a killed run leaves none
        spec = read_json(workspace.spec)
        write_json(workspace.spec, spec | {"parallelism": {"nproc_per_node": 2}})
        assert torchrun(workspace, 2).returncode != 0
        assert read_json(workspace.failure)["code"] == "resume_not_exact"

    def test_a_stop_request_stops_all_ranks_with_a_checkpoint(self, make_workspace: MakeWorkspace, llama: Path) -> None:
        workspace = make_workspace("w", llama, ranks=2)
        workspace.stop.write_text('{"reason": "cancel"}')
        assert torchrun(workspace, 2).returncode == 0
        assert read_json(workspace.result) | {"train_loss": None} == {
            "outcome": "stopped",
            "step": 1,
            "total_steps": 8,
            "trained_tokens": lines(workspace.metrics)[0]["trained_tokens"],
            "train_loss": None,
        }
        assert lines(workspace.checkpoint_lines)[0]["step"] == 1


class TestProcesses:
    def test_finished_runs_leave_cleanly_again_and_again(self, make_workspace: MakeWorkspace, llama: Path) -> None:
        # Without the exit inside main, about 3 of 45 such runs aborted or hung after success. Every other test here adds runs.
        for number in range(2):
            finished(make_workspace(f"w{number}", llama, ranks=2, training={"max_steps": 1}))

    def test_ranks_die_with_a_killed_agent(self, make_workspace: MakeWorkspace, llama: Path) -> None:
        workspace = make_workspace("w", llama, ranks=2, training={"max_steps": 100_000})
        with training(workspace) as agent:
            agent.kill()
            # The ranks hold the other end of the pipe: it ends when the last of them is gone.
            agent.communicate(timeout=TIMEOUT_S)
        assert not workspace.result.exists()

    def test_a_terminated_agent_lets_the_ranks_save_first(self, make_workspace: MakeWorkspace, llama: Path) -> None:
        workspace = make_workspace("w", llama, ranks=2, training={"max_steps": 100_000})
        with training(workspace) as agent:
            agent.terminate()
            agent.communicate(timeout=TIMEOUT_S)
        result = read_json(workspace.result)
        assert result["outcome"] == "stopped"
        assert lines(workspace.checkpoint_lines)[-1]["step"] == result["step"]

    def test_the_first_failing_ranks_cause_is_told(self, make_workspace: MakeWorkspace, llama: Path, tmp_path: Path) -> None:
        workspace = make_workspace("w", llama, ranks=2, rows=[{"messages": [{"from": "human", "value": "a"}]}])
        done = torchrun(workspace, 2, TORCHELASTIC_ERROR_FILE=str(workspace.error))
        assert done.returncode != 0
        failure = read_json(workspace.failure)
        assert failure["code"] == "invalid_training_file"
        assert failure["message"].startswith("line 1:")
        assert "invalid_training_file" in json.dumps(read_json(workspace.error))


def test_a_rank_whose_agent_was_killed_while_it_imported_does_not_go_on(tmp_path: Path) -> None:
    """Nobody has told the kernel yet that it is to die then: it would train beside the job's next attempt."""
    parent = "import os, subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]]); os._exit(0)"
    orphan = "from worker.trainer.train import die_with_parent; die_with_parent(); print('goes on')"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "a job"}
    command = [sys.executable, "-c", parent, "-c", orphan, str(tmp_path)]
    told = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert told.stdout == ""  # read to its end: until the orphan has gone
    assert "Traceback" not in told.stderr


class TestSlowPreparation:
    def test_does_not_meet_the_collective_timeout(self, make_workspace: MakeWorkspace, llama: Path) -> None:
        """Rank 0 tokenises for longer than any collective may take; the others look at the disk meanwhile."""
        resources = {"accelerator": "cpu", "collective_timeout_s": 5}
        workspace = make_workspace("w", llama, ranks=2, training={"max_steps": 1}, resources=resources)
        run_changed(workspace, SLOW_TOKENISING)
        assert read_json(workspace.result)["outcome"] == "finished"


SLOW_TOKENISING = """
import time
import worker.trainer.data as data
from worker.trainer.train import main

tokenize_file = data.tokenize_file

def slow(*args):
    time.sleep(10)
    return tokenize_file(*args)

data.tokenize_file = slow
main()
"""


def test_the_shards_of_every_rank_are_in_the_adapter(make_workspace: MakeWorkspace, llama: Path) -> None:
    """Each rank sets its part of every adapter tensor to its own number; the file must hold both."""
    workspace = make_workspace("w", llama, parallelism=FSDP2, training={"max_steps": 1})
    run_changed(workspace, MARK_SHARDS)
    tensors = load_file(workspace.export / "adapter" / "adapter_model.safetensors")
    assert all(set(tensor.flatten().tolist()) == {1.0, 2.0} for tensor in tensors.values())


MARK_SHARDS = """
import os
import torch
import worker.trainer.export as export
from worker.trainer.train import main

full_weights = export.full_weights

def marked(model, **options):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.to_local().fill_(1.0 + int(os.environ["RANK"]))
    return full_weights(model, **options)

export.full_weights = marked
main()
"""
