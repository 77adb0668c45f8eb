"""Files that lie, lead elsewhere, hang, or are replaced: one clear error, at once, in little memory."""

import json
import os
import pickle
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
from commandline import run
from contents import label_batches, write_batches, write_stream
from contract import is_refused, random_tokens
from interpreter import run_program
from processes import forked

from zb_hdf5 import Loader, ReadAs, errors, open_corpus, open_reader, open_writer, verify_store
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.files.signatures import MEGATRON_MAGIC
from zb_hdf5.spec import HDF5_MAGIC, INDEX_NAME
from zb_hdf5.store.repair import repair_file
from zb_hdf5.trainers.megatron import HEADER as MEGATRON_HEADER

SHAPE = (4, 1024)
ACCESSES = ("auto", "mmap", "pread", "h5py")


def write(path, seed=0, count=6):
    """Write batches of uint32, and return them."""
    tokens = random_tokens(count, *SHAPE, seed=seed)
    write_batches(path, tokens, overwrite=True)
    return tokens


def write_tokens(path, first=0):
    return write_stream(path, np.arange(first, first + 5000) % 60000, chunk_tokens=2048, overwrite=True).path


def outcome_of(*arguments):
    """Run a command; return (exit code, all output), and see that it ends in no traceback."""
    group = convert if str(arguments[0]).endswith(("-hdf5", "-batch", "-npy")) else zb
    done = run(group, *arguments)
    return done.exit_code, done.output


# --- what is in another file -----------------------------------------------------------------------------------
def replace_dataset(path, name, make):
    """Put something else in the place of a dataset; its attributes stay."""
    with h5py.File(path, "r+") as h5:
        old = h5[name]
        shape = old.shape
        dtype = old.dtype
        attributes = dict(old.attrs)
        del h5[name]
        make(h5, name, shape, dtype)
        if isinstance(h5.get(name, getlink=True), h5py.HardLink):
            for key, value in attributes.items():
                h5[name].attrs[key] = value


def external_link(h5, name, shape, dtype):
    h5[name] = h5py.ExternalLink("other.h5", f"/{name}")


def soft_link_out(h5, name, shape, dtype):
    h5["out"] = h5py.ExternalLink("other.h5", "/")
    h5[name] = h5py.SoftLink(f"/out/{name}")


def virtual(h5, name, shape, dtype):
    layout = h5py.VirtualLayout(shape, dtype)
    layout[...] = h5py.VirtualSource("other.h5", name, shape, dtype)
    h5.create_virtual_dataset(name, layout)


def external_storage(h5, name, shape, dtype):
    secret = Path(h5.filename).with_name("secret")
    secret.write_bytes(b"\x01" * (int(np.prod(shape)) * dtype.itemsize))
    h5.create_dataset(name, shape, dtype, external=[(str(secret), 0, secret.stat().st_size)])


LEADING_OUT = [external_link, soft_link_out, virtual, external_storage]


@pytest.mark.parametrize("make", LEADING_OUT)
@pytest.mark.parametrize("name", ["batches", "crc32"])
def test_nothing_outside_of_a_batch_file_is_followed(name, make, tmp_path):
    write(tmp_path / "other.h5")
    write(tmp_path / "x.h5", seed=1)
    replace_dataset(tmp_path / "x.h5", name, make)
    for access in ACCESSES:
        with pytest.raises(errors.FormatError, match="nothing outside of a file is followed"):
            open_reader(tmp_path / "x.h5", access=access, verify="batch")
    [report] = verify_store(tmp_path / "x.h5")
    assert "nothing outside" in str(report.problem)
    is_refused(errors.FormatError, lambda: repair_file(tmp_path / "x.h5"), match="nothing outside")
    if name == "batches":
        for command in (("info", tmp_path / "x.h5"), ("hdf5-to-batch", tmp_path / "x.h5", tmp_path / "o.batch")):
            code, output = outcome_of(*command)
            assert (code, "nothing outside" in output) == (1, True), output


@pytest.mark.parametrize("make", LEADING_OUT)
@pytest.mark.parametrize("name", ["tokens", "crc32", "doc_offsets"])
def test_nothing_outside_of_a_stream_is_followed(name, make, tmp_path):
    write_tokens(tmp_path / "other.h5")
    path = write_tokens(tmp_path / "x.h5", first=7)
    replace_dataset(path, name, make)
    assert "nothing outside" in str(verify_store(path)[0].problem)
    if name != "crc32":
        is_refused(errors.FormatError, lambda: open_corpus(path), match="nothing outside")


