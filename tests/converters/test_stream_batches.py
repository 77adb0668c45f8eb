"""Documents of a stream, packed into batches: what is known of each token is that of its source token, wherever it is.

Each token says which one of the stream it is.
"""

import re
from itertools import pairwise

import numpy as np
import pytest
from commandline import run, succeed
from contents import files_in
from contract import is_refused
from damage import flip
from hypothesis import assume, given
from hypothesis import strategies as st
from interrupted import Failing, Stops
from source_tokens import ALL, FIELDS, check_step, make_stream, spans_of, write_documents

from examples import examples
from zb_hdf5 import ArgumentError, ChecksumError, FormatError, HDF5ShardWriter, Loader, convert, open_reader
from zb_hdf5.converters.cli import convert_commands as command
from zb_hdf5.converters.engines import open_engine
from zb_hdf5.converters.merge import merge_parts
from zb_hdf5.errors import ConvertError
from zb_hdf5.spec import documents_path
from zb_hdf5.store.rebuild import index_files
from zb_hdf5.store.verify import verify_store

LENGTHS = [5, 17, 3, 0, 8, 40, 1, 1, 22, 9, 30]
HOW = {"seed": 3, "rank": 0, "world_size": 1, "drop_last": False}
CARRIED = {"targets": True, "fields": ("number", "pair"), "documents": ALL, "spans": True}


def make_streams(folder, lengths, cuts, *, splits=None, spans=spans_of, named=None):
    """Write a store of streams, cut at `cuts`; each split counts by itself; of unnamed files only places are known."""
    folder.mkdir()
    edges = [0, *sorted(cuts), len(lengths)]
    splits, named = splits or ["train"] * len(edges), named or [True] * len(edges)
    reached, paths = {}, []
    for file, (a, b) in enumerate(pairwise(edges)):
        paths.append(folder / f"s{file}.h5")
        with HDF5ShardWriter(paths[-1], chunk_tokens=16, fields=FIELDS) as writer:
            first = reached.get(splits[file], (0, 0))
            how = {"spans": spans, "named": named[file]}
            reached[splits[file]] = write_documents(writer, lengths[a:b], first, **how)
    index_files(paths, splits=dict(zip([p.name for p in paths], splits, strict=False))).save(folder)
    return folder


