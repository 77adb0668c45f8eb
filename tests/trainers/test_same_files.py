"""One folder stands for the same files in place and converted, whatever its format is and wherever in it they lie."""

import json
import os
import struct
import subprocess
import sys

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commandline import report_of, run_zb
from reading import reading

from zb_hdf5 import Loader, convert, verify_store, write_digests
from zb_hdf5.commands.zb import zb
from zb_hdf5.errors import FormatError, NotFoundError

#: Ids of a file: a whole number of records.
IDS = 40
NOBODY = 65_534


def ids_of(number):
    return (number * 1000 + np.arange(IDS)).astype("<u2")


def raw(path, ids):
    path.write_bytes(ids.tobytes())


def llmc(path, ids):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.tobytes())


def megatron(path, ids):
    path.write_bytes(ids.tobytes())
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, 1, 2)
    tables = np.array([len(ids)], "<i4").tobytes() + np.array([0, 0, 1], "<i8").tobytes()
    path.with_suffix(".IDX" if path.suffix == ".BIN" else ".idx").write_bytes(head + tables)


def datatrove(path, ids):
    path.write_bytes(ids.tobytes())
    path.with_name(f"{path.name}.index").write_bytes(np.array([len(ids)], "<u8").tobytes())


def npy(path, ids):
    with open(path, "wb") as file:
        np.save(file, ids)


def hdf5(path, ids):
    with h5py.File(path, "w") as h5:
        h5["tokens"] = ids


def records(path, ids):
    with h5py.File(path, "w") as h5:
        h5["tokens"] = ids.reshape(-1, 5)


def ragged(path, ids):
    with h5py.File(path, "w") as h5:
        h5["values"] = ids
        h5["offsets"] = np.array([0, 7, len(ids)])


def rows(ids):
    return pa.table({"input_ids": pa.array([ids.tolist()], pa.list_(pa.uint16()))})


def parquet(path, ids):
    pq.write_table(rows(ids), path)


def arrow(path, ids):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows(ids).schema) as writer:
        writer.write_table(rows(ids))


def lines(path, ids):
    path.write_text(json.dumps({"input_ids": ids.tolist()}) + "\n")


#: The ending and the writer of the files of each format, and the options by which a folder of them is read.
IN_PLACE = {
    "llmc": (".bin", llmc, {}),
    "nanogpt": (".bin", raw, {"source_dtype": "uint16"}),
    "olmo": (".npy", raw, {"source_dtype": "uint16"}),
    "megatron": (".bin", megatron, {}),
    "datatrove": (".ds", datatrove, {}),
    "npy": (".npy", npy, {}),
    "hdf5": (".h5", hdf5, {}),
    "records": (".hdf5", records, {}),
}
CONVERTED = {
    "ragged": (".h5", ragged, {}),
    "parquet": (".parquet", parquet, {}),
    "arrow": (".arrow", arrow, {}),
    "jsonl": (".jsonl", lines, {}),
    "json": (".json", lines, {}),
}
FORMATS = {**IN_PLACE, **CONVERTED}
#: The places of the files of a folder, in the order in which they are read.
PLACES = ("a/b/c/0", "linked/0", "linked/deep/1", "one", "z/2")


def named(place, suffix):
    """Return the name of the file of a place: that of the last one is in capitals."""
    return f"{place}{suffix.upper() if place == PLACES[-1] else suffix}"


@pytest.fixture(params=FORMATS)
def corpus(request, tmp_path):
    """A folder with files at all levels, behind a link, and copies that nobody means: the name, and its options."""
    suffix, write, options = FORMATS[request.param]
    folder = tmp_path / "in"
    for place in (folder / "a/b/c", folder / "z", folder / ".ipynb_checkpoints", folder / ".Trash-1000/files"):
        place.mkdir(parents=True)
    (tmp_path / "far/deep").mkdir(parents=True)
    (folder / "linked").symlink_to("../far")
    for number, place in enumerate(PLACES, 1):
        write(folder / named(place, suffix), ids_of(number))
    for place in (".ipynb_checkpoints/one-checkpoint", ".Trash-1000/files/0", "z/.hidden", "z/._2"):
        write(folder / f"{place}{suffix}", ids_of(60))
    return request.param, folder, options


EXPECTED = np.concatenate([ids_of(number) for number in range(1, len(PLACES) + 1)])


