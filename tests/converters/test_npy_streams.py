"""`.npy` streams with a boundary token: their documents are known in the stream, and in batches that are made of it."""

import numpy as np
import pytest
from commandline import run as run_command
from commandline import succeed
from hypothesis import given
from hypothesis import strategies as st
from interrupted import Failing, Stops

from examples import examples
from zb_hdf5 import ArgumentError, ConvertError, Loader, MmapTokenStore, ShardIndex, convert
from zb_hdf5.converters import npy_source
from zb_hdf5.converters.cli import convert as command
from zb_hdf5.store.verify import verify_store

END = 9


def reference(tokens, boundary):
    """Cut a list of tokens one by one."""
    documents, current = [], []
    for token in tokens:
        if boundary == "before" and token == END and current:
            documents.append(current)
            current = []
        current.append(token)
        if boundary == "after" and token == END:
            documents.append(current)
            current = []
    return [*documents, current] if current else documents


def save(folder, *streams, dtype="u2"):
    folder.mkdir()
    for number, tokens in enumerate(streams):
        np.save(folder / f"part-{number}.npy", np.array(tokens, dtype))
    return folder


@examples(20)
@given(
    st.lists(st.lists(st.integers(0, END), max_size=40), min_size=1, max_size=3).filter(any),
    st.sampled_from(["after", "before"]),
    st.integers(1, 7),
)
def test_documents_are_those_of_a_cut_token_by_token(tmp_path_factory, streams, boundary, block):
    folder = tmp_path_factory.mktemp("npy")
    source = save(folder / "tokens", *streams)
    before, npy_source.BLOCK_TOKENS = npy_source.BLOCK_TOKENS, block  # documents straddle blocks
    try:
        report = convert([source], "stream", folder / "stream", boundary_token_id=END, boundary=boundary)
    finally:
        npy_source.BLOCK_TOKENS = before
    expected = [(number, document) for number, tokens in enumerate(streams) for document in reference(tokens, boundary)]
    assert report.counts.documents == len(expected)
    with MmapTokenStore(folder / "stream") as store:
        assert store.boundary_token_id == END
        assert [store.document(k).tolist() for k in range(store.document_count)] == [each for _, each in expected]
        places = [store.documents.document(k) for k in range(store.document_count)]
    assert [place.source for place in places] == [str(source / f"part-{number}.npy") for number, _ in expected]
    counts = [0] * len(streams)
    for place, (number, _) in zip(places, expected, strict=True):
        counts[number] += 1
        assert place.row == counts[number]
    assert not [each.problem for each in verify_store(folder / "stream") if each.problem]


def test_packed_batches_know_their_documents(tmp_path):
    streams = [[1, 2, END, 3, END], [4, 5, 6, 7, END, 8]]
    convert([save(tmp_path / "tokens", *streams)], "stream", tmp_path / "stream", boundary_token_id=END)
    how = {"batch_size": 3, "seq_len": 4, "shuffle": False, "packing": "concat", "remainder": "pad"}
    convert(tmp_path / "stream", "hdf5", tmp_path / "batches", **how)
    with Loader(tmp_path / "batches", shuffle="sequential", documents=("documents", "document_ids")) as loader:
        step = next(iter(loader))
    assert step["tokens"].tolist() == [[1, 2, END, 3], [END, 4, 5, 6], [END, END, END, END]]
    assert step["document_ids"].tolist() == [[0, 0, 0, 1], [2, 3, 3, 3], [-1] * 4]
    assert step["documents"].tolist() == [0, 1, 1, 2, -1]


def test_an_interrupted_run_goes_on(tmp_path):
    source = save(tmp_path / "tokens", [1, END, 2], [3, END], [4, END])
    with pytest.raises(Stops):
        convert([source], "stream", tmp_path / "stream", boundary_token_id=END, engine=Failing(2))
    with pytest.raises(ConvertError, match="resume"):
        convert([source], "stream", tmp_path / "stream", boundary_token_id=END)
    with pytest.raises(ConvertError, match="other"):
        convert([source], "stream", tmp_path / "stream", boundary_token_id=1, resume=True)
    report = convert([source], "stream", tmp_path / "stream", boundary_token_id=END, resume=True)
    assert report.kept.shards == 2
    arguments = ["npy-to-stream", source, tmp_path / "whole", "--boundary-token-id", END]
    assert "documents  4" in succeed(command, *arguments).output
    assert ShardIndex.load(tmp_path / "whole").sha256 == report.sha256
    again = run_command(command, *arguments)
    assert (again.exit_code, "exists" in again.output) == (1, True)


@pytest.mark.parametrize(("tokens", "how", "message"), [
    (np.array([[1, 2]]), {}, r"expected a 1-D stream of tokens, found shape \(1, 2\)"),
    (np.array([1.0]), {}, "integer"),
    (np.array([], "u2"), {}, "no documents in 1 file"),
    (np.array([1, 7]), {"vocab_size": 7}, r"a\.npy: .*7"),
    (np.array([1, 70_000]), {"dtype": "uint16"}, r"a\.npy: .*70,?000"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused(tmp_path, tokens, how, message):
    np.save(tmp_path / "a.npy", tokens)
    with pytest.raises((ConvertError, ArgumentError), match=message):
        convert([tmp_path / "a.npy"], "stream", tmp_path / "stream", boundary_token_id=1, **how)
    assert not (tmp_path / "stream").exists()
