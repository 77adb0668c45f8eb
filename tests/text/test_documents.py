"""Documents from files: what is read, what is dropped, and that row groups together are the whole file."""

import codecs
import gzip
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from shlex import quote

import numpy as np
import pytest
from contract import is_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zb_hdf5 import ConvertError, FormatError, UnavailableError
from zb_hdf5.console import message_of
from zb_hdf5.files.look import Look
from zb_hdf5.text import document_file, json_lines, text_corpus
from zb_hdf5.text.dropped import Dropped, Reason
from zb_hdf5.text.json_lines import JsonLinesFile
from zb_hdf5.text.parquet_file import ParquetFile
from zb_hdf5.text.plain_text import PlainTextFile
from zb_hdf5.text.text_corpus import FILE_KINDS, open_documents
from zb_hdf5.trainers.id_tables import ColumnSelection, JsonLinesIds


def read(file):
    """Return all texts, and all that was dropped."""
    texts, dropped = [], Dropped()
    for block in file.blocks():
        texts += block.texts
        dropped.merge(block.dropped)
    return texts, dropped


@pytest.fixture
def write_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(texts, kind=None, row_group_size=3, name="a.parquet"):
        table = pa.table({"id": range(len(texts)), "text": pa.array(texts, kind or pa.string())})
        parquet.write_table(table, tmp_path / name, row_group_size=row_group_size)
        return tmp_path / name

    return write


BLANK = None  # a line that is not a document, and is not counted
LINES = [
    (b'{"text": "one"}', "one"),
    (b'{"text": "zwei \\u00fc"}', "zwei ü"),
    (b"{]", Reason.BAD_JSON),
    (b'["text"]', Reason.IN_ARRAY),
    (b"", BLANK),
    (b'{"txt": "one"}', Reason.MISSING),
    (b'{"text": null}', Reason.MISSING),
    (b'{"text": 3}', Reason.NOT_TEXT),
    (b'{"text": ""}', Reason.EMPTY),
    (b'{"text": "\xff"}', Reason.NOT_UTF8),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_json_lines(tmp_path, name, end):
    path = tmp_path / name
    data = b"\n".join(line for line, _ in LINES) + end
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    texts, dropped = read(JsonLinesFile(path))
    assert texts == ["one", "zwei ü"]
    expected = {"bad JSON": 1, "in a JSON array": 1, "no text": 2, "not text": 1, "empty": 1, "not UTF-8": 1}
    assert dropped.counts == expected
    assert dropped.first == [f"line {n} of {path}: {LINES[n - 1][1].value}" for n in (3, 4, 6, 7, 8)]
    path = tmp_path / "other.jsonl"
    path.write_text('{"body": "one"}\n')
    assert read(JsonLinesFile(path, "body"))[0] == ["one"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(LINES), max_size=30), st.integers(1, 40))
def test_row_groups_of_json_lines_are_the_whole_file(tmp_path, lines, row_group_bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line, _ in lines))
    with pytest.MonkeyPatch.context() as patch:
        whole = read(JsonLinesFile(path))
        patch.setattr(json_lines, "ROW_GROUP_BYTES", row_group_bytes)
        assert read(JsonLinesFile(path)) == whole
    assert whole[0] == [text for _, text in lines if text is not BLANK and not isinstance(text, Reason)]


def places(file, numbers):
    """Return the row of each text, and the place of each text that was dropped, of some row groups."""
    blocks = [block for number in numbers for block in file.row_group(number)]
    texts = [pair for block in blocks for pair in zip(block.rows, block.texts, strict=True)]
    return sorted(texts), sorted(place for block in blocks for place in block.dropped.first)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([*LINES, (b'{"text": "%s"}' % (b"x" * 99), "x" * 99)]), max_size=30),
    st.sampled_from([b"\n", b""]),
    st.integers(1, 90),
    st.randoms(use_true_random=False),
)
def test_each_row_group_knows_the_numbers_of_its_lines(tmp_path, lines, end, row_group_bytes, random):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in lines) + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zb_hdf5.text.dropped.FIRST_DROPPED", len(lines) + 1)
        whole = places(JsonLinesFile(path), [0])
        patch.setattr(json_lines, "ROW_GROUP_BYTES", row_group_bytes)
        file = JsonLinesFile(path)
        numbers = random.sample(range(file.num_row_groups), file.num_row_groups)
        assert places(file, numbers) == whole
        assert places(pickle.loads(pickle.dumps(JsonLinesFile(path))), numbers) == whole
    numbered = [(n, text) for n, (_, text) in enumerate(lines, 1) if text is not BLANK]
    assert whole[0] == [(n, text) for n, text in numbered if not isinstance(text, Reason)]


