"""Documents from files: what is read, what is dropped, and that row groups together are the whole file."""

import gzip
import io
import json
import pickle
import sys

import pytest
from contract import is_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zb_hdf5 import ConvertError, FormatError, UnavailableError
from zb_hdf5.console import message_of
from zb_hdf5.text import corpus as documents
from zb_hdf5.text.corpus import FILE_KINDS, Dropped, JsonLinesFile, ParquetFile, PlainTextFile, Reason, open_documents


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


LINES = [
    (b'{"text": "one"}', "one"),
    (b'{"text": "zwei \\u00fc"}', "zwei ü"),
    (b"{", Reason.BAD_JSON),
    (b'["text"]', Reason.BAD_JSON),
    (b"", Reason.BAD_JSON),
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
    assert dropped.counts == {"bad JSON": 3, "no text": 2, "not text": 1, "empty": 1, "not UTF-8": 1}
    assert dropped.first == [f"line {n} of {path}: {LINES[n - 1][1].value}" for n in (3, 4, 5, 6, 7)]
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
        patch.setattr(documents, "ROW_GROUP_BYTES", row_group_bytes)
        assert read(JsonLinesFile(path)) == whole
    assert whole[0] == [text for _, text in lines if not isinstance(text, Reason)]


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
        patch.setattr(documents, "FIRST_DROPPED", len(lines) + 1)
        whole = places(JsonLinesFile(path), [0])
        patch.setattr(documents, "ROW_GROUP_BYTES", row_group_bytes)
        file = JsonLinesFile(path)
        numbers = random.sample(range(file.num_row_groups), file.num_row_groups)
        assert places(file, numbers) == whole
        assert places(pickle.loads(pickle.dumps(JsonLinesFile(path))), numbers) == whole
    assert whole[0] == [(n, text) for n, (_, text) in enumerate(lines, 1) if not isinstance(text, Reason)]


@pytest.mark.parametrize("copied", [False, True])
def test_the_lines_of_a_file_are_counted_once_however_many_row_groups_there_are(tmp_path, monkeypatch, copied):
    path, counted = tmp_path / "a.jsonl", []

    class Counting(io.FileIO):
        def readinto(self, buffer):
            counted.append(super().readinto(buffer))
            return counted[-1]

    def opened(file):
        return io.BufferedReader(Counting(file.path), 16)

    monkeypatch.setattr(documents, "ROW_GROUP_BYTES", 200)
    monkeypatch.setattr(JsonLinesFile, "_open", opened)
    path.write_bytes(b'{"text": "one"}\n' * 1000)
    file = JsonLinesFile(path)
    assert (file.num_row_groups, counted) == (80, [])  # who only looks at it need not wait
    for number in range(80):
        [*(pickle.loads(pickle.dumps(file)) if copied else file).row_group(number)]
    assert sum(counted) < 3 * path.stat().st_size  # once to count, once to read, and some twice


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
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UnavailableError, match=r"this needs the package pyarrow: pip install '.\[text\]'"):
        ParquetFile(tmp_path / "a.parquet")


def test_a_text_file_is_one_document_and_blocks_are_small(tmp_path, monkeypatch):
    path, text = tmp_path / "a.txt", "first\r\n\r\nsecond ü\n"
    for data, texts, dropped in ((text.encode(), [text], {}), (b"\xff", [], {"not UTF-8": 1}), (b"", [], {"empty": 1})):
        path.write_bytes(data)
        found = read(PlainTextFile(path))
        assert (found[0], found[1].counts) == (texts, dropped)
    monkeypatch.setattr(documents, "BLOCK_DOCUMENTS", 4)
    monkeypatch.setattr(documents, "BLOCK_CHARACTERS", 20)
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
    assert message_of(caught.value).endswith(f"files are there; run 'zb convert {command}' for them")