def converted(folder, destination, name, options):
    """Convert a folder to a stream, or to rows in the order in which they lie; return the report."""
    if name in CONVERTED or name in ("megatron", "datatrove"):
        return convert(folder, "stream", destination, **options)
    options = {**options, "source_format": "bin"} if name == "olmo" else options  # which asks for documents
    return convert(folder, "hdf5", destination, batch_size=1, seq_len=5, shuffle=False, **options)


def trained_on(path, options):
    """Return all ids that a loader gives, in their order."""
    with Loader(
        path, batch_size=1, seq_len=5, shuffle="sequential", rank=0, world_size=1, **reading(options)
    ) as loader:
        return np.concatenate([next(loader).numpy().reshape(-1) for _ in range(len(loader))])


def test_a_conversion_reads_the_files_at_all_levels_and_no_copy(corpus, tmp_path):
    name, folder, options = corpus
    converted(folder, tmp_path / "out", name, options)
    np.testing.assert_array_equal(trained_on(tmp_path / "out", {}), EXPECTED)


@pytest.mark.parametrize("corpus", IN_PLACE, indirect=True)
def test_a_loader_reads_the_same_files_in_place(corpus):
    _, folder, options = corpus
    np.testing.assert_array_equal(trained_on(folder, options), EXPECTED)
    assert report_of(zb, "info", folder, *words(options))["num_files"] == len(PLACES)


def words(options):
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.parametrize("corpus", IN_PLACE, indirect=True)
def test_digests_are_of_the_same_files_and_a_lost_one_is_named(corpus, tmp_path):
    name, folder, options = corpus
    suffix = IN_PLACE[name][0]
    digests = tmp_path / "digests.json"
    made = write_digests(folder, digests, **reading(options))
    assert [*made.files] == [named(place, suffix) for place in PLACES]
    assert not any(
        report.problem or report.missing for report in verify_store(folder, **reading({**options, "digests": digests}))
    )
    np.testing.assert_array_equal(trained_on(folder, {**options, "digests": digests, "verify": "batch"}), EXPECTED)
    victim = folder / f"linked/deep/1{suffix}"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert [
        report.path for report in verify_store(folder, **reading({**options, "digests": digests})) if report.problem
    ] == [str(victim)]
    victim.unlink()
    if name == "megatron":
        victim.with_suffix(".idx").unlink()
    problems = {
        report.path: str(report.problem) for report in verify_store(folder, **reading({**options, "digests": digests}))
    }
    assert "is not there, and digests.json has digests of it" in problems[str(victim)]


#: Converts folders, opens them, and trains a tokenizer on each, as another user; prints how each of it has ended.
AS_NOBODY = f"""
import json, os, sys
import h5py, numpy, pyarrow, torch
from zb_hdf5 import Loader, ReadAs, convert, train_tokenizer
from zb_hdf5.converters import source_documents, source_records, run, text_source, trainer_source
os.setegid({NOBODY}); os.seteuid({NOBODY})
def outcome(act, *args, **options):
    try:
        act(*args, **options)
    except Exception as error:
        return f"{{type(error).__name__}} {{error}}"
    return "done"
found = {{}}
for name, options in json.load(sys.stdin).items():
    path = name + "/in"
    shape = dict(batch_size=1, seq_len=5)
    found[name] = [
        outcome(convert, path, "stream", "work/out", **options),
        outcome(convert, path, "hdf5", "work/rows", **shape, **options),
        outcome(Loader, path, **shape, read_as=ReadAs(source_dtype=options.get("source_dtype"))),
        outcome(train_tokenizer, path, "work/tok.json", 300),
    ]
print(json.dumps(found))
"""


def text_lines(path, ids):
    path.write_text(json.dumps({"text": "a word"}) + "\n")


def text(path, ids):
    path.write_text("a word")


def text_parquet(path, ids):
    pq.write_table(pa.table({"text": ["a word"]}), path)


