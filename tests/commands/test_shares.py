"""Tokens by source, in a store or in steps of a state: equal to counts of what real loaders give in these steps."""

import json
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
from commandline import one_error, report_of, run_zb, succeed
from contents import write_batches
from packed import write_packed
from processes import python

from zb_hdf5 import Loader, MixedLoader, convert, open_corpus
from zb_hdf5.commands.zb import zb
from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.table_writer import DocumentsWriter, PiecesWriter
from zb_hdf5.field_sets.document_words import make_words
from zb_hdf5.spec import documents_path

VALUES = ("cu_seqlens", "documents", "sources", "meta:lang")
WINDOWS = {"batch_size": 3, "seq_len": 20}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Rows and streams of documents of three files, and of two languages, or of none."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "texts").mkdir()
    rng = np.random.default_rng(7)
    for name in "abc":
        rows = [{"text": name * int(size), "lang": (None, "en", "de")[size % 3]} for size in rng.integers(1, 70, 40)]
        (folder / "texts" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"tokenizer": "byte", "metadata_columns": ("lang",)}
    shape = {"batch_size": 4, "seq_len": 32, "shuffle": True, "seed": 3}
    convert(folder / "texts", "hdf5", folder / "rows", val_fraction=0.2, **shape, **how)
    convert(folder / "texts", "stream", folder / "one", shards=1, **how)
    convert(folder / "texts", "stream", folder / "several", shards=4, **how)
    for name in ("rows", "one", "several"):
        with open_corpus(folder / name, split="train") as corpus:
            make_words(corpus, "lang", "lang")
    return folder


def names_of(loader, by):
    return loader.sources if by == "source" else loader.words("lang")


def counted_in(steps, by, names):
    """Return the tokens and the documents of each name in steps of loaders, and the tokens of padding."""
    tokens, documents = Counter(), {}
    for step in steps:
        places = step["sources" if by == "source" else by].tolist()
        sizes = [stop - start for start, stop in pairwise(step["cu_seqlens"].tolist())]
        for number, place, size in zip(step["documents"].tolist(), places, sizes, strict=True):
            name = "padding" if number < 0 else None if place < 0 else names[place]
            tokens[name] += size
            documents.setdefault(name, set()).add(number)
    padding = tokens.pop("padding", 0)
    return {name: (size, len(documents[name])) for name, size in tokens.items()}, padding


def require_counts(report, expected, padding, store=None):
    """Compare a report with counts: groups of which no token is there may be listed."""
    groups = [each for each in report["groups"] if store in (None, each["store"])]
    assert {each["name"]: (each["tokens"], each["documents"]) for each in groups if each["tokens"]} == expected
    if store is None:
        assert report["padding"] == padding
        assert sum(each["percent"] for each in groups) == pytest.approx(100)


def which(stores, state, folder, *arguments, code=0):
    """Return the report of `zb which` about a state."""
    (folder / "state.json").write_text(json.dumps(state))
    return report_of(zb, "which", *stores, "--state", folder / "state.json", *arguments, code=code)


def loaders_of(path, world_size, **options):
    return [Loader(path, rank=rank, world_size=world_size, documents=VALUES, **options) for rank in range(world_size)]


