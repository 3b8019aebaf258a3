"""Models on the wire: names of weights."""

from typing import Any, Literal, Self

from pydantic import BaseModel
from sqlalchemy import Row

from app.config import get_settings

BASE_OWNER = "base"


class ModelOut(BaseModel):
    """OpenAI's model object. For a fine-tuned model also its base (`root`), its job, and a checkpoint's step."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    fine_tuning_job_id: str | None = None
    step_number: int | None = None

    @classmethod
    def of(cls, model: Row[Any]) -> Self:
        return cls(
            id=model.id,
            created=int(model.created_at),
            owned_by=get_settings().organization_id,
            root=model.base_model,
            fine_tuning_job_id=model.job_id,
            step_number=model.step,
        )

    @classmethod
    def base(cls, name: str) -> Self:
        return cls(id=name, created=0, owned_by=BASE_OWNER, root=name)
