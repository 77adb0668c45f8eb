"""A bound on the memory of a conversion of documents: kept, told where it is too little, without a trace in bytes."""

import re
import subprocess
import time
from contextlib import nullcontext

import numpy as np
import pytest
from commandline import one_error, run_zb
from contents import files_in, write_stream
from processes import anonymous_bytes, command_of, environment

from zb_hdf5 import ArgumentError, HDF5ShardWriter, convert
from zb_hdf5.converters import packed_rows, run, stream_source
from zb_hdf5.converters.document_memory import DocumentMemory
from zb_hdf5.documents import document_table
from zb_hdf5.spec import StoreMeta

MIB = 1 << 20
ROWS = {"seq_len": 16, "batch_size": 4}
ZB = "from zb_hdf5.__main__ import zb; zb()"


def stream_of(path, count, mean, fields=None):
    """Write a stream of documents of some lengths."""
    random = np.random.default_rng(count)
    lengths = random.geometric(1 / mean, count)
    tokens = random.integers(1, 50_000, lengths.sum(), dtype=np.uint16)
    values = fields and {name: np.ones((len(tokens), *shape), dtype) for name, (dtype, shape) in fields.items()}
    write_stream(path, tokens, lengths, values, dtype="uint16", boundary_token_id=0, fields=fields)
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    stream_of(folder / "a.h5", 500, 9)
    convert(folder / "a.h5", "stream", folder / "parts", shards=2, workers=1)
    for target, name in (("megatron", "a.bin"), ("datatrove", "a.ds"), ("olmo", "a.npy")):
        convert(folder / "a.h5", target, folder / name, workers=1)
    return folder


WAYS = [
    ("hdf5", {"packing": "best-fit", **ROWS}),
    ("hdf5", {"packing": "pad", **ROWS}),
    ("hdf5", {"packing": "concat", "val_fraction": 0.2, **ROWS}),
    ("batch", {"packing": "concat", "tokens_only": True, **ROWS}),
    ("stream", {}),
    ("stream", {"shards": 3, "workers": 2}),
    ("megatron", {"tokens_only": True}),
]


@pytest.mark.parametrize("name", ["a.h5", "parts", "a.bin", "a.ds", "a.npy"])
@pytest.mark.parametrize(("target", "how"), WAYS)
@pytest.mark.thin
def test_no_byte_depends_on_the_bound(sources, name, target, how, tmp_path, monkeypatch):
    of_olmo = {"source_format": "olmo", "source_dtype": "uint16"} if name == "a.npy" else {}
    for out, bound in (("free", {}), ("bound", {"memory": "600MiB"})):
        convert(sources / name, target, tmp_path / out, **how, **of_olmo, **bound)
        monkeypatch.setattr(stream_source, "BOUNDED_TOKENS", 50)
        monkeypatch.setattr(packed_rows, "PIECES_AT_ONCE", 5)
        monkeypatch.setattr(document_table, "TEXTS_AT_ONCE", 1)
    assert files_in(tmp_path / "free") == files_in(tmp_path / "bound")


@pytest.mark.parametrize("name", ["a.h5", "a.bin"])
@pytest.mark.parametrize(("target", "how"), [*WAYS[:2], *WAYS[4:6]])
def test_too_little_is_told_before_the_work_with_the_least_that_is_enough(sources, name, target, how, tmp_path):
    before = files_in(tmp_path)
    with pytest.raises(ArgumentError, match=r"^memory: 1.0 MiB is too little for .* 500 documents: it takes") as found:
        convert(sources / name, target, tmp_path / "out", memory=MIB, **how)
    least = int(re.search(r"pass memory='(\d+)MiB' or more", str(found.value))[1])
    assert files_in(tmp_path) == before
    assert ("fewer workers: one takes memory='" in str(found.value)) is ("workers" in how)
    with pytest.raises(ArgumentError, match="too little"):
        convert(sources / name, target, tmp_path / "out", memory=least * MIB - 1, **how)
    assert convert(sources / name, target, tmp_path / "out", memory=f"{least}MiB", **how).counts.tokens_in


