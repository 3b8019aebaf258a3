"""Tables and archives: the rows that are in them, as they are, and nothing that only looks like one."""

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.files import archives, dataset, tabular
from tests.conftest import CASES

ROWS = [{"prompt": f"{number} + {number} =", "completion": f" {2 * number}"} for number in range(700)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read(content: bytes, filename: str) -> list[dict[str, Any]]:
    return [row.value for row in dataset.read_rows(io.BytesIO(content), filename)]


def check(content: bytes, filename: str) -> dataset.Report:
    return dataset.check(io.BytesIO(content), filename)


def codes(content: bytes, filename: str) -> list[tuple[str, int | None]]:
    return [(problem.code, problem.line) for problem in check(content, filename).problems]


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target.getvalue()


def tarred(members: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def link_in_tar() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        member = tarfile.TarInfo("train.jsonl")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    return target.getvalue()


def parquet(table: dict[str, Any] | pa.Table, **options: Any) -> bytes:
    target = io.BytesIO()
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), target, **options)
    return target.getvalue()


class TestPacked:
    @pytest.mark.parametrize(
        ("pack", "filename", "kinds"),
        [
            (gzip.compress, "train.jsonl.gz", ["gzip"]),
            (lambda content: zipped({"train.jsonl": content}), "data.zip", ["zip"]),
            (lambda content: tarred({"data/train.jsonl": content}), "data.tar", ["tar"]),
            (lambda content: gzip.compress(tarred({"./train.jsonl": content})), "data.tgz", ["gzip", "tar"]),
            (lambda content: zipped({"README.md": b"# rows", "train.jsonl": content}), "a.zip", ["zip"]),
            (lambda content: content, "upload", []),
        ],
    )
    def test_rows_are_the_same_packed_or_not(self, pack: Callable[[bytes], bytes], filename: str, kinds: list[str]) -> None:
        report = check(pack(LINES), filename)
        assert read(pack(LINES), filename) == ROWS
        assert (report.source.archives, report.source.format) == (kinds, "jsonl")

    def test_what_finder_adds_is_listed_and_not_read(self) -> None:
        report = dataset.check(CASES / "A15b_mac_zip.zip", "A15b_mac_zip.zip")
        assert report.as_json()["ignored_members"] == ["__MACOSX/._train.jsonl", ".DS_Store"]
        assert (report.rows_read, report.rows_used) == (2, 2)

    def test_a_table_in_an_archive_is_read_too(self) -> None:
        table = {name: [row[name] for row in ROWS] for name in ROWS[0]}
        assert read(gzip.compress(parquet(table)), "a.parquet.gz") == ROWS
        assert read(zipped({"a.csv": b"prompt,completion\na,b\n"}), "a.zip") == [{"prompt": "a", "completion": "b"}]

    @pytest.mark.parametrize(
        ("content", "code"),
        [
            (zipped({"train.jsonl": LINES, "validation.jsonl": LINES}), "several_data_files"),
            (zipped({"../train.jsonl": LINES}), "unsafe_archive"),
            (zipped({"a.jsonl": LINES, "C:\\x.txt": b""}), "unsafe_archive"),
            (tarred({"/etc/train.jsonl": LINES}), "unsafe_archive"),
            (link_in_tar(), "unsafe_archive"),
            (zipped({"a.png": b"", "b.png": b""}), "dataset_empty"),
            (zipped({}), "dataset_empty"),
            (zipped({"a.jsonl": LINES}, zipfile.ZIP_LZMA), "unsupported_format"),
            (zipped({"a.zip": zipped({"a.jsonl": LINES})}), "archive_in_archive"),
            (gzip.compress(gzip.compress(LINES)), "archive_in_archive"),
            (zipped({f"{number}.txt": b"" for number in range(archives.MAX_MEMBERS + 1)}), "archive_too_large"),
            (tarred({"a.jsonl": LINES})[:5000], "archive_broken"),
        ],
    )
    def test_an_archive_that_could_mislead_is_refused_as_a_whole(self, content: bytes, code: str) -> None:
        assert codes(content, "a") == [(code, None)]

    @pytest.mark.parametrize("cut", [20, 200])
    def test_a_cut_off_archive_is_said_to_be_one(self, cut: int) -> None:
        assert codes(gzip.compress(LINES)[:-cut], "a.jsonl.gz")[-1] == ("archive_broken", None)

    @pytest.mark.parametrize("pack", [gzip.compress, lambda content: zipped({"a.jsonl": content})])
    def test_a_bomb_is_stopped_while_it_inflates(self, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(archives, "ALWAYS_ALLOWED_BYTES", 1 << 20)
        report = check(pack(b'{"text": "' + b"a" * 5_000_000 + b'"}'), "a")
        assert [problem.code for problem in report.problems] == ["archive_too_large"]


class TestCsv:
    def test_blank_cells_stay_blank_and_words_stay_words(self) -> None:
        path = CASES / "A15a_blank_cells.csv"
        found = [row.value["messages"] for row in dataset.read_rows(path, path.name)]
        assert [messages[-1]["content"] for messages in found] == ["4", "Hello!", "null", "line one\nline two", "NA"]
        assert [messages[0]["content"] for messages in found][:2] == ["Add the numbers\n\n2 and 2", "Say hello"]

    def test_rows_are_named_by_the_line_they_begin_on(self) -> None:
        content = b'prompt,completion\n"two\nlines",a\nb,c,d\n\ne,\nf,g\n'
        report = check(content, "a.csv")
        assert [(p.code, p.line, p.offset) for p in report.problems] == [("wrong_cell_count", 4, 32), ("empty_text", 6, 39)]
        assert (report.rows_read, report.rows_used) == (4, 2)

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"text,text\na,b\n", ("dataset_duplicate_key", 1)),
            (b'text\na\n"b\n', ("bad_table", 3)),
            (b'text\n"a"b\n', ("bad_table", 2)),
            (b"text\n\xff\n", ("dataset_bad_encoding", 2)),
            (b"text\n", ("dataset_empty", None)),
        ],
    )
    def test_a_broken_table_is_named_with_its_line(self, content: bytes, problem: tuple[str, int | None]) -> None:
        assert codes(content, "a.csv")[-1] == problem

    def test_a_byte_order_mark_and_windows_line_ends_leave_no_trace(self) -> None:
        assert read(b"\xef\xbb\xbfprompt\tcompletion\r\na, b\tc\r\n", "a.tsv") == [{"prompt": "a, b", "completion": "c"}]

    def test_a_quote_that_is_never_closed_does_not_fill_the_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tabular, "MAX_ROW_BYTES", 1000)
        assert codes(b'text\n"' + b"a\n" * 5000, "a.csv") == [("row_too_large", 2)]


