"""A format of another trainer that is read in place: one class in `FORMATS`, and one row in `HOLDERS`."""

import numpy as np
import pytest
import torch
from contract import random_tokens

from zb_hdf5 import Loader, errors, open_reader, open_stream
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.files.tokens import open_extents
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.registry import FORMATS, FileFormat
from zb_hdf5.spec import NO_SHA256, STREAM_LAYOUT, StoreMeta
from zb_hdf5.store.holders import HOLDERS, Holder, Opening
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shard_table import ShardEntry

CHUNK_TOKENS = 64
META = StoreMeta(1, CHUNK_TOKENS, np.dtype("<u2"), layout=STREAM_LAYOUT)


class BinFormat(FileFormat):
    """A file of uint16 tokens without a header, as nanoGPT has it."""

    name = "bare"
    suffix = ".bin"
    holds_batches = False
    tokens_only = True

    def open_column(self, path, meta, access, *, identity=None, read_as=None, column=None):
        num_bytes = path.stat().st_size
        extents = Extents([Run(0, num_bytes, 1)], num_bytes)
        tokens = open_extents(path, extents, meta.dtype, num_bytes // 2, access, identity)
        return BatchReader(path, meta, -(-num_bytes // 2 // CHUNK_TOKENS), tokens)


class BinHolder(Holder):
    """A folder of such files."""

    name = "bare"

    def find(self, look, backend, read_as, split):
        path = look.path
        if path.is_dir() and any(path.glob("*.bin")):
            return Opening(path, self.name, STREAM_LAYOUT, "bare")
        return None

    def stream_index(self, opening):
        entries = []
        for file in sorted(opening.path.glob("*.bin")):
            count = file.stat().st_size // 2
            entries.append(ShardEntry(file.name, "bare", 0, -(-count // CHUNK_TOKENS), count, NO_SHA256))
        return ShardIndex(META, entries)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of two files of the new format, and its tokens."""
    monkeypatch.setitem(FORMATS, "bare", BinFormat())
    monkeypatch.setattr("zb_hdf5.store.holders.HOLDERS", {"bare": BinHolder(), **HOLDERS})
    tokens = random_tokens(1, 1, 1777).reshape(-1).astype(np.uint16)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.bin").write_bytes(tokens[:1000].tobytes())
    (tmp_path / "corpus" / "b.bin").write_bytes(tokens[1000:].tobytes())
    return tmp_path / "corpus", tokens


def test_it_is_a_stream_with_windows_a_loader_and_states(folder):
    path, tokens = folder
    with open_stream(path) as stream:
        np.testing.assert_array_equal(stream.get_slice(900, 1100), tokens[900:1100])
    with open_reader(path, batch_size=2, seq_len=50, overlap=1) as reader:
        assert (reader.backend, reader.layout, reader.num_batches) == ("bare", "stream", 17)
        np.testing.assert_array_equal(reader.read_batch(10), [tokens[1000:1051], tokens[1050:1101]])
    options = {"batch_size": 2, "seq_len": 50, "rank": 0, "world_size": 1}
    with Loader(path, **options) as first, Loader(path, **options) as second:
        next(first)
        second.load_state_dict(first.state_dict())
        assert torch.equal(next(first), next(second))


def test_its_windows_need_a_shape(folder):
    with pytest.raises(errors.ArgumentError, match="is a token stream: pass batch_size and seq_len"):
        open_reader(folder[0])