def test_the_command_names_the_options_to_type(sources, tmp_path):
    how = [tmp_path / "out", "--to", "stream", "--memory", 9, "--workers", 2]
    of_two = one_error(run_zb("convert", sources / "parts", *how), 2)
    assert re.search(r" pass --memory \d+MiB or more, or fewer --workers: one takes --memory \d+MiB$", of_two)
    of_one_file = one_error(run_zb("convert", sources / "a.bin", *how), 2)
    assert of_one_file.startswith("--memory: 9 bytes is too little for 1 process and 500 documents: it takes")


@pytest.mark.parametrize(("options", "message"), [
    ({"boundary_token_id": 0}, "memory bounds documents whose number is known before they are cut"),
    ({"tokenizer": "byte", "source_format": "jsonl"}, r"memory belongs to .*stream.*; fewer workers take less"),
])  # fmt: skip
def test_documents_that_are_not_counted_are_refused_with_the_way(options, message, tmp_path):
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "a.bin")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    source = tmp_path / ("a.jsonl" if "tokenizer" in options else "a.bin")
    headerless = {} if "tokenizer" in options else {"source_dtype": "uint16"}
    with pytest.raises(ArgumentError, match=message):
        convert(source, "stream", tmp_path / "out", memory="1GiB", **options, **headerless)
    assert not (tmp_path / "out").exists()


def test_a_bound_lowers_the_workers_to_those_that_fit():
    memory = DocumentMemory.of_rows(10**7, 10**9, StoreMeta(32, 2048, np.dtype("<u2")), "best-fit")
    assert memory.needed(1) < memory.needed(2) < memory.needed(3)
    for count in (1, 2, 5):
        assert memory.workers_within(memory.needed(count), 9) == count
    assert (memory.workers_within(1 << 50, 9), memory.workers_within(1, 9)) == (9, 1)
    small = DocumentMemory.of_rows(10, 100, StoreMeta(4, 16, np.dtype("<u2")), "pad")
    assert small.needed(1) < 100 * MIB


def test_without_a_bound_the_workers_are_those_of_before(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SMALL_BYTES", 0)
    monkeypatch.setattr(run, "default_workers", lambda: 2)
    seen = []
    monkeypatch.setattr(run, "open_engine", lambda executor, workers, preload: seen.append(workers) or nullcontext())
    for bound in ({}, {"memory": "1GiB"}, {"memory": "150MiB"}):
        convert(sources / "parts", "stream", tmp_path / "out", **bound)
    assert seen == [2, 2, 1]


def peak_of(*arguments):
    """Return the most memory that all processes of a command take together."""
    peak = 0
    with subprocess.Popen(command_of(ZB, *arguments), start_new_session=True, env=environment()) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.01)
    assert process.returncode == 0
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("way", ["megatron to rows", "stream to stream", "long metadata", "a long document"])
def test_all_processes_together_stay_within_the_least_that_is_named(way, tmp_path):
    command = ["convert", tmp_path / "a.h5", tmp_path / "out", "--to", "stream"]
    if way == "stream to stream":  # unbounded, it takes 324 MiB by one process
        stream_of(tmp_path / "a.h5", 60_000, 150, {"vector": ("<f4", (8,))})
    elif way == "long metadata":
        with HDF5ShardWriter(tmp_path / "a.h5", dtype="uint16", boundary_token_id=0) as writer:
            for number in range(40_000):
                writer.write_document([number % 999] * 20, id=number, metadata={"text": 3000 * "x"})
    elif way == "a long document":
        write_stream(tmp_path / "a.h5", np.ones(50_000_100, np.uint16), [100, 50_000_000])
    else:
        convert(stream_of(tmp_path / "a.h5", 1_000_000, 10), "megatron", tmp_path / "a.bin", workers=1)
        command = ["convert", tmp_path / "a.bin", tmp_path / "out", "--to", "hdf5", "--seq-len", 512]
        command += ["--packing", "best-fit", "--shards", 2]
    for workers in (1, 2):
        how = [*command, "--workers", workers, "--quiet", "--force"]
        least = re.search(r"pass --memory (\d+)MiB", one_error(run_zb(*how, "--memory", 1), 2))[1]
        assert 64 * MIB < peak_of(*how, "--memory", f"{least}MiB") <= int(least) * MIB, workers
