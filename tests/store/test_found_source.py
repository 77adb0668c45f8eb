"""The format that a conversion finds at a path that several formats could have, in the order beside the list."""

import h5py
import numpy as np
import pytest
from byte_files import write_megatron
from contract import is_refused

from zb_hdf5 import FormatError, ReadAs
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format import NOT_IN_PLACE
from zb_hdf5.store.found_source import found_source

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


def test_a_path_without_any_format_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"anything")
    with Look(tmp_path) as look:
        is_refused(FormatError, lambda: found_source(look), match="a.bin")
