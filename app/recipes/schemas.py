"""Recipes on the wire."""

from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from app.recipes.presets import Recipe


class RecipeOut(BaseModel):
    """A preset that a job's `spec.recipe` may name; every field of `spec` given beside it overrides the preset's."""

    id: str
    object: Literal["recipe"] = "recipe"
    description: str
    model: str | None = Field(description="The base model it was made for; null: any.")
    spec: dict[str, Any] = Field(description="What it sets; the rest has the spec's own defaults.")

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        return cls(id=recipe.id, description=recipe.description, model=recipe.model, spec=recipe.spec)
