"""The files of a corpus: where each lies, its tokens, and its digests, stored or made."""

import hashlib
import pickle

import numpy as np
import pytest
from contract import random_tokens

from zb_hdf5 import ReadAs, ShardIndex, convert, open_corpus, open_writer, verify_store, write_digests
from zb_hdf5.formats.corpus_file import CorpusFile, CorpusFiles
from zb_hdf5.spec import NO_SHA256


def sha256_of(ids):
    return hashlib.sha256(np.ascontiguousarray(ids)).hexdigest()


@pytest.fixture
def arrays(tmp_path):
    """A folder of two `.npy` files, one of them in a folder of its own, and the ids of each."""
    ids = {"a.npy": np.arange(300, dtype="<u2"), "b/0.npy": np.arange(200, dtype="<u2")}
    for name, each in ids.items():
        (tmp_path / "arrays" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "arrays" / name, each)
    return tmp_path / "arrays", ids


def test_files_of_a_store_have_the_facts_of_its_index(tmp_path, write_store):
    folder = write_store(tmp_path / "store", random_tokens(8, 4, 64), [3, 6])
    entries = ShardIndex.load(folder).shards
    with open_corpus(folder) as corpus:
        assert [(file.name, file.num_tokens, file.sha256) for file in corpus.files] == [
            (entry.path, entry.token_count, entry.sha256) for entry in entries
        ]
        assert [file.path for file in corpus.files] == [entry.file(folder) for entry in entries]
        assert corpus.files[-1] == corpus.files[1:][-1] == CorpusFile(folder, *corpus.files[2][1:])
        assert sum(file.num_tokens for file in corpus.files) == len(corpus)
        with pytest.raises(IndexError):
            corpus.files[3]


def test_files_in_no_store_have_the_digests_that_were_made(arrays, tmp_path):
    folder, ids = arrays
    made = write_digests(folder, tmp_path / "x.json").files
    with open_corpus(folder) as corpus:
        assert [tuple(file) for file in corpus.files] == [
            (folder, name, len(each), None, None) for name, each in ids.items()
        ]
    with open_corpus(folder, read_as=ReadAs(digests=tmp_path / "x.json")) as corpus:
        assert [(file.path, file.made) for file in corpus.files] == [(folder / name, made[name]) for name in ids]
        assert [file.sha256 for file in corpus.files] == [*map(sha256_of, ids.values())]


@pytest.mark.parametrize("target", ["hdf5", "batch"])
def test_a_lone_file_is_the_one_file_of_its_corpus(target, tmp_path):
    rows = np.arange(16 * 8, dtype="<u4").reshape(16, 8)
    np.save(tmp_path / "rows.npy", rows)
    path = tmp_path / f"lone.{'h5' if target == 'hdf5' else 'batch'}"
    convert(tmp_path / "rows.npy", target, path, batch_size=4, shuffle=False, dtype="uint32")
    with open_corpus(path) as corpus:
        [file] = corpus.files
        assert (file.path, file.name, file.num_tokens, file.made) == (path, path.name, rows.size, None)
        assert file.sha256 == corpus.sha256 == (sha256_of(rows) if target == "hdf5" else None)


def test_a_growing_shard_is_where_its_bytes_are(tmp_path):
    folder = tmp_path / "live"
    with open_writer(folder, batch_size=2, seq_len=8, dtype="uint16", live=True, shard_batches=2) as writer:
        writer.write(np.zeros((3, 2, 8), np.uint16))
        with open_corpus(folder) as corpus:
            assert [file.name for file in corpus.files] == ["shard-00000.h5", "shard-00001.h5.partial"]
            assert all(file.path.exists() for file in corpus.files)
            assert [file.sha256 is None for file in corpus.files] == [False, True]
        assert [report.path for report in verify_store(folder)] == [str(file.path) for file in corpus.files]


class Asked(list):
    """Names, and the numbers of those that somebody has asked for."""

    def __init__(self, names):
        super().__init__(names)
        self.numbers = []

    def __getitem__(self, number):
        self.numbers.append(number)
        return super().__getitem__(number)


def test_no_file_of_many_is_made_before_it_is_asked_for(tmp_path):
    names = Asked(f"shard-{number:05}.h5" for number in range(100_000))
    files = CorpusFiles(tmp_path, names, np.full(100_000, 7), [NO_SHA256] * 100_000, {})
    assert (len(files), len(names.numbers), "100,000 files" in repr(files)) == (100_000, 0, True)
    assert files[99_999] == CorpusFile(tmp_path, "shard-99999.h5", 7)
    assert names.numbers == [99_999]


def test_a_copy_of_a_corpus_carries_no_files(tmp_path, write_store):
    folder = write_store(tmp_path / "store", random_tokens(4, 4, 64), [2])
    with open_corpus(folder) as corpus:
        before = pickle.dumps(corpus)
        assert len([*corpus.files]) == 2
        assert pickle.dumps(corpus) == before
        assert b"CorpusFile" not in before
