"""What documents cost on disk, beside the tokens that they are made of."""

import numpy as np

from zb_hdf5.documents.document_table import DocumentRows
from zb_hdf5.documents.document_writer import DocumentsWriter
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.table_file import PiecesWriter

SEQ_LEN, LENGTH, ROWS = 2048, 500, 4000
TOKEN_BYTES = ROWS * SEQ_LEN * 2  # uint16


def test_pieces_take_a_fiftieth_of_the_tokens(tmp_path):
    tokens = ROWS * SEQ_LEN
    starts = np.union1d(np.arange(0, tokens, SEQ_LEN), np.arange(0, tokens, LENGTH))
    ends = starts.searchsorted(np.arange(0, tokens + 1, SEQ_LEN))
    writer = PiecesWriter(tmp_path / "x.h5")
    writer.append_pieces(Pieces(ends, (starts % SEQ_LEN).astype(np.uint32), starts.astype(np.uint64), SEQ_LEN))
    info = writer.publish(seq_len=SEQ_LEN, split="train", tokens_sha256="")
    assert info.path.stat().st_size == info.num_bytes
    assert info.num_bytes <= 0.02 * TOKEN_BYTES


def test_a_document_table_with_sources_and_rows_takes_little_more(tmp_path):
    count = ROWS * SEQ_LEN // LENGTH
    with DocumentsWriter(tmp_path / "d.h5") as writer:
        for start in range(0, count, 1000):
            some = min(1000, count - start)
            rows = np.arange(start + 1, start + some + 1, dtype=np.uint64)
            writer.append([LENGTH] * some, DocumentRows(["a.parquet"], np.zeros(some, np.uint32), rows))
        info = writer.publish()
    assert info.path.stat().st_size == info.num_bytes
    assert info.num_bytes <= 0.022 * TOKEN_BYTES
