"""Formats of installed packages: found by their entry points, asked last, and never a traceback."""

import importlib
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
from commandline import report_of, run_zb, succeed
from contract import check_loader, check_reader, is_refused
from installed import ZARR, forget_installed, install, install_zarr, write_zarr

from zb_hdf5 import ArgumentError, FormatError, IncompleteError, Loader, ReadAs, convert, open_corpus, open_reader
from zb_hdf5.commands.zb import zb
from zb_hdf5.formats.document_source import CompletedSource, DocumentSource
from zb_hdf5.formats.document_writer import DocumentWriter
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.store.format_list import flat_format
from zb_hdf5.store.found_path import found_at
from zb_hdf5.trainers.guards import GuardedSource, guarded

TOKENS = np.random.default_rng(2).integers(0, 50_000, 24 * 4 * 50).astype(np.uint16)
SHAPE = {"batch_size": 4, "seq_len": 50}


@pytest.fixture(autouse=True)
def forgotten():
    yield
    forget_installed()


@pytest.fixture(params=["npy", "zarr 2", "zarr 3"])
def path(request, tmp_path, monkeypatch):
    """Return the same ids in a format of ours, and in that of the package of the examples."""
    if request.param == "npy":
        np.save(tmp_path / "a.npy", TOKENS)
        return tmp_path / "a.npy"
    install_zarr(tmp_path, monkeypatch)
    return write_zarr(tmp_path / "a.zarr", TOKENS, int(request.param[-1]))


def message_of(result):
    """Return the message of a failed command, which may hold the name of an error of a package."""
    assert result.exit_code != 0
    assert (result.stdout, "Traceback" in result.stderr) == ("", False)
    assert result.stderr.startswith("Error: ")
    return result.stderr


# --- the contract ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("access", ["auto", "mmap", "pread"])
def test_it_is_read_in_place_as_the_contract_says(access, path):
    with open_reader(path, **SHAPE, access=access) as reader:
        check_reader(reader, TOKENS.reshape(-1, 4, 50))


@pytest.mark.parametrize("shuffle", ["global", "records", "sequential"])
def test_it_is_trained_from_as_the_contract_says(shuffle, path):
    check_loader(lambda **given: Loader(path, **{**SHAPE, "shuffle": shuffle, "rank": 0, "world_size": 1, **given}))


def test_every_command_reads_it(path, tmp_path):
    facts = report_of(zb, "info", path)
    assert (facts["kind"], facts["tokens"], facts["dtype"]) == ("stream", TOKENS.size, "uint16")
    shape = ("--batch-size", 4, "--seq-len", 50)
    succeed(zb, "show", path, "--batch", 0, *shape)
    succeed(zb, "which", path, "--batch", 1, *shape)
    assert "hold no digests" in run_zb("verify", path, code=6).output
    succeed(zb, "index", "digests", path, "-o", tmp_path / "digests")
    succeed(zb, "verify", path, "--digests", tmp_path / "digests")
    with Loader(
        path, **SHAPE, read_as=ReadAs(digests=tmp_path / "digests"), shuffle="sequential", rank=0, world_size=1
    ) as loader:
        np.testing.assert_array_equal(next(loader), TOKENS[:200].reshape(4, 50))


def test_it_is_converted_to_a_store_and_a_stream(path, tmp_path):
    succeed(zb, "convert", path, tmp_path / "out", "--batch-size", 4, "--seq-len", 50, "--no-shuffle")
    with open_reader(tmp_path / "out") as reader:
        assert np.concatenate(list(reader)).ravel().tolist() == TOKENS[: reader.corpus.num_tokens].tolist()
        assert reader.corpus.num_tokens == TOKENS.size
    succeed(zb, "verify", tmp_path / "out")
    name = found_at(path).backend
    how = ("--boundary-token-id", 7) if name == "npy" else ("--tokens-only",)
    succeed(zb, "convert", "--from", name, "--to", "stream", path, tmp_path / "stream", *how)
    with open_corpus(tmp_path / "stream") as stream:
        np.testing.assert_array_equal(stream.tokens[0 : TOKENS.size], TOKENS)
    convert(tmp_path / "out", "hdf5", tmp_path / "ours")  # formats of ours are converted as before
    assert report_of(zb, "convert", "--list")["formats"]["npy"]["in_place"]