TEXTS = {"txt": (".txt", text), "lines": (".jsonl", text_lines), "table": (".parquet", text_parquet)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.slow
def test_a_folder_that_may_not_be_listed_ends_everything(tmp_path):
    writers = {**FORMATS, **{name: (*row, {"tokenizer": "gpt2"}) for name, row in TEXTS.items()}}
    for name, (suffix, write, _) in writers.items():
        (tmp_path / name / "in/closed").mkdir(parents=True)
        write(tmp_path / name / f"in/a{suffix}", ids_of(1))
        write(tmp_path / name / f"in/closed/b{suffix}", ids_of(2))
        (tmp_path / name / "in/closed").chmod(0)
    (tmp_path / "work").mkdir()
    (tmp_path / "work").chmod(0o777)
    tmp_path.chmod(0o755)
    asked = json.dumps({name: options for name, (_, _, options) in writers.items()})
    command = [sys.executable, "-c", AS_NOBODY]
    run = subprocess.run(command, cwd=tmp_path, input=asked, capture_output=True, text=True, check=False)
    for name in writers:
        (tmp_path / name / "in/closed").chmod(0o755)
    assert run.returncode == 0, run.stderr
    for name, outcomes in json.loads(run.stdout).items():
        expected = f"UnavailableError {name}/in/closed: expected a folder or file that can be listed, found Permission"
        assert [outcome[: len(expected)] for outcome in outcomes] == [expected] * 4
    assert [*(tmp_path / "work").iterdir()] == []


def test_a_link_that_leads_nowhere_ends_a_conversion(corpus, tmp_path):
    _, folder, options = corpus
    (folder / "z/part").symlink_to("/nowhere")
    with pytest.raises(NotFoundError, match="z/part: expected a link to a file or folder"):
        convert(folder, "stream", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "corpus", sorted(FORMATS.keys() - {"json"}), indirect=True
)  # which is read where nothing else is
@pytest.mark.thin
def test_files_of_other_endings_are_counted_and_the_first_is_named(corpus, tmp_path, capfd):
    name, folder, options = corpus
    first = folder / "a/x.ds.zst"
    for path in (first, folder / "y.parquet.gz"):
        path.touch()
    report = converted(folder, tmp_path / "out", name, options)
    assert report.to_json()["files_left_out"] == 2
    assert ("note", f"2 files are left out, the first is {first}") in report.lines()
    assert f"note: {folder}: 2 files are left out, the first is {first}\n" in capfd.readouterr().err
    np.testing.assert_array_equal(trained_on(tmp_path / "out", {}), EXPECTED)


@pytest.mark.parametrize("corpus", IN_PLACE, indirect=True)
def test_a_loader_says_once_what_is_left_out_and_info_does(corpus, capfd):
    _, folder, options = corpus
    first = folder / "a/x.jsonl.zst"
    first.touch()
    (folder / ".y.jsonl").touch()
    for _ in range(2):
        Loader(folder, batch_size=1, seq_len=5, rank=0, world_size=1, **reading(options)).close()
    assert capfd.readouterr().err == f"note: {folder}: 1 file is left out: {first}\n"
    info = report_of(zb, "info", folder, *words(options))
    assert (info["files_left_out"], info["first_left_out"]) == (1, str(first))
    assert f"1 file, the first is {first}" in run_zb("info", folder, *words(options), code=0).stdout


def test_the_training_of_a_tokenizer_reads_all_levels_and_says_what_is_left_out(tmp_path):
    folder = tmp_path / "in"
    (folder / "part").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    (folder / "linked").symlink_to("../far")
    for place in ("0.jsonl", "part/1.JSONL", "linked/2.jsonl", ".hidden.jsonl"):
        (folder / place).write_text("".join(json.dumps({"text": f"{place} {number}"}) + "\n" for number in range(9)))
    (folder / "part/x.jsonl.bz2").touch()
    options = ("--vocab-size", 300, "-o", tmp_path / "tok.json")
    report = report_of(zb, "tokenizer", "train", folder, *options)
    assert report["documents"] == 27
    assert (report["files_left_out"], report["first_left_out"]) == (1, str(folder / "part/x.jsonl.bz2"))


def test_folders_of_mds_are_found_behind_links_and_a_lost_one_is_named(tmp_path):
    np.save(tmp_path / "ids.npy", ids_of(1).reshape(-1, 5))
    convert(tmp_path / "ids.npy", "hdf5", tmp_path / "rows", batch_size=1, shuffle=False)
    for split in ("train-a", "train-b"):
        convert(tmp_path / "rows", "mds", tmp_path / f"far-{split}")
    (tmp_path / "in").mkdir()
    for split in ("train-a", "train-b"):
        (tmp_path / "in" / split).symlink_to(f"../far-{split}")
    with pytest.raises(FormatError, match="has the data sets train-a, train-b"):
        convert(tmp_path / "in", "stream", tmp_path / "out")
    (tmp_path / "in/test").symlink_to("nowhere")
    with pytest.raises(NotFoundError, match="in/test: expected a link to a file or folder"):
        convert(tmp_path / "in", "stream", tmp_path / "again")
