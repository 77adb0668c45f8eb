"""Digests of files that hold none: made once, and compared as our own streams are with theirs."""

import contextlib
import hashlib
import itertools
import json
import pickle
import re
import shutil
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from commandline import one_error, report_of, run_zb
from contract import is_refused
from damage import flip
from processes import running, started, wait_until
from reading import reading

from zb_hdf5 import (
    DocumentLoader,
    HDF5ShardWriter,
    Loader,
    MixedLoader,
    ReadAs,
    errors,
    open_corpus,
    open_reader,
    verify_store,
    write_digests,
)
from zb_hdf5.commands.zb import zb
from zb_hdf5.spec import DEFAULT_CHUNK_TOKENS
from zb_hdf5.store.digests import Digests
from zb_hdf5.store.rebuild import index_files
from zb_hdf5.store.shard_report import Outcome

GOLDEN = Path(__file__).parents[1] / "data" / "trainers"
#: The digests of `megatron/uint16`, as the first version has written them.
FROZEN = GOLDEN / "megatron-uint16.digests.json"
SHAPE = {"batch_size": 4, "seq_len": 64}
ALONE = {"rank": 0, "world_size": 1}
#: More than two chunks, and a last one that is not full.
NUM_TOKENS = 2 * DEFAULT_CHUNK_TOKENS + 5_000
#: Windows of long streams: a hundred batches, none of which is as long as a chunk.
LONG = {"batch_size": 4, "seq_len": 1024}


def ids_of(dtype, count=NUM_TOKENS, seed=5):
    """Return ids that each dtype of integers can hold."""
    return np.random.default_rng(seed).integers(0, 30_000, count).astype(dtype)


