"""Batches of pieces of documents at random places, with all that can be stored beside them, and what is where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from zb_hdf5 import open_writer
from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.documents.pieces import Pieces, ends_of
from zb_hdf5.documents.table_writer import DocumentsWriter, PiecesWriter
from zb_hdf5.spec import NO_DOCUMENT, documents_path

FIELDS = {"mask": "u1", "vector": ("f4", (2,)), "mark": "S1", "both": [("x", "u1"), ("y", "f4")]}


class Packed(NamedTuple):
    """A file of batches, and its content."""

    path: Path
    cells: list[list[tuple[int, int, int]]]  # (token, document, place in it) of each column; padding is of document -1
    documents: list[list[int]]  # their tokens
    spans: dict[int, list[tuple[int, int, Any]]]  # (start, stop, value), by document
    fields: dict[str, np.ndarray]  # values of shape (R, S, ...)

    def held(self, document: int) -> list[tuple[int, int]]:
        """Return (place, token) of the tokens of a document that are in the file."""
        return sorted((place, token) for row in self.cells for token, of, place in row if of == document)


def damage_table(path, name="offsets"):
    """Flip a bit of the first row of a dataset; called again, it is as it was."""
    with h5py.File(path) as h5:
        at = h5[name].id.get_offset()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def write_packed(path, lengths, *, seq_len=8, batch_size=2, seed=0, vocab=50, lost=0.2) -> Packed:
    """Write documents of these lengths in pieces, in any order; a share of the pieces is lost."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, vocab, length).tolist() for length in lengths]
    chunks = []
    for number, length in enumerate(lengths):
        some = rng.integers(0, length + 1, rng.integers(0, 3)).tolist()
        cuts = sorted({0, length, *some, *range(0, length, seq_len)})
        chunks += [(number, a, b) for a, b in zip(cuts, cuts[1:], strict=False) if rng.random() >= lost]  # noqa: RUF007
    rng.shuffle(chunks)
    cells = []
    pieces = []
    for number, a, b in chunks:
        if not cells or len(cells[-1]) + b - a > seq_len:
            cells.append([])
            pieces.append([])
        if not cells[-1] or cells[-1][-1][1:] != (number, a - 1):  # else the piece before goes on
            pieces[-1].append((len(cells[-1]), sum(lengths[:number]) + a))
        cells[-1] += [(documents[number][place], number, place) for place in range(a, b)]
    while not cells or len(cells) % batch_size:
        cells.append([])
        pieces.append([])
    for row, found in zip(cells, pieces, strict=True):
        if len(row) < seq_len:
            found.append((len(row), NO_DOCUMENT))
            row += [(0, -1, 0)] * (seq_len - len(row))
    spans = _spans(documents, rng)
    fields = _field_values(np.array([[of * 100 + place for _, of, place in row] for row in cells]))
    _write(Path(path), cells, pieces, lengths, spans, fields, batch_size)
    return Packed(Path(path), cells, documents, spans, fields)


def _spans(documents, rng):
    found = {}
    for number, tokens in enumerate(documents):
        edges = sorted(set(rng.integers(0, len(tokens) + 1, 4).tolist()))
        pairs = list(zip(edges, edges[1:], strict=False))[:: rng.integers(1, 3)]  # noqa: RUF007
        found[number] = [(a, b, {"document": number, "span": k}) for k, (a, b) in enumerate(pairs)]
    return found


def _field_values(seeds):
    both = np.zeros(seeds.shape, np.dtype(FIELDS["both"]))
    both["x"] = seeds % 7
    both["y"] = seeds / 4
    marks = np.array([b"a", b"b", b"c"])[seeds % 3]
    vector = np.stack([seeds, -seeds], axis=-1).astype("f4")
    return {"mask": (seeds % 2).astype("u1"), "vector": vector, "mark": marks, "both": both}


def _write(path, cells, pieces, lengths, spans, fields, batch_size):
    flat = np.array([[token for token, _, _ in row] for row in cells], np.uint16)
    tokens = flat.reshape(-1, batch_size, len(cells[0]))
    shape = {"batch_size": batch_size, "seq_len": len(cells[0]), "dtype": "uint16"}
    with open_writer(path, **shape, fields={name: FIELDS[name] for name in fields}) as writer:
        values = {name: each.reshape(*tokens.shape, *each.shape[2:]) for name, each in fields.items()}
        writer.write(tokens, fields=values)
        sha256 = writer.finish().sha256
    flat = np.array([piece for found in pieces for piece in found], object).reshape(-1, 2)
    ends = ends_of(np.array([len(found) for found in pieces]))
    writer = PiecesWriter(path)
    writer.append_pieces(Pieces(ends, flat[:, 0].astype("u4"), flat[:, 1].astype("u8"), len(cells[0])))
    writer.publish(seq_len=len(cells[0]), split="train", tokens_sha256=sha256)
    table = DocumentsWriter(documents_path(path))
    for number, length in enumerate(lengths):
        rows = DocumentRows(
            names=[f"{number % 2}.jsonl"],
            sources=np.zeros(1, "u4"),
            rows=np.array([number + 1], "u8"),
            ids=[f"id-{number}".encode()],
            metadata=[json.dumps({"n": number}).encode()],
        )
        table.append_documents([length], rows)
        start = table.token_count - length
        starts, stops = (np.array([start + span[k] for span in spans[number]], np.int64) for k in (0, 1))
        table.append_spans(starts, stops, [json.dumps(value).encode() for *_, value in spans[number]])
    table.publish(tokens_sha256=sha256)


def tokens_of(pieces):
    """Return (piece, offset or None for padding, position in the piece) of each token, row by row."""
    rows = []
    for row in range(pieces.num_records):
        cells = []
        for piece in range(pieces.ends[row], pieces.ends[row + 1]):
            last = piece + 1 == pieces.ends[row + 1]
            length = (pieces.seq_len if last else int(pieces.columns[piece + 1])) - int(pieces.columns[piece])
            offset = int(pieces.offsets[piece])
            for place in range(length):
                cells.append((piece, None if offset == NO_DOCUMENT else offset + place, place))
        assert len(cells) == pieces.seq_len
        rows.append(cells)
    return rows


def require_same_pieces(found, expected):
    assert (found.ends.dtype, found.columns.dtype, found.offsets.dtype) == (np.int64, np.uint32, np.uint64)
    assert found.seq_len == expected.seq_len
    for name in ("ends", "columns", "offsets"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def places_of(packing):
    """Return the row of each piece of a `Packing`, and the column of its first token."""
    counts = np.diff(packing.first)
    before = np.cumsum(packing.lengths) - packing.lengths
    return np.repeat(np.arange(packing.num_rows), counts), before - np.repeat(before[packing.first[:-1]], counts)