@pytest.mark.parametrize("copied", [False, True])
def test_the_lines_of_a_file_are_counted_once_however_many_row_groups_there_are(tmp_path, monkeypatch, copied):
    path, counted = tmp_path / "a.jsonl", []

    class Counting(io.FileIO):
        def readinto(self, buffer):
            counted.append(super().readinto(buffer))
            return counted[-1]

    def opened(look):
        return io.BufferedReader(Counting(look.path), 16)

    monkeypatch.setattr(json_lines, "ROW_GROUP_BYTES", 200)
    monkeypatch.setattr(json_lines, "unpacked", opened)
    path.write_bytes(b'{"text": "one"}\n' * 1000)
    file = JsonLinesFile(path)
    assert (file.num_row_groups, counted) == (80, [16])  # who only looks at it need not wait
    for number in range(80):
        [*(pickle.loads(pickle.dumps(file)) if copied else file).row_group(number)]
    assert sum(counted) < 3 * path.stat().st_size  # once to count, once to read, and some twice


MARK = codecs.BOM_UTF8
GOOD = b'{"text": "one", "input_ids": [1, 2]}\n{"text": "two", "input_ids": [3]}\n'


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize(
    "data", [MARK + GOOD, MARK * 2 + GOOD, MARK + GOOD + MARK + GOOD, MARK + b"\n" + GOOD, GOOD + MARK]
)
def test_a_byte_order_mark_is_no_text_of_json_lines(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    expected = ["one", "two"] * data.count(b"one")
    assert read(*open_documents([path])) == (expected, Dropped())
    rows = [*JsonLinesIds(Look(path), ColumnSelection()).rows(0)]
    assert np.concatenate([each.tokens for each in rows]).tolist() == [1, 2, 3] * data.count(b"one")


@pytest.mark.parametrize("marks", [1, 2])
def test_a_byte_order_mark_is_no_text_of_a_text_file(tmp_path, marks):
    path = tmp_path / "a.txt"
    path.write_bytes(MARK * marks + "a\ufeffb".encode())
    assert read(*open_documents([path])) == (["a\ufeffb"], Dropped())
    path.write_bytes(MARK * marks)
    assert read(*open_documents([path]))[1].counts == {"empty": 1}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a b.jsonl", "a b.jsonl.gz", "a b.txt"])
def test_the_line_for_a_file_of_another_encoding_converts_it(tmp_path, name, encoding):
    path = tmp_path / name
    text = '{"text": "one"}\n' if "jsonl" in name else "one"
    data = ("\ufeff" + text).encode(encoding)
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    expected = rf"expected UTF-8, found {encoding[:6].upper()} by its first bytes; convert it: (.*)"
    with pytest.raises(FormatError, match=expected) as refused:
        open_documents([path])
    subprocess.run(["/bin/sh", "-c", str(refused.value).partition("convert it: ")[2]], check=True, timeout=60)
    assert read(*open_documents([tmp_path / f"utf8-{name.removesuffix('.gz')}"])) == (["one"], Dropped())


NO_OBJECTS = [
    (b'[{"text": "one"}, {"text": "two"}]', {"in a JSON array": 1}),
    (b'[\n{"text": "one"},\n{"text": "two"},\n{"text": "three"}\n]', {"in a JSON array": 4}),
    (b'[{"text": "one"},\n{"text": "two"}]', {"in a JSON array": 1, "bad JSON": 1}),
    (b'{\n  "text": "one",\n  "id": 1\n}\n', {"of JSON over several lines": 4}),
    (b'{"text": "one"} {"text": "two"}\n{"text": "one"}{"text": "two"}\n', {"with several JSON objects": 2}),
    (b'"one"\n3\n', {"without a JSON object": 2}),
    ('{"text": "one"}\n'.encode("utf-16-le"), {"of UTF-16": 2}),
    ('{"text": "\xfc"}'.encode("utf-16-be"), {"of UTF-16": 1}),
    (b'{"text": "one}\n', {"bad JSON": 1}),
    (bytes(99) + b"\n" + bytes(9), {"of zero bytes": 2}),
    (b" \n\t\r\n\n", {}),
]


@pytest.mark.parametrize(("data", "counts"), NO_OBJECTS)
def test_lines_that_are_no_objects_are_counted_as_what_they_are(tmp_path, data, counts):
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    assert read(JsonLinesFile(path))[1].counts == counts


def test_a_number_of_many_digits_hides_no_text(tmp_path):
    path, digits = tmp_path / "a.jsonl", "7" * 5000
    path.write_text(f'{{"n": {digits}, "m": -3, "text": "one", "input_ids": [1, 2]}}\n')
    [block] = JsonLinesFile(path, metadata_columns=["n", "m"]).blocks()
    assert block.texts == ["one"]
    assert json.loads(block.metadata[0]) == {"n": digits, "m": -3}
    assert read(JsonLinesFile(path, "n"))[1].counts == {"not text": 1}
    assert [rows.tokens.tolist() for rows in JsonLinesIds(Look(path), ColumnSelection()).rows(0)] == [[1, 2]]


def test_a_key_that_begins_late_is_found_and_no_file_is_called_empty(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    others = b'{"other": ""}\n' * 1500
    path.write_bytes(others + b'{"text": "one"}\n')
    assert read(*open_documents([path]))[0] == ["one"]
    monkeypatch.setattr(text_corpus, "SAMPLE_BYTES", 15_000)
    is_refused(
        ConvertError, lambda: open_documents([path]), match=r": no key 'text' in the first lines of 1 file; pass"
    )
    path.write_bytes(others[:14_000])
    is_refused(
        ConvertError, lambda: open_documents([path]), match=r"no documents in 1 file \(no key 'text' in its lines\)"
    )


def test_a_gzip_file_that_is_cut_off(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    for data in (gzip.compress(b'{"text": "one"}\n' * 1000)[:-10], b"no gzip"):
        path.write_bytes(data)
        is_refused(FormatError, lambda: read(JsonLinesFile(path)), match=r"a\.jsonl\.gz: damaged or cut off")


def test_parquet_of_all_kinds_of_text_and_of_none(write_parquet, tmp_path):
    path = write_parquet(["a", None, "b", "", "c", "d", "e"])
    file = ParquetFile(path)
    assert file.num_row_groups == 3
    assert [list(block.texts) for k in range(3) for block in file.row_group(k)] == [["a", "b"], ["c", "d"], ["e"]]
    texts, dropped = read(file)
    assert texts == ["a", "b", "c", "d", "e"]
    assert dropped == Dropped({"no text": 1, "empty": 1}, [f"row 2 of {path}: no text", f"row 4 of {path}: empty"])
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        assert read(ParquetFile(write_parquet(["a", "b", "a"], kind)))[0] == ["a", "b", "a"]
    bad = pa.array([b"a", b"\xff", b"b"]).view(pa.string())
    parquet.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    texts, dropped = read(ParquetFile(tmp_path / "a.parquet"))
    assert (texts, dropped.first) == (["a", "b"], [f"row 2 of {tmp_path / 'a.parquet'}: not UTF-8"])


def test_parquet_errors(write_parquet, tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    path = write_parquet(["a", "b"])
    lists = write_parquet([["a"], ["b"]], pa.list_(pa.string()), name="lists.parquet")
    for file, column, message in (
        (path, "body", "no column 'body' for the text; its columns are: id, text"),
        (path, "id", "column 'id': expected text, found int64"),
        (lists, "text", r"column 'text': expected text, found list<.*string>; name another column"),
    ):
        with pytest.raises(ConvertError, match=message):
            ParquetFile(file, column)
    (tmp_path / "b.parquet").write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FormatError, match=r"b\.parquet: not a Parquet file, or a damaged one"):
        ParquetFile(tmp_path / "b.parquet")
    is_refused(FileNotFoundError, lambda: ParquetFile(tmp_path / "c.parquet"))
    path = write_parquet([f"document {i} " * 50 for i in range(100)], row_group_size=100)
    data = path.read_bytes()
    path.write_bytes(data[:1000] + bytes(400) + data[1400:])
    is_refused(FormatError, lambda: read(ParquetFile(path)), match="not a Parquet file, or a damaged one")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnavailableError, match=r"this needs the package pyarrow: pip install 'zb_hdf5\[text\]'"):
        ParquetFile(tmp_path / "a.parquet")


def test_a_text_file_is_one_document_and_blocks_are_small(tmp_path, monkeypatch):
    path, text = tmp_path / "a.txt", "first\r\n\r\nsecond ü\n"
    for data, texts, dropped in ((text.encode(), [text], {}), (b"\xff", [], {"not UTF-8": 1}), (b"", [], {"empty": 1})):
        path.write_bytes(data)
        found = read(PlainTextFile(path))
        assert (found[0], found[1].counts) == (texts, dropped)
    monkeypatch.setattr(document_file, "BLOCK_DOCUMENTS", 4)
    monkeypatch.setattr(document_file, "BLOCK_CHARACTERS", 20)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (1, 1, 1, 1, 1, 30, 10, 10, 1)))
    assert [[len(text) for text in b.texts] for b in JsonLinesFile(path).blocks()] == [[1] * 4, [1, 30], [10, 10], [1]]


