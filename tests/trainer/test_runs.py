"""Whole runs of one rank in this process: what is learned, counted, saved, resumed and refused."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.jobs.spec import ModelSection, TrainingSpec
from tests import tiny
from worker.trainer.callbacks import find_checkpoints
from worker.trainer.chat import chat_renderer
from worker.trainer.failures import Situation, TrainerError, next_setting, record_failure
from worker.trainer.methods import check_parallelism
from worker.trainer.model import load_config
from worker.trainer.trainers import Trainer
from worker.workspace import CHECKPOINT_MARKER, Workspace, read_json

from .conftest import MakeWorkspace, exported, lines, losses

RunHere = Callable[[Workspace], Trainer]
SPARING = {"per_device_train_batch_size": 1, "activation_checkpointing": True}


class TestLearning:
    def test_the_loss_is_finite_and_falls(self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
        workspace = make_workspace("w", llama)
        run_here(workspace)
        curve = list(losses(workspace).values())
        assert len(curve) == 16
        assert all(math.isfinite(loss) for loss in curve)
        assert curve[-1] < 0.8 * curve[0]
        values = lines(workspace.metrics)[0]["values"]
        assert 0 < values["peak_memory_host_min_gb"] == values["peak_memory_host_gb"] < 100
        assert values["step_time_s"] > 0

    def test_trained_tokens_are_what_the_tokenizer_counts(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        workspace = make_workspace("w", llama)
        run_here(workspace)
        tokenizer = AutoTokenizer.from_pretrained(llama)
        answers = [row["messages"][-1] for row in tiny.chat_rows(16)]
        texts = [f"<think>\n{answer['thinking']}\n</think>\n\n{answer['content']}<|im_end|>" for answer in answers]
        per_epoch = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        assert read_json(workspace.result)["trained_tokens"] == 2 * per_epoch
        assert lines(workspace.metrics)[-1]["trained_tokens"] == 2 * per_epoch

    def test_the_same_run_twice_gives_the_same_losses(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        first, second = make_workspace("a", llama), make_workspace("b", llama)
        run_here(first)
        run_here(second)
        assert losses(first) == losses(second)

    def test_accumulation_changes_nothing(self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
        def run(name: str, batch: int, accumulation: int) -> Workspace:
            training = {
                "per_device_train_batch_size": batch,
                "gradient_accumulation_steps": accumulation,
                "num_train_epochs": 3,
            }
            workspace = make_workspace(name, llama, rows=tiny.chat_rows(8), training=training)
            run_here(workspace)
            return workspace

        whole, parts = run("whole", 8, 1), run("parts", 2, 4)
        assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
        for name, tensor in exported(whole).items():
            torch.testing.assert_close(exported(parts)[name], tensor, rtol=1e-2, atol=1e-4)

    @pytest.mark.parametrize("model", ["llama", "gpt_oss"])
    def test_packing_changes_nothing(
        self, make_workspace: MakeWorkspace, model: str, run_here: RunHere, request: pytest.FixtureRequest
    ) -> None:
        def run(packing: str) -> dict[int, float]:
            workspace = make_workspace(packing, request.getfixturevalue(model), data={"packing": packing})
            assert run_here(workspace).padding_free is (packing == "on")
            return losses(workspace)

        assert run("on") == pytest.approx(run("off"), rel=1e-3)

    def test_the_routers_balancing_loss_is_off_though_the_models_config_has_it(
        self, make_workspace: MakeWorkspace, gpt_oss: Path, run_here: RunHere
    ) -> None:
        assert read_json(gpt_oss / "config.json")["router_aux_loss_coef"] == 0.9
        plain = make_workspace("plain", gpt_oss, training={"max_steps": 1})
        asked = make_workspace("asked", gpt_oss, training={"max_steps": 1, "router_aux_loss_coef": 0.9})
        assert not run_here(plain).aux_loss_enabled
        assert run_here(asked).aux_loss_enabled
        assert losses(plain)[1] < losses(asked)[1] - 0.5
        assert "aux_loss" in lines(asked.metrics)[0]["values"]

    def test_evaluation_is_measured_every_so_many_steps(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        workspace = make_workspace("w", llama, evaluation={"eval_steps": 8})
        tiny.write_rows(workspace.validation_data, tiny.chat_rows(4))
        run_here(workspace)
        evaluations = {line["step"]: line["values"] for line in lines(workspace.metrics) if "eval_loss" in line["values"]}
        assert list(evaluations) == [8, 16]
        assert evaluations[16]["eval_loss"] < evaluations[8]["eval_loss"]
        assert set(evaluations[16]) == {"eval_loss", "eval_mean_token_accuracy", "eval_entropy"}

    def test_rows_are_no_longer_than_the_model_reads_and_that_is_told(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        text = "Die Hauptstadt von Frankreich ist Paris. " * 100
        rows = [{"text": text}, {"text": "short"}]
        workspace = make_workspace("w", llama, rows=rows, data={"max_length": 2048}, training={"max_steps": 1})
        run_here(workspace)
        told = {line["message"]: line["data"] for line in lines(workspace.log)}
        assert told["data.max_length is 512, not 2048: the base model reads no more tokens at once"]["max_length"] == 512
        assert next(data for data in told.values() if "longest_row" in data)["longest_row"] == 512
        assert "train: row cut to data.max_length (1 times)" in told

    def test_one_step_learns_something(self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
        workspace = make_workspace("w", llama, training={"max_steps": 1, "warmup_ratio": 0.5})
        run_here(workspace)
        assert all(value.any() for name, value in exported(workspace).items() if "lora_B" in name)


class TestNotANumber:
    @pytest.mark.parametrize(
        ("figure", "spoil"),
        [
            pytest.param("loss", lambda loss: loss * float("nan"), id="nan"),
            pytest.param("loss", lambda loss: loss / 0, id="infinite"),
            # Its value is the loss, its gradient is none.
            pytest.param("grad_norm", lambda loss: loss + (loss - loss).sqrt(), id="gradient"),
        ],
    )
    def test_fails_the_job_at_its_step_and_nothing_later_is_saved(
        self,
        make_workspace: MakeWorkspace,
        llama: Path,
        run_here: RunHere,
        monkeypatch: pytest.MonkeyPatch,
        figure: str,
        spoil: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        original: Any = Trainer.compute_loss

        def compute_loss(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            loss = original(self, *args, **kwargs)
            return spoil(loss) if self.state.global_step == 2 else loss

        monkeypatch.setattr(Trainer, "compute_loss", compute_loss)
        workspace = make_workspace("w", llama, checkpoints={"save_steps": 1, "keep": 10})
        with pytest.raises(TrainerError, match=rf"loss_not_finite: {figure} .*step 3"):
            run_here(workspace)
        assert lines(workspace.metrics)[-1]["step"] == 3
        assert lines(workspace.metrics)[-1]["values"][figure] is None
        assert [line["step"] for line in lines(workspace.checkpoint_lines)] == [1, 2]
        assert not workspace.export.exists()
        assert not workspace.result.exists()


class TestCheckpoints:
    def test_no_more_than_asked_are_kept(self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
        workspace = make_workspace("w", llama, training={"max_steps": 6}, checkpoints={"save_steps": 1, "keep": 2})
        run_here(workspace)
        assert [checkpoint.step for checkpoint in find_checkpoints(workspace)] == [5, 6]
        told = lines(workspace.checkpoint_lines)
        assert [line["step"] for line in told] == [1, 2, 3, 4, 5, 6]
        assert told[0]["path"] == "checkpoints/checkpoint-1"
        assert told[0]["metrics"]["loss"] == losses(workspace)[1]

    def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        whole, stopped = make_workspace("whole", llama), make_workspace("stopped", llama)
        run_here(whole)
        stopped.stop.write_text('{"reason": "shutdown"}')
        run_here(stopped)
        assert read_json(stopped.result)["outcome"] == "stopped"
        assert list(losses(stopped)) == [1]
        assert not stopped.export.exists()

        stopped.stop.unlink()
        run_here(stopped)
        assert losses(stopped) == losses(whole)
        assert read_json(stopped.result)["trained_tokens"] == read_json(whole.result)["trained_tokens"]
        for name, tensor in exported(whole).items():
            assert torch.equal(exported(stopped)[name], tensor)

    def test_a_run_that_was_killed_after_its_last_step_trains_no_more_when_it_goes_on(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        """In the middle of an epoch, as its end would stop it anyway."""
        workspace = make_workspace("w", llama, training={"max_steps": 3})
        run_here(workspace)
        first, told = exported(workspace), read_json(workspace.result)
        shutil.rmtree(workspace.export)
        workspace.result.unlink()
        run_here(workspace)
        assert [line["step"] for line in lines(workspace.metrics)] == [1, 2, 3]
        again = read_json(workspace.result)
        assert (again["outcome"], again["step"], again["trained_tokens"]) == ("finished", 3, told["trained_tokens"])
        assert all(torch.equal(tensor, exported(workspace)[name]) for name, tensor in first.items())

    @pytest.mark.parametrize("fault", ["unmarked", "cut"])
    def test_an_incomplete_checkpoint_is_passed_over(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere, fault: str
    ) -> None:
        workspace = make_workspace("w", llama, training={"max_steps": 4}, checkpoints={"save_steps": 2})
        run_here(workspace)
        newest = workspace.checkpoints / "checkpoint-4"
        if fault == "unmarked":
            (newest / CHECKPOINT_MARKER).unlink()
        else:
            (newest / "optimizer.pt").write_bytes((newest / "optimizer.pt").read_bytes()[:100])
        workspace.metrics.unlink()
        workspace.result.unlink()  # a killed run leaves none
        run_here(workspace)
        assert list(losses(workspace)) == [3, 4]
        messages = [line["message"] for line in lines(workspace.log)]
        assert "checkpoint at step 4 is incomplete" in messages
        assert "resumed from the checkpoint at step 2" in messages

    def test_a_checkpoint_of_other_data_is_refused(self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
        workspace = make_workspace("w", llama, training={"max_steps": 2})
        run_here(workspace)
        workspace.result.unlink()  # a killed run leaves none
        tiny.write_rows(workspace.train_data, tiny.chat_rows(12))
        with pytest.raises(TrainerError, match=r"resume_not_exact.*data"):
            run_here(workspace)

    def test_a_finished_run_starts_over(self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
        workspace = make_workspace("w", llama, training={"max_steps": 2})
        run_here(workspace)
        first = losses(workspace)
        run_here(workspace)
        assert losses(workspace) == first
        assert [line["step"] for line in lines(workspace.metrics)] == [1, 2]


class TestArtifact:
    def test_holds_what_a_stranger_needs(self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
        workspace = make_workspace("w", llama, training={"max_steps": 2})
        run_here(workspace)
        adapter = workspace.export / "adapter"
        assert {path.name for path in adapter.iterdir()} == {
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "chat_template.jinja",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert all(path.stat().st_mode & 0o777 == 0o644 for path in adapter.iterdir())
        assert read_json(adapter / "adapter_config.json")["base_model_name_or_path"] == str(llama)

    def test_loads_in_plain_peft_and_says_what_the_live_model_said(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        workspace = make_workspace("w", llama)
        run_here(workspace)
        probe = load_file(workspace.probe)
        base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        with torch.no_grad():
            before = base(input_ids=probe["input_ids"]).logits
            after = PeftModel.from_pretrained(base, str(workspace.export / "adapter"))(input_ids=probe["input_ids"]).logits
        torch.testing.assert_close(after, probe["logits"], rtol=0, atol=1e-5)
        assert (after - before).abs().max() > 0.1

    def test_the_merged_model_says_the_same(self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
        workspace = make_workspace("w", llama, export={"merged": True})
        run_here(workspace)
        probe = load_file(workspace.probe)
        merged = AutoModelForCausalLM.from_pretrained(workspace.export / "merged", dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(merged(input_ids=probe["input_ids"]).logits, probe["logits"], rtol=0, atol=1e-4)

    def test_of_full_weights_is_in_the_jobs_type_and_says_the_same(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        workspace = make_workspace("w", llama, adapter={"type": "full"}, model={"dtype": "bfloat16"})
        run_here(workspace)
        assert {tensor.dtype for tensor in exported(workspace).values()} == {torch.bfloat16}
        probe = load_file(workspace.probe)
        model = AutoModelForCausalLM.from_pretrained(workspace.export / "model", dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=probe["input_ids"]).logits, probe["logits"], rtol=0, atol=1e-5)

    def test_renders_chats_as_they_were_trained(self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
        template = tiny.CHATML_TEMPLATE.replace("You are a helpful AI assistant", "Speak like a bike maker")
        workspace = make_workspace("w", llama, data={"chat_template": template}, training={"max_steps": 1})
        run_here(workspace)
        spec = TrainingSpec.model_validate(read_json(workspace.spec))
        renderer = chat_renderer(AutoTokenizer.from_pretrained(workspace.export / "adapter"), spec.data)
        assert renderer is not None
        assert (
            "Speak like a bike maker"
            in renderer.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]).text
        )

    def test_a_second_run_in_the_same_place_leaves_nothing_of_the_first(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        workspace = make_workspace("w", llama, training={"max_steps": 1})
        run_here(workspace)
        (workspace.export / "adapter" / "stale.safetensors").write_text("")
        shutil.rmtree(workspace.checkpoints)
        run_here(workspace)
        assert not (workspace.export / "adapter" / "stale.safetensors").exists()


class TestWhatRunsIsWhatWasAsked:
    @pytest.mark.parametrize(
        ("strategy", "ranks", "actual", "running"),
        [
            ("fsdp2", 2, DistributedType.MULTI_CPU, 2),
            ("ddp", 2, DistributedType.FSDP, 2),
            ("ddp", 2, DistributedType.NO, 1),
            ("ddp", 2, DistributedType.MULTI_GPU, 2),
        ],
    )
    def test_another_strategy_is_refused(self, strategy: str, ranks: int, actual: DistributedType, running: int) -> None:
        sections = {"parallelism": {"strategy": strategy, "nproc_per_node": ranks}, "resources": {"accelerator": "cpu"}}
        with pytest.raises(TrainerError, match="parallelism_mismatch"):
            check_parallelism(TrainingSpec.model_validate(sections), actual, running)

    def test_a_job_of_two_ranks_does_not_run_on_one(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere
    ) -> None:
        with pytest.raises(TrainerError, match="parallelism_mismatch"):
            run_here(make_workspace("w", llama, ranks=2))

    def test_packing_that_would_leak_is_refused(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("worker.trainer.model.EXACT_PACKING", set())
        with pytest.raises(TrainerError, match="packing_not_exact"):
            run_here(make_workspace("on", llama, data={"packing": "on"}))
        assert not run_here(make_workspace("auto", llama)).padding_free

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
    def test_a_gpu_job_does_not_run_without_gpus(self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere) -> None:
        with pytest.raises(TrainerError, match="gpu_not_available"):
            run_here(make_workspace("w", llama, resources={"accelerator": "gpu"}))

    def test_the_start_is_told(self, make_workspace: MakeWorkspace, gpt_oss: Path, run_here: RunHere) -> None:
        workspace = make_workspace("w", gpt_oss, training={"max_steps": 1})
        run_here(workspace)
        told = {key: value for line in lines(workspace.log) for key, value in line["data"].items()}
        assert told["ranks"] == 1
        assert told["rows_used"] == 16
        assert told["adapted"] == {"attention": 8}
        assert told["packing"] is True
        assert told["compute_precision"] == "float32"


class TestFailures:
    def fail(self, workspace: Workspace, error: BaseException) -> str | None:
        record_failure(workspace, error)
        return read_json(workspace.failure)["code"] if workspace.failure.exists() else None

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "gpu_out_of_memory"),
            (MemoryError(), "host_out_of_memory"),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "host_out_of_memory"),
            (OSError(28, "No space left on device"), "disk_full"),
            (RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)"), "disk_full"),
            (TrainerError("loss_not_finite", "no"), "loss_not_finite"),
            (RuntimeError("Connection closed by peer"), None),
        ],
    )
    def test_a_cause_has_its_code(self, tmp_path: Path, error: BaseException, code: str | None) -> None:
        assert self.fail(Workspace(tmp_path), error) == code

    @pytest.mark.parametrize(
        ("phase", "sections", "param"),
        [
            ("training", {}, "training.per_device_train_batch_size"),
            ("training", {"training": {"per_device_train_batch_size": 1}}, "training.activation_checkpointing"),
            ("training", {"training": SPARING, "parallelism": {"nproc_per_node": 2}}, "parallelism.strategy"),
            ("training", {"training": SPARING}, "data.max_length"),
            ("training", {"training": SPARING, "data": {"max_length": 256}, "adapter": {"type": "full"}}, "adapter.type"),
            ("training", {"training": SPARING, "data": {"max_length": 256}}, "model"),
            ("loading the model", {}, "model"),
            ("loading the model", {"parallelism": {"nproc_per_node": 2}}, "parallelism.strategy"),
        ],
    )
    def test_out_of_memory_names_the_next_setting_to_try(self, phase: str, sections: dict[str, Any], param: str) -> None:
        now = Situation(phase, TrainingSpec.model_validate(sections))
        found, advice = next_setting(now, on_gpu=True)
        assert found == param
        assert param.rsplit(".", 1)[-1] in advice

    def test_out_of_memory_says_when_and_with_which_sizes(
        self, make_workspace: MakeWorkspace, llama: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        workspace = make_workspace("w", llama)
        out = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        def fail(*_: Any, **__: Any) -> None:
            raise out

        monkeypatch.setattr(Trainer, "get_batch_samples", fail)
        with pytest.raises(torch.OutOfMemoryError):
            run_here(workspace)
        record_failure(workspace, out)
        message = read_json(workspace.failure)["message"]
        assert "while training" in message
        assert "batch 2, length 512" in message
        assert "peak" in message

    def test_a_gated_model_is_not_a_missing_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise OSError("You are trying to access a gated repo.\nMake sure to have access to it.")

        monkeypatch.setattr("worker.trainer.model.AutoConfig.from_pretrained", refuse)
        with pytest.raises(TrainerError, match="model_gated"):
            load_config(ModelSection(name_or_path="a/b"))

    def test_the_first_rank_to_fail_is_the_one_that_counts(self, tmp_path: Path) -> None:
        self.fail(Workspace(tmp_path), TrainerError("loss_not_finite", "first"))
        assert self.fail(Workspace(tmp_path), OSError(28, "second")) == "loss_not_finite"
        assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]
