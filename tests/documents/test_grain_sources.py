"""Documents and records through the DataLoader of grain: two workers, resumed, with ids, masks and metadata.

`.ci/peers recipes` has grain; elsewhere these tests are skipped.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from processes import PROGRAMS, python

from zb_hdf5 import HDF5ShardWriter, ReadAs, StoreRecords, convert, open_corpus

pytestmark = pytest.mark.slow

TRAINERS = Path(__file__).parents[1] / "data" / "trainers"
MASK = "loss_mask"
#: A file of OLMo, which has no header; its documents are in the `.csv.gz` beside it.
OLMO = TRAINERS / "olmo" / "uint16" / "part-0-00000.npy"
#: How many are taken before the state.
TAKEN = 7


@pytest.fixture
def stream(tmp_path):
    """Return a stream of 40 documents, each with an id, metadata and a mask."""
    with HDF5ShardWriter(tmp_path / "stream.h5", dtype="uint16", fields={MASK: "u1"}) as writer:
        for number in range(40):
            ids = np.arange(number, 2 * number + 1)
            facts = {"id": f"d{number}", "metadata": {"lang": "de" if number % 3 else "fr"}}
            writer.write_document(ids, fields={MASK: ids % 2}, **facts)
    return tmp_path / "stream.h5"


@pytest.fixture
def olmo_folder(tmp_path):
    """Return a folder of two files of OLMo with other ids and the same documents, each with a mask beside it."""
    ids = np.fromfile(OLMO, "uint16")
    for number, values in enumerate((ids, ids + 1)):
        path = tmp_path / "olmo" / f"token_ids_part_{number:04}.npy"
        path.parent.mkdir(exist_ok=True)
        values.tofile(path)
        (values % 3 == 0).tofile(path.with_name(f"labels_mask_part_{number:04}.npy"))
        shutil.copy(OLMO.with_suffix(".csv.gz"), path.with_suffix(".csv.gz"))
    return path.parent


def documents_of(path, mask, dtype=None):
    """Return the values of the documents of a path in their order, as the corpus gives them."""
    with open_corpus(path, read_as=ReadAs(source_dtype=dtype)) as corpus:
        return [
            {"ids": each.ids.tolist(), "id": each.id, "metadata": each.metadata}
            | ({"mask": each.field(mask).tolist()} if mask else {})
            for each in corpus.documents
        ]


def ids_of(documents):
    """Return the ids of documents, one after the other."""
    return [token for each in documents for token in each["ids"]]


def by_grain(*how):
    """Return what grain gives in a process of its own."""
    done = python(PROGRAMS / "grain_source.py", *how)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_each_once_and_resumed(expected, kind, path, mask, state, dtype=""):
    """Another process goes on with the next one, in the order that grain has chosen."""
    pytest.importorskip("grain")
    whole = by_grain(kind, path, mask, dtype, -1)
    assert whole != expected
    assert sorted(whole, key=repr) == sorted(expected, key=repr)
    assert by_grain(kind, path, mask, dtype, TAKEN, state) == whole[:TAKEN]
    assert by_grain(kind, path, mask, dtype, -1, state) == whole[TAKEN:]


@pytest.mark.parametrize(
    ("files", "mask"),
    [("megatron/uint16/corpus_text_document.idx", ""), ("datatrove/uint16", ""), ("datatrove/loss", MASK)],
)
def test_grain_reads_documents_of_other_trainers(files, mask, tmp_path):
    expected = documents_of(TRAINERS / files, mask)
    with open_corpus(TRAINERS / files) as corpus:
        assert sum(len(each["ids"]) for each in expected) == len(corpus)
    assert not mask or {value for each in expected for value in each["mask"]} == {0, 1}
    require_each_once_and_resumed(expected, "documents", TRAINERS / files, mask, tmp_path / "state")


def test_grain_reads_documents_of_a_file_of_olmo_as_its_table_has_them(tmp_path):
    expected = documents_of(OLMO, "", "uint16")
    lengths = json.loads((OLMO.parent / "truth.json").read_text())["lengths"]
    assert [len(each["ids"]) for each in expected] == lengths
    assert ids_of(expected) == np.fromfile(OLMO, "uint16").tolist()
    require_each_once_and_resumed(expected, "documents", OLMO, "", tmp_path / "state", "uint16")


def test_grain_reads_documents_of_a_folder_of_olmo_with_masks(olmo_folder, tmp_path):
    expected = documents_of(olmo_folder, MASK, "uint16")
    ids = np.fromfile(OLMO, "uint16")
    assert ids_of(expected) == [*ids.tolist(), *(ids + 1).tolist()]
    assert all(each["mask"] == [value % 3 == 0 for value in each["ids"]] for each in expected)
    require_each_once_and_resumed(expected, "documents", olmo_folder, MASK, tmp_path / "state", "uint16")


def test_grain_reads_documents_of_a_stream_with_masks_and_metadata(stream, tmp_path):
    expected = documents_of(stream, MASK)
    assert expected[5] == {"ids": [*range(5, 11)], "id": "d5", "metadata": {"lang": "de"}, "mask": [1, 0] * 3}
    require_each_once_and_resumed(expected, "documents", stream, MASK, tmp_path / "state")


def test_grain_reads_records_of_a_store_with_masks_and_metadata(stream, tmp_path):
    convert(stream, "hdf5", tmp_path / "h5", seq_len=64, batch_size=2, packing="best-fit")
    with StoreRecords(tmp_path / "h5", fields=(MASK,), documents=True, metadata=True) as source:
        records = [json.dumps(record, default=np.ndarray.tolist) for record in source]
    expected = [json.loads(record) for record in records]
    assert any({"lang": "fr"} in each["metadata"] for each in expected)
    assert len(expected) > TAKEN
    require_each_once_and_resumed(expected, "records", tmp_path / "h5", MASK, tmp_path / "state")
