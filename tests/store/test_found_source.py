"""The format that a conversion finds at a path that several formats could have, in the order beside the list."""

import doors
import h5py
import numpy as np
import pytest
from byte_files import write_megatron
from contract import is_refused

from zb_hdf5 import FormatError, ReadAs
from zb_hdf5.errors import BackendError
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format import NOT_IN_PLACE
from zb_hdf5.store.format_list import FORMATS, in_order_of_sources, load_format
from zb_hdf5.store.found_source import found_source
from zb_hdf5.store.recognition import rows_at

IDS = np.arange(60, dtype=np.uint16)


def pair(folder):
    write_megatron(folder / "pair.bin", IDS, [20, 40], 8)


def lines(name, *keys):
    def write(folder):
        values = {"text": '"some text"', "input_ids": "[1, 2, 3]", "mine": "[1, 2, 3]"}
        line = ", ".join(f'"{key}": {values[key]}' for key in keys)
        (folder / name).write_text(f"{{{line}}}\n" * 3)

    return write


def array(folder):
    np.save(folder / "ids.npy", IDS)


def raw(folder):
    IDS.tofile(folder / "ids.bin")


def by_columns(folder):
    np.save(folder / "ids.npy", np.asfortranarray(IDS.reshape(6, 10)))


def plain_text(folder):
    (folder / "a.txt").write_text("some text\n")


def ragged(folder):
    with h5py.File(folder / "docs.h5", "w") as h5:
        h5["tokens"] = IDS.astype(np.int32)
        h5["offsets"] = np.array([0, 20, 60])


def two_datasets(folder):
    with h5py.File(folder / "two.h5", "w") as h5:
        h5["this"] = h5["that"] = IDS.astype(np.int32).reshape(6, 10)
        h5["other"] = IDS.astype(np.int32).reshape(6, 10)


#: What is written, the options, and the format; that of a file that is not read in place has a star.
CASES = {
    "rows before files in place": ([pair, lines("a.jsonl", "input_ids")], {}, "hf*"),
    "text before files in place": ([pair, lines("a.jsonl", "text")], {}, "jsonl*"),
    "files in place": ([pair], {}, "megatron"),
    "arrays before text": ([array, plain_text], {}, "npy*"),
    "arrays that are not read in place": ([by_columns], {}, "npy*"),
    "text": ([plain_text], {}, "text*"),
    "a tokenizer asks for text": ([lines("a.jsonl", "input_ids")], {"tokenizer": "byte"}, "jsonl*"),
    "text beside ids is text": ([lines("a.jsonl", "input_ids", "text")], {}, "jsonl*"),
    "a column of ids asks for rows": ([lines("a.jsonl", "text", "mine")], {"ids_column": "mine"}, "hf*"),
    "a plain .json comes last": ([pair, lines("a.json", "text")], {}, "megatron"),
    "lines in a .json": ([lines("a.json", "text")], {}, "jsonl*"),
    "ids in a .json": ([lines("a.json", "text", "mine")], {"ids_column": "mine"}, "hf*"),
    "documents in HDF5": ([ragged], {}, "ragged*"),
    "a dataset of them": ([ragged], {"read_as": ReadAs("tokens")}, "hdf5"),
    "its documents": ([ragged], {"read_as": ReadAs("tokens"), "offsets": "offsets"}, "ragged*"),
    "one of two datasets": ([two_datasets], {"read_as": ReadAs("this")}, "hdf5"),
    "two datasets": ([two_datasets], {}, "hdf5*"),
    "ids without a header": ([raw], {"read_as": ReadAs(source_dtype="uint16")}, "bin"),
    "options without use": ([pair], {"read_as": ReadAs(unwritten="fill")}, "megatron"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_of_several_formats_is_found(case, tmp_path):
    writers, options, expected = CASES[case]
    (tmp_path / "source").mkdir()
    for write in writers:
        write(tmp_path / "source")
    with Look(tmp_path / "source") as look:
        found = found_source(look, **options)
    assert found.backend + "*" * (found.layout == NOT_IN_PLACE) == expected


def test_a_store_is_found_before_all_that_lies_in_it(tmp_path, write_store):
    write_store(tmp_path / "S", np.zeros((4, 2, 8), np.uint32), (4,), ("batch",))
    array(tmp_path / "S")
    lines("a.jsonl", "input_ids")(tmp_path / "S")
    with Look(tmp_path / "S") as look:
        assert (found_source(look, tokenizer="byte").backend, found_source(look).layout) == ("batch", "batches")


#: Each kind of file or folder that a test writes, and the format that reads its documents once.
OF_ROWS = {"saved": "hf", "a.parquet": "hf", "mds": "mds", "litdata": "litdata", "offsets.h5": "ragged"}


@pytest.mark.parametrize(("name", "backend"), OF_ROWS.items())
def test_a_format_of_rows_finds_a_path_that_is_not_read_in_place(name, backend, tmp_path):
    if name in doors.DOORS:
        doors.made(name, tmp_path)
    else:
        ragged(tmp_path)
        (tmp_path / "docs.h5").rename(tmp_path / name)
    array(tmp_path)
    code = load_format(FORMATS[backend])
    with Look(tmp_path / name) as look, Look(tmp_path / "ids.npy") as other:
        found = code.recognise(look)
        assert (found.path, found.backend, found.layout) == (look.path, backend, NOT_IN_PLACE)
        assert found.look is look  # what it has read is there for `rows`
        assert code.recognise(other) is None
        is_refused(BackendError, lambda: code.recognise(look, "npy"), match=f"found a '{backend}' file")
        assert (found_source(look), rows_at(look)) == (found, found)


def test_a_conversion_asks_for_rows_then_for_endings_then_in_place():
    names = [row.name for row in in_order_of_sources()]
    rows, endings = ["hf", "mds", "litdata", "ragged"], ["npy", "parquet", "jsonl", "text"]
    assert names[:8] == [*rows, *endings]
    assert [row.name for row in in_order_of_sources(asks_for_text=True)] == [*endings, *rows, *names[8:]]
    assert names[8:] == [name for name in FORMATS if name not in names[:8]]


def test_a_path_without_any_format_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"anything")
    with Look(tmp_path) as look:
        is_refused(FormatError, lambda: found_source(look), match="a.bin")