def kept_places(lengths, packing, seq_len):
    """Return the places of the tokens that a packing keeps."""
    starts, total = np.cumsum(lengths) - lengths, int(np.sum(lengths))
    if packing == "concat":
        return set(range(total // seq_len * seq_len))
    if packing == "best-fit":
        return set(range(total))
    return {start + k for start, length in zip(starts.tolist(), lengths, strict=True) for k in range(length)[:seq_len]}


def require_tokens(path, lengths, expected, *, seq_len, spans=spans_of, ranks=1, **how):
    """Read all of a store, and compare all that comes with each token with its source token."""
    seen = []
    for rank in range(ranks):
        with Loader(path, seq_len=seq_len, **{**HOW, "rank": rank, "world_size": ranks}, **how, **CARRIED) as loader:
            for step in loader:
                check_step(step, lengths, seq_len=seq_len, spans=spans)
                seen.append(step["tokens"].numpy().reshape(-1))
    tokens = np.concatenate(seen)
    assert set((tokens[tokens > 0] - 1000).tolist()) == expected


@st.composite
def random_documents(draw):
    """Draw lengths and the spans of each document: ascending, with gaps and without."""
    lengths, spans = [], []
    for number in range(draw(st.integers(1, 12))):
        length = draw(st.integers(0, 25))
        edges = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        step = draw(st.sampled_from([1, 2]))
        pairs = list(pairwise(edges))[::step]
        spans.append([(start, stop, [number, start]) for start, stop in pairs])
        lengths.append(length)
    return lengths, lambda number, length: spans[number]


PACKED = {
    "documents": random_documents(),
    "packing": st.sampled_from(["concat", "best-fit", "pad"]),
    "shuffle": st.booleans(),
    "shape": st.tuples(st.integers(1, 3), st.sampled_from([4, 8, 12])),
    "per_shard": st.integers(1, 4),
    "cuts": st.sets(st.integers(0, 12), max_size=2),
}


def make_packed(folder, documents, packing, shuffle, shape, per_shard, cuts):
    """Write random documents, pack them, and return the store and the places of the tokens in it."""
    (lengths, spans), (batch_size, seq_len) = documents, shape
    expected = kept_places(lengths, packing, seq_len)
    assume(expected)
    inside = [cut for cut in cuts if 0 < cut < len(lengths)]
    named = [True, False, True]  # of the middle one only what its spans are
    if inside:
        stream = make_streams(folder / "streams", lengths, inside, spans=spans, named=named)
    else:
        stream = make_stream(folder / "s.h5", lengths, spans=spans)
    convert(
        stream, "hdf5", folder / "packed", batch_size=batch_size, seq_len=seq_len, packing=packing, shuffle=shuffle,
        seed=5, shard_size=per_shard * batch_size * seq_len * 2,
    )  # fmt: skip
    return folder / "packed", expected


@examples(20)
@given(
    **PACKED,
    order=st.sampled_from(["global", "records", "block", "sequential"]),
    access=st.sampled_from(["auto", "mmap", "pread", "h5py"]),
    wanted=st.integers(1, 4),
    cut=st.sampled_from([1, 2, 4]),
    ranks=st.integers(1, 3),
)
def test_each_value_is_that_of_its_source_token(
    tmp_path_factory, documents, shape, order, access, wanted, cut, ranks, **how
):
    store, expected = make_packed(tmp_path_factory.mktemp("packed"), documents=documents, shape=shape, **how)
    require_tokens(
        store, documents[0], expected, spans=documents[1], seq_len=shape[1] // cut, shuffle=order, access=access,
        batch_size=wanted, ranks=ranks,
    )  # fmt: skip


@pytest.mark.slow
@examples(8)
@given(**PACKED, parts=st.integers(1, 3))
def test_it_stays_that_after_other_conversions(tmp_path_factory, documents, shape, parts, **how):
    folder = tmp_path_factory.mktemp("again")
    store, expected = make_packed(folder, documents=documents, shape=shape, **how)
    read = {"spans": documents[1], "seq_len": shape[1], "shuffle": "records"}
    convert(store, "hdf5", folder / "one", shards=1)
    require_tokens(folder / "one", documents[0], expected, **read)
    for job in range(parts):  # the jobs of an array, in another cut
        convert(
            folder / "one", "hdf5", folder / "back", shard_range=(job, parts), shard_size=3 * shape[0] * shape[1] * 2
        )
    if parts > 1:
        merge_parts(folder / "back")
    require_tokens(folder / "back", documents[0], expected, **read)
    assert not any(report.problem or report.missing for report in verify_store(folder / "back"))


def pack(stream, destination, *, target="hdf5", dtype="keep", work=None, **options):
    how = {"batch_size": 2, "seq_len": 8, "packing": "best-fit", **options, **(work or {})}
    if "shards" not in how:
        how.setdefault("shard_size", 96)
    return convert(stream, target, destination, dtype=dtype, **how)


@pytest.fixture
def stream(tmp_path):
    return make_stream(tmp_path / "s.h5", LENGTHS)


@pytest.mark.slow
def test_workers_resumes_and_array_parts_give_the_same_files(tmp_path, stream):
    report = pack(stream, tmp_path / "whole")
    expected = files_in(tmp_path / "whole")
    assert len(report.shards) == 3
    with open_engine("local", 2) as engine:
        pack(stream, tmp_path / "workers", work={"engine": engine})
    assert files_in(tmp_path / "workers") == expected
    is_refused(Stops, lambda: pack(stream, tmp_path / "resumed", work={"engine": Failing(1)}))
    resumed = pack(stream, tmp_path / "resumed", work={"resume": True})
    assert resumed.kept.shards == 1
    assert files_in(tmp_path / "resumed") == expected
    for job in (1, 0, 2):
        pack(stream, tmp_path / "parts", work={"shard_range": (job, 3)})
    merge_parts(tmp_path / "parts")
    assert files_in(tmp_path / "parts") == expected
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["parts", "resumed", "whole", "workers"]


def test_each_split_is_packed_by_itself_and_spans_of_several_encodings_are_refused(tmp_path):
    splits = ["val", "train", "train"]
    streams = make_streams(tmp_path / "streams", LENGTHS, [4, 7], splits=splits)
    pack(streams, tmp_path / "out", pad_id=0)
    for split, lengths in (("val", LENGTHS[:4]), ("train", LENGTHS[4:])):
        require_tokens(tmp_path / "out", lengths, set(range(sum(lengths))), seq_len=8, split=split, shuffle="records")
        with open_reader(tmp_path / "out", split=split) as reader:
            assert len(reader.corpus.documents) == len(lengths)
            last = reader.corpus.documents[len(lengths) - 1]
    assert (last.id, last.metadata) == (f"doc-{len(lengths) - 1}", {"place": sum(lengths) - lengths[-1]})
    is_refused(ConvertError, lambda: pack(streams, tmp_path / "one.h5", shard_size=None), match="must not be mixed")
    (tmp_path / "s").mkdir()
    for name, codec in (("a.h5", "json"), ("b.h5", str.encode)):
        with HDF5ShardWriter(tmp_path / "s" / name, spans_codec=codec) as writer:
            writer.write_document(np.arange(9), spans=[(0, 3, "a value")])
    index_files([tmp_path / "s" / "a.h5", tmp_path / "s" / "b.h5"]).save(tmp_path / "s")
    with pytest.raises(FormatError, match=r"expected spans encoded as 'json', found 'custom'.*stores of their own"):
        pack(tmp_path / "s", tmp_path / "two")


def test_one_file_keeps_all_of_it_beside_it_and_a_damaged_stream_is_not_packed(tmp_path, stream):
    pack(stream, tmp_path / "x.h5", shard_size=None)
    require_tokens(tmp_path / "x.h5", LENGTHS, set(range(sum(LENGTHS))), seq_len=8, shuffle="global")
    assert not [path for path in tmp_path.iterdir() if "plan" in path.name]
    flip(stream, stream.read_bytes().index(np.arange(1020, 1030).astype("<u2").tobytes()))
    is_refused(ChecksumError, lambda: pack(stream, tmp_path / "out"), match="crc32")
    assert not (tmp_path / "out").exists()


def test_command_and_function_write_the_same(tmp_path, stream):
    shape = {"batch_size": 2, "seq_len": 8, "packing": "pad", "shuffle": False, "pad_id": 7, "shards": 2}
    with pytest.raises(ConvertError, match="batch files hold tokens and nothing else"):
        convert(stream, "batch", tmp_path / "function", **shape)
    report = convert(stream, "batch", tmp_path / "function", **shape, dtype="uint32", tokens_only=True)
    given = "--batch-size 2 --seq-len 8 --packing pad --no-shuffle --pad-id 7 --shards 2 --dtype uint32 --tokens-only"
    succeed(command, "stream-to-batch", stream, tmp_path / "command", *given.split())
    assert files_in(tmp_path / "command") == files_in(tmp_path / "function")
    assert report.meta.dtype == np.uint32
    planned = succeed(command, "stream-to-hdf5", stream, tmp_path / "dry", "--seq-len", 8, "--dry-run")
    assert "would write" in planned.output
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["command", "function"]


def test_padding_has_no_values(tmp_path, stream):
    pack(stream, tmp_path / "out", packing="pad", pad_id=9)
    with open_reader(tmp_path / "out") as reader:
        tokens = np.concatenate(list(reader))
        number = np.concatenate(list(reader.field("number"))).reshape(tokens.shape)
    assert (tokens == 9).sum() > 10
    np.testing.assert_array_equal(number, np.where(tokens == 9, 0, tokens.astype(int) - 1000))
    pack(stream, tmp_path / "three", packing="pad", batch_size=3, pad_id=0)
    with Loader(tmp_path / "three", shuffle="sequential", batch_size=1, **HOW, **CARRIED) as loader:
        empty = [step for step in loader if not step["tokens"].any()]
    assert [step["spans"] for step in empty] == [[]] * 2  # ten documents have tokens: two rows fill the last batch
    assert all((step["span_index"] == -1).all() for step in empty)


@pytest.mark.parametrize("of_a_store", [False, True])
def test_a_document_table_of_another_stream_is_refused(tmp_path, of_a_store):
    folders = [tmp_path / name for name in ("one", "other")]
    for folder, lengths in zip(folders, (LENGTHS, LENGTHS[2:]), strict=True):
        if of_a_store:
            make_streams(folder, lengths, [4])
        else:
            folder.mkdir()
            make_stream(folder / "s0.h5", lengths)
    ours, other = (documents_path(folder / "s0.h5") for folder in folders)
    ours.write_bytes(other.read_bytes())
    path = folders[0] if of_a_store else folders[0] / "s0.h5"
    is_refused(FormatError, lambda: pack(path, tmp_path / "out"), match=r"belongs to another (store|file).* restore it")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("tokens", "facts", "message"), [
    (9, {"spans": [(5, 10, "x")]}, r"document 0: span 0: expected .* 0 <= start < stop <= 9, found \(5, 10, 'x'\)"),
    (9, {"spans": [(-1, 2, "x")]}, r"span 0: expected .* 0 <= start < stop <= 9, found \(-1, 2, 'x'\)"),
    (9, {"spans": [(4, 4, "x")]}, r"span 0: expected .* 0 <= start < stop .* found \(4, 4, 'x'\)"),
    (9, {"spans": [(0, 4, "x"), (3, 5, "y")]}, r"span 1: expected .* 4 <= start .* \(3, 5, 'y'\); they must ascend"),
    (9, {"spans": [(0, 4, b"\xff")]}, r"the value of span 0 cannot be encoded: .*choose another spans_codec"),
    (9, {"id": b"\xff"}, r"document 0: expected an id, a text or a whole number, found b'\\xff'"),
    (9, {"id": "\ud800"}, r"the id '\\ud800' is not valid Unicode"),
    (9, {"id": 1.5}, r"document 0: expected an id"),
    (9, {"id": ""}, r"document 0: expected an id"),
    (9, {"metadata": {1: {(): 2}}}, r"expected metadata that JSON can hold"),
    (9, {"metadata": {(): 1}}, r"document 0: "),
    (9, {"spans": [(0, 1, {1})]}, r"document 0: "),
    (9, {"spans": [(4, 6, 1), (0, 2, 1)]}, r"span 1: .* found \(0, 2, 1\); they must ascend"),
    (9, {"spans": [(0, 1, 1), (2, 4)]}, r"document 0: span 1: expected \(start, stop, value\) .* found \(2, 4\)"),
    (9, {"spans": [(0.5, 2, 1)]}, r"document 0: span 0: expected \(start, stop, value\) .* found \(0\.5, 2, 1\)"),
    (9, {"spans": [(0, 2.5, 1)]}, r"document 0: span 0: expected"),
    (9, {"spans": [7]}, r"document 0: span 0: expected .* found 7"),
    (9, {"fields": {"number": np.zeros(8, "u4")}}, r"field number: expected shape \(9,\).*found.*\(8,\)"),
    (9, {"fields": {}}, r"number"),
])  # fmt: skip
@pytest.mark.thin
def test_bad_documents_are_refused_and_nothing_of_them_is_written(tmp_path, tokens, facts, message):
    facts = {"fields": {"number": np.zeros(tokens, "u4")}, **facts}
    with HDF5ShardWriter(tmp_path / "s.h5", fields={"number": "u4"}) as writer:
        with pytest.raises((ArgumentError, ConvertError), match=message) as refused:
            writer.write_document(np.arange(tokens), **facts)
        assert str(refused.value).startswith(str(tmp_path / "s.h5"))
        assert "\n" not in str(refused.value)
        writer.write_document(np.arange(4), {"number": np.zeros(4, "u4")}, id="good")
    with open_reader(tmp_path / "s.h5", batch_size=1, seq_len=4) as reader:
        assert reader.corpus.documents[0].id == "good"
        assert len(reader.corpus.documents) == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"packing": "tight"}, "packing must be one of"),
    ({"remainder": "keep"}, "remainder must be one of"),
    ({"pad_id": 2**16}, "pad_id: token id 65536"),
    ({"shards": 2, "shard_size": 96}, "pass either shards or shard_size, not both"),
    ({"seq_len": 1000, "packing": "concat"}, "do not fill one batch"),
    ({"shards": 10**6, "shard_size": None}, "cannot fill 1,000,000 shards"),
    ({"remainder": "error", "batch_size": 7}, "left over; pass remainder='drop'"),
])  # fmt: skip
def test_bad_options_are_refused(tmp_path, stream, options, message):
    is_refused((ArgumentError, ConvertError), lambda: pack(stream, tmp_path / "out", **options), match=message)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_other_sources_are_refused(tmp_path, stream):
    np.save(tmp_path / "x.npy", np.arange(100))
    pack(stream, tmp_path / "packed")
    shape = ["--batch-size", "2", "--seq-len", "8", "--quiet"]
    for path, message in (
        (tmp_path / "x.npy", "expected a stream with documents, found none"),
        (tmp_path / "packed", "expected a token stream of documents, found batches"),
    ):
        done = run(command, "stream-to-hdf5", path, tmp_path / "out", *shape)
        assert done.exit_code == 2
        assert message in re.sub(r"\s+", " ", done.output)
    with pytest.raises(ArgumentError, match="packing belongs to stream"):
        convert(tmp_path / "x.npy", "hdf5", tmp_path / "out", packing="pad")
    small = {"batch_size": 2, "seq_len": 8, "workers": 1, "vocab_size": 9}
    is_refused(ConvertError, lambda: convert(stream, "hdf5", tmp_path / "out", **small), match=r"token ids in 0\.\.8")
    is_refused(ConvertError, lambda: pack(stream, stream, shard_size=None), match="is or holds the source")
    is_refused(ConvertError, lambda: pack(stream, tmp_path / "nowhere" / "out"), match="no such folder")
