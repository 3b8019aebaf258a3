"""A job as a run in MLflow, and its result as a registered model. The weights are uploaded file by file, never loaded."""

import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import ColSpec, DataType, Schema

from app.config import get_settings
from worker.workspace import Workspace

MODEL = "model"  # where the MLflow model lies among the run's artifacts
MAX_PARAM_CHARACTERS = 6000  # of MLflow's stores
METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100  # what one request may hold
ENDS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
LIBRARIES = ("torch", "transformers", "peft", "accelerate")


class MlflowRun:
    """The run of one job. `facts` is what the job object shows of it; a later attempt goes on with them."""

    def __init__(self, job: Any, wanted: dict[str, Any], facts: dict[str, Any]) -> None:
        settings = get_settings()
        uri = wanted["tracking_uri"] or settings.mlflow_tracking_uri
        self.client = MlflowClient(uri, settings.mlflow_registry_uri or None)
        self.job = job
        self.wanted = wanted
        self.facts = {"type": "mlflow"} | facts
        self._last_steps: dict[str, int] | None = None

    def open(self) -> bool:
        """Make the run, or find it again with the last step of each figure. May be repeated; False when it was open."""
        if self._last_steps is not None:
            return False
        if "run_id" not in self.facts:
            self._create()
        params = [Param(name, text[:MAX_PARAM_CHARACTERS]) for name, text in flat(self.job.spec)]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self.client.log_batch(self.facts["run_id"], params=params[start : start + PARAMS_AT_ONCE])
        known = self.client.get_run(self.facts["run_id"]).data
        self._last_steps = {metric.key: metric.step for metric in known._metric_objs}
        return True

    def log_steps(self, lines: list[dict[str, Any]]) -> None:
        """Every figure of every step that is not there yet."""
        last = self._last_steps or {}
        figures = (metric for line in lines for metric in _metrics(line))
        # An evaluation's line repeats what its step's line has said of the epoch and the tokens.
        new = {(metric.key, metric.step): metric for metric in figures if metric.step > last.get(metric.key, 0)}
        metrics = list(new.values())
        for start in range(0, len(metrics), METRICS_AT_ONCE):
            batch = metrics[start : start + METRICS_AT_ONCE]
            self.client.log_batch(self.facts["run_id"], metrics=batch)
            last |= {metric.key: metric.step for metric in batch}

    def hand_over(self, workspace: Workspace, names: list[str]) -> None:
        """Upload the result, as a model that `mlflow.transformers.load_model` loads, and register it where that is asked."""
        if not names or "model_version" in self.facts:
            return
        run_id, folder = self.facts["run_id"], workspace.root / "mlflow"
        weights = write_model(workspace.export, folder, self.job, run_id)
        for name in names:
            if not name.startswith(f"{weights}/"):
                self.client.log_artifact(run_id, str(workspace.export / name), str(Path("result", name).parent))
        self.client.log_artifacts(run_id, str(folder), MODEL)
        if registered := self.wanted["register_as"]:
            self.facts |= {"registered_model": registered, "model_version": self._register(registered, folder)}

    def close(self, status: str) -> None:
        """End the run as the job has ended."""
        self.client.set_terminated(self.facts["run_id"], ENDS[status])

    def _create(self) -> None:
        experiment_id = self._experiment()
        tags = self.wanted["tags"] | {"tuneyard.job_id": self.job.id}
        run = self.client.create_run(experiment_id, tags=tags, run_name=self.wanted["run_name"] or self.job.id)
        self.facts |= {"experiment": self.wanted["experiment"], "experiment_id": experiment_id, "run_id": run.info.run_id}

    def _experiment(self) -> str:
        known = self.client.get_experiment_by_name(self.wanted["experiment"])
        return known.experiment_id if known else self.client.create_experiment(self.wanted["experiment"])

    def _register(self, name: str, folder: Path) -> str:
        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
                raise
        run_id = self.facts["run_id"]
        for version in self.client.search_model_versions(f"name = '{name}'"):
            if version.run_id == run_id:  # from before this process was started again
                return str(version.version)
        source = f"{self.client.get_run(run_id).info.artifact_uri}/{MODEL}"
        # With the folder at hand a registry that copies (Unity Catalog does) need not download what was just uploaded.
        version = self.client._create_model_version(
            name, source, run_id=run_id, tags={"tuneyard.job_id": self.job.id}, local_model_path=str(folder)
        )
        return str(version.version)


def write_model(export: Path, folder: Path, job: Any, run_id: str) -> str:
    """An MLflow model around the exported files, which are linked and not copied; the name of the export it holds.

    Full or merged weights stand alone. A bare adapter names its base, which is loaded from where the job found it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    weights = next(name for name in ("merged", "model", "adapter") if (export / name).is_dir())
    is_adapter = weights == "adapter"
    _link(export / weights, folder / ("peft" if is_adapter else "model"))
    _link(export / weights, folder / "components" / "tokenizer", without=".safetensors")
    held = {"peft_adaptor": "peft", "local_base_model_path": job.spec["model"]["name_or_path"]}
    model = Model(artifact_path=MODEL, run_id=run_id, signature=_signature())
    model.add_flavor(
        "transformers",
        transformers_version=importlib.metadata.version("transformers"),
        code=None,
        task="text-generation",
        instance_type="TextGenerationPipeline",
        torch_dtype=f"torch.{job.spec['model']['dtype']}",
        pipeline_model_type="AutoModelForCausalLM",
        source_model_name=job.spec["model"]["name_or_path"],
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
        **(held if is_adapter else {"model_binary": "model"}),
    )
    mlflow.pyfunc.add_to_model(model, loader_module="mlflow.transformers")
    model.save(str(folder / "MLmodel"))
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in ("mlflow", *LIBRARIES)]
    (folder / "requirements.txt").write_text("\n".join(pins) + "\n", encoding="utf-8")
    return weights


def flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A spec's values by dotted name, as text."""
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in flat(inner, f"{prefix}.{key}" if prefix else key)]
    return [] if value is None else [(prefix, value if isinstance(value, str) else json.dumps(value))]


def _metrics(line: dict[str, Any]) -> list[Metric]:
    more = {name: line[name] for name in ("epoch", "trained_tokens", "tokens_per_second")}
    figures = (line["values"] | more).items()
    at = int(line["at"] * 1000)
    return [Metric(name, float(value), at, line["step"]) for name, value in figures if value is not None]


def _signature() -> ModelSignature:
    """Text in, text out; Unity Catalog takes no model without one."""
    text = Schema([ColSpec(DataType.string)])
    return ModelSignature(inputs=text, outputs=text)


def _link(source: Path, target: Path, without: str | None = None) -> None:
    """Hard links where the file system has them: a merge is as large as its base."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if without is None or path.suffix != without:
            try:
                os.link(path, target / path.name)
            except OSError:
                shutil.copy2(path, target / path.name)