class TestParquet:
    def test_chats_are_read_without_the_nulls_that_columns_add(self) -> None:
        messages = [
            {"role": "user", "content": "Hi", "thinking": None, "name": None},
            {"role": "assistant", "content": "Hello.", "thinking": "A greeting.", "name": None},
        ]
        (row,) = read(parquet({"messages": [messages]}), "a.parquet")
        assert row["messages"][0] == {"role": "user", "content": "Hi"}
        assert row["messages"][1]["thinking"] == "A greeting."

    def test_more_rows_than_a_batch_keep_their_order(self) -> None:
        table = {name: [row[name] for row in ROWS] for name in ROWS[0]}
        assert read(parquet(table, row_group_size=300), "upload") == ROWS

    def test_columns_that_json_has_no_values_for_are_left_out_with_a_warning(self) -> None:
        table = pa.table({"text": ["a"], "image": pa.array([b"\xff"], pa.binary()), "at": pa.array([0], pa.timestamp("s"))})
        report = check(parquet(table), "a.parquet")
        assert report.is_usable
        assert [(w["code"], w["path"]) for w in report.as_json()["warnings"]] == [
            ("column_not_read", "image"),
            ("column_not_read", "at"),
        ]

    def test_a_row_is_named_by_its_number(self) -> None:
        assert codes(parquet({"text": ["a", "", None, "b"]}), "a.parquet") == [("empty_text", 2), ("invalid_text", 3)]

    @pytest.mark.parametrize("content", [b"PAR1", b"PAR1" + bytes(100) + b"PAR1", parquet({"text": ["a"]})[:-30]])
    def test_a_damaged_file_is_refused(self, content: bytes) -> None:
        assert codes(content, "a.parquet") == [("bad_table", None)]


class TestWarnings:
    def test_a_column_of_several_types_is_read_and_told(self) -> None:
        report = dataset.check(CASES / "A05a_metadata_type_flip.jsonl", "a.jsonl").as_json()
        assert (report["rows_read"], report["rows_used"]) == (60, 60)
        mixed = [warning for warning in report["warnings"] if warning["code"] == "mixed_type_column"]
        assert [warning["path"] for warning in mixed] == ["metadata.title"]
        assert "text from line 1, number from line 49, list from line 50" in mixed[0]["message"]

    def test_columns_left_out_and_repeated_rows_are_counted(self) -> None:
        row = {"text": "a", "source": "book"}
        report = check("".join(json.dumps(r) + "\n" for r in [row, row, {"text": "b"}]).encode(), "a").as_json()
        assert [(w["code"], w["path"], w.get("rows")) for w in report["warnings"]] == [
            ("column_not_read", "source", 2),
            ("duplicate_rows", None, None),
        ]
        assert report["duplicates"] == {"rows": 1, "compared": 3}

    def test_turns_are_counted(self) -> None:
        turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
        lines = [{"conversations": turns}, {"conversations": turns + turns}]
        report = check("\n".join(map(json.dumps, lines)).encode(), "a").as_json()
        assert report["turns"] == {"fewest": 2, "most": 4, "mean": 3.0, "roles": {"user": 3, "assistant": 3}}
        assert report["detected_format"] == {"archives": [], "file": "jsonl", "rows": "sharegpt"}

    def test_every_error_has_its_place_and_how_to_fix_it(self) -> None:
        content = b'{"text": "a"}\n{"text": 5}\n{"text": \n'
        errors = check(content, "a").as_json()["errors"]
        assert [(e["code"], e["line"], e["byte_offset"], e["path"]) for e in errors] == [
            ("invalid_text", 2, 14, "text"),
            ("dataset_bad_json", 3, 26, None),
        ]
        assert all(error["fix"] for error in errors)

    def test_places_in_an_array_are_bytes_too(self) -> None:
        errors = check('[{"text": "é"},\n {"text": 5}]'.encode(), "a").as_json()["errors"]
        assert [(error["line"], error["byte_offset"]) for error in errors] == [(2, 18)]