def test_opening_files_and_folders(tmp_path):
    for name in ("b/z.jsonl", "b/a.txt", "a.txt", "b/c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [file.path.relative_to(tmp_path).as_posix() for file in open_documents([tmp_path])]
    assert names == ["a.txt", "b/a.txt", "b/z.jsonl"]
    kinds = [type(file) for file in open_documents([tmp_path / "b/c.md", tmp_path / "b"], "text")]
    assert kinds == [PlainTextFile, PlainTextFile]
    for name, kind, opened in (("a.txt", "jsonl", JsonLinesFile), ("b/z.jsonl", "text", PlainTextFile)):
        assert [type(file) for file in open_documents([tmp_path / name], kind)] == [opened]  # any name will do
    with pytest.raises(ConvertError, match=r"b: expected files that end in \.parquet, found none"):
        open_documents([tmp_path / "b"], "parquet")
    is_refused(ConvertError, lambda: open_documents([tmp_path / "b/c.md"]), match=r"c\.md: expected files that end in")
    assert set(FILE_KINDS) == {"parquet", "jsonl", "text"}


def test_a_folder_may_be_named_like_a_file_and_a_file_is_named_once(tmp_path):
    (tmp_path / "b.jsonl").mkdir()
    for path in (tmp_path / "a.jsonl", tmp_path / "b.jsonl" / "part-0.jsonl"):
        path.write_text('{"text": "one"}\n')
    for kind in (None, "jsonl"):
        names = [file.path.relative_to(tmp_path).as_posix() for file in open_documents([tmp_path], kind)]
        assert names == ["a.jsonl", "b.jsonl/part-0.jsonl"]
    with pytest.raises(ConvertError, match=r"b\.jsonl: expected files that end in \.txt, found none; \.jsonl files"):
        open_documents([tmp_path / "b.jsonl"], "text")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path)
    message = r"a\.txt: is named 2 times; its documents would be stored as often: name it once"
    for paths in ([tmp_path, tmp_path / "a.txt"], [tmp_path / "a.txt", tmp_path / "link" / "a.txt"]):
        with pytest.raises(ConvertError, match=message):
            open_documents(paths)


