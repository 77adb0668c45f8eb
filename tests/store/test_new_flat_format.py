"""A format of another trainer that is read in place: one class, and one row of `FORMATS`."""

import numpy as np
import pytest
import torch
from contract import random_tokens

from zb_hdf5 import Loader, errors, open_corpus, open_reader
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.store.format_list import FORMATS


class BareFiles(FlatFormat):
    """Files of uint16 tokens without a header."""

    sign = ""

    def fits(self, look):
        return True

    def facts(self, look):
        return FlatFacts(look.text, look.num_bytes // 2, np.dtype("<u2"), identity=look.identity)


ROW = FormatRow(
    name="bare", noun="bare files", suffixes=(".bare",), place=f"{__name__}:BareFiles", is_flat=True,
    holds_documents=False,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of two files of the new format, and its tokens."""
    monkeypatch.setitem(FORMATS, "bare", ROW)
    tokens = random_tokens(1, 1, 1777).reshape(-1).astype(np.uint16)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.bare").write_bytes(tokens[:1000].tobytes())
    (tmp_path / "corpus" / "b.bare").write_bytes(tokens[1000:].tobytes())
    return tmp_path / "corpus", tokens


def test_it_is_a_stream_with_windows_a_loader_and_states(folder):
    path, tokens = folder
    with open_corpus(path) as stream:
        np.testing.assert_array_equal(stream.tokens[900:1100], tokens[900:1100])
    with open_reader(path, batch_size=2, seq_len=50, overlap=1) as reader:
        assert (reader.corpus.backend, reader.corpus.layout, reader.num_batches) == ("bare", "stream", 17)
        np.testing.assert_array_equal(reader.read_batch(10), [tokens[1000:1051], tokens[1050:1101]])
    options = {"batch_size": 2, "seq_len": 50, "rank": 0, "world_size": 1}
    with Loader(path, **options) as first, Loader(path, **options) as second:
        next(first)
        second.load_state_dict(first.state_dict())
        assert torch.equal(next(first), next(second))


def test_its_windows_need_a_shape(folder):
    with pytest.raises(errors.ArgumentError, match="is a token stream: pass batch_size and seq_len"):
        open_reader(folder[0])
