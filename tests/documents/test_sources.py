"""The source of each segment: the file that its document came from, by the place of its name among all names."""

import json
import pickle
from itertools import pairwise

import numpy as np
import pytest
from contract import is_refused

from zb_hdf5 import ArgumentError, BatchIndexError, DocumentLoader, Loader, MixedLoader, convert, open_corpus

ALONE = {"rank": 0, "world_size": 1}
END = 256  # of the tokenizer of bytes
BOTH = ("cu_seqlens", "documents", "sources")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three files; each document repeats the name of its file, so that every token tells it."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(7)
    for name in "abc":
        lines = [json.dumps({"text": name * int(count)}) for count in rng.integers(1, 60, 40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def corpora(texts, tmp_path_factory):
    """A store of shuffled rows with two splits, and streams of one table and of several."""
    folder = tmp_path_factory.mktemp("corpora")
    rows = {"batch_size": 4, "seq_len": 32, "shuffle": True, "seed": 3, "val_fraction": 0.2}
    convert(texts, "hdf5", folder / "rows", tokenizer="byte", **rows)
    convert(texts, "hdf5", folder / "cut", tokenizer="byte", batch_size=4, seq_len=32)
    convert(texts, "stream", folder / "one", tokenizer="byte", shards=1)
    convert(texts, "stream", folder / "several", tokenizer="byte", shards=4)
    return folder


def require_true_sources(loader, steps):
    """Compare the source of each segment with its own tokens, and with the facts of its document."""
    seen = set()
    documents = loader.batches.corpus.documents
    for _ in range(steps):
        step = next(loader)
        edges = step["cu_seqlens"].tolist()
        tokens = step["tokens"].reshape(-1).tolist()
        assert len(step["sources"]) == len(step["documents"]) == len(edges) - 1
        facts = zip(pairwise(edges), step["documents"].tolist(), step["sources"].tolist(), strict=True)
        for (start, stop), number, source in facts:
            if number < 0:
                assert source == -1
                continue
            name = loader.sources[source]
            assert name == documents[number].source
            letters = {chr(token) for token in tokens[start:stop] if token != END}
            assert letters <= {name.rpartition("/")[2][0]}
            seen |= letters
    assert seen == set("abc")


@pytest.mark.parametrize("shuffle", ["global", "records", "sequential"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rows", {}),
        ("rows", {"split": "val"}),
        ("rows", {"split": None}),
        ("cut", {"seq_len": 16, "targets": True}),
        ("one", {"batch_size": 4, "seq_len": 32}),
        ("several", {"batch_size": 4, "seq_len": 32, "targets": True}),
    ],
)
def test_each_segment_has_the_source_that_its_tokens_tell(corpora, name, options, shuffle):
    with Loader(corpora / name, documents=BOTH, shuffle=shuffle, **options, **ALONE) as loader:
        require_true_sources(loader, len(loader))


def test_a_resumed_loader_gives_the_same_sources(corpora):
    options = {"batch_size": 4, "seq_len": 32, "documents": BOTH}
    with Loader(corpora / "several", **options, **ALONE) as loader:
        expected = [next(loader)["sources"].tolist() for _ in range(6)]
        next(iter(loader))
    with Loader(corpora / "several", **options, **ALONE) as loader:
        [next(loader) for _ in range(3)]
        state = loader.state_dict()
        copy = pickle.loads(pickle.dumps(loader))
    with copy, Loader(corpora / "several", **options, **ALONE) as other:
        other.load_state_dict(state)
        for again in (other, copy):
            assert [next(again)["sources"].tolist() for _ in range(3)] == expected[3:]


def test_documents_tell_the_sources_of_numbers_of_any_shape(corpora):
    with open_corpus(corpora / "several") as corpus:
        documents = corpus.documents
        numbers = np.random.default_rng(5).integers(0, len(documents), (3, 20))
        names = [[documents.sources[place] for place in row] for row in documents.source_of(numbers).tolist()]
        assert names == [[documents[number].source for number in row] for row in numbers.tolist()]
        assert documents.source_of([-1, 0]).tolist() == [-1, 0]
        assert documents.source_of([]).shape == (0,)
        for number in (-2, len(documents)):
            is_refused(BatchIndexError, lambda number=number: documents.source_of(number), match="no document")


def test_whole_documents_and_mixtures_have_their_sources(corpora):
    stored = open_corpus(corpora / "one").documents
    with DocumentLoader(corpora / "one", batch_size=8, collate="pad", **ALONE) as loader:
        step = next(loader)
    for row, place in zip(step["tokens"].tolist(), stored.source_of(step["documents"]).tolist(), strict=True):
        assert chr(row[0]) == stored.sources[place].rpartition("/")[2][0]
    paths = {"x": corpora / "one", "y": corpora / "several"}
    options = {"batch_size": 4, "seq_len": 32, "documents": BOTH}
    with MixedLoader(paths, {"x": 1, "y": 1}, **options, **ALONE) as mixed:
        names = mixed.loaders["x"].sources
        assert names == mixed.loaders["y"].sources
        step = next(mixed)
        for start, place in zip(step["cu_seqlens"].tolist(), step["sources"].tolist(), strict=False):
            token = int(step["tokens"].reshape(-1)[start])
            assert place == -1 or token == END or chr(token) == names[place].rpartition("/")[2][0]


def test_sources_that_are_not_stored_are_refused(corpora, tmp_path):
    """Megatron's files tell documents apart, and not where these came from."""
    convert(corpora / "one", "megatron", tmp_path / "out")
    options = {"batch_size": 2, "seq_len": 8, **ALONE}
    with Loader(tmp_path / "out", documents=("documents",), **options) as loader:
        assert loader.sources == []
        assert loader.batches.corpus.documents.source_of([[0, 1]]).tolist() == [[-1, -1]]
    is_refused(ArgumentError, lambda: Loader(tmp_path / "out", documents=("sources",), **options), match="no sources")
