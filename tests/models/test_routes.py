"""Models, as the official SDK uses them."""

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests import factories
from tests.conftest import Live


class TestListModels:
    def test_base_models_come_first_then_the_projects_own_and_their_checkpoints(self, client: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        model = factories.create_model(live.project_id, job_id)
        factories.add_checkpoint(job_id, 5)
        names = [model.id for model in client.models.list()]
        assert names[:2] == ["openai/gpt-oss-20b", "openai/gpt-oss-120b"]
        assert names[2] == model
        assert names[3].endswith(":ckpt-step-5")

    def test_another_projects_models_are_not_seen(self, client: OpenAI, other: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        model = factories.create_model(live.project_id, job_id)
        assert model not in [model.id for model in other.models.list()]
        with pytest.raises(openai.NotFoundError):
            other.models.retrieve(model)

    @pytest.mark.anyio
    async def test_the_asynchronous_client_lists_all_on_one_page(self, async_client: AsyncOpenAI) -> None:
        assert [model.object async for model in async_client.models.list()] == ["model", "model"]


class TestRetrieveModel:
    def test_an_id_with_a_slash_is_found(self, client: OpenAI) -> None:
        model = client.models.retrieve("openai/gpt-oss-20b")
        assert (model.id, model.object, model.owned_by) == ("openai/gpt-oss-20b", "model", "base")

    def test_a_fine_tuned_model_names_its_base_and_job(self, client: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        model = client.models.retrieve(factories.create_model(live.project_id, job_id))
        assert isinstance(model.created, int)
        assert model.model_extra == {"root": "base", "fine_tuning_job_id": job_id, "step_number": None}

    def test_a_checkpoint_is_a_model_too(self, client: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_checkpoint(job_id, 5)
        name = client.fine_tuning.jobs.checkpoints.list(job_id).data[0].fine_tuned_model_checkpoint
        assert (client.models.retrieve(name).model_extra or {})["step_number"] == 5

    def test_an_unknown_model_is_not_found(self, client: OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("no/such-model")
        assert caught.value.code == "model_not_found"


class TestDeleteModel:
    def test_a_deleted_model_is_gone(self, client: OpenAI, live: Live) -> None:
        model = factories.create_model(live.project_id, factories.create_job(live.project_id))
        deleted = client.models.delete(model)
        assert (deleted.id, deleted.object, deleted.deleted) == (model, "model", True)
        with pytest.raises(openai.NotFoundError):
            client.models.delete(model)

    def test_a_base_model_stays(self, client: OpenAI) -> None:
        with pytest.raises(openai.PermissionDeniedError):
            client.models.delete("openai/gpt-oss-20b")

    def test_a_checkpoint_stays_with_its_job(self, client: OpenAI, live: Live) -> None:
        job_id = factories.create_job(live.project_id)
        factories.add_checkpoint(job_id, 5)
        name = client.fine_tuning.jobs.checkpoints.list(job_id).data[0].fine_tuned_model_checkpoint
        with pytest.raises(openai.PermissionDeniedError):
            client.models.delete(name)
