"""Fingerprints, orders, states, opens and written bytes of every kind of path, plans, reports. See `pins.py`."""

import json
from dataclasses import replace

import golden
import numpy as np
import pins
import pytest
from reading import reading

from zb_hdf5 import open_corpus, verify_store, write_digests
from zb_hdf5.store.found_path import found_at, look_of
from zb_hdf5.store.found_store import FoundStore
from zb_hdf5.store.recognition import files_in_place

CASES = pins.cases()
PINNED = pins.load()
REMEDY = "run `python tests/pins.py` as its docstring says: it adds the new cases alone"


@pytest.fixture(scope="module")
def folder(pinned_kinds):
    return pinned_kinds


def more_opens(case, pinned, found):
    """Return the files that are opened more often than before; those that are opened less often are taken over."""
    if "opens" not in found:
        return []
    before = pinned["opens"]
    more = {name: count for name, count in found["opens"].items() if count > before.get(name, 0)}
    found["opens"] = before
    return [f"{case}: opens of {name}: {before.get(name, 0)} -> {count}" for name, count in more.items()]


def test_every_case_is_pinned():
    served = {f"served/{name}" for name in pins.SERVED}  # which remote/test_requests.py compares
    assert CASES.keys() | served == PINNED.keys(), REMEDY


# "bench" is slow: it times reads for a second, and prepares them for two; test_bench.py has its report each day
@pytest.mark.filterwarnings("ignore:channel 1 is taken")
@pytest.mark.parametrize(
    "group", ["facts", "reports", "bytes", "plans", "jobs", "shapes", pytest.param("bench", marks=pytest.mark.slow)]
)
def test_facts_are_those_of_earlier_builds(group, folder):
    different = []
    for case, make in CASES.items():
        if case.startswith(f"{group}/"):
            found = json.loads(json.dumps(make(folder)))
            different += more_opens(case, PINNED[case], found)
            different += [f"{case}: {fact}" for fact in golden.differences({"": PINNED[case]}, {"": found})]
    assert not different


@pytest.mark.filterwarnings("ignore:channel 1 is taken")
def test_files_that_are_verified_are_those_that_are_opened(folder):
    compared = []
    for name, kind in pins.kinds().items():
        options = reading(kind.options)
        with look_of(folder / kind.path) as look:
            found = found_at(look.path, look=look, **{**options, "split": None})
            if not kind.digests and not isinstance(found, FoundStore):
                files = files_in_place(look, found.read_as)
                assert (files.code.name, tuple(files.files)) == (found.backend, found.files or (look.text,)), name
                compared.append(found.backend)
    assert {"npy", "megatron", "datatrove", "olmo", "bin", "batch", "hdf5"} <= {*compared}


@pytest.mark.filterwarnings("ignore:channel 1 is taken")
def test_each_file_of_a_corpus_is_verified_by_its_digest(folder, tmp_path):
    compared = 0
    for name, kind in pins.kinds().items():
        path = folder / kind.path
        options = reading({**kind.options, "split": None})
        if kind.digests:
            write_digests(path, tmp_path / f"{name}.json", read_as=options["read_as"])
            options["read_as"] = replace(options["read_as"], digests=tmp_path / f"{name}.json")
        reports = {report.path: report for report in verify_store(path, read_as=options["read_as"])}
        with open_corpus(path, **options) as corpus:
            files = {str(file.path): file for file in corpus.files}
        tables = {path for path, report in reports.items() if report.document_count}
        others = {path for path in reports if name.startswith("both-formats") and not path.startswith(str(corpus.path))}
        assert reports.keys() - tables - others == files.keys(), name
        for place, file in files.items():
            assert file.sha256 in (None, reports[place].sha256), (name, place)
            assert (file.made is not None) == kind.digests, (name, place)
            compared += file.sha256 is not None
    assert compared > 40


@pytest.mark.filterwarnings("ignore:channel 1 is taken")
def test_nothing_but_refresh_changes_a_corpus(folder):
    for name, kind in pins.kinds().items():
        if kind.digests:
            continue
        with open_corpus(folder / kind.path, **reading(kind.options)) as corpus:
            before = dict(vars(corpus))
            batches = corpus.batches(**({} if corpus.windows else pins.WINDOWS))
            _ = corpus.fingerprint, batches.fingerprint, batches[0], corpus.documents, len(corpus.files), repr(corpus)
            for each in corpus.fields:
                _ = corpus.field(each.name).tokens[:1]
            _ = corpus.cached(lambda corpus: corpus.tokens), corpus.with_verify("none")
            may_grow = corpus.is_stream or not corpus.complete
            assert may_grow or corpus.refresh() == corpus.num_tokens
            assert not [key for key, value in before.items() if vars(corpus)[key] is not value], name


@pytest.mark.filterwarnings("ignore:channel 1 is taken")
def test_a_corpus_has_the_edges_the_split_and_the_format_of_each_of_its_files(folder):
    splits = {}
    for name, kind in pins.kinds().items():
        if kind.digests:
            continue
        with open_corpus(folder / kind.path, **reading({**kind.options, "split": None})) as corpus:
            sizes = [file.num_tokens for file in corpus.files]
            edges = [0, *np.cumsum(sizes).tolist()]
            assert (corpus.file_edges[:-1], corpus.file_edges[-1]) == (edges[:-1], corpus.num_tokens), name
            assert len(corpus.file_splits) == len(sizes)
            assert corpus.backends == [corpus.backend]
            assert corpus.is_cut or not corpus.is_stream
            assert sum(tokens for _, tokens in corpus.compressed_files) == (edges[-1] if name == "compressed" else 0)
            splits[name] = {*corpus.file_splits}
    assert splits.pop("text-store") == {"train", "val"}
    assert all(found == {"train"} for found in splits.values())