def test_it_is_listed_and_named_like_a_format_of_ours(tmp_path, monkeypatch):
    install_zarr(tmp_path, monkeypatch)
    folder = write_zarr(tmp_path / "a.zarr", TOKENS)
    listed = report_of(zb, "convert", "--list")["formats"]["zarr"]
    assert (listed["in_place"], listed["is_source"], listed["is_target"]) == (True, True, False)
    assert "--source-dtype" in succeed(zb, "convert", "--from", "zarr", "--help").stdout
    with open_reader(folder, **SHAPE, backend="zarr") as reader:
        assert pickle.loads(pickle.dumps(reader)).num_batches == reader.num_batches


@pytest.mark.parametrize(("version", "changes", "error", "message"), [
    (2, {"compressor": {"id": "zstd"}}, FormatError, "expected a 1-D array of integers in uncompressed chunks"),
    (2, {"shape": [10, 10]}, FormatError, "expected a 1-D array of integers"),
    (2, {"dtype": "<f4"}, FormatError, "expected a 1-D array of integers, found"),
    (3, {"codecs": [{"name": "bytes"}, {"name": "zstd"}]}, FormatError, r"codecs \['bytes', 'zstd'\]"),
    (3, {"shape": [2**60]}, IncompleteError, "expected 1,152,921,504,606,847 chunks, found 5"),
    (2, {"zarr_format": 9}, FormatError, "uncompressed chunks, found 9"),
])  # fmt: skip
def test_an_array_that_it_cannot_read_is_one_message(version, changes, error, message, tmp_path, monkeypatch):
    install_zarr(tmp_path, monkeypatch)
    folder = write_zarr(tmp_path / "a.zarr", TOKENS, version, **changes)
    is_refused(error, lambda: open_corpus(folder), match=message)
    message_of(run_zb("info", folder))


def test_a_chunk_that_was_cut_short_is_refused(tmp_path, monkeypatch):
    install_zarr(tmp_path, monkeypatch)
    folder = write_zarr(tmp_path / "a.zarr", TOKENS)
    os.truncate(folder / "4", 100)
    is_refused(IncompleteError, lambda: open_corpus(folder), match="expected 2,000 bytes")


