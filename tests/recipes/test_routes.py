"""The presets as a caller sees them."""

import httpx2
import pytest

from app.jobs.spec import TrainingSpec
from app.recipes.presets import RECIPES, Recipe
from app.recipes.service import laid_over


def test_every_recipe_is_listed_with_what_it_sets(http: httpx2.Client) -> None:
    listed = http.get("/v1/recipes").json()
    assert [recipe["id"] for recipe in listed["data"]] == list(RECIPES)
    assert {"gpt-oss-20b-ddp-lora", "gpt-oss-120b-fsdp2-lora-experts", "sft-lora", "sft-full", "dpo-lora"} <= set(RECIPES)
    first = listed["data"][0]
    assert (first["object"], first["model"]) == ("recipe", "openai/gpt-oss-20b")
    assert first["spec"]["training"]["lr_scheduler_type"] == "cosine_with_min_lr"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.id)
def test_every_recipe_is_a_valid_spec(recipe: Recipe) -> None:
    TrainingSpec.model_validate(recipe.spec)


def test_what_a_request_says_is_laid_over_field_by_field() -> None:
    recipe = RECIPES["gpt-oss-120b-fsdp2-lora-experts"]
    spec = laid_over(recipe, {"adapter": {"rank_pattern": {"q_proj": 2}}, "seed": 1})
    assert spec["adapter"]["rank_pattern"] == {"q_proj": 2}
    assert spec["adapter"]["r"] == 32
    assert (spec["seed"], spec["training"]) == (1, recipe.spec["training"])
