"""Metadata of documents: what JSON has is kept, numpy scalars become numbers, and all else is refused by its name."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pytest
from commandline import one_error, run
from contract import is_refused
from interpreter import run_program

from zb_hdf5 import ConvertError, HDF5ShardWriter, convert, open_corpus, open_reader
from zb_hdf5.converters.cli import convert_commands as command

UTC = datetime.UTC


def kept(tmp_path, metadata):
    """Return the metadata of a document as a reader gives them."""
    path = tmp_path / "d.h5"
    with HDF5ShardWriter(path, overwrite=True) as writer:
        writer.write_document([1, 2], metadata=metadata)
    with open_corpus(path) as store:
        return store.documents[0].metadata


@pytest.mark.parametrize(("value", "expected"), [
    (np.int64(3), 3), (np.uint8(7), 7), (np.float32(0.5), 0.5), (np.float64(2.5), 2.5), (np.float16(0.25), 0.25),
    (np.bool_(True), True), ([np.int32(1), {"a": np.float32(1.5)}], [1, {"a": 1.5}]), (np.str_("x"), "x"),
    (None, None), ((1, 2), [1, 2]), (2**70, 2**70), ("ä\ud800", "ä\ud800"),
    (datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC), "2024-05-06T07:08:09+00:00"),
    (datetime.date(2024, 5, 6), "2024-05-06"), (datetime.time(7, 8), "07:08:00"), (Decimal("1.50"), "1.50"),
])  # fmt: skip
def test_a_value_has_its_json_form(value, expected, tmp_path):
    found = kept(tmp_path, {"key": value})
    assert found == {"key": expected}
    assert type(found["key"]) is type(expected)


@pytest.mark.parametrize(("value", "kind"), [
    (np.arange(3), "ndarray"), (np.array(3), "ndarray"), (b"\xff", "bytes"), ({1, 2}, "set"), (object(), "object"),
    (float("nan"), "float"), (float("inf"), "float"), (np.float32("nan"), "float32"), (1j, "complex"),
    (np.datetime64("2024-01-01", "ns"), "datetime64"), (np.timedelta64(1, "s"), "timedelta64"),
    (np.bytes_(b"x"), "bytes_"),
    (np.longdouble(1), "longdouble"), (datetime.timedelta(1), "timedelta"), (Decimal("NaN"), "Decimal"),
    (bytearray(b"x"), "bytearray"), ([1, {"a": b"x"}], "list"), ({"a": {1: {2}}}, "dict"), ({b"k": 1}, "dict"),
    ({1: "a", "1": "b"}, "dict"), ([{"a": ({None: 1},)}], "list"), ({np.int64(1): 2}, "dict"),
])  # fmt: skip
def test_what_json_lacks_is_refused_by_its_key_and_type(value, kind, tmp_path):
    metadata = {"good": 1, "key": value}
    is_refused(ConvertError, lambda: kept(tmp_path, metadata), match=f"metadata 'key'.*found {kind}")


def test_a_key_that_is_no_text_is_refused(tmp_path):
    is_refused(ConvertError, lambda: kept(tmp_path, {1: "a", "1": "b"}), match="metadata 1: .*the key 1 is not text")


@pytest.mark.parametrize("metadata", ["text", 7, ["a"]])
def test_metadata_that_are_no_mapping_are_refused(metadata, tmp_path):
    is_refused(ConvertError, lambda: kept(tmp_path, metadata), match="expected metadata in a dict")


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


def test_deep_metadata_are_refused(tmp_path):
    is_refused(ConvertError, lambda: kept(tmp_path, {"key": deep()}), match="metadata 'key'")


def write_parquet(path, **columns):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": ["one", "two"], **columns}), path)
    return path


def ingest(path, columns):
    return run(command, "parquet-to-hdf5", path, path.with_suffix(".out"), "--tokenizer", "byte", "--batch-size", 1,
               "--seq-len", 4, "--metadata-columns", columns, "--quiet", "--workers", 1)  # fmt: skip


def test_a_binary_column_of_parquet_is_refused_by_name_before_any_work(tmp_path):
    pa = pytest.importorskip("pyarrow")
    values = [b"\xff", b"x"]
    kinds = {"b": pa.binary(), "l": pa.large_binary(), "f": pa.binary(1), "d": pa.dictionary(pa.int32(), pa.binary())}
    columns = {name: pa.array(values, kind) for name, kind in kinds.items() if name != "d"}
    columns["d"] = pa.array(values, pa.binary()).dictionary_encode()
    columns["s"] = pa.array([{"in": b"x"}, None], pa.struct([("in", pa.binary())]))
    columns["i"] = pa.array([[b"x"], None], pa.list_(pa.binary()))
    path = write_parquet(tmp_path / "a.parquet", **columns)
    for name in columns:
        assert f"column '{name}': expected values that JSON has, found " in one_error(ingest(path, name), 1)
        assert not path.with_suffix(".out").exists()


def test_dates_and_decimals_of_parquet_are_kept_as_text(tmp_path):
    pa = pytest.importorskip("pyarrow")
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9)
    path = write_parquet(
        tmp_path / "a.parquet",
        at=pa.array([moment, None], pa.timestamp("us", "UTC")), day=[moment.date(), None],
        price=pa.array([Decimal("1.50"), None]), score=pa.array([0.5, None], pa.float32()), tags=[["a"], None],
    )  # fmt: skip
    assert ingest(path, "at,day,price,score,tags").exit_code == 0
    with open_reader(path.with_suffix(".out")) as reader:
        one, two = (reader.corpus.documents[number].metadata for number in range(2))
    expected = {"at": "2024-05-06T07:08:09+00:00", "day": "2024-05-06", "price": "1.50", "score": 0.5, "tags": ["a"]}
    assert (one, two) == (expected, dict.fromkeys(expected))


def test_a_value_that_json_lacks_names_the_row_and_the_column(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", score=[0.5, float("nan")])
    error = one_error(ingest(path, "score"), 1)
    assert "row 2 of " in error
    assert "metadata 'score': expected metadata that JSON can hold, found float nan" in error
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"text": "x", "score": float("inf")}))
    is_refused(
        ConvertError,
        lambda: convert(lines, "stream", tmp_path / "out", tokenizer="byte", metadata_columns=("score",), workers=1),
        match="line 1 of .*metadata 'score'",
    )


@pytest.mark.parametrize(("pandas", "expected"), [(True, "2023-11-14T22:13:20.123456789"), (False, "Install pandas")])
def test_nanoseconds_need_pandas(pandas, expected, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pandas")
    write_parquet(tmp_path / "a.parquet", at=pa.array([1700000000123456789, None], pa.timestamp("ns")))
    if not pandas:
        (tmp_path / "pandas.py").write_text("raise ImportError")
    code = (
        "from zb_hdf5 import ConvertError\n"
        "from zb_hdf5.text.parquet_file import ParquetFile\n"
        "file = ParquetFile('a.parquet', metadata_columns=['at'])\n"
        "try:\n    print([block.metadata for block in file.row_group(0)])\n"
        "except ConvertError as error:\n    print(error)\n"
    )
    assert expected in run_program(code, folder=tmp_path).stdout
