"""Any bytes give rows or a report: never another error, never a hang."""

import io
import json

from hypothesis import given
from hypothesis import strategies as st

from app.files import dataset

KEYS = st.sampled_from(["messages", "role", "content", "from", "value", "text"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
)


@given(st.binary())
def test_any_bytes_give_a_report(content: bytes) -> None:
    report = dataset.check(io.BytesIO(content), "a.jsonl")
    assert report.num_problems + report.rows_used > 0


@given(st.lists(JSON), st.booleans())
def test_any_json_gives_a_report(values: list[object], is_array: bool) -> None:
    content = json.dumps(values) if is_array else "\n".join(json.dumps(value) for value in values)
    report = dataset.check(io.BytesIO(content.encode()), "a.jsonl")
    assert report.num_problems + report.rows_used > 0
