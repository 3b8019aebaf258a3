"""/v1/recipes"""

from fastapi import APIRouter

from app.auth import KeyedRoute, ProjectId
from app.recipes import service
from app.recipes.schemas import RecipeOut
from app.schemas import ListOut

router = APIRouter(prefix="/v1/recipes", tags=["Recipes"], route_class=KeyedRoute)


@router.get("", summary="List recipes")
def list_recipes(_project_id: ProjectId) -> ListOut[RecipeOut]:
    """Named presets for `spec.recipe`."""
    recipes = [RecipeOut.of(recipe) for recipe in service.list_recipes()]
    return ListOut[RecipeOut].of(recipes, [recipe.id for recipe in recipes])
