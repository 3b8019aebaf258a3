"""What every feature's wire shares: ids, OpenAI's list envelope, and pages by cursor."""

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict
from sqlalchemy import ColumnElement, Connection, Row, Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from app.errors import InvalidRequest

Item = TypeVar("Item")
Order = Literal["asc", "desc"]
After = Annotated[str | None, Query(max_length=512, description="Id of the last object of the page before.")]


class RequestModel(BaseModel):
    """A request body: an unknown field is an error, never ignored."""

    model_config = ConfigDict(extra="forbid")


class ListOut(BaseModel, Generic[Item]):
    """OpenAI's list envelope. Clients go on while `has_more`, with `after=<last_id>`."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None

    @classmethod
    def of(cls, items: list[Item], ids: Sequence[str], *, has_more: bool = False) -> Self:
        """The envelope around one page, `ids` being those of its items."""
        return cls(data=items, has_more=has_more, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)


class Deleted(BaseModel):
    """Proof that an object is gone."""

    id: str
    object: str
    deleted: bool = True


def fetch_page(
    connection: Connection,
    statement: Select[Any],
    position: tuple[InstrumentedAttribute[Any], InstrumentedAttribute[str]],
    *,
    after: str | None,
    limit: int,
    order: Order = "desc",
) -> tuple[Sequence[Row[Any]], bool]:
    """One page of a list, and whether more follows. `position` is (time or number, id): it orders the list without ties,
    so rows inserted meanwhile neither repeat nor hide others."""
    if after is not None:
        statement = statement.where(_beyond(connection, statement, position, after, order))
    columns = [column.desc() if order == "desc" else column.asc() for column in position]
    rows = connection.execute(statement.order_by(*columns).limit(limit + 1)).all()
    return rows[:limit], len(rows) > limit


def _beyond(
    connection: Connection,
    statement: Select[Any],
    position: tuple[InstrumentedAttribute[Any], InstrumentedAttribute[str]],
    after: str,
    order: Order,
) -> ColumnElement[bool]:
    anchor = connection.execute(statement.with_only_columns(*position).where(position[1] == after)).one_or_none()
    if anchor is None:
        # Page one instead would send the SDK's iterator round in a circle.
        raise InvalidRequest(
            "`after` names no object of this list: give the id of one on the page before.", code="unknown_cursor", param="after"
        )
    here, there = tuple_(*position), tuple_(*anchor)
    return here < there if order == "desc" else here > there