def write_npy(folder, dtype, count=NUM_TOKENS):
    folder.mkdir()
    for number, part in enumerate(np.split(ids_of(dtype, count), [count // 3 * 2])):
        np.save(folder / f"{number}.npy", part)


def write_llmc(folder, dtype="<u2", count=NUM_TOKENS):
    folder.mkdir()
    for number, part in enumerate(np.split(ids_of(dtype, count), [count // 3 * 2])):
        head = np.zeros(256, "<i4")
        head[:3] = (20240520, 1, len(part)) if part.itemsize == 2 else (20240801, 7, len(part))
        (folder / f"{number}.bin").write_bytes(head.tobytes() + part.tobytes())


def write_datatrove(folder, dtype="<u2", count=NUM_TOKENS):
    folder.mkdir()
    (folder / "0.ds").write_bytes(ids_of(dtype, count).tobytes())
    (folder / "0.ds.index").write_bytes(np.array([*range(1000, count, 1000), count], "<u8").tobytes())


#: Name -> what makes a folder of such files.
WRITERS = {
    "npy-u2": lambda folder: write_npy(folder, "<u2"),
    "npy-i8": lambda folder: write_npy(folder, ">i8"),
    "npy-i4": lambda folder: write_npy(folder, "<i4"),
    "llmc": write_llmc,
    "llmc-u4": lambda folder: write_llmc(folder, "<u4"),
    "datatrove": write_datatrove,
} | {
    name: lambda folder, name=name: shutil.copytree(GOLDEN / name, folder)
    for name in ("megatron/uint16", "megatron/int32", "megatron/sentences", "datatrove/uint32")
}  # fmt: skip


@pytest.fixture(params=WRITERS)
def folder(request, tmp_path):
    """A folder of files of each kind."""
    WRITERS[request.param](tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def digests(folder, tmp_path):
    """The digests of that folder."""
    write_digests(folder, tmp_path / "digests.json")
    return tmp_path / "digests.json"


@pytest.fixture
def long(tmp_path):
    """Return (file, its digests): a stream of one file of uint16, whose digests were made."""
    np.save(tmp_path / "long.npy", ids_of("<u2"))
    write_digests(tmp_path / "long.npy", tmp_path / "long.json")
    return tmp_path / "long.npy", tmp_path / "long.json"


def outcome_of(path, digests):
    """Return the outcome of each file, and the first problem."""
    reports = verify_store(path, read_as=ReadAs(digests=digests))
    return [report.outcome for report in reports], next((each.problem for each in reports if each.problem), None)


def copy_golden(tmp_path):
    return shutil.copytree(GOLDEN / "megatron" / "uint16", tmp_path / "data")


# --- the file --------------------------------------------------------------------------------------------------------
def test_the_bytes_of_a_file_of_digests_are_frozen(tmp_path):
    made = write_digests(GOLDEN / "megatron" / "uint16", tmp_path / "x.json")
    assert (tmp_path / "x.json").read_bytes() == FROZEN.read_bytes()
    assert Digests.load(FROZEN).files == made.files
    assert outcome_of(GOLDEN / "megatron" / "uint16", FROZEN) == ([Outcome.VERIFIED], None)


def test_digests_are_those_of_sha256sum_and_zlib(tmp_path):
    WRITERS["datatrove"](tmp_path / "data")
    found = write_digests(tmp_path / "data", tmp_path / "x.json").files["0.ds"]
    content = (tmp_path / "data" / "0.ds").read_bytes()
    assert found.sha256 == hashlib.sha256(content).hexdigest()
    chunk = DEFAULT_CHUNK_TOKENS * 2
    parts = [content[start : start + chunk] for start in range(0, len(content), chunk)]
    assert found.crc32 == "".join(f"{zlib.crc32(part):08x}" for part in parts)
    offsets = np.array([*range(0, NUM_TOKENS, 1000), NUM_TOKENS], "<u8")
    assert found.documents_sha256 == hashlib.sha256(offsets).hexdigest()


def test_every_file_is_verified_and_read_as_without_digests(folder, digests):
    outcomes, problem = outcome_of(folder, digests)
    assert (set(outcomes), problem) == ({Outcome.VERIFIED}, None)
    checks = {check for report in verify_store(folder, read_as=ReadAs(digests=digests)) for check in report.checks}
    has_documents = any(each.suffix in (".idx", ".index") for each in folder.iterdir())
    assert checks == {"crc32", "sha256", *(["documents"] if has_documents else [])}
    for shuffle in ("global", "records"):
        with Loader(folder, **SHAPE, **ALONE, shuffle=shuffle) as loader:
            expected = torch.stack([*itertools.islice(loader, 40)])
        for verify in ("auto", "batch", "none"):
            how = {**SHAPE, **ALONE, "shuffle": shuffle, "verify": verify}
            with Loader(folder, **how, read_as=ReadAs(digests=digests)) as loader:
                assert torch.equal(torch.stack([*itertools.islice(loader, 40)]), expected), verify
                assert loader.batches.verified == ("all reads" if verify == "batch" else "none")
    with open_corpus(folder) as plain, open_corpus(folder, verify="store", read_as=ReadAs(digests=digests)) as stream:
        assert stream.verified == "store"
        np.testing.assert_array_equal(stream.tokens[0 : len(stream)], plain.tokens[0 : len(plain)])
        np.testing.assert_array_equal(stream.doc_offsets, plain.doc_offsets)


def test_a_state_fits_with_and_without_digests(folder, digests):
    how = {**SHAPE, **ALONE, "seed": 9}
    with Loader(folder, **how) as plain, Loader(folder, **how, read_as=ReadAs(digests=digests)) as compared:
        batches = [next(plain) for _ in range(6)]
        state = plain.state_dict()
        rest = [next(plain) for _ in range(4)]
        for _ in range(6):
            next(compared)
        assert compared.state_dict() == state
    for options in ({}, {"digests": digests}, {"digests": digests, "verify": "batch"}):
        with Loader(folder, **how, **reading(options)) as resumed:
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert torch.equal(torch.stack([next(resumed) for _ in range(4)]), torch.stack(rest))
    assert len(batches) == 6


def test_a_file_of_a_folder_is_compared_with_the_digests_of_the_folder(tmp_path):
    WRITERS["llmc"](tmp_path / "data")
    write_digests(tmp_path / "data", tmp_path / "x.json")
    assert outcome_of(tmp_path / "data" / "1.bin", tmp_path / "x.json") == ([Outcome.VERIFIED], None)
    with open_corpus(
        tmp_path / "data" / "1.bin", verify="batch", read_as=ReadAs(digests=tmp_path / "x.json")
    ) as stream:
        np.testing.assert_array_equal(stream.tokens[0:9], ids_of("<u2")[NUM_TOKENS // 3 * 2 :][:9])


# --- a flipped bit ---------------------------------------------------------------------------------------------------
def message_of_flip(file, read):
    """Return the error of a read of a damaged chunk, without the name of the file and the remedy."""
    with pytest.raises(errors.ChecksumError) as caught:
        read()
    return caught.value.facts.replace(str(file), "FILE")


@pytest.mark.parametrize(("verify", "chunk"), [("auto", 0), ("none", 0), ("batch", 1), ("store", 1)])
def test_a_flipped_bit_is_the_same_error_as_in_our_own_stream(verify, chunk, long, tmp_path):
    path, digests = long
    (tmp_path / "own").mkdir()
    own = tmp_path / "own" / "long.h5"
    with HDF5ShardWriter(own, dtype="uint16") as writer:
        writer.write_document(ids_of("<u2"))
    index_files([own]).save(own.parent)
    first = chunk * DEFAULT_CHUNK_TOKENS
    for file in (path, own):
        flip(file, file.read_bytes().index(ids_of("<u2")[:100].tobytes()) + 2 * first + 1001)

    def read(data, **options):
        with open_corpus(data, verify=verify, **options) as stream:
            stream.tokens[0:1]  # proves the file
            stream.tokens[first : first + 10]

    found = message_of_flip(path, lambda: read(path, read_as=ReadAs(digests=digests)))
    assert re.match(rf"FILE: chunk {chunk}.*expected crc32 [0-9a-f]{{8}}, found [0-9a-f]{{8}}", found)
    assert found == message_of_flip(own, lambda: read(own.parent)).replace(", repair it, or convert again", "")


def test_a_flipped_bit_stops_the_batch_that_has_it(long):
    path, digests = long
    flip(path, 128 + 2 * (DEFAULT_CHUNK_TOKENS + 17))
    with open_reader(path, **LONG, read_as=ReadAs(digests=digests), verify="batch") as reader:
        copied = pickle.loads(pickle.dumps(reader))
        good = [reader.read_batch(number) for number in range(DEFAULT_CHUNK_TOKENS // 4096)]
        np.testing.assert_array_equal(np.concatenate(good).ravel(), ids_of("<u2")[:DEFAULT_CHUNK_TOKENS])
        with copied:
            for each in (reader, copied):
                words = r"long\.npy: chunk 1: expected crc32"
                is_refused(errors.ChecksumError, lambda each=each: each.read_batch(len(good)), match=words)
    with Loader(
        path, **LONG, **ALONE, read_as=ReadAs(digests=digests)
    ) as loader:  # only the first read of a file is compared
        assert sum(1 for _ in loader) == NUM_TOKENS // 4096
    outcomes, problem = outcome_of(path, digests)
    assert outcomes == [Outcome.BAD]
    assert "chunk 1 is the first bad one" in str(problem)


@pytest.mark.parametrize("kind", ["npy-i8", "npy-i4"])
def test_ids_that_are_widened_or_narrowed_are_compared_as_they_are_stored(kind, tmp_path):
    WRITERS[kind](tmp_path / "data")
    write_digests(tmp_path / "data", tmp_path / "x.json")
    flip(tmp_path / "data" / "1.npy", -3)
    words = r"1\.npy: chunk 0: expected crc32"
    with open_corpus(tmp_path / "data", read_as=ReadAs(digests=tmp_path / "x.json"), verify="batch") as stream:
        stream.tokens[0:9]
        is_refused(errors.ChecksumError, lambda: stream.tokens[NUM_TOKENS - 9 : NUM_TOKENS], match=words)


@pytest.mark.parametrize("verify", ["auto", "batch"])
def test_documents_are_compared_when_they_are_read(verify, tmp_path):
    data = copy_golden(tmp_path)
    index = data / "corpus_text_document.idx"
    content = bytearray(index.read_bytes())
    edges = np.frombuffer(content, "<i8", offset=len(content) - 61 * 8).copy()
    edges[2] = edges[3]  # documents that still ascend: two of them become one
    content[-61 * 8 :] = edges.tobytes()
    index.write_bytes(content)
    with open_corpus(data, verify=verify, read_as=ReadAs(digests=FROZEN)) as stream:
        is_refused(errors.ChecksumError, lambda: stream.doc_offsets, match="its documents are others: expected sha256")
    is_refused(
        errors.ChecksumError,
        lambda: DocumentLoader(data, collate="pad", batch_size=2, **ALONE, read_as=ReadAs(digests=FROZEN)),
        match="its documents are others",
    )
    with open_corpus(data, verify="none", read_as=ReadAs(digests=FROZEN)) as stream:
        assert len(stream.doc_offsets) == 61
    outcomes, problem = outcome_of(data, FROZEN)
    assert outcomes == [Outcome.BAD]
    assert "its documents are others" in str(problem)


# --- other files -----------------------------------------------------------------------------------------------------
def cut(data):
    path = next(data.glob("*.ds"))
    path.write_bytes(path.read_bytes()[:-2])


def lengthened(data):
    path = next(data.glob("*.ds"))
    path.write_bytes(path.read_bytes() + bytes(2))
    index = path.with_name("0.ds.index")
    index.write_bytes(index.read_bytes() + np.array([NUM_TOKENS + 1], "<u8").tobytes())


def added(data):
    for path in [*data.iterdir()]:
        shutil.copy(path, data / path.name.replace("0.", "1."))


def renamed(data):
    for path in [*data.iterdir()]:
        path.rename(data / path.name.replace("0.", "1."))


@pytest.mark.parametrize(("change", "kind", "words", "outcomes"), [
    (cut, errors.IncompleteError, "it was cut short", {Outcome.BAD}),
    (lengthened, errors.FormatError, "expected bytes 1058576, as x.json has it, found 1058578", {Outcome.BAD}),
    (added, errors.FormatError, "expected the digests of 1.ds, found digests of 0.ds",
     {Outcome.VERIFIED, Outcome.UNVERIFIED}),
    (renamed, errors.FormatError, "expected the digests of 1.ds, found digests of 0.ds",
     {Outcome.UNVERIFIED, Outcome.BAD}),
])  # fmt: skip
def test_other_files_are_one_clear_error(change, kind, words, outcomes, tmp_path):
    WRITERS["datatrove"](tmp_path / "data")
    write_digests(tmp_path / "data", tmp_path / "x.json")
    change(tmp_path / "data")
    how = reading({**SHAPE, "digests": tmp_path / "x.json"})
    is_refused(kind, lambda: open_reader(tmp_path / "data", **how), match=re.escape(words))
    assert words in one_error(run_zb("info", tmp_path / "data", "--digests", tmp_path / "x.json"))
    assert set(outcome_of(tmp_path / "data", tmp_path / "x.json")[0]) == outcomes


def test_another_file_of_the_same_size_is_found_at_its_first_read(long):
    path, digests = long
    np.save(path, ids_of("<u2", seed=6))
    how = reading({**LONG, "digests": digests, "verify": "none"})
    is_refused(errors.ChecksumError, lambda: open_reader(path, **how), match="is damaged, or belongs elsewhere")
    np.save(path, ids_of("<i2"))
    is_refused(
        errors.FormatError,
        lambda: open_corpus(path, read_as=ReadAs(digests=digests)),
        match="expected dtype <u2, .*found <i2",
    )


def test_a_missing_file_is_named(tmp_path):
    WRITERS["llmc"](tmp_path / "data")
    write_digests(tmp_path / "data", tmp_path / "x.json")
    (tmp_path / "data" / "0.bin").unlink()
    is_refused(
        errors.IncompleteError,
        lambda: open_corpus(tmp_path / "data", read_as=ReadAs(digests=tmp_path / "x.json")),
        match=r"0\.bin: is not there, and x\.json has digests of it",
    )
    found = run_zb("verify", tmp_path / "data", "--digests", tmp_path / "x.json", code=4)
    assert "0.bin: is not there" in found.output


def patched(**changes):
    """Return what changes keys of a file of digests; the key "check" then goes with them."""

    def change(text):
        value = json.loads(text)
        for name, new in changes.items():
            holder = value["files"] if name in value["files"] and isinstance(new, list) else value
            holder[name] = new
        return json.dumps({key: each for key, each in value.items() if key != "check"})

    return change


@pytest.mark.parametrize(("change", "words"), [
    (lambda text: text[: len(text) // 2], "not JSON"),
    (lambda text: text.replace("8efa06f0", "8efa06f1"), "does not have the digest in its last key"),
    (lambda text: "[]", "expected a JSON object"),
    (patched(format="zb-shards"), "expected format 'zb-digests', found 'zb-shards'"),
    (patched(version=2), "expected version 1, found 2"),
    (patched(chunk_tokens=2**60), "expected chunk_tokens 262144, found 1152921504606846976"),
    (patched(backend="zarr"), "expected backend npy or megatron"),
    (patched(token_count=[2**60]), "expected the crc32 of 4,398,046,511,104 chunks"),
    (patched(token_count=[2**80]), "token_count"),
    (patched(token_count=[-1]), "expected sizes from 0 on"),
    (patched(bytes=[38_688, 1]), "expected arrays of one length"),
    (patched(crc32=["8efa06fx"]), "expected the crc32 of 1 chunks"),
    (patched(crc32=["8efa06f08efa06f0"]), "expected the crc32 of 1 chunks"),
    (patched(crc32=[1]), "expected str"),
    (patched(sha256=["x"]), "64 hexadecimal digits"),
    (patched(sha256="0" * 64), "expected sha256"),
    (patched(documents_sha256=["0" * 63]), "64 hexadecimal digits"),
    (patched(path=["../corpus_text_document.bin"]), "expected the names of files of one folder"),
    (patched(path=["corpus\0.bin"]), "expected the names of files of one folder"),
    (patched(files={}), "'path' is missing"),
])  # fmt: skip
def test_a_file_of_digests_that_lies_is_refused(change, words, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text(change(FROZEN.read_text()))
    data = GOLDEN / "megatron" / "uint16"
    is_refused(errors.FormatError, lambda: open_corpus(data, read_as=ReadAs(digests=bad)), match=re.escape(words))
    for command in ("verify", "info", "show"):
        message = one_error(run_zb(command, data, "--digests", bad))
        assert words in message
        assert message.startswith(str(bad))


def test_digests_of_another_format_and_of_data_with_digests_are_refused(long, tmp_path, write_file):
    path, digests = long
    words = "expected digests of 'npy' files, found 'megatron'"
    is_refused(errors.FormatError, lambda: open_corpus(path, read_as=ReadAs(digests=FROZEN)), match=words)
    store = tmp_path / "own.h5"
    write_file(store, np.zeros((2, 2, 8), "<u2"))
    for use in (open_reader, Loader, verify_store):
        is_refused(
            errors.BackendError,
            lambda use=use: use(store, read_as=ReadAs(digests=digests)),
            match="is for files that hold none",
        )
    is_refused(
        errors.NotFoundError,
        lambda: open_corpus(path, read_as=ReadAs(digests=tmp_path / "none.json")),
        match="no such file",
    )
    is_refused(errors.BackendError, lambda: write_digests(store, tmp_path / "x.json"), match="stores have digests")
    assert "--digests" in one_error(run_zb("info", store, "--digests", digests))
    np.save(tmp_path / "records.npy", np.zeros((4, 8), "<u2", order="F"))
    is_refused(
        errors.FormatError,
        lambda: write_digests(tmp_path / "records.npy", tmp_path / "x.json"),
        match="found Fortran order",
    )
    assert not (tmp_path / "x.json").exists()


# --- loaders ---------------------------------------------------------------------------------------------------------
def test_a_mixture_takes_readers_with_digests(long, tmp_path):
    path, digests = long
    WRITERS["llmc"](tmp_path / "data")
    write_digests(tmp_path / "data", tmp_path / "x.json")
    sources = {"a": (path, digests), "b": (tmp_path / "data", tmp_path / "x.json")}
    weights = {"a": 2.0, "b": 1.0}

    def mixture(**options):
        readers = {
            name: open_reader(data, **LONG, read_as=ReadAs(digests=own), **options)
            for name, (data, own) in sources.items()
        }
        return MixedLoader(readers, weights, **ALONE)

    plain = MixedLoader({name: data for name, (data, _) in sources.items()}, weights, **ALONE, **LONG)
    with contextlib.closing(plain), contextlib.closing(mixture(verify="batch")) as mixed:
        for _ in range(9):
            assert torch.equal(next(plain), next(mixed))
        state = plain.state_dict()
        assert mixed.state_dict() == state
        expected = [next(plain) for _ in range(3)]
    with contextlib.closing(mixture()) as resumed:
        resumed.load_state_dict(state)
        assert torch.equal(torch.stack([next(resumed) for _ in range(3)]), torch.stack(expected))
    flip(path, 128)
    is_refused(errors.ChecksumError, mixture, match=r"long\.npy: chunk 0: expected")


def test_documents_come_as_without_digests(tmp_path):
    how = {"collate": "pad", "batch_size": 3, **ALONE}
    data = GOLDEN / "megatron" / "uint16"
    with (
        DocumentLoader(data, **how) as plain,
        DocumentLoader(data, **how, read_as=ReadAs(digests=FROZEN), verify="batch") as compared,
    ):
        for one, other in itertools.islice(zip(plain, compared, strict=True), 8):
            assert torch.equal(one["tokens"], other["tokens"])
        assert compared.state_dict() == plain.state_dict()


def test_a_refreshed_stream_keeps_its_digests(long):
    path, digests = long
    with open_corpus(path, verify="batch", read_as=ReadAs(digests=digests)) as stream:
        assert stream.refresh() == NUM_TOKENS
        flip(path, 300)
        is_refused(errors.ZbError, lambda: stream.tokens[0:10])


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
@pytest.mark.parametrize("verify", ["auto", "batch", "none"])
def test_batches_as_long_as_a_chunk_are_read(verify, dtype, tmp_path):
    ids = ids_of(dtype)
    np.save(tmp_path / "x.npy", ids)
    write_digests(tmp_path / "x.npy", tmp_path / "x.json")
    how = {**ALONE, "batch_size": 128, "seq_len": 2048, "shuffle": "sequential"}
    expected = torch.from_numpy(ids[: 2 * DEFAULT_CHUNK_TOKENS].astype(np.int64))
    with Loader(tmp_path / "x.npy", **how) as plain:
        assert torch.equal(torch.cat([*plain]).ravel(), expected)
    with Loader(tmp_path / "x.npy", **how, verify=verify, read_as=ReadAs(digests=tmp_path / "x.json")) as compared:
        assert torch.equal(torch.cat([*compared]).ravel(), expected)


def test_a_cache_keeps_compared_chunks(long, tmp_path):
    path, digests = long
    how = reading({**LONG, **ALONE, "digests": digests, "cache": tmp_path / "cache"})
    with Loader(path, **LONG, **ALONE) as loader:
        expected = torch.stack([*loader])
    for _ in range(2):
        with Loader(path, **how, verify="batch") as loader:
            assert torch.equal(torch.stack([*loader]), expected)


# --- the command -----------------------------------------------------------------------------------------------------
def test_the_command_writes_once_and_replaces_by_force(tmp_path):
    data = copy_golden(tmp_path)
    made = tmp_path / "x.json"
    report = report_of(zb, "index", "digests", data, "-o", made)
    assert (report["num_files"], report["tokens"], report["backend"]) == (1, 19_344, "megatron")
    assert report["sha256"] == Digests.load(made).sha256
    before = made.read_bytes()
    assert "pass --force to replace it" in one_error(run_zb("index", "digests", data, "-o", made))
    flip(data / "corpus_text_document.bin", 0)
    run_zb("index", "digests", data, "-o", made, "--force", "--quiet", code=0)
    assert made.read_bytes() != before
    for other in (data / "corpus_text_document.bin", data / "corpus_text_document.idx"):
        content = other.read_bytes()
        assert "is not a file of digests" in one_error(run_zb("index", "digests", data, "-o", other, "--force"))
        assert other.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "x.json"]


def test_every_command_with_digests(tmp_path):
    data = GOLDEN / "megatron" / "uint16"
    shape = ("--batch-size", 4, "--seq-len", 64)
    assert report_of(zb, "info", data, "--digests", FROZEN)["crc32"] is True
    assert report_of(zb, "info", data)["crc32"] is False
    assert run_zb("show", data, "--digests", FROZEN, code=0).output == run_zb("show", data, code=0).output
    run_zb("report", data, "--digests", FROZEN, "-o", tmp_path / "report.html", code=0)
    run_zb("which", data, "--batch", 1, *shape, "--digests", FROZEN, code=0)
    run_zb("doctor", data, "--digests", FROZEN, code=0)
    report = report_of(zb, "verify", data, "--digests", FROZEN)
    assert report["files"][0]["checks"] == ["crc32", "sha256", "documents"]
    assert f"'zb index digests {data}" in run_zb("verify", data, code=6).output


def test_a_verdict_names_the_command_and_the_file(long):
    path, digests = long
    flip(path, 128)
    found = one_error(run_zb("show", path, "--batch", 0, "--digests", digests), code=3)
    assert found.endswith(f"run 'zb verify {path} --digests FILE'")
    assert "long.npy: chunk 0 is the first bad one" in run_zb("verify", path, "--digests", digests, code=3).output


def test_progress_counts_every_token_of_the_total_that_was_announced(tmp_path):
    WRITERS["llmc"](tmp_path / "data")
    for work in (
        lambda **how: write_digests(tmp_path / "data", tmp_path / "x.json", **how),
        lambda **how: verify_store(tmp_path / "data", read_as=ReadAs(digests=tmp_path / "x.json"), **how),
    ):
        totals, counts = [], []
        work(announce=totals.append, progress=counts.append)
        assert (totals, sum(counts)) == ([NUM_TOKENS], NUM_TOKENS)


@pytest.mark.parametrize("exists", [False, True])
def test_work_that_stops_leaves_what_was_there(exists, long, tmp_path):
    path, digests = long
    if not exists:
        digests.unlink()
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_digests(path, digests, overwrite=exists, progress=stop)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_file_that_changes_meanwhile_is_refused(long, tmp_path):
    path, _ = long

    def change(_):
        flip(path, 200)

    with pytest.raises(errors.IncompleteError, match="was changed while its digests were made"):
        write_digests(path, tmp_path / "x.json", progress=change)
    assert not (tmp_path / "x.json").exists()


@pytest.mark.slow
def test_sigterm_leaves_nothing_half_written(tmp_path):
    np.lib.format.open_memmap(tmp_path / "large.npy", "w+", "<u2", (6 << 30,))  # a file of holes
    digests = tmp_path / "x.json"
    with running(started("from zb_hdf5.__main__ import zb; zb()", "index", "digests", tmp_path, "-o", digests)) as one:
        wait_until(digests.with_name("x.json.partial").exists, one)
        one.send_signal(signal.SIGTERM)
        _, err = one.communicate(timeout=100)
    assert one.returncode == 143
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["large.npy"]
