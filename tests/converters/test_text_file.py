"""Text to tokens: routing documents to shards, boundary tokens, long documents; the same whatever the shards."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zb_hdf5 import ArgumentError, ConvertError
from zb_hdf5.converters.documents import TRAIN, VAL, Recipe, TextSource, route
from zb_hdf5.converters.source import Counts
from zb_hdf5.text import corpus as documents
from zb_hdf5.text.corpus import open_documents
from zb_hdf5.text.tokenizers import load_tokenizer

WITH_BOUNDARY = Recipe("byte", 256)


@pytest.fixture(scope="module")
def texts():
    return [f"document {number} " * (1 + number % 5) for number in range(200)]


@pytest.fixture
def files(tmp_path, texts, monkeypatch):
    """Return three files of JSON lines, of 5, 3 and 1 row groups or so."""
    monkeypatch.setattr(documents, "ROW_GROUP_BYTES", 1500)
    for name, part in (("a", texts[:120]), ("b", texts[120:190]), ("c", texts[190:])):
        lines = [json.dumps({"text": text}) for text in part]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines[:3], "bad", *lines[3:], '{"text": ""}']) + "\n")
    return open_documents([tmp_path])


def encode(files, plan, recipe=WITH_BOUNDARY, num_threads=1):
    """Return the documents of a shard as lists of ids, and their counts."""
    counts, found, before = Counts(), [], 0
    for encoded, read in plan.read(TextSource(files, "jsonl", recipe), num_threads, counts):
        assert before <= read <= plan.num_bytes
        before = read
        found += [part.tolist() for part in np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])]
    return found, counts


def tokens_of(texts):
    return [[*text.encode(), 256] for text in texts]


@pytest.mark.parametrize("num_shards", [1, 4])
def test_held_out_documents_do_not_depend_on_the_shards(files, texts, num_shards):
    *train, val = route(TextSource(files, "jsonl", WITH_BOUNDARY), num_shards, val_fraction=0.2, seed=7)
    assert ([plan.split for plan in train], val.split) == ([TRAIN] * num_shards, VAL)
    kept = [document for plan in train for document in encode(files, plan)[0]]
    held_out, counts = encode(files, val)
    again = encode(files, route(TextSource(files, "jsonl", WITH_BOUNDARY), val_fraction=0.2, seed=7)[-1])[0]
    assert held_out == again
    assert sorted(kept + held_out) == sorted(tokens_of(texts))
    assert 20 <= len(held_out) <= 60
    assert not counts.documents_dropped.counts, "counted in the shards of the training documents"
    assert encode(files, route(TextSource(files, "jsonl", WITH_BOUNDARY), val_fraction=0.2, seed=8)[-1])[0] != held_out


@pytest.mark.parametrize("boundary", [None, 256])
@given(st.lists(st.text(min_size=1), min_size=1, max_size=8), st.integers(1, 12))
def test_long_documents_are_cut(boundary, texts, limit):
    tokens, lengths, cut = Recipe("byte", boundary, limit).encode(load_tokenizer("byte"), texts, 1)
    end = [] if boundary is None else [boundary]
    whole = [text.encode("utf-8", "surrogatepass") for text in texts]
    expected = [[*document[:limit], *end] for document in whole]
    assert tokens.tolist() == [token for document in expected for token in document]
    assert lengths.tolist() == [len(document) for document in expected]
    assert cut == sum(max(0, len(document) - limit) for document in whole)


def test_routing_errors(files):
    groups = sum(file.num_row_groups for file in files)
    with pytest.raises(ConvertError, match=f"{groups} row groups cannot fill {groups + 1} shards"):
        route(TextSource(files, "jsonl", WITH_BOUNDARY), groups + 1)
    assert [len(plan.groups) for plan in route(TextSource(files, "jsonl", WITH_BOUNDARY), groups)] == [1] * groups
    with pytest.raises(ArgumentError, match="must be at least 0 and below 1, found 1"):
        route(TextSource(files, "jsonl", WITH_BOUNDARY), val_fraction=1)
    with pytest.raises(ArgumentError, match="not both"):
        route(TextSource(files, "jsonl", WITH_BOUNDARY), val_fraction=0.1, val_last_shard=True)
    with pytest.raises(ConvertError, match="leaves nothing to train on"):
        route(TextSource(files, "jsonl", WITH_BOUNDARY), 1, val_last_shard=True)
