"""An `.idx` of Megatron: opened once, and refused wherever ids are read if it names a part of its `.bin`."""

import json
import os
import shutil
import struct

import numpy as np
import pytest
from commandline import one_error, run_zb
from interpreter import run_program

from zb_hdf5 import DocumentLoader, FormatError, Loader, convert, open_corpus, open_reader, verify_store, write_digests

#: The tokens of each sequence.
LENGTHS = np.array([5, 3, 8, 1, 9, 4] * 10)
STARTS = np.cumsum(LENGTHS) - LENGTHS
#: The sequences that an index names; the last one is that of the file, which a look compares.
CHOICES = {
    "a part": [*range(20), *range(30, 60)],
    "the end": [*range(10, 60)],
    "another order": [1, 0, *range(2, 60)],
    "one of them twice": [*range(30), 3, *range(31, 60)],
}


def write(folder, rows, lengths=LENGTHS, name="c"):
    """Write the ids of all sequences, and an index of some."""
    ids = np.arange(LENGTHS.sum(), dtype="<u2")
    path = folder / f"{name}.bin"
    path.write_bytes(ids.tobytes())
    index = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, len(rows), len(rows) + 1)
    index += lengths[rows].astype("<i4").tobytes() + (2 * STARTS[rows]).astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index + np.arange(len(rows) + 1, dtype="<i8").tobytes())
    return path


def uses(path, tmp_path):
    """Return all that reads the ids of a path."""
    shape = {"batch_size": 1, "seq_len": 8, "rank": 0, "world_size": 1}
    digests = tmp_path / "digests.json"

    def sliced():
        with open_corpus(path) as stream:
            stream.tokens[0:4]

    return (
        lambda: next(Loader(path, **shape)),
        lambda: next(Loader(path, **shape, shuffle="sequential", access="pread")),
        lambda: next(DocumentLoader(path, collate="pack", max_tokens=64, rank=0, world_size=1)),
        lambda: open_reader(path, batch_size=1, seq_len=8).read_batch(0),
        sliced,
        lambda: convert(path, "stream", tmp_path / "stream"),
        lambda: convert(path, "stream", tmp_path / "whole", tokens_only=True),
        lambda: write_digests(path, digests),
    )


@pytest.mark.parametrize("form", ["file", "index", "folder"])
@pytest.mark.parametrize("choice", CHOICES)
def test_an_index_of_a_part_or_another_order_is_refused_by_all_that_reads(choice, form, tmp_path):
    (tmp_path / "in").mkdir()
    path = write(tmp_path / "in", CHOICES[choice])
    path = {"file": path, "index": path.with_suffix(".idx"), "folder": path.parent}[form]
    for use in uses(path, tmp_path):
        with pytest.raises(FormatError, match=r"c\.idx: expected sequences that follow each other") as caught:
            use()
        assert "restore the index" in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
    assert "expected sequences that follow each other" in one_error(run_zb("info", path), 1)
    [report] = verify_store(path)
    assert "expected sequences that follow each other" in str(report.problem)


def test_an_index_whose_end_is_no_end_of_the_file_is_refused_at_the_first_look(tmp_path):
    path = write(tmp_path, [*range(50)])
    with pytest.raises(FormatError, match="belongs to another index"):
        Loader(path, batch_size=1, seq_len=8)


def test_a_whole_index_is_checked_once_and_again_when_it_has_changed(tmp_path, monkeypatch):
    from zb_hdf5.trainers import megatron

    checked = []
    require_rows = megatron._Index.require_rows
    monkeypatch.setattr(megatron, "ROWS_CHECKED", 7)
    monkeypatch.setattr(
        megatron._Index, "require_rows", lambda self, *rows: checked.append(rows) or require_rows(self, *rows)
    )
    path = write(tmp_path, [*range(60)])
    for _ in range(3):
        with open_corpus(path) as stream:
            np.testing.assert_array_equal(stream.tokens[0:300], np.arange(300))
            np.testing.assert_array_equal(stream.documents[20].ids, np.arange(LENGTHS[20]) + STARTS[20])
    assert [rows[0] for rows in checked] == [*range(0, 60, 7)]
    write(tmp_path, CHOICES["another order"])
    with pytest.raises(FormatError, match="found sequence 0 of 3 ids at byte 10, after one that ends at 0"):
        open_corpus(path).tokens[0:4]


def test_a_length_below_zero_is_refused(tmp_path):
    lengths = LENGTHS.copy()
    lengths[7] = -lengths[7]
    path = write(tmp_path, [*range(60)], lengths)
    with pytest.raises(FormatError, match="found sequence 7 of -3 ids"):
        next(Loader(path, batch_size=1, seq_len=8, rank=0, world_size=1))


def test_empty_sequences_and_none_are_read(tmp_path):
    lengths = np.array([0, 4, 0, 0, 3, 0])
    ends = np.cumsum(lengths)
    path = tmp_path / "c.bin"
    path.write_bytes(np.arange(7, dtype="<u2").tobytes())
    index = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, 6, 7) + lengths.astype("<i4").tobytes()
    path.with_suffix(".idx").write_bytes(
        index + (2 * (ends - lengths)).astype("<i8").tobytes() + np.arange(7, dtype="<i8").tobytes()
    )
    with open_corpus(path) as stream:
        assert [len(stream.documents[number].ids) for number in range(6)] == lengths.tolist()


#: Reads all tokens and documents of a folder under a limit of descriptors, and prints how often each file was opened.
READ_ALL = """
import collections, json, resource, sys
from zb_hdf5 import open_corpus
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
opened = collections.Counter()
sys.addaudithook(lambda event, args: opened.update([str(args[0])]) if event == "open" else None)
with open_corpus(sys.argv[1]) as corpus:
    total = int(corpus.tokens[0:corpus.num_tokens].sum()) + sum(len(document.ids) for document in corpus.documents)
print(json.dumps([total, [count for path, count in opened.items() if path.endswith(".idx")]]))
"""


def test_each_index_of_a_folder_is_opened_once_and_again_where_few_files_may_be_open(tmp_path):
    path = write(tmp_path, [*range(60)])
    for number in range(1, 20):
        for suffix in (".bin", ".idx"):
            shutil.copyfile(path.with_suffix(suffix), tmp_path / f"c{number:02}{suffix}")
    expected = 20 * (sum(range(LENGTHS.sum())) + LENGTHS.sum())
    for limit, most in ((1024, 1), (64, 3)):
        total, counts = json.loads(run_program(READ_ALL, tmp_path, limit).stdout)
        assert (total, len(counts), min(counts), max(counts)) == (expected, 20, 1, most)


def test_an_index_that_is_replaced_while_it_is_open_is_named(tmp_path):
    path = write(tmp_path, [*range(60)])
    with open_corpus(path) as stream:
        new = tmp_path / "new.idx"
        shutil.copyfile(path.with_suffix(".idx"), new)
        os.replace(new, path.with_suffix(".idx"))
        with pytest.raises(FormatError, match=r"c\.idx: changed since it was opened"):
            len(stream.documents[20].ids)
