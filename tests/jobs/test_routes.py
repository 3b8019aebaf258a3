"""Jobs, as the official SDK and a dashboard use them."""

import json
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests import factories
from tests.conftest import CASES, Live

JOBS = "/v1/fine_tuning/jobs"
MODEL = "openai/gpt-oss-20b"
ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
HOSTILE_PATHS = json.loads((CASES / "C13a_hostile_names.json").read_text())["artifact_paths"]


@pytest.fixture
def training_file(client: OpenAI) -> str:
    file = client.files.create(file=("train.jsonl", json.dumps(ROW).encode()), purpose="fine-tune")
    factories.read_uploads()
    return file.id


class TestCreateJob:
    def test_a_job_starts_queued_with_everything_resolved(self, client: OpenAI, training_file: str) -> None:
        job = client.fine_tuning.jobs.create(
            model=MODEL,
            training_file=training_file,
            suffix="mine",
            metadata={"team": "x"},
            method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": "auto", "batch_size": 2}}},
            extra_body={"spec": {"adapter": {"r": 8}}},
        )
        assert (job.object, job.status, job.model, job.training_file) == ("fine_tuning.job", "queued", MODEL, training_file)
        assert (job.error, job.fine_tuned_model, job.finished_at, job.trained_tokens) == (None, None, None, None)
        assert job.result_files == []
        assert job.organization_id == "org-tuneyard"
        assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (3, 2)
        assert job.metadata == {"team": "x"}
        extra = job.model_extra or {}
        assert extra["spec"]["adapter"]["r"] == 8
        assert extra["spec"]["data"]["max_length"] == 2048
        assert extra["spec"]["seed"] == job.seed
        assert client.fine_tuning.jobs.retrieve(job.id) == job

    def test_explicit_nulls_are_as_good_as_nothing(self, client: OpenAI, training_file: str) -> None:
        nulls: dict[str, Any] = dict.fromkeys(("suffix", "seed", "validation_file", "integrations", "metadata"))
        job = client.fine_tuning.jobs.create(model=MODEL, training_file=training_file, **nulls)
        assert job.status == "queued"

    def test_old_codes_hyperparameters_count(self, client: OpenAI, training_file: str) -> None:
        job = client.fine_tuning.jobs.create(model=MODEL, training_file=training_file, hyperparameters={"n_epochs": 2})
        assert job.hyperparameters.n_epochs == 2

    def test_a_file_with_bad_rows_is_refused_unless_the_job_skips_them(self, client: OpenAI) -> None:
        file = client.files.create(file=CASES / "A09a_no_answer.jsonl", purpose="fine-tune")
        factories.read_uploads()
        with pytest.raises(openai.BadRequestError, match="line 2") as caught:
            client.fine_tuning.jobs.create(model=MODEL, training_file=file.id)
        assert (caught.value.code, caught.value.param) == ("invalid_training_file", "training_file")
        skips = {"spec": {"data": {"on_bad_rows": "skip"}}}
        assert client.fine_tuning.jobs.create(model=MODEL, training_file=file.id, extra_body=skips).status == "queued"

    @pytest.mark.anyio
    async def test_the_asynchronous_client_creates_too(self, async_client: AsyncOpenAI) -> None:
        file = await async_client.files.create(file=("train.jsonl", json.dumps(ROW).encode()), purpose="fine-tune")
        job = await async_client.fine_tuning.jobs.create(model=MODEL, training_file=file.id)
        assert [event.message async for event in await async_client.fine_tuning.jobs.list_events(job.id)]

    @pytest.mark.parametrize(
        ("body", "param", "words"),
        [
            ({"modle": "x"}, "modle", "`model`"),
            ({"learning_rate": 1}, "learning_rate", "`spec.training.learning_rate`"),
            ({"spec": {"adapter": {"rank": 8}}}, "spec.adapter.rank", "Unknown field"),
            ({"spec": {"adaptor": {}}}, "spec.adaptor", "`spec.adapter`"),
            ({"spec": {"adapter": {"r": 0}}}, "spec.adapter.r", "greater than or equal to 1"),
            ({"spec": {"adapter": {"target_modules": 5}}}, "spec.adapter.target_modules", "valid list"),
            ({"spec": {"training": {"learning_rate": "fast"}}}, "spec.training.learning_rate", "valid number"),
            ({"method": {"type": "reinforcement"}}, "method.type", "supervised"),
            ({"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 3}}}}, "method.dpo.hyperparameters.beta", "2"),
            ({"spec": {"recipe": "nope"}}, "spec.recipe", "dpo-lora"),
            ({"spec": {"method": "kto", "training": {"per_device_train_batch_size": 1}}}, "spec", "2 or more"),
            (
                {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 51}}}},
                "method.supervised.hyperparameters.n_epochs",
                "50",
            ),
            (
                {"hyperparameters": {"n_epochs": 2}, "method": {"supervised": {"hyperparameters": {"n_epochs": 3}}}},
                "hyperparameters.n_epochs",
                "only there",
            ),
            ({"hyperparameters": {"batch_size": "big"}}, "hyperparameters.batch_size", "integer"),
            ({"spec": {"data": {"template_date": "2026-02-30"}}}, "spec.data.template_date", "day"),
            ({"suffix": "x" * 65}, "suffix", "64"),
            ({"suffix": "a:b"}, "suffix", "letters"),
            ({"seed": -1}, "seed", "0"),
            ({"metadata": {"a": 5}}, "metadata.a", "string"),
            ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
            ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", "16"),
            ({"metadata": {"a": "x\x00"}}, "metadata.a", "NUL"),
            (
                {"spec": {"evaluation": {"prompts": [[{"content": "\ud800"}]]}}},
                "spec.evaluation.prompts[0][0].content",
                "surrogate",
            ),
            ({"spec": {"export": {"hub": {}}}}, "spec.export.hub.repo_id", "required"),
            ({"spec": {"export": {"hub": {"repo_id": "nobody"}}}}, "spec.export.hub.repo_id", "pattern"),
            ({"integrations": [{"type": "wandb", "wandb": {}}]}, "integrations[0].wandb.project", "required"),
            ({"integrations": [{"type": "mlflow", "mlflow": {}}]}, "integrations[0].mlflow.experiment", "required"),
            (
                {"integrations": [{"type": "mlflow", "mlflow": {"experiment": "x", "register_as": "only_a_name"}}]},
                "integrations[0].mlflow.register_as",
                "pattern",
            ),
        ],
    )
    def test_a_bad_value_is_named_by_its_path(self, http: httpx2.Client, body: dict[str, Any], param: str, words: str) -> None:
        content = json.dumps({"model": MODEL, "training_file": "file-x", **body})
        answer = http.post(JOBS, content=content, headers={"Content-Type": "application/json"})
        error = answer.json()["error"]
        assert answer.status_code == 422
        assert error["param"] == param
        assert words in error["message"]

    @pytest.mark.parametrize(
        ("prompt", "place"),
        [
            ([], ""),
            ([{"role": "user"}], "[0].content"),
            ([{"role": "user", "content": 5}], "[0].content"),
            ([{"role": "system", "content": "Be brief."}, {"role": "wizard", "content": "Hi"}], "[1].role"),
        ],
    )
    def test_a_prompt_no_template_can_print_is_refused(
        self, http: httpx2.Client, training_file: str, prompt: list[dict[str, Any]], place: str
    ) -> None:
        spec = {"evaluation": {"prompts": [[{"role": "user", "content": "Hi"}], prompt]}}
        answer = http.post(JOBS, json={"model": MODEL, "training_file": training_file, "spec": spec})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "spec.evaluation.prompts[1]" + place

    @pytest.mark.parametrize(
        ("body", "param", "words"),
        [
            ({"method": {"type": "dpo", "dpo": {}, "supervised": {}}}, "method.supervised", "leave"),
            ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo", "leave"),
            ({"method": {"type": "dpo"}, "spec": {"method": "kto"}}, "spec.method", "only one"),
            ({"spec": {"adapter": {"type": "qlora"}, "resources": {"accelerator": "cpu"}}}, "spec.adapter.type", "GPU"),
            ({"spec": {"evaluation": {"keep_best": True}}}, "validation_file", "keep_best"),
            ({"spec": {"evaluation": {"early_stopping": {}}}}, "validation_file", "early_stopping"),
            (
                {
                    "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}},
                    "spec": {"preference": {"beta": 0.3}},
                },
                "spec.preference.beta",
                "one of them",
            ),
        ],
    )
    def test_what_does_not_go_together_is_named(
        self, http: httpx2.Client, training_file: str, body: dict[str, Any], param: str, words: str
    ) -> None:
        answer = http.post(JOBS, json={"model": MODEL, "training_file": training_file, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert words in error["message"]

    def test_openais_dpo_has_its_own_defaults(self, client: OpenAI, training_file: str) -> None:
        job = client.fine_tuning.jobs.create(
            model=MODEL,
            training_file=training_file,
            method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3, "learning_rate_multiplier": 2}}},
        )
        assert job.method is not None
        assert job.method.type == "dpo"
        spec = (job.model_extra or {})["spec"]
        assert (spec["method"], spec["preference"]["beta"], spec["training"]["learning_rate"]) == ("dpo", 0.3, 2e-5)
        assert job.method.to_dict()["dpo"] == {
            "hyperparameters": {"n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 2.0, "beta": 0.3}
        }

    def test_a_type_without_its_block_has_the_defaults(self, client: OpenAI, training_file: str) -> None:
        job = client.fine_tuning.jobs.create(model=MODEL, training_file=training_file, method={"type": "dpo"})
        assert (job.model_extra or {})["spec"]["preference"]["beta"] == 0.1

    def test_a_recipe_fills_what_the_request_leaves_out(self, client: OpenAI, training_file: str) -> None:
        spec = {"recipe": "gpt-oss-120b-fsdp2-lora-experts", "adapter": {"r": 4}, "training": {"max_steps": 5}}
        job = client.fine_tuning.jobs.create(
            model=MODEL,
            training_file=training_file,
            hyperparameters={"learning_rate_multiplier": 0.5},
            extra_body={"spec": spec},
        )
        resolved = (job.model_extra or {})["spec"]
        assert resolved["recipe"] == "gpt-oss-120b-fsdp2-lora-experts"
        assert (resolved["adapter"]["r"], resolved["adapter"]["alpha"]) == (4, 32)
        assert (resolved["training"]["max_steps"], resolved["training"]["learning_rate"]) == (5, 7.5e-5)
        assert resolved["parallelism"]["strategy"] == "fsdp2"

    def test_a_recipes_own_epochs_do_not_stand_against_n_epochs(self, client: OpenAI, training_file: str) -> None:
        job = client.fine_tuning.jobs.create(
            model=MODEL,
            training_file=training_file,
            hyperparameters={"n_epochs": 2},
            extra_body={"spec": {"recipe": "gpt-oss-20b-ddp-lora"}},
        )
        assert job.hyperparameters.n_epochs == 2

    def test_a_bottomless_value_is_refused(self, http: httpx2.Client) -> None:
        content = '{"spec": {"evaluation": {"prompts": ' + "[" * 500 + "]" * 500 + "}}}"
        answer = http.post(JOBS, content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "spec")

    def test_all_faults_are_listed_beside_the_first(self, http: httpx2.Client) -> None:
        error = http.post(JOBS, json={"seed": -1, "suffix": ""}).json()["error"]
        assert [fault["param"] for fault in error["errors"]] == ["model", "training_file", "suffix", "seed"]


class TestListJobs:
    def test_newest_first_in_pages(self, client: OpenAI, live: Live) -> None:
        made = [factories.create_job(live.project_id, created_at=float(second)) for second in range(5)]
        assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == made[::-1]

    def test_jobs_made_meanwhile_do_not_shift_the_pages(self, client: OpenAI, live: Live) -> None:
        made = [factories.create_job(live.project_id, created_at=float(second)) for second in range(3)]
        page = client.fine_tuning.jobs.list(limit=2)
        factories.create_job(live.project_id)
        assert [job.id for job in (*page.data, *page.get_next_page().data)] == made[::-1]

    def test_jobs_of_one_moment_are_each_listed_once(self, client: OpenAI, live: Live) -> None:
        made = {factories.create_job(live.project_id, created_at=1.0) for _ in range(5)}
        listed = [job.id for job in client.fine_tuning.jobs.list(limit=2)]
        assert set(listed) == made
        assert len(listed) == 5

    def test_metadata_chooses(self, client: OpenAI, live: Live) -> None:
        wanted = factories.create_job(live.project_id, job_metadata={"team": "x", "run": "1"})
        factories.create_job(live.project_id, job_metadata={"team": "y"})
        without = factories.create_job(live.project_id)
        assert [job.id for job in client.fine_tuning.jobs.list(metadata={"team": "x"})] == [wanted]
        assert [job.id for job in client.fine_tuning.jobs.list(metadata={"team": "x", "run": "2"})] == []
        assert [job.id for job in client.fine_tuning.jobs.list(extra_query={"metadata": "null"})] == [without]

    def test_a_filter_no_metadata_can_match_is_refused(self, http: httpx2.Client) -> None:
        answer = http.get(f"{JOBS}?metadata[%00]=x")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")

    def test_another_projects_jobs_are_not_seen(self, client: OpenAI, other: OpenAI, live: Live) -> None:
        factories.create_job(live.project_id)
        assert list(other.fine_tuning.jobs.list()) == []


class TestRetrieveJob:
    def test_fields_keep_their_types_in_every_state(self, client: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_wait(job_id, 3, "No node is registered.", "nodes")
        queued = client.fine_tuning.jobs.retrieve(job_id)
        assert (queued.model_extra or {})["queue"] == {
            "position": 3,
            "reason": "No node is registered.",
            "blocking_resource": "nodes",
            "estimated_start": None,
        }
        assert (client.fine_tuning.jobs.list().data[0].model_extra or {})["queue"] == (queued.model_extra or {})["queue"]
        factories.update_job(job_id, status="running", step=3, total_steps=9, tokens_per_second=12.5, started_at=5.5)
        running = client.fine_tuning.jobs.retrieve(job_id)
        assert (running.model_extra or {})["progress"] == {"step": 3, "total_steps": 9, "tokens_per_second": 12.5}
        assert (running.model_extra or {})["queue"] is None
        error = {"code": "worker_lost", "message": "gone", "param": None}
        factories.update_job(job_id, status="failed", error=error, finished_at=9.9)
        failed = client.fine_tuning.jobs.retrieve(job_id)
        assert failed.error is not None
        assert (failed.error.code, failed.finished_at) == ("worker_lost", 9)
        assert set(queued.to_dict()) == set(running.to_dict()) == set(failed.to_dict())

    def test_a_job_asked_to_stop_says_so_until_it_has(self, client: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="running", cancel_requested_at=1.0)
        assert client.fine_tuning.jobs.retrieve(job_id).status == "cancelling"  # type: ignore[comparison-overlap]
        factories.update_job(job_id, status="cancelled")
        assert client.fine_tuning.jobs.retrieve(job_id).status == "cancelled"

    def test_a_poller_is_only_told_what_has_changed(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        etag = http.get(f"{JOBS}/{job_id}").headers["etag"]
        same = http.get(f"{JOBS}/{job_id}", headers={"If-None-Match": etag})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
        factories.update_job(job_id, step=1)
        assert http.get(f"{JOBS}/{job_id}", headers={"If-None-Match": etag}).status_code == 200

    def test_unknown_and_foreign_jobs_look_the_same_on_every_path(self, other: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_artifact(job_id, "a.txt", b"x")
        http = httpx2.Client(base_url=live.url, headers={"Authorization": f"Bearer {other.api_key}"})
        paths = ("", "/events", "/checkpoints", "/metrics", "/artifacts", "/artifacts/a.txt/content", "/logs")
        stream = {"Accept": "text/event-stream"}
        with http:
            for path, headers in [*((path, {}) for path in paths), ("/events", stream), ("/logs", stream)]:
                foreign = http.get(f"{JOBS}/{job_id}{path}", headers=headers)
                unknown = http.get(f"{JOBS}/ftjob-unknown{path}", headers=headers)
                assert foreign.status_code == unknown.status_code == 404
                assert foreign.text.replace(job_id, "ID") == unknown.text.replace("ftjob-unknown", "ID")


class TestCancelJob:
    def test_a_queued_job_is_cancelled_at_once_and_again_is_the_same(self, client: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        assert client.fine_tuning.jobs.cancel(job_id).status == "cancelled"
        assert client.fine_tuning.jobs.cancel(job_id).status == "cancelled"

    def test_a_job_that_has_ended_is_refused_once(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id, status="succeeded")
        answer = http.post(f"{JOBS}/{job_id}/cancel", headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")


class TestListEvents:
    def test_newest_first_in_pages(self, client: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_events(job_id, "one", "two", "three")
        events = list(client.fine_tuning.jobs.list_events(job_id, limit=2))
        assert [event.message for event in events] == ["three", "two", "one"]
        assert (events[0].object, events[0].level, events[0].type) == ("fine_tuning.job.event", "info", "message")


class TestListCheckpoints:
    def test_figures_have_openais_names(self, client: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        for step in (5, 10):
            factories.add_checkpoint(job_id, step, loss=0.5, mean_token_accuracy=0.9, eval_loss=0.6, custom=1.0)
        checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job_id, limit=1))
        assert [checkpoint.step_number for checkpoint in checkpoints] == [10, 5]
        newest = checkpoints[0]
        assert newest.fine_tuning_job_id == job_id
        assert newest.fine_tuned_model_checkpoint.endswith(":ckpt-step-10")
        assert (newest.metrics.step, newest.metrics.train_loss, newest.metrics.valid_loss) == (10, 0.5, 0.6)
        assert (newest.metrics.model_extra or {})["custom"] == 1.0


class TestMetrics:
    def test_columns_have_one_length_and_gaps_are_null(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_metrics(job_id, range(1, 4))
        metrics = http.get(f"{JOBS}/{job_id}/metrics").json()
        assert metrics["columns"] == {"step": [1, 2, 3], "loss": [1.0, 0.5, 1 / 3], "grad_norm": [None] * 3}

    def test_many_points_are_thinned_out_but_the_ends_stay(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_metrics(job_id, range(1, 101))
        metrics = http.get(f"{JOBS}/{job_id}/metrics", params={"max_points": 4}).json()
        assert metrics["total_points"] == 100
        assert metrics["columns"]["step"] == [1, 34, 67, 100]

    def test_a_chart_asks_only_for_what_is_new(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_metrics(job_id, range(1, 11))
        metrics = http.get(f"{JOBS}/{job_id}/metrics", params={"since_step": 9}).json()
        assert metrics["columns"]["step"] == [9, 10]

    def test_a_job_without_figures_has_empty_columns(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        assert http.get(f"{JOBS}/{job_id}/metrics").json()["columns"] == {"step": []}


class TestArtifacts:
    def test_a_list_says_what_there_is(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        sha256 = factories.add_artifact(job_id, "adapter/adapter_config.json", b"{}")
        listed = http.get(f"{JOBS}/{job_id}/artifacts").json()
        assert listed["has_more"] is False
        (artifact,) = listed["data"]
        assert (artifact["name"], artifact["bytes"], artifact["sha256"]) == ("adapter/adapter_config.json", 2, sha256)
        assert artifact["uri"].startswith("file://")

    def test_a_download_can_be_resumed_checked_and_skipped(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        sha256 = factories.add_artifact(job_id, "adapter/weights.bin", b"0123456789")
        path = f"{JOBS}/{job_id}/artifacts/adapter/weights.bin/content"
        whole = http.get(path)
        assert (whole.content, whole.headers["etag"], whole.headers["content-length"]) == (b"0123456789", f'"{sha256}"', "10")
        head = http.head(path)
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "10")
        assert http.get(path, headers={"If-None-Match": whole.headers["etag"]}).status_code == 304

    @pytest.mark.parametrize(
        ("wanted", "status", "content"),
        [
            ("bytes=2-4", 206, b"234"),
            ("bytes=7-", 206, b"789"),
            ("bytes=-3", 206, b"789"),
            ("bytes=5-99", 206, b"56789"),
            ("bytes=-99", 206, b"0123456789"),
            ("bytes=10-", 416, b""),
            ("bytes=4-2", 416, b""),
            ("bytes=-0", 416, b""),
            ("bytes=0-1,4-5", 200, b"0123456789"),
            ("lines=1-2", 200, b"0123456789"),
            ("bytes=-", 200, b"0123456789"),
        ],
    )
    def test_single_ranges_are_served(self, http: httpx2.Client, live: Live, wanted: str, status: int, content: bytes) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_artifact(job_id, "a.bin", b"0123456789")
        answer = http.get(f"{JOBS}/{job_id}/artifacts/a.bin/content", headers={"Range": wanted})
        assert (answer.status_code, answer.content) == (status, content)

    def test_a_range_of_another_version_is_not_served(self, http: httpx2.Client, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_artifact(job_id, "a.bin", b"0123456789")
        headers = {"Range": "bytes=2-4", "If-Range": '"of-yesterday"'}
        assert http.get(f"{JOBS}/{job_id}/artifacts/a.bin/content", headers=headers).status_code == 200

    @pytest.mark.parametrize("name", HOSTILE_PATHS)
    def test_a_name_is_looked_up_and_never_a_path(self, http: httpx2.Client, live: Live, name: str) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_artifact(job_id, "adapter/weights.bin", b"0123456789")
        answer = http.get(f"{JOBS}/{job_id}/artifacts/{name}/content")
        assert answer.status_code == 404
        assert "/etc" not in answer.json()["error"]["message"].replace(name, "")
