"""What a node answers when it is asked what a model would learn."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from app import db
from app.errors import TuneyardError
from app.files import service as files
from app.jobs.spec import TrainingSpec
from app.keys import service as keys
from app.previews.schemas import PreviewResult
from app.previews.tables import Preview
from tests import tiny
from tests.conftest import CASES
from worker import preview as previewer

ROWS = [{"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "Ja."}]} for n in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return keys.create_project(session, "test").id


def upload(project_id: str, *rows: Any) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return files.create_file(project_id, io.BytesIO("\n".join(lines).encode()), "a.jsonl", "fine-tune").id


def look(project_id: str, model: Path | str, file_id: str, *lines: int, **more: Any) -> PreviewResult:
    """The whole way of a question through the process that answers it, as the API shows the answer."""
    spec = TrainingSpec.model_validate({"model": {"name_or_path": str(model)}})  # the model reads 512 tokens at once
    preview = Preview(
        project_id=project_id, file_id=file_id, lines=list(lines), spec={}, validation_file=more.get("validation")
    )
    return PreviewResult.model_validate(previewer.look(preview, spec))


def test_the_first_rows_are_shown_unless_lines_are_named(project_id: str, model: Path) -> None:
    file_id = upload(project_id, "", *ROWS)
    assert [row.line for row in look(project_id, model, file_id).rows] == [2, 3, 4]
    assert [row.line for row in look(project_id, model, file_id, 6).rows] == [6]


def test_rows_that_cannot_be_read_are_told_beside_those_that_can(project_id: str, model: Path) -> None:
    found = look(project_id, model, upload(project_id, ROWS[0], "{", ROWS[1]))
    assert (found.rows_read, found.rows_tokenized, found.rows_used, found.num_unreadable) == (3, 2, 2, 1)
    assert (found.unreadable[0].line, found.unreadable[0].code) == (2, "dataset_bad_json")


def test_rows_of_the_validation_file_that_are_trained_on_are_named(project_id: str, model: Path) -> None:
    reordered = {"messages": [dict(reversed(message.items())) for message in ROWS[3]["messages"]]}
    validation = upload(project_id, {"messages": [*ROWS[0]["messages"], *ROWS[1]["messages"]]}, reordered, ROWS[4])
    found = look(project_id, model, upload(project_id, *ROWS), validation=validation)
    assert found.overlap is not None
    assert (found.overlap.rows_read, found.overlap.rows_in_both, found.overlap.lines) == (3, 2, [2, 3])


def test_a_prompt_over_max_length_is_named_with_its_line(project_id: str, model: Path) -> None:
    content = (CASES / "A09b_prompt_over_max_one.jsonl").read_bytes().decode().splitlines()
    found = look(project_id, model, upload(project_id, *content), 3)
    assert [error.line for error in found.errors] == [3]
    assert (found.num_long_rows, found.rows_used) == (1, 3)
    assert found.rows[0].sequences[0].beyond_max_length is not None


def test_a_model_without_a_tokenizer_is_an_answer_too(project_id: str, tmp_path: Path) -> None:
    with pytest.raises(TuneyardError) as caught:
        look(project_id, tmp_path, upload(project_id, *ROWS))
    assert (caught.value.code, caught.value.param) == ("model_not_supported", "model")