@pytest.mark.parametrize("make", LEADING_OUT)
def test_nothing_outside_of_a_foreign_file_is_followed(make, tmp_path):
    write(tmp_path / "other.h5")
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5["there/batches"] = np.arange(2 * 4 * 1024, dtype="<u4").reshape(2, *SHAPE)
        label_batches(h5["there/batches"])
        h5["same"] = h5py.SoftLink("there/batches")
        make(h5, "batches", (2, *SHAPE), np.dtype("<u4"))
    is_refused(
        errors.FormatError,
        lambda: open_reader(tmp_path / "x.h5", read_as=ReadAs(dataset="batches")),
        match="nothing outside",
    )
    with open_reader(tmp_path / "x.h5") as reader:  # the only one whose bytes are in the file
        assert (reader.corpus.foreign_dataset, len(reader)) == ("there/batches", 2)
    with open_reader(tmp_path / "x.h5", read_as=ReadAs(dataset="same")) as reader:  # a soft link that stays in the file
        assert len(reader) == 2


def test_a_link_that_leads_to_itself_is_no_dataset(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5["a"] = h5py.SoftLink("/b")
        h5["b"] = h5py.SoftLink("/a")
    is_refused(errors.FormatError, lambda: open_reader(tmp_path / "x.h5", read_as=ReadAs(dataset="a")))


# --- claims ----------------------------------------------------------------------------------------------------
CLAIM = """
import resource, sys
from zb_hdf5 import open_corpus, ZbError, open_reader, verify_store
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    opened = open_corpus(sys.argv[1]) if sys.argv[2] == "stream" else open_reader(sys.argv[1], access=sys.argv[2])
    opened.doc_offsets if sys.argv[2] == "stream" else opened.read_batch(0)
except ZbError as error:
    print(type(error).__name__, error)
assert verify_store(__import__("pathlib").Path(sys.argv[1]))[0].problem is not None
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def opened_in_little_memory(path, how):
    """Open a file in a process of its own; return what it said, after less than 64 MiB."""
    done = run_program(CLAIM, path, how)
    assert done.returncode == 0, done.stderr
    said, grown = done.stdout.splitlines()
    assert int(grown) < 64 << 10, done.stdout
    return said


def claiming(rows):
    """Return what makes a dataset of so many rows, none of which has a place."""

    def make(h5, name, shape, dtype):
        chunks = (1, *shape[1:]) if len(shape) == 3 else (2048,)
        h5.create_dataset(name, (rows, *shape[1:]), dtype, chunks=chunks, maxshape=(None, *shape[1:]))

    return make


@pytest.mark.parametrize("claimed", [2**28, 2**31, 2**45])
@pytest.mark.thin
def test_a_small_file_that_claims_many_batches_is_refused_in_little_memory(claimed, tmp_path):
    path = tmp_path / "x.h5"
    write(path)
    for name in ("batches", "crc32"):
        replace_dataset(path, name, claiming(claimed))
    with h5py.File(path, "r+") as h5:
        h5["batches"].attrs.modify("num_batches", np.uint64(claimed))
    for access in ("auto", "h5py"):
        assert opened_in_little_memory(path, access).startswith("IncompleteError")


@pytest.mark.parametrize(("name", "attribute"), [("tokens", "token_count"), ("doc_offsets", "document_count")])
@pytest.mark.thin
def test_a_small_stream_that_claims_much_is_refused_in_little_memory(name, attribute, tmp_path):
    path = write_tokens(tmp_path / "x.h5")
    replace_dataset(path, name, claiming(2**40))
    with h5py.File(path, "r+") as h5:
        h5["tokens"].attrs.modify(attribute, np.uint64(2**40 - 1))
    assert opened_in_little_memory(path, "stream").startswith("IncompleteError")


def test_an_npy_header_that_claims_more_than_the_file_is_refused(tmp_path):
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (2**40,)})
    with pytest.raises(errors.ZbError, match="expected at least 2,199,023,255,680 bytes"):
        open_corpus(tmp_path / "x.npy")


@contextmanager
def edited_index(folder):
    """Give the content of an index, and write what becomes of it, without the check of its text."""
    content = json.loads((folder / INDEX_NAME).read_text())
    yield content
    del content["check"]
    (folder / INDEX_NAME).write_text(json.dumps(content))


@pytest.mark.parametrize(("count", "message"), [
    *((count, "num_batches|token_count") for count in (2**62, 2**70, -1)), (2**40, "batches overlap"),
])  # fmt: skip
def test_counts_in_an_index_are_no_larger_than_files_can_be(count, message, write_store, tmp_path):
    folder = write_store(tmp_path / "store", random_tokens(3, 2, 16), (3,))
    with edited_index(folder) as text:
        text["shards"]["num_batches"][0] = count
        text["shards"]["token_count"][0] = count * 32
        if count == 2**40:
            text["columns"]["batches"]["stride"][0], text["columns"]["batches"]["chunks"][0] = 0, count
        text["token_count"] = sum(text["shards"]["token_count"])
    is_refused(errors.FormatError, lambda: Loader(folder), lambda: open_reader(folder), match=message)


def test_groups_inside_of_each_other_cost_little_and_are_not_printed(tmp_path):
    """The time grew with the square of the depth: 44 s for 3,000 groups, whose names filled the message."""
    with h5py.File(tmp_path / "deep.h5", "w") as h5:
        group = h5
        for _ in range(3000):
            group = group.create_group("g")
        group["tokens"] = np.arange(100, dtype="<u2")
    began_s = time.process_time()
    for command in (("info",), ("show",), ("convert", tmp_path / "deep.h5", tmp_path / "out.h5")):
        code, output = outcome_of(*(command if len(command) > 1 else (*command, tmp_path / "deep.h5")))
        assert code == 1, output
        assert len(output) < 800, output
        assert "its first 64 levels of groups" in output
    assert time.process_time() - began_s < 20


def megatron_index(path, lengths, edges):
    """Write an `.idx` of ids of two bytes, as it is given."""
    lengths = np.asarray(lengths, "<i4")
    offsets = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    head = MEGATRON_HEADER.pack(MEGATRON_MAGIC, 1, 8, len(lengths), len(edges))
    path.write_bytes(head + lengths.tobytes() + offsets.tobytes() + np.asarray(edges, "<i8").tobytes())


@pytest.mark.parametrize("edges", [[0, 2**63 - 1, -2, 3], [0, -(2**63), 2**62, 3], [0, 2, 1, 3]])
def test_edges_of_documents_that_wrap_are_refused(edges, tmp_path):
    """The difference of 2**63 - 1 and -2 is 1 in 64 bits."""
    np.arange(6, dtype="<u2").tofile(tmp_path / "x.bin")
    megatron_index(tmp_path / "x.idx", [2, 2, 2], edges)
    for command in (("show",), ("convert", tmp_path / "x.bin", tmp_path / "out", "--to", "stream")):
        code, output = outcome_of(*(command if len(command) > 1 else (*command, tmp_path / "x.bin")))
        assert (code, "expected edges of documents that ascend" in output) == (1, True), output


def test_offsets_of_documents_that_wrap_are_refused(tmp_path):
    offsets = np.array([0, 5, -(2**63), 10], np.int64)
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5["tokens"] = np.arange(10, dtype="<u2")
        h5["offsets"] = offsets
    named = ("--from", "ragged", "--dataset", "tokens", "--offsets", "offsets", "--to", "stream")
    code, output = outcome_of("convert", tmp_path / "x.h5", tmp_path / "out", *named)
    assert (code, "expected offsets that ascend" in output) == (1, True), output


def test_an_index_of_many_empty_sequences_is_refused_in_little_memory(tmp_path):
    count = 100_000_000
    (tmp_path / "x.bin").touch()
    with open(tmp_path / "x.idx", "wb") as file:
        file.write(MEGATRON_HEADER.pack(MEGATRON_MAGIC, 1, 8, count, 2))
        file.truncate(MEGATRON_HEADER.size + 12 * count)
        file.seek(0, os.SEEK_END)
        file.write(np.array([0, count], "<i8").tobytes())
    is_refused(errors.FormatError, lambda: open_corpus(tmp_path / "x.bin"), match="at most 4,194,304 empty sequences")
    (tmp_path / "x.ds").touch()
    with open(tmp_path / "x.ds.index", "wb") as file:
        file.truncate(8 * count)
    is_refused(errors.FormatError, lambda: open_corpus(tmp_path / "x.ds"), match="at most 4,194,304 empty documents")


# --- names -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["a\0b.h5", "\ud800.h5"])
@pytest.mark.parametrize("kind", ["batches", "stream"])
def test_a_name_that_no_file_can_have_is_a_format_error_everywhere(kind, name, write_store, tmp_path):
    folder = tmp_path / "store"
    if kind == "batches":
        write_store(folder, random_tokens(3, 2, 16), (3,))
    else:
        (tmp_path / "text").mkdir()
        (tmp_path / "text" / "a.txt").write_text("a text " * 100)
        assert (
            outcome_of("text-to-hdf5", tmp_path / "text", folder, "--tokenizer", "byte", "--layout", "stream")[0] == 0
        )
    with edited_index(folder) as text:
        text["shards"]["path"][0] = name
    options = {} if kind == "batches" else {"batch_size": 1, "seq_len": 8}
    attempts = (lambda: verify_store(folder), lambda: Loader(folder, **options), lambda: open_reader(folder, **options))
    is_refused(errors.FormatError, *attempts, match="not the name of a file")
    for command in ("verify", "info"):
        code, output = outcome_of(command, folder)
        assert (code, "not the name of a file" in output) == ({"verify": 3, "info": 1}[command], True), output


# --- FIFOs and devices -----------------------------------------------------------------------------------------
@pytest.fixture
def no_hang():
    """End a test that waits for the other end of a FIFO."""
    import signal

    def too_long(*_):
        raise AssertionError("hangs")

    previous = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("name", ["x.h5", "x.npy", "x.batch", "x.h5.partial", "store/shards.json"])
@pytest.mark.usefixtures("no_hang")
def test_a_fifo_is_refused_at_once_by_every_command(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    for command in (["info"], ["verify"], ["doctor"], ["repair"]):
        code, output = outcome_of(*command, path)
        assert code != 0, output
        assert output.startswith("Error: ") or "FIFO" in output, output
    uses = (lambda: open_reader(path), lambda: Loader(path), lambda: open_reader(path, batch_size=1, seq_len=8))
    is_refused((errors.ZbError, OSError), *uses)
    for command in ("npy-to-hdf5", "hdf5-to-batch", "batch-to-hdf5"):
        assert outcome_of(command, path, tmp_path / "out", "--batch-size", 1, "--seq-len", 8)[0] != 0


@pytest.mark.parametrize("suffix", [".h5", ".batch", ".npy"])
@pytest.mark.usefixtures("no_hang")
def test_a_fifo_as_a_shard_or_index_of_a_store_is_refused_at_once(suffix, tmp_path):
    tokens = np.arange(64 * 16, dtype="<u2").reshape(64, 16)
    np.save(tmp_path / "in.npy", tokens)
    folder = tmp_path / "store"
    if suffix == ".npy":
        folder.mkdir()
        np.save(folder / "a.npy", tokens.reshape(-1))
        victim = folder / "a.npy"
        options = {"batch_size": 1, "seq_len": 8, "backend": "npy"}
    else:
        command = "npy-to-hdf5" if suffix == ".h5" else "npy-to-batch"
        done = outcome_of(command, tmp_path / "in.npy", folder, "--batch-size", 4, "--seq-len", 16, "--shards", 2)
        assert done[0] == 0, done[1]
        victim = sorted(folder.glob(f"*{suffix}"))[0]
        options = {}
    victim.unlink()
    os.mkfifo(victim)
    is_refused(errors.ZbError, lambda: next(iter(Loader(folder, shuffle="sequential", **options))))
    if suffix != ".npy":
        assert "FIFO" in str(verify_store(folder)[0].problem)
        assert outcome_of("index", "rebuild", "--force", folder)[0] == 1
        (folder / INDEX_NAME).unlink()
        os.mkfifo(folder / INDEX_NAME)
        attempts = (lambda: Loader(folder), lambda: open_reader(folder), lambda: verify_store(folder))
        is_refused(errors.FormatError, *attempts, match="FIFO")


@pytest.mark.usefixtures("no_hang")
def test_devices_and_folders_are_refused(tmp_path):
    (tmp_path / "x.h5").symlink_to("/dev/zero")
    told = "expected a file, found a FIFO, a socket or a device"
    is_refused(errors.FormatError, lambda: open_reader(tmp_path / "x.h5"), match=told)
    (tmp_path / "y.h5").mkdir()
    is_refused((errors.ZbError, OSError), lambda: open_reader(tmp_path / "y.h5"))


# --- another file under the same name --------------------------------------------------------------------------
def replaced(path, make):
    """Put another file of the same size in the place of `path`."""
    other = path.with_name("other.h5")
    make(other)
    assert other.stat().st_size == path.stat().st_size
    os.utime(other, ns=(1, path.stat().st_mtime_ns + 1_000_000))
    os.replace(other, path)


@pytest.mark.parametrize("access", ["mmap", "pread", "h5py"])
def test_a_replaced_file_is_never_read_for_the_old_one(access, tmp_path):
    path = tmp_path / "x.h5"
    tokens = write(path)
    unread = open_reader(path, access=access)
    reader = open_reader(path, access=access)
    np.testing.assert_array_equal(reader.read_batch(0), tokens[0])
    sent = pickle.dumps(reader)
    replaced(path, lambda other: write(other, seed=1))
    np.testing.assert_array_equal(reader.read_batch(3), tokens[3])  # what is open is the old file
    is_refused(errors.FormatError, lambda: pickle.loads(sent).read_batch(3), match="changed since it was opened")
    if access == "h5py":
        is_refused(errors.FormatError, lambda: unread.read_batch(3), reader.corpus.digests.crc32, match="changed since")
    else:
        assert reader.corpus.digests.crc32().tolist() == [zlib.crc32(batch) for batch in tokens]

    def reads_the_old_file_or_none():
        try:
            return np.array_equal(reader.read_batch(3), tokens[3])
        except errors.ZbError as error:
            return "changed since" in str(error)

    with forked(reads_the_old_file_or_none):
        pass
    reader.close()
    unread.close()


@pytest.mark.parametrize("access", ["mmap", "pread", "h5py"])
def test_a_replaced_stream_is_never_read_for_the_old_one(access, tmp_path):
    path = write_tokens(tmp_path / "x.h5")
    store = open_corpus(path, access=access)
    with open_corpus(path) as other:
        old, offsets = np.array(other.tokens[0:100]), other.doc_offsets.copy()
    np.testing.assert_array_equal(store.tokens[0:100], old)
    sent = pickle.dumps(store)
    replaced(path, lambda other: write_tokens(other, first=9))
    later = pickle.loads(sent)
    is_refused(errors.FormatError, lambda: later.tokens[0:100], lambda: later.doc_offsets, match="changed since")
    if access == "h5py":
        is_refused(errors.FormatError, lambda: store.doc_offsets, match="changed since")
    else:  # by the descriptor of the old file, which is open
        np.testing.assert_array_equal(store.doc_offsets, offsets)
    np.testing.assert_array_equal(store.tokens[0:100], old)
    store.close()


# --- arguments -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"codec": "gzip"}, {"fields": {"mask": "u1"}}])
def test_more_batches_than_the_disk_holds_are_refused_before_anything_is_written(options, tmp_path):
    with pytest.raises(errors.ArgumentError, match=r"expected_batches=1,000,000,000,000 needs [\d,]+ bytes, only"):
        open_writer(tmp_path / "x.h5", batch_size=2, seq_len=8, expected_batches=10**12, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".h5", ".batch"])
@pytest.mark.parametrize("wrong", [{"expected_batches": -1}, {"batch_size": 2.5}, {"seq_len": "8"}, {"seed": None}])
def test_arguments_that_are_no_counts_are_refused(wrong, suffix, tmp_path):
    with pytest.raises(errors.ArgumentError, match=next(iter(wrong))):
        open_writer(tmp_path / f"x{suffix}", **({"batch_size": 2, "seq_len": 8} | wrong))
    assert list(tmp_path.iterdir()) == []


def test_a_dual_file_is_read_as_a_batch_file(tmp_path):
    path = tmp_path / "x.batch"
    tokens = np.arange(16).reshape(1, 2, 8)
    write_batches(path, tokens)
    with open(path, "r+b") as file:  # the reserved bytes of a header: HDF5 looks for its signature there
        file.seek(512)
        file.write(HDF5_MAGIC + bytes(range(100)))
    with open_reader(path) as reader:
        assert reader.corpus.backend == "batch"
        np.testing.assert_array_equal(list(reader), tokens)
    with pytest.raises(errors.BackendError, match="asked for backend 'hdf5', found a 'batch' file"):
        open_reader(path, backend="hdf5")
