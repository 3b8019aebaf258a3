"""Previews on the wire."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator
from sqlalchemy import Row

from app.files.schemas import Found
from app.jobs.schemas import MethodRequest, SpecRequest, refuse_unstorable
from app.schemas import RequestModel

MAX_LINES = 20


class PreviewCreate(RequestModel):
    """What a job would be asked for, as far as it decides about tokens."""

    model: str = Field(min_length=1, max_length=512, description="As a job names it.")
    spec: SpecRequest = Field(default_factory=SpecRequest, description="As a job has it.")
    method: MethodRequest | None = None
    validation_file: str | None = Field(
        default=None, pattern="^file-", max_length=64, description="The id of a file to look for rows that are in both."
    )
    lines: list[Annotated[int, Field(ge=1, le=2**53)]] = Field(
        default=[], max_length=MAX_LINES, description="The lines of the rows to show. Default: the first three rows."
    )

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, value: Any) -> Any:
        refuse_unstorable(value)
        return value


class Segment(BaseModel):
    """Tokens that follow each other and all carry loss, or none does."""

    text: str
    tokens: int
    trained: bool


class Beyond(BaseModel):
    """What of a row lies beyond `max_length`."""

    tokens: int
    trained_tokens: int
    text: str


class Sequence(BaseModel):
    """What the model reads: a `row`, or for preferences the prompt with the `chosen`, `rejected` or only answer (`completion`).
    The first 4,096 tokens are shown; all are counted."""

    name: Literal["row", "chosen", "rejected", "completion"]
    text: str
    tokens: int
    trained_tokens: int
    token_ids: list[int]
    segments: list[Segment]
    beyond_max_length: Beyond | None


class MessageOut(BaseModel):
    """What of a message carries loss."""

    index: int
    role: str
    trained_tokens: int
    trained_text: str


class ShownRow(BaseModel):
    """A row as it is trained on, or why it cannot be."""

    line: int
    error: str | None
    sequences: list[Sequence]
    messages: list[MessageOut]
    dropped: list[str]


class Refused(BaseModel):
    """A row that has nothing to learn under this model and spec."""

    line: int
    message: str


class LongRow(BaseModel):
    """A row of more than `max_length` tokens."""

    line: int
    tokens: int


class SpreadOut(BaseModel):
    """How a number differs from row to row."""

    fewest: int
    most: int
    mean: float
    total: int


class Overlap(BaseModel):
    """Rows of the validation file that stand in the training file too; the first 100 lines."""

    rows_read: int
    rows_in_both: int
    lines: list[int]


class PreviewResult(BaseModel):
    """What the model would learn. `rows_tokenized` is fewer than `rows_read` for a very large file."""

    rows_read: int
    rows_tokenized: int
    rows_used: int
    num_unreadable: int
    unreadable: list[Found]
    num_errors: int
    errors: list[Refused]
    tokens_per_row: SpreadOut
    trained_tokens_per_row: SpreadOut
    dropped: dict[str, int]
    max_length: int
    on_long_rows: str
    num_long_rows: int
    long_rows: list[LongRow]
    rows: list[ShownRow]
    overlap: Overlap | None


class PreviewError(BaseModel):
    """Why there is no answer."""

    code: str
    message: str
    param: str | None


class PreviewOut(BaseModel):
    """A question, and its answer once a node has given it."""

    id: str
    object: Literal["file.preview"] = "file.preview"
    created_at: int
    file_id: str
    status: Literal["waiting", "done", "failed"]
    error: PreviewError | None
    result: PreviewResult | None

    @classmethod
    def of(cls, preview: Row[Any]) -> Self:
        return cls.model_validate(
            {
                "id": preview.id,
                "created_at": int(preview.created_at),
                "file_id": preview.file_id,
                "status": "done" if preview.result else "failed" if preview.error else "waiting",
                "error": preview.error,
                "result": preview.result,
            }
        )
