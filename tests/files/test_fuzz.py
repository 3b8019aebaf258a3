"""Any bytes give rows or a report: never another error, never a hang."""

import gzip
import io
import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from app.files import dataset

KEYS = st.sampled_from(["messages", "role", "content", "from", "value", "text", "instruction", "output", "input", "chosen"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
)
NAMES = st.sampled_from(["a.jsonl", "a.csv", "a.tsv", "upload", "a.parquet", "a.tar", "a.zip"])


def _zip(content: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a.jsonl", content)
    return target.getvalue()


def _parquet() -> bytes:
    target = io.BytesIO()
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "Hi"}]] * 20}), target)
    return target.getvalue()


VALID = [b'{"text": "a"}\n' * 20, b'prompt,completion\n"a\nb",c\n' * 5]
WHOLE = [gzip.compress(VALID[0]), _zip(VALID[0]), _parquet(), *VALID]


def assert_reported(content: bytes, name: str) -> None:
    report = dataset.check(io.BytesIO(content), name)
    assert report.num_problems + report.rows_used > 0
    json.dumps(report.as_json())


@given(st.binary(), NAMES)
def test_any_bytes_give_a_report(content: bytes, name: str) -> None:
    assert_reported(content, name)


@given(st.lists(JSON), st.booleans())
def test_any_json_gives_a_report(values: list[object], is_array: bool) -> None:
    content = json.dumps(values) if is_array else "\n".join(json.dumps(value) for value in values)
    assert_reported(content.encode(), "a.jsonl")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(WHOLE), st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=4)), max_size=4), NAMES)
def test_any_damage_to_a_file_gives_a_report(whole: bytes, damage: list[tuple[int, bytes]], name: str) -> None:
    content = bytearray(whole)
    for position, patch in damage:
        content[position % len(content) : position % len(content) + len(patch)] = patch
    assert_reported(bytes(content), name)