@pytest.mark.parametrize("by", ["source", "meta:lang"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("shuffle", ["global", "records", ("block", 2), "sequential"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rows", {}),
        ("rows", {"seq_len": 8, "batch_size": 5}),
        ("one", WINDOWS),
        ("several", WINDOWS | {"targets": True}),
    ],
)
def test_steps_of_all_ranks_have_the_tokens_that_loaders_give(
    corpora, tmp_path, name, options, shuffle, world_size, by
):
    loaders = loaders_of(corpora / name, world_size, shuffle=shuffle, **options)
    for loader in loaders:
        loader.set_epoch(1)
    steps = [step for loader in loaders for step in islice(iter(loader), 1, len(loader) - 1)]
    size = ["--batch-size", loaders[0].batch_size, "--world-size", world_size]
    asked = ("--steps", f"1:{len(loaders[0]) - 1}", "--by", by, *size)
    report = which([corpora / name], loaders[0].state_dict(), tmp_path, *asked)
    assert report["steps"] == len(loaders[0]) - 2
    require_counts(report, *counted_in(steps, by, names_of(loaders[0], by)))


@pytest.mark.parametrize(("name", "options"), [("rows", {}), ("several", WINDOWS)])
def test_the_steps_before_and_after_a_state_are_those_of_other_ranks_and_batches(corpora, tmp_path, name, options):
    with Loader(corpora / name, shuffle="records", rank=0, world_size=1, **options) as first:
        first.set_epoch(2)
        next(islice(iter(first), 12, None))  # 13 steps of one rank
        state = first.state_dict()
    loaders = loaders_of(corpora / name, 2, shuffle="records", **options | {"batch_size": 2})
    for loader in loaders:
        loader.load_state_dict(state)
    count = 2 * len(loaders[0]) + 3  # into the second epoch after that of the state
    steps = [loader.get_batch() for loader in loaders for _ in range(count)]
    size = ("--batch-size", 2, "--world-size", 2, "--by", "source")
    report = which([corpora / name], state, tmp_path, "--next", count, *size)
    require_counts(report, *counted_in(steps, "source", loaders[0].sources))
    assert loaders[0].epoch == 4
    for loader in loaders:
        loader.load_state_dict(state | {"position": 0})
    past = state["position"] // 4
    steps = [step for loader in loaders for step in islice(iter(loader), past)]
    before = state | {"position": past * 4}
    report = which([corpora / name], before, tmp_path, "--last", past, *size)
    require_counts(report, *counted_in(steps, "source", loaders[0].sources))
    told = which([corpora / name], before, tmp_path, "--last", past + 1, *size, code=2)
    assert f"expected at most {past} steps before the state in its epoch" in told


def test_positions_that_a_state_skips_are_not_counted(corpora, tmp_path):
    skip = [(0, 8, 40), (1, 0, 5)]
    loaders = loaders_of(corpora / "rows", 1, skip=skip)
    steps = [loaders[0].get_batch() for _ in range(len(loaders[0]) + 4)]
    state = loaders[0].state_dict() | {"epoch": 0, "position": 0}
    report = which([corpora / "rows"], state, tmp_path, "--next", len(steps), "--by", "source")
    require_counts(report, *counted_in(steps, "source", loaders[0].sources))


def test_a_whole_epoch_sees_each_source_once_and_two_epochs_twice(corpora, tmp_path):
    with Loader(corpora / "rows", batch_size=1, rank=0, world_size=1) as loader:
        state = loader.state_dict()
    for epochs in (1, 2):
        asked = ("--next", epochs * len(loader), "--batch-size", 1, "--by", "source")
        report = which([corpora / "rows"], state, tmp_path, *asked)
        assert [each["epochs"] for each in report["groups"]] == [epochs] * 3
        whole = report_of(zb, "info", corpora / "rows", "--split", "train", "--by", "source")
        assert [each["tokens"] for each in report["groups"]] == [epochs * each["tokens"] for each in whole["groups"]]


@pytest.mark.parametrize("weights", [{"x": 1, "y": 2}, {"x": 0.3, "y": 0.7}])
@pytest.mark.parametrize("batch_size", [4, 3])
def test_a_mixture_names_its_members_and_their_sources(corpora, tmp_path, weights, batch_size):
    paths = {"x": corpora / "rows", "y": corpora / "rows"}
    options = {"batch_size": batch_size, "shuffle": "records", "seed": 5, "documents": VALUES}
    ranks = [MixedLoader(paths, weights, rank=rank, world_size=2, **options) for rank in range(2)]
    steps = [[next(mixed) for mixed in ranks] for _ in range(20)]
    for mixed in ranks:
        mixed.set_weights({"x": 3, "y": 1})
    steps += [[next(mixed) for mixed in ranks] for _ in range(20)]
    state = ranks[0].state_dict()
    steps += [[next(mixed) for mixed in ranks] for _ in range(30)]
    stores = [f"{name}={path}" for name, path in paths.items()]
    for asked, first, stop in ((("--steps", "5:63"), 5, 63), (("--last", 25), 15, 40), (("--next", 30), 40, 70)):
        report = which(stores, state, tmp_path, *asked, "--world-size", 2, "--by", "source")
        seen = [step for each in steps[first:stop] for step in each]
        expected, padding = counted_in(seen, "source", ranks[0].loaders["x"].sources)
        for name in expected:
            found = [each["tokens"] for each in report["groups"] if each["name"] == name]
            assert (len(found), sum(found)) == (2, expected[name][0])
        assert report["padding"] == padding
        batches = ranks[0].runs(2 * first, 2 * stop)
        total = sum(run.stop - run.start for runs in batches.values() for run in runs)
        assert total == 2 * batch_size * (stop - first)
    assert "expected at most 40 steps" in which(
        stores, state, tmp_path, "--last", 41, "--by", "source", "--world-size", 2, code=2
    )


def test_each_member_of_a_mixture_has_its_own_counts(corpora, tmp_path):
    paths = {"x": corpora / "one", "y": corpora / "several"}
    with MixedLoader(paths, {"x": 1, "y": 3}, documents=VALUES, rank=0, world_size=1, **WINDOWS) as mixed:
        steps = {"x": [], "y": []}
        before = mixed.counts()
        for _ in range(100):
            step = next(mixed)
            [name] = [name for name, count in mixed.counts().items() if count > before[name]]
            steps[name].append(step)
            before = mixed.counts()
        state = mixed.state_dict()
        names = {name: loader.words("lang") for name, loader in mixed.loaders.items()}
    stores = [f"{name}={path}" for name, path in paths.items()]
    report = which(stores, state, tmp_path, "--last", 100, "--by", "meta:lang")
    for name in paths:
        require_counts(report, *counted_in(steps[name], "meta:lang", names[name]), store=name)


def test_info_counts_all_splits_unless_one_is_named(corpora):
    with Loader(corpora / "rows", documents=VALUES[:3], split=None, rank=0, world_size=1) as loader:
        expected, padding = counted_in([*loader], "source", loader.sources)
    require_counts(report_of(zb, "info", corpora / "rows", "--by", "source"), expected, padding)


@pytest.mark.parametrize("by", ["source", "meta:lang"])
@pytest.mark.parametrize(
    ("name", "options"), [("rows", {}), ("one", {"batch_size": 64, "seq_len": 1, "last": "short"})]
)
def test_info_counts_the_tokens_of_a_whole_path(corpora, name, options, by):
    with Loader(corpora / name, documents=VALUES, rank=0, world_size=1, **options) as loader:
        expected, padding = counted_in([*loader], by, names_of(loader, by))
    report = report_of(zb, "info", corpora / name, "--split", "train", "--by", by)
    require_counts(report, expected, padding)
    assert {each["epochs"] for each in report["groups"]} == {None}


def test_rows_of_documents_that_are_not_whole_are_counted_as_they_are_there(tmp_path):
    packed = write_packed(tmp_path / "p.h5", np.random.default_rng(2).integers(0, 40, 30).tolist())
    report = report_of(zb, "info", packed.path, "--by", "source")
    cells = [document for row in packed.cells for _, document, _ in row]
    expected = {}
    for place in range(2):
        mine = [document for document in cells if document >= 0 and document % 2 == place]
        expected[f"{place}.jsonl"] = len(mine), len(set(mine))
    require_counts(report, expected, cells.count(-1))


def test_the_table_has_a_line_for_each_source_the_largest_first(corpora, tmp_path):
    with Loader(corpora / "rows", rank=0, world_size=1) as loader:
        state = loader.state_dict()
    report = which([corpora / "rows"], state, tmp_path, "--next", 3, "--by", "source")
    asked = ("--state", tmp_path / "state.json", "--next", 3, "--by", "source")
    *_, head, first, second, third = succeed(zb, "which", corpora / "rows", *asked).stdout.splitlines()
    assert head.split() == ["tokens", "share", "documents", "epochs", "source"]
    for line, each in zip((first, second, third), report["groups"], strict=True):
        shown = [f"{each['tokens']:,}", f"{each['percent']:.2f}%", str(each["documents"]), f"{each['epochs']:.2f}"]
        assert line.split() == [*shown, each["name"]]
    *_, head, first = succeed(zb, "info", corpora / "one", "--by", "meta:lang").stdout.splitlines()[:-2]
    assert head.split() == ["tokens", "share", "documents", "meta:lang"]
    assert "epochs" not in first


def test_what_cannot_be_counted_is_told_by_one_message(corpora, tmp_path):
    np.save(tmp_path / "t.npy", np.arange(64 * 16, dtype=np.uint16).reshape(64, 16))
    convert(tmp_path / "t.npy", "hdf5", tmp_path / "bare", batch_size=4)
    convert(corpora / "one", "megatron", tmp_path / "out", tokens_only=True)
    with Loader(corpora / "rows", rank=0, world_size=1) as loader:
        rows = loader.state_dict()
    with Loader(tmp_path / "bare", rank=0, world_size=1) as loader:
        bare = loader.state_dict()
    (tmp_path / "state.json").write_text(json.dumps(rows))
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    asked = ("which", corpora / "rows", "--state", tmp_path / "state.json")
    for arguments, code, message in (
        (("info", tmp_path / "bare", "--by", "source"), 1, "holds no documents"),
        (("info", tmp_path / "out", "--by", "source"), 2, "its documents name no sources"),
        (("info", corpora / "rows", "--by", "meta:lang"), 2, "open one of them, such as --split train"),
        (("info", corpora / "one", "--by", "meta:other"), 2, "there is no field set 'other'"),
        (
            ("which", tmp_path / "bare", "--state", tmp_path / "bare.json", "--next", 1, "--by", "source"),
            1,
            "holds no documents",
        ),
        (
            (*asked, "--steps", "0:99999", "--by", "source"),
            2,
            "as many as the epoch has on 1 rank with batches of 4, found 99,999",
        ),
        ((*asked, "--next", 10**30, "--by", "source"), 2, "expected steps up to 4,611"),
        ((*asked, "--next", 1, "--by", "source", "--world-size", 1000), 2, "too few for 1,000 ranks"),
    ):
        assert message in one_error(run_zb(*arguments), code)
    for arguments, message in (
        (("--steps", "5:5", "--by", "source"), "expected two numbers that ascend"),
        (("--steps", f"0:{'9' * 5000}", "--by", "source"), "expected two numbers that ascend"),
        (("--steps", "5", "--by", "source"), "expected two numbers that ascend"),
        (("--next", 1, "--by", "lang"), "expected source, or meta:NAME"),
        (("--next", 1), "pass --by with --state and one of --steps, --next and --last"),
        (("--next", 1, "--last", 1, "--by", "source"), "pass --by with"),
        (("--step", 1, "--by", "source"), "pass --by with"),
    ):
        assert message in run_zb(*asked, *arguments, code=2).stderr


#: Runs `zb` until it reads the pieces of records, and then interrupts it.
INTERRUPTED = """
import signal, sys
from zb_hdf5.formats.batches import Batches
from zb_hdf5.__main__ import zb
Batches.read_pieces = lambda *_: signal.raise_signal(signal.SIGINT)
sys.argv[0] = "zb"
zb()
"""


def test_ctrl_c_ends_the_count_with_130_and_no_traceback(corpora):
    done = python(INTERRUPTED, "info", corpora / "rows", "--by", "source")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (130, "", 1), done.stderr
    assert done.stderr.startswith("Error: interrupted")


ROWS, OF_ROW, LENGTH = 1_000_000, 8, 2
#: Runs `zb`, and prints the most memory that the process had; `ru_maxrss` would have that of its parent too.
MEASURED = """
import re
from pathlib import Path
from zb_hdf5.__main__ import zb
try:
    zb()
finally:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
@pytest.mark.longest
def test_a_million_rows_are_counted_in_less_than_500_mb(tmp_path):
    rng = np.random.default_rng(0)
    tokens = np.zeros((ROWS // 8, 8, OF_ROW * LENGTH), np.uint16)
    sha256 = write_batches(tmp_path / "r.h5", tokens, dtype="uint16").sha256
    order = rng.permutation(ROWS * OF_ROW)
    pieces = PiecesWriter(tmp_path / "r.h5")
    columns = np.tile(np.arange(OF_ROW, dtype=np.uint32) * LENGTH, ROWS)
    ends = np.arange(ROWS + 1) * OF_ROW
    pieces.append_pieces(Pieces(ends, columns, order.astype(np.uint64) * np.uint64(LENGTH), OF_ROW * LENGTH))
    pieces.publish(seq_len=OF_ROW * LENGTH, split="train", tokens_sha256=sha256)
    sources = rng.integers(0, 7, len(order)).astype(np.uint32)
    table = DocumentsWriter(documents_path(tmp_path / "r.h5"))
    table.append_documents(np.full(len(order), LENGTH), DocumentRows(names=[*"abcdefg"], sources=sources))
    table.publish(tokens_sha256=sha256)
    with Loader(tmp_path / "r.h5", rank=0, world_size=1, shuffle="sequential") as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    steps = 100_000
    asked = ("--state", tmp_path / "state.json", "--steps", f"0:{steps}", "--by", "source", "--json")
    done = python(MEASURED, "which", tmp_path / "r.h5", *asked)
    assert done.returncode == 0, done.stderr
    text, _, kilobytes = done.stdout.strip().rpartition("\n")
    documents = np.bincount(sources[order[: steps * 8 * OF_ROW]], minlength=7)
    expected = {name: (LENGTH * count, count) for name, count in zip("abcdefg", documents.tolist(), strict=True)}
    require_counts(json.loads(text), expected, 0)
    assert int(kilobytes) < 500_000