@pytest.mark.parametrize("in_folder", [True, False])
@pytest.mark.parametrize(("kind", "name", "command"), [
    ("parquet", "a.jsonl", "jsonl-to-hdf5"), ("parquet", "a.ndjson.gz", "jsonl-to-hdf5"),
    ("parquet", "a.txt", "text-to-hdf5"), ("jsonl", "a.parquet", "parquet-to-hdf5"),
    ("text", "a.parquet", "parquet-to-hdf5"),
])  # fmt: skip
def test_files_of_another_kind_name_the_command_that_reads_them(kind, name, command, in_folder, tmp_path):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConvertError, match="files are there; leave out the kind") as caught:
        open_documents([tmp_path if in_folder else tmp_path / name], kind)
    assert message_of(caught.value).endswith(f"files are there; run 'zb convert {command} ...' for them")


@pytest.mark.parametrize(
    ("name", "reader", "written"),
    [("a.jsonl", "cat", "a.jsonl"), ("a.JSON.GZ", "zcat", "a.JSON"), ("b c.jsonl.zst", "zstdcat", "b c.jsonl")],
)
def test_the_line_that_makes_good_lines_unpacks_the_file(name, reader, written):
    line = f"{reader} {quote(name)} | jq -c '.[]' > {quote(f'lines-{written}')}"
    assert Dropped({"in a JSON array": 1}).cure(Path(name)).endswith(f": {line}")
