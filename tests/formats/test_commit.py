"""The order of a commit: a kill, or a failing disk, at each single write of it, by injection and not at random."""

import errno
import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from contents import batches_of, write_batches
from interpreter import Interpreter, start_program
from numbered import FIELDS, documents_of, fields_of, numbered_batches
from processes import PROGRAMS

from zb_hdf5 import convert, open_corpus, open_reader, open_writer, verify_store
from zb_hdf5.store.repair import repair_file
from zb_hdf5.store.unchecked_file import open_chunks, open_damaged

SHIM = Path(__file__).parents[1] / "failing_disk.c"


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory):
    """An interpreter whose programs say which of their writes fails."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and Linux")
    library = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl"], check=True)
    with Interpreter(LD_PRELOAD=str(library)) as interpreter:
        yield interpreter


@pytest.fixture
def hit_each_write(failing_disk, thinned, tmp_path):
    """Return `hit_each_write(kind, error=0, **arguments) -> folders`: run one commit, and hit it in each write."""
    numbers = thinned(range(1, 1000), 3)

    def hit(kind, error=0, **arguments):
        given = (kind, tmp_path, error, json.dumps(numbers), json.dumps(arguments))
        done = failing_disk.run(PROGRAMS / "hit_commit.py", *given, timeout=600)
        assert done.returncode == 0, done.stderr
        unhit = int(done.stdout)
        assert unhit > 2, "a commit is at least the data and the marker"
        hits = numbers[: numbers.index(unhit)]
        return [tmp_path / str(number) for number in hits]

    return hit


def unfinished(folder):
    """Return the file of tokens that a kill has left, under either name."""
    [path] = [path for path in folder.iterdir() if path.name.removesuffix(".partial") == "x.h5"]
    return path


PAGE = (32, 64)  # a batch of uint16 is one page

COMMITS = {
    "first": {"shape": PAGE, "before": 0, "count": 3, "expected": 0},
    "known": {"shape": PAGE, "before": 3, "count": 5, "expected": 8},
    "more than expected": {"shape": PAGE, "before": 8, "count": 1, "expected": 8},
    "extended": {"shape": PAGE, "before": 16, "count": 1, "expected": 0},
    "group over an extension": {"shape": PAGE, "before": 10, "count": 30, "expected": 0},
    "padded": {"shape": (3, 800), "before": 16, "count": 2, "expected": 0},
    "crc32 of batch 4,097": {"shape": (2, 32), "before": 4096, "count": 1, "expected": 0},
    "finish": {"shape": PAGE, "before": 5, "count": 0, "expected": 0},
    "finish a full block": {"shape": PAGE, "before": 16, "count": 0, "expected": 16},
    "compressed, first": {"shape": PAGE, "before": 0, "count": 3, "expected": 0, "codec": "gzip"},
    "compressed, extended": {"shape": PAGE, "before": 16, "count": 3, "expected": 0, "codec": "zstd"},
    "compressed, finish": {"shape": PAGE, "before": 5, "count": 0, "expected": 8, "codec": "zstd"},
}


def cases(named, slow):
    """Return the parameters of named cases, some of which are slow."""
    assert slow <= set(named)
    return [pytest.param(each, id=name, marks=pytest.mark.slow if name in slow else ()) for name, each in named.items()]


WITH_FIELDS = {
    f"{name} with fields": {**COMMITS[name], "with_fields": True}
    for name in ("known", "extended", "compressed, extended", "finish")
}
SLOW = {"crc32 of batch 4,097", "group over an extension", "padded", "extended with fields", "finish with fields"}


def opened(path, has_fields):
    """Open the file that a kill has left: as a broken file, for its fields."""
    return open_damaged(path, Path("x.h5")).corpus.batches() if has_fields else open_reader(path)


def require_batches(reader, count, shape, has_fields):
    expected = numbered_batches(0, count, shape)
    found = np.empty((count, *shape), reader.dtype)
    reader.read_batches_into(0, found)
    np.testing.assert_array_equal(found, expected)
    if has_fields:
        require_values(reader.corpus, expected, count)


@pytest.mark.parametrize("arguments", cases(COMMITS | WITH_FIELDS, SLOW))
@pytest.mark.thin
def test_a_batch_writer_killed_in_any_write_of_a_commit_loses_nothing(arguments, hit_each_write):
    shape = arguments["shape"]
    before = arguments["before"]
    count = arguments["count"]
    has_fields = "with_fields" in arguments
    for folder in hit_each_write("batches", **arguments):
        path = unfinished(folder)
        with opened(path, has_fields) as reader:
            kept = reader.num_batches
            assert kept in (range(before, before + count + 1) if has_fields else {before, before + count}), folder.name
            require_batches(reader, kept, shape, has_fields)
        if kept and path.name.endswith(".partial"):
            report = repair_file(path, dry_run=True)
            assert (report.kept, report.dropped) == (kept, []), folder.name
    if kept:
        repair_file(path)
        assert [found.problem for found in verify_store(folder / "x.h5")] == [None]
        with open_reader(folder / "x.h5") as reader:
            require_batches(reader, kept, shape, has_fields)


STREAMS = {
    "chunk": {"chunk": 2048, "length": 500, "before": 10, "count": 5},
    "chunk 17": {"chunk": 2048, "length": 2048, "before": 16, "count": 1},
    "document 8,192": {"chunk": 4096, "length": 1, "before": 8192, "count": 4096},
    "finish": {"chunk": 2048, "length": 500, "before": 10, "count": 0},
    "compressed chunk": {"chunk": 2048, "length": 500, "before": 10, "count": 5, "codec": "gzip"},
    "compressed, finish": {"chunk": 2048, "length": 500, "before": 10, "count": 0, "codec": "zstd"},
}
STREAMS |= {f"{name} with fields": {**STREAMS[name], "with_fields": True} for name in ("chunk 17", "finish")}


@pytest.mark.parametrize("arguments", cases(STREAMS, {"finish with fields"}))
@pytest.mark.thin
def test_a_stream_writer_killed_in_any_write_of_a_commit_loses_nothing(arguments, hit_each_write):
    chunk = arguments["chunk"]
    length = arguments["length"]
    before = arguments["before"]
    least = before * length // chunk * chunk
    expected = documents_of(0, before + arguments["count"], length)
    for folder in hit_each_write("stream", **arguments):
        path = unfinished(folder)
        with open_corpus(path) as store:
            assert store.num_tokens >= least, folder.name
            np.testing.assert_array_equal(store.tokens[0 : store.num_tokens], expected[: store.num_tokens])
            ends = store.doc_offsets
            np.testing.assert_array_equal(ends, np.arange(len(ends)) * length)
            assert (len(ends) - 1) * length <= store.num_tokens < len(ends) * length
        problem = verify_store(path)[0].problem
        assert problem is None or "has not finished" in str(problem), folder.name
        if "with_fields" in arguments:
            with open_chunks(path) as corpus:
                require_values(corpus, expected[: corpus.num_tokens], corpus.num_units)
            if path.name.endswith(".partial"):
                assert repair_file(path, dry_run=True).dropped == []
    if "with_fields" in arguments:
        repair_file(path)
        with open_corpus(folder / "x.h5") as store:
            for name, values in fields_of(documents_of(0, len(store.doc_offsets) - 1, length)).items():
                field = store.field(name)
                np.testing.assert_array_equal(field.tokens[0 : field.num_tokens], values.reshape(-1))


def require_values(corpus, expected, num_units):
    """Check every value of every field that is committed, and the crc32 of each of its chunks."""
    assert sorted(FIELDS) == [field.name for field in corpus.meta.fields]
    for name, values in fields_of(expected).items():
        field = corpus.field(name)
        assert field.num_units >= num_units
        crc32 = field.digests.crc32()
        flat = values.reshape(-1)
        for number in range(num_units):
            place = slice(number * field.meta.batch_tokens, (number + 1) * field.meta.batch_tokens)
            found = field.tokens[place.start : place.start + len(flat[place])]  # the last of a stream has fewer
            np.testing.assert_array_equal(found, flat[place])
            assert zlib.crc32(found) == crc32[number]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", ["known", "extended", "finish"])
@pytest.mark.parametrize("has_fields", [False, True], ids=["tokens", "fields"])
@pytest.mark.thin
def test_a_disk_that_fails_in_any_write_is_one_error_with_path_and_cause(code, name, has_fields, hit_each_write):
    """Tokens and fields stay equal, whatever could not be written; the writer goes on only if all can be."""
    arguments = COMMITS[name]
    shape = arguments["shape"]
    before = arguments["before"]
    count = arguments["count"]
    for folder in hit_each_write("batches", code, with_fields=has_fields, **arguments):
        first, _, then = (folder / "said").read_text().partition("\n")
        assert first.startswith(f"{code} {folder}/x.h5"), first
        assert "Traceback" not in (folder / "log").read_text()
        if not count:
            assert then.startswith("ClosedError"), then  # `finish` cannot be tried again
            assert not [path for path in folder.iterdir() if path.name.startswith("x.")]
            continue
        partial = folder / "x.h5.partial"
        assert then == "written again" or (then.startswith("ConvertError") and str(partial) in then), then
        with opened(partial, has_fields) as reader:
            assert reader.num_batches >= before
            require_batches(reader, before, shape, has_fields)
        assert repair_file(partial, dry_run=True).kept >= before
    if (code, name) == (errno.EIO, "known"):
        assert all(text in then for text in ("Input/output error", "3 batches", "repair it")), then


def test_a_file_is_no_longer_than_its_batches_and_their_metadata(tmp_path):
    """Room that was made for more is given back."""
    sizes = []
    for expected in (0, 5, 500):
        path = tmp_path / f"{expected}.h5"
        write_batches(path, numbered_batches(0, 5, PAGE), dtype="uint16", expected_batches=expected)
        sizes.append(path.stat().st_size)
        assert [report.problem for report in verify_store(path)] == [None]
        with open_reader(path) as reader:
            assert reader.corpus.extents is not None
            assert reader.corpus.extents.end == sizes[-1]
    assert max(sizes) - min(sizes) <= 4096  # SWMR mode aligns the first batch otherwise


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize(
    "shape", [(32, 512), (1, 44_800), (3, 800), (3, 1000), (1, 2500), (2, 5), (7, 1500), (48, 512)]
)
@pytest.mark.thin
def test_a_finished_file_is_hardly_larger_than_its_data(shape, dtype, tmp_path):
    fields = {"mask": "u1", "vector": ("<f4", (3,))}
    count = min(4096, max(1, (8 << 20) // (shape[0] * shape[1] * 4)))
    tokens = np.zeros((count, *shape), dtype)
    values = {"mask": tokens.astype("u1"), "vector": np.zeros((*tokens.shape, 3), "f4")}
    for name, kept in (("plain.h5", {}), ("fields.h5", values)):
        options = {"batch_size": shape[0], "seq_len": shape[1], "dtype": dtype}
        options |= {"fields": fields, "expected_batches": count} if kept else {}
        with open_writer(tmp_path / name, **options) as writer:
            for start in range(0, count, 1 + count // 3):
                part = slice(start, start + 1 + count // 3)
                writer.write(tokens[part], {name: array[part] for name, array in kept.items()})
        data = tokens.nbytes + sum(array.nbytes for array in kept.values())
        assert data <= (tmp_path / name).stat().st_size <= 1.01 * data + (4 << 20)
        with open_reader(tmp_path / name, access="mmap") as reader:
            assert len(reader) == count


def test_the_partial_of_a_conversion_is_read_between_two_commits(tmp_path, monkeypatch):
    """By another process: `num_batches` rules, and each batch below it is that of the source."""
    monkeypatch.setattr("zb_hdf5.converters.batch_target.COMMIT_BYTES", 16 << 20)
    rows = np.random.default_rng(3).integers(0, 2**16, (40_000, 512)).astype("u2")  # 39 MiB: two commits and a rest
    np.save(tmp_path / "a.npy", rows)
    code = (
        "import h5py, numpy as np, sys\nsource = np.load(sys.argv[2], mmap_mode='r').reshape(-1, 32, 512)\n"
        "for _ in sys.stdin:\n    h5 = h5py.File(sys.argv[1], 'r', swmr=True)\n    stored = h5['batches']\n"
        "    n = int(stored.attrs['num_batches'])\n"
        "    assert all(np.array_equal(stored[k], source[k]) for k in range(n))\n"
        "    print(n, len(stored), flush=True)\n    h5.close()"
    )
    seen = []

    def look(tokens):
        if len(seen) < 6:
            print(file=reader.stdin, flush=True)
            seen.append(tuple(map(int, reader.stdout.readline().split())))

    with start_program(code, tmp_path / "x.h5.partial", tmp_path / "a.npy") as reader:
        convert(tmp_path / "a.npy", "hdf5", tmp_path / "x.h5", shuffle=False, progress=look)
    assert reader.returncode == 0
    assert {count for count, _ in seen} == {0, 512}
    assert {rows for _, rows in seen} == {1250}
    np.testing.assert_array_equal(batches_of(tmp_path / "x.h5", verify="store").reshape(rows.shape), rows)


FAILING = {
    "one file": ("out.h5", {"batch_size": 32, "seq_len": 64}),
    "compressed": ("out.h5", {"batch_size": 32, "seq_len": 64, "codec": "zstd"}),
    "stream": ("out", {"layout": "stream", "tokenizer": "byte", "id_column": "id"}),
    "rows": ("out", {"seq_len": 64, "batch_size": 8, "tokenizer": "byte", "id_column": "id"}),
}


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.thin
def test_a_process_whose_disk_has_failed_goes_on_and_ends_as_it_wants_to(name, failing_disk, thinned, tmp_path):
    """HDF5 ends in a segmentation fault when it closes what it could not write a second time."""
    target, options = FAILING[name]
    folder = tmp_path / "out"
    folder.mkdir()
    np.save(tmp_path / "in.npy", np.arange(300 * 32 * 64, dtype="<u2"))
    texts = [json.dumps({"text": f"{k} words and " * 8, "id": str(k)}) for k in range(300)]
    (tmp_path / "in.jsonl").write_text("\n".join(texts))
    source = tmp_path / ("in.jsonl" if "tokenizer" in options else "in.npy")
    codes = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
    faults = [(number, codes[number % len(codes)]) for number in thinned(range(1, 60))]
    given = (folder, json.dumps(faults), json.dumps(str(source)), target, json.dumps(options))
    program = PROGRAMS / "convert_on_failing_disk.py"
    done = failing_disk.run(program, *given, timeout=600)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert [end for end in ends[:-1] if end[1] != (8 if end[0] % 2 else 9)] == []
    assert ends[-1][1] in (0, 8, 9), ends[-1]
    assert len(ends) > 4
