"""/v1/models"""

from fastapi import APIRouter

from app.auth import ModelRoute, ProjectId
from app.config import get_settings
from app.dependencies import Read, Write
from app.models import service
from app.models.schemas import ModelOut
from app.schemas import Deleted, ListOut

router = APIRouter(prefix="/v1/models", tags=["Models"], route_class=ModelRoute)


@router.get("", summary="List models")
def list_models(project_id: ProjectId, connection: Read) -> ListOut[ModelOut]:
    """All on one page, as clients expect: base models first, then this project's fine-tuned models and checkpoints."""
    tuned = [ModelOut.of(row) for row in service.list_tuned(connection, project_id)]
    models = [ModelOut.base(name) for name in get_settings().base_models] + tuned
    return ListOut[ModelOut].of(models, [model.id for model in models])


@router.get("/{model:path}", summary="Retrieve a model")
def retrieve_model(model: str, project_id: ProjectId, connection: Read) -> ModelOut:
    if service.is_base_model(model):
        return ModelOut.base(model)
    return ModelOut.of(service.get_tuned(connection, project_id, model))


@router.delete("/{model:path}", summary="Delete a fine-tuned model")
def delete_model(model: str, project_id: ProjectId, session: Write) -> Deleted:
    service.delete_model(session, project_id, model)
    return Deleted(id=model, object="model")
