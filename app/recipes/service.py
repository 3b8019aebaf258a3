"""Presets by name, and a request's spec laid over one."""

from typing import Any

from app.recipes.presets import RECIPES, Recipe


def list_recipes() -> list[Recipe]:
    """Every preset, in the order of the guide."""
    return list(RECIPES.values())


def find(name: str) -> Recipe | None:
    """The preset of that name."""
    return RECIPES.get(name)


def choices() -> str:
    """The names, for an error."""
    return ", ".join(RECIPES)


def laid_over(recipe: Recipe, given: dict[str, Any]) -> dict[str, Any]:
    """The preset's spec with what a request says instead: field by field, lists and maps as a whole."""
    sections = {name: _merged(part, given[name]) for name, part in recipe.spec.items() if name in given}
    return recipe.spec | given | sections


def _merged(part: Any, given: Any) -> Any:
    return part | given if isinstance(part, dict) and isinstance(given, dict) else given
