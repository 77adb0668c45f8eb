"""Compressed stores behind HTTP: unpacked from ranges, without HDF5 where the index says where they lie."""

import h5py
import numpy as np
import pytest
from contents import batches_of, write_stream

from zb_hdf5 import BackendError, Loader, open_reader, verify_store
from zb_hdf5.store.streams import index_streams

TOKENS = np.random.default_rng(4).choice(np.arange(0, 60_000, 1500), (30, 8, 64)).astype("<u2")


@pytest.mark.parametrize("codec", ["zstd", "gzip"])
def test_a_store_is_read_without_hdf5(codec, served, write_store, monkeypatch, tmp_path):
    folder, url = served
    write_store(folder / "z", TOKENS, (7, 20), codec=codec)
    assert {report.outcome for report in verify_store(f"{url}/z")} == {"verified"}
    with pytest.raises(BackendError, match="needs a file of this machine"):
        open_reader(f"{url}/z", access="mmap")
    monkeypatch.setattr(h5py, "File", None)
    with open_reader(f"{url}/z", verify="batch") as reader:
        assert reader.wants_threads
        np.testing.assert_array_equal(np.stack(list(reader)), TOKENS)
        rows = np.random.default_rng(0).permutation(240)[:40]
        found = np.empty((40, 64), "<u2")
        reader.read_records_into(rows, found)
        np.testing.assert_array_equal(found, TOKENS.reshape(-1, 64)[rows])
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        with Loader(f"{url}/z", shuffle="sequential", rank=0, world_size=1, cache=cache) as loader:
            np.testing.assert_array_equal(np.stack([batch.numpy() for batch in loader]), TOKENS)


def test_lone_files_and_streams_are_read(served, write_file):
    folder, url = served
    write_file(folder / "x.h5", TOKENS, codec="zstd")
    np.testing.assert_array_equal(batches_of(f"{url}/x.h5"), TOKENS)
    (folder / "s").mkdir()
    flat = TOKENS.reshape(-1)
    paths = [folder / "s" / f"shard-0000{k}.h5" for k in range(2)]
    for path, part in zip(paths, np.split(flat, [5000]), strict=True):
        write_stream(path, part, chunk_tokens=512, codec="gzip")
    index_streams(paths).save(folder / "s")
    for name in ("s", "s/shard-00000.h5"):
        with open_reader(f"{url}/{name}", batch_size=3, seq_len=50) as reader:
            found = np.concatenate(list(reader)).reshape(-1)
            np.testing.assert_array_equal(found, flat[: len(found)])