# --- packages that fail ------------------------------------------------------------------------------------------
#: A package that fails where it is asked, and the words of its note.
FORMAT = """
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.format_row import FormatRow
import numpy as np
class Odd(FlatFormat):
    sign = "anything"
    def fits(self, look):
        {recognises}
    def facts(self, look):
        {facts}
ROW = FormatRow(noun="odd files", suffixes=(".odd",), place=__name__ + ":Odd", is_flat=True, holds_documents=False)
"""
SPOILED = [
    ("raise RuntimeError('no luck\\nat all')", "cannot be loaded: RuntimeError: no luck"),
    ("import no_such_module", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
    ("ROW = 5", "cannot be loaded: TypeError: expected a FormatRow, found 5"),
    ("def ROW(): return 1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
    ("OTHER = 1", "cannot be loaded: AttributeError: "),
    (FORMAT.format(recognises="return look.no_such", facts="pass"), "failed: AttributeError: "),
]


@pytest.mark.parametrize(("text", "note"), SPOILED)
def test_a_package_that_fails_is_a_note_with_its_name(text, note, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "spoiled", text)
    (tmp_path / "x.odd").write_bytes(bytes(100))
    (tmp_path / "y.odd").mkdir()
    message = message_of(run_zb("info", tmp_path / "x.odd"))
    assert "no known file" in message
    assert f"the package spoiled 1.0: its format spoiled {note}" in message
    with pytest.raises(FormatError) as caught:
        Loader(tmp_path / "x.odd", **SHAPE)
    assert any(note in each for each in caught.value.__notes__)
    if "cannot be loaded" in note:
        for use in (
            lambda: convert(tmp_path / "x.odd", "hdf5", tmp_path / "out", source_format="spoiled"),
            lambda: convert(tmp_path / "x.odd", "spoiled", tmp_path / "out"),
            lambda: open_reader(tmp_path / "x.odd", backend="spoiled"),
        ):
            with pytest.raises(ArgumentError) as refused:
                use()
            assert any(note in each for each in refused.value.__notes__)
        result = run_zb("convert", "--from", "spoiled", tmp_path / "x.odd", tmp_path / "out", code=2)
        assert note in result.stderr
    np.save(tmp_path / "a.npy", TOKENS)  # formats of ours ask no package
    with open_reader(tmp_path / "a.npy", **SHAPE) as reader:
        assert reader.num_batches == 24


def test_a_package_that_fails_later_is_one_error_with_its_name(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "spoiled", FORMAT.format(recognises="return True", facts="return {}['x']"))
    (tmp_path / "x.odd").write_bytes(bytes(100))
    expected = "the package spoiled 1.0: its format spoiled failed: KeyError: 'x'"
    for command in (("info", tmp_path / "x.odd"), ("convert", tmp_path / "x.odd", tmp_path / "out")):
        assert expected in message_of(run_zb(*command))
    assert not (tmp_path / "out").exists()


COUNTED_LATER = """from zb_hdf5.spec import NOT_COUNTED
        return FlatFacts(look.text, 50, np.dtype("<u2"), num_documents=NOT_COUNTED)
    def document_offsets(self, found):
        return np.array([0, 20, 50], np.uint64)"""


@pytest.mark.parametrize(
    "own",
    [
        "",
        """
    def num_documents(self, found):
        return {}['x']""",
    ],
)
def test_documents_of_a_package_are_counted_when_somebody_asks(own, tmp_path, monkeypatch):
    text = FORMAT.format(recognises="return True", facts=COUNTED_LATER + own)
    install(tmp_path, monkeypatch, "spoiled", text)
    (tmp_path / "x.odd").write_bytes(bytes(100))
    with open_corpus(tmp_path / "x.odd") as stream:
        assert stream.has_documents
        if own:
            is_refused(FormatError, lambda: stream.document_count, match="its format spoiled failed: KeyError: 'x'")
        else:
            assert (stream.document_count, len(stream.documents[1].ids)) == (2, 30)


def test_other_packages_are_asked_when_one_fails_and_no_name_of_ours_is_taken(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "spoiled", "raise RuntimeError('no')")
    install(tmp_path, monkeypatch, "other", FORMAT.format(recognises="return False", facts="pass"), "megatron")
    install_zarr(tmp_path, monkeypatch)
    folder = write_zarr(tmp_path / "a.zarr", TOKENS)
    with open_corpus(folder) as stream:
        assert stream.num_tokens == TOKENS.size
    (tmp_path / "x.odd").write_bytes(bytes(100))
    message = message_of(run_zb("info", tmp_path / "x.odd"))
    assert "the package other 1.0: its format megatron has a name that is taken" in message
    assert flat_format("megatron").__class__.__module__ == "zb_hdf5.trainers.megatron"


SOURCE = """
from dataclasses import replace
import lines_format
class Source(lines_format.LinesSource):
    def read(self, group, choose, num_threads):
        yield from super().read(group, choose, num_threads)
        {end}
class Lines(lines_format.Lines):
    def rows(self, found, *, vocab_size):
        return Source([each.path for each in found], vocab_size)
ROW = replace(lines_format.ROW, noun="lines", place=__name__ + ":Lines")
def make():
    return ROW
"""


OBJECT = """
import numpy as np
from zb_hdf5.formats.document_source import DocumentGroup, TokenizedDocuments
from zb_hdf5.formats.format import RowsFormat
from zb_hdf5.formats.format_row import FormatRow
class Words:  # no base class, and no member that has a default
    tokenizer = ""
    boundary_token_id = None
    has_ids = False
    dtype = np.dtype("uint16")
    vocab_size = 100
    description = {{"format": "words"}}
    identity = {{}}
    def __init__(self, paths):
        self.paths = paths
        self.groups = [DocumentGroup(number, 0, 1.0, 1) for number in range(len(paths))]
    def read(self, group, choose, num_threads):
        path = self.paths[group.file_number]
        ids = np.array(path.read_text().split(), np.int64)
        yield TokenizedDocuments(ids, np.array([len(ids)]), str(path), np.ones(1, np.uint64))
{spoil}
class WordFiles(RowsFormat):
    def fits(self, look):
        return True
    def rows(self, found):
        return Words([each.path for each in found])
ROW = FormatRow(noun="words", suffixes=(".words",), place=__name__ + ":WordFiles", is_of_rows=True)
"""


def test_any_object_with_the_members_of_a_source_is_one(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "words", OBJECT.format(spoil=""))
    (tmp_path / "x.words").write_text("1 2 3")
    convert(tmp_path / "x.words", "stream", tmp_path / "a", workers=2)
    words = importlib.import_module("words")
    convert(words.Words([tmp_path / "x.words"]), "stream", tmp_path / "b", workers=1)
    convert(tmp_path / "x.words", "hdf5", tmp_path / "c", seq_len=3, batch_size=1)
    for made in ("a", "b"):
        with open_corpus(tmp_path / made) as stream:
            assert stream.documents[0].ids.tolist() == [1, 2, 3]
    with open_reader(tmp_path / "c") as reader:
        assert reader.read_batch(0).tolist() == [[1, 2, 3]]
    monkeypatch.delattr(words.Words, "has_ids")
    is_refused(ArgumentError, lambda: convert(words.Words([]), "stream", tmp_path / "d"), match="or an open source")


def test_a_member_of_an_object_is_asked_for_when_it_is_needed(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "words", OBJECT.format(spoil=""))
    words = importlib.import_module("words").Words([])
    for source in (CompletedSource(words), GuardedSource(words, "words 1.0", "words")):
        assert (source.num_tokens, source.max_dropped, source.vocab_size) == (None, 1.0, 100)
        words.num_tokens = 3
        assert pickle.loads(pickle.dumps(source)).num_tokens == source.num_tokens == 3
        source.num_tokens = 4
        assert (source.num_tokens, words.num_tokens) == (4, 3)
        del words.num_tokens
        assert not hasattr(source, "__enter__")


def test_a_member_that_fails_names_its_package(tmp_path, monkeypatch):
    spoil = "    num_tokens = property(lambda self: {}['lost'])"
    install(tmp_path, monkeypatch, "worse", OBJECT.format(spoil=spoil))
    (tmp_path / "x.words").write_text("1 2 3")
    message = message_of(run_zb("convert", tmp_path / "x.words", tmp_path / "out", "--to", "stream"))
    assert "the package worse 1.0: its format worse failed: KeyError: 'lost'" in message


def test_a_source_that_lacks_members_is_named_with_its_package(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "less", OBJECT.format(spoil="    del identity, has_ids"))
    (tmp_path / "x.words").write_text("1 2 3")
    message = message_of(run_zb("convert", tmp_path / "x.words", tmp_path / "out", "--to", "stream"))
    assert "the package less 1.0: its format less failed: TypeError: expected a source of documents" in message
    assert "found a Words without has_ids, identity" in message


@pytest.mark.parametrize(("name", "attribute"), [("lines_pack", "ROW"), ("made_lines", "make")])
def test_a_source_of_documents_of_a_package_is_converted(name, attribute, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, name, SOURCE.format(end="pass"), attribute=attribute)
    (tmp_path / "x.lines").write_text("1 2 3\n4 5\n")
    for options in ({}, {"source_format": name}):
        destination = tmp_path / f"stream-{len(options)}"
        convert(tmp_path / "x.lines", "stream", destination, vocab_size=9, workers=1, **options)
        with open_corpus(destination) as stream:
            assert [stream.documents[k].ids.tolist() for k in range(2)] == [[1, 2, 3], [4, 5]]
    message = message_of(run_zb("info", tmp_path / "x.lines"))
    assert "no known file" in message


def test_a_source_of_a_package_that_fails_leaves_nothing_half_written(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "bad_lines", SOURCE.format(end="raise LookupError('lost')"))
    (tmp_path / "x.lines").write_text("1 2 3\n4 5\n")
    work = ("--vocab-size", 9, "--workers", 1, "--to", "stream")
    message = message_of(run_zb("convert", tmp_path / "x.lines", tmp_path / "out", *work))
    assert "the package bad-lines 1.0: its format bad_lines failed: LookupError: lost" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("interface", "guard"), [
    (FlatFormat, guarded(FlatFormat, "a package", "name")),
    (DocumentSource, GuardedSource),
    (DocumentWriter, guarded(DocumentWriter, "a package", "name")),
])  # fmt: skip
def test_every_method_of_an_interface_is_guarded(interface, guard):
    methods = {name for name in vars(interface) if callable(getattr(interface, name)) and not name.startswith("_")}
    assert methods <= vars(guard).keys()


# --- a real installation -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_pip_installs_the_package_of_the_examples(tmp_path):
    source = shutil.copytree(ZARR.parent, tmp_path / "format_zarr")
    how = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *how, "--target", tmp_path / "site", source]
    subprocess.run(command, check=True)
    folder = write_zarr(tmp_path / "a.zarr", TOKENS, 3)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ZARR.parents[2])])}
    for words in (("info", folder), ("convert", folder, tmp_path / "out", "--seq-len", 50, "--workers", 2)):
        command = [sys.executable, "-m", "zb_hdf5", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    with open_reader(tmp_path / "out") as reader:
        assert reader.corpus.num_tokens == TOKENS.size // (32 * 50) * 32 * 50
