"""The README's tree and the API guide's spec are the real ones."""

import json
import re
import subprocess
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app.jobs.spec import TrainingSpec

ROOT = Path(__file__).parents[1]
# Of these every file is named, of the other folders only that they are there.
LISTED_IN_FULL = ("app/", "worker/", "demo/")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def paths_in_tree() -> set[str]:
    """Every path of the README's tree. Names stand before the first two spaces; folders end in a slash."""
    block = re.search(r"## What lies where\n\n```\n(.*?)```", read("README.md"), re.DOTALL)
    assert block is not None
    paths: set[str] = set()
    parents: list[str] = []
    for line in block.group(1).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r" {2,}", line.strip())[0].split()
        parents = parents[:depth]
        paths |= {"".join(parents) + name for name in names}
        if names[0].endswith("/"):
            parents.append(names[0])
    return paths


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return {path for path in listed if path and not path.endswith("__init__.py")}


def test_every_path_in_the_tree_exists() -> None:
    assert [path for path in sorted(paths_in_tree()) if not (ROOT / path).exists()] == []


def test_the_tree_lists_every_file_at_the_top_and_of_app_worker_and_demo() -> None:
    expected = {path for path in tracked() if "/" not in path or path.startswith(LISTED_IN_FULL)}
    assert expected - paths_in_tree() == set()


def test_the_tree_lists_every_folder_at_the_top() -> None:
    assert {path.split("/")[0] + "/" for path in tracked() if "/" in path} - paths_in_tree() == set()


def test_the_api_guide_has_every_field_of_the_spec_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \| .*? \| (none|required|`.*?`) \| (.*) \|$", read("docs/api.md"), re.MULTILINE)
    documented = {name: (default, meaning) for name, default, meaning in rows}
    assert documented == {name: (shown(field.default), field.description or "") for name, field in spec_fields()}


def spec_fields(model: type[BaseModel] = TrainingSpec, prefix: str = "") -> list[tuple[str, FieldInfo]]:
    """Every field by its dotted name; a section that may be left out is a field too."""
    fields: list[tuple[str, FieldInfo]] = []
    for name, field in model.model_fields.items():
        sections = [kind for kind in (field.annotation, *get_args(field.annotation)) if _is_model(kind)]
        if field.annotation not in sections:
            fields.append((prefix + (field.alias or name), field))
        for section in sections:
            fields += spec_fields(section, f"{prefix}{name}.")
    return fields


def _is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def shown(default: object) -> str:
    if default is PydanticUndefined:
        return "required"
    return "none" if default in (None, "") else f"`{json.dumps(default)}`"
