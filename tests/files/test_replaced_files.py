"""A result of several files is one result, whatever ends the process between two steps of its publication."""

import json
import os
import random
import re
import shutil
import signal
import time
from itertools import count

import numpy as np
import pytest
from commandline import run_zb
from contents import files_in, names
from interrupted import ended_after
from packed import write_packed
from reading import reading

from zb_hdf5 import ConvertError, HDF5ShardWriter, ReadAs, ZbError, convert, open_corpus, train_tokenizer
from zb_hdf5.errors import ExistsError, FormatError
from zb_hdf5.files.replaced_files import ReplacedFiles
from zb_hdf5.store.repair import repair_file

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TOKENS = 300


def write_documents(path, seed, **options):
    """Write documents with ids, and a loss mask: of any seed there are as many tokens."""
    rng = np.random.default_rng(seed)
    cuts = sorted({0, TOKENS, *rng.integers(1, TOKENS, 9).tolist()})
    how = {"fields": {"loss_mask": "u1"}, "vocab_size": 500, "boundary_token_id": 499}
    with HDF5ShardWriter(path, **how, **options) as writer:
        for number, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):  # noqa: RUF007
            mask = rng.integers(0, 2, stop - start, np.uint8)
            writer.write_document(rng.integers(0, 499, stop - start), {"loss_mask": mask}, id=f"{seed}-{number}")
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Write two sources of each kind."""
    folder = tmp_path_factory.mktemp("sources")
    for seed in (0, 1):
        write_documents(folder / f"stream-{seed}.h5", seed)
        write_packed(folder / f"packed-{seed}.h5", [40] * 9, seed=seed)
        text = "".join(f"{seed} word {number * (seed + 2)} " for number in range(60))
        (folder / f"text-{seed}.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 3)
    return folder


def converted(source, target, **options):
    """Return what converts one of two sources to a file."""

    def make(sources, seed, path, force):
        convert(sources / f"{source}-{seed}.h5", target, path, force=force, workers=1, **options)

    return make


def trained(sources, seed, path, force):
    train_tokenizer(sources / f"text-{seed}.jsonl", path, 270, overwrite=force)


def streamed(sources, seed, path, force):
    write_documents(path, seed, overwrite=force)


#: The file of the ids -> how it is made, with the files beside it.
RESULTS = {
    "D.bin": (converted("stream", "megatron", tokens_only=True), ["D.idx"]),
    "D.ds": (converted("stream", "datatrove", tokens_only=True), ["D.ds.index", "D.ds.loss", "D.ds.metadata"]),
    "D.npy": (converted("stream", "olmo", tokens_only=True), ["D.csv.gz"]),
    "stream.h5": (streamed, ["stream.h5.documents"]),
    "packed.h5": (converted("packed", "hdf5"), ["packed.h5.documents", "packed.h5.pieces"]),
    "D.batch": (converted("packed", "batch", tokens_only=True), ["D.batch.crc32"]),
    "D.json": (trained, ["D.tiktoken"]),
}


def require_one_result(folder, ids, possible):
    """See that a folder has the files of one result, or no file of ids."""
    found = {name: data for name, data in files_in(folder).items() if not name.startswith(".")}
    whole = {name: data for name, data in found.items() if not name.endswith((".partial", ".progress"))}
    assert ids not in whole or whole in possible, sorted(whole)
    return found


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("is_forced", [True, False], ids=["force", "fresh"])
@pytest.mark.parametrize("ids", RESULTS)
@pytest.mark.thin
def test_no_step_leaves_a_mixture_and_the_next_run_makes_the_result(ids, is_forced, number, sources, tmp_path):
    make, beside = RESULTS[ids]
    for name, seed in (("old", 0), ("new", 1)):
        (tmp_path / name).mkdir()
        make(sources, seed, tmp_path / name / ids, False)
        assert names(tmp_path / name) == sorted([ids, *beside])
    old, new = files_in(tmp_path / "old"), files_in(tmp_path / "new")
    assert all(old[name] != new[name] for name in (ids, *beside) if not name.endswith(".metadata"))
    for step in count(1):
        folder = tmp_path / "at work"
        shutil.copytree(tmp_path / "old", folder) if is_forced else folder.mkdir()
        was_ended = ended_after(step, number, lambda folder=folder: make(sources, 1, folder / ids, is_forced))
        found = require_one_result(folder, ids, [old, new])
        if number != signal.SIGKILL:  # nothing unfinished is left
            assert found in ([old, new] if is_forced else [{}, new]), (step, sorted(found))
            assert names(folder) == sorted(found)
        if is_forced or ids not in found:
            make(sources, 1, folder / ids, is_forced)
        else:
            with pytest.raises(ExistsError):
                make(sources, 1, folder / ids, False)
        assert (files_in(folder), names(folder)) == (new, sorted(new)), step
        shutil.rmtree(folder)
        if not was_ended:
            break
    assert step > len(beside) + 2


@pytest.mark.parametrize("trials", [4, pytest.param(25, marks=[pytest.mark.slow, pytest.mark.longest])])
@pytest.mark.parametrize("ids", RESULTS)
@pytest.mark.thin
def test_kills_at_random_moments_leave_no_mixture(ids, trials, sources, tmp_path):
    make, _ = RESULTS[ids]
    chance = random.Random(ids)
    for name, seed in (("old", 0), ("new", 1)):
        (tmp_path / name).mkdir()
        began_s = time.monotonic()
        make(sources, seed, tmp_path / name / ids, False)
        took_s = time.monotonic() - began_s
    old, new = files_in(tmp_path / "old"), files_in(tmp_path / "new")
    for trial in range(trials):
        is_forced = trial % 2 == 0
        folder = tmp_path / str(trial)
        shutil.copytree(tmp_path / "old", folder) if is_forced else folder.mkdir()
        child = os.fork()
        if child == 0:
            try:
                make(sources, 1, folder / ids, is_forced)
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0, took_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        require_one_result(folder, ids, [old, new])
        make(sources, 1, folder / ids, True)
        assert files_in(folder) == new


def test_a_path_whose_old_file_is_aside_is_told_so(sources, tmp_path):
    make, _ = RESULTS["D.bin"]
    make(sources, 0, tmp_path / "D.bin", False)
    for step in count(1):
        assert ended_after(step, signal.SIGKILL, lambda: make(sources, 1, tmp_path / "D.bin", True))
        if not (tmp_path / "D.bin").exists():
            break
    [aside] = [name for name in names(tmp_path) if name.startswith(".D.bin")]
    told = f"the old one is in {aside}: run the command again"
    assert told in run_zb("info", tmp_path / "D.bin", code=2).stderr
    with pytest.raises((ZbError, OSError), match=re.escape(told)):
        open_corpus(tmp_path / "D.bin")


@pytest.mark.parametrize("ids", ["D.bin", "D.ds", "D.npy"])
def test_an_open_stream_does_not_read_the_documents_of_the_result_that_replaced_its_own(ids, sources, tmp_path):
    make, _ = RESULTS[ids]
    make(sources, 0, tmp_path / ids, False)
    how = {"source_dtype": "uint16"} if ids == "D.npy" else {}
    with open_corpus(tmp_path / ids, **reading(how)) as stream:
        make(sources, 1, tmp_path / ids, True)
        with pytest.raises(FormatError, match=r"changed since it was opened|was replaced"):
            _ = stream.doc_offsets


@pytest.mark.slow
def test_an_undoing_that_is_killed_goes_on(tmp_path):
    """Whatever step ends it: all old files are back in the end, and no new one is."""
    for begun in (1, 2, 3, 4, 5):
        for step in count(1):
            folder = tmp_path / f"{begun}-{step}"
            folder.mkdir()
            path, beside = folder / "D.bin", [folder / "D.a", folder / "D.b"]
            old = ReplacedFiles(path, beside)
            for file in (path, *beside):
                file.write_text("old")
                file.with_suffix(f"{file.suffix}.partial").write_text("new")

            def publish(old=old, path=path, beside=beside):
                with old.aside():
                    for file in (*beside, path):
                        os.replace(f"{file}.partial", file)

            assert ended_after(begun, signal.SIGKILL, publish)
            was_ended = ended_after(step, signal.SIGKILL, old.put_back)
            old.put_back()
            assert {file.read_text() for file in (path, *beside)} == {"old"}
            assert not [name for name in names(folder) if name.startswith(".")]
            if not was_ended:
                break


def test_a_file_of_others_beside_a_fresh_result_is_refused_and_stays(sources, tmp_path):
    """A mask, an index or documents of another file would be read with the new ids."""
    for target, ids, stale in (
        ("megatron", "D.bin", "D.idx"),
        ("bin", "D.bin", "D.idx"),
        ("llmc", "D.bin", "D.idx"),
        ("datatrove", "D.ds", "D.ds.loss"),
        ("olmo", "D.npy", "D.csv.gz"),
        ("olmo", "token_ids_0.npy", "labels_mask_0.npy"),
    ):
        (tmp_path / stale).write_text("precious")
        with pytest.raises(ExistsError, match=stale):
            convert(sources / "stream-0.h5", target, tmp_path / ids, tokens_only=True)
        assert names(tmp_path) == [stale]
        (tmp_path / stale).unlink()


def test_files_that_the_new_result_lacks_go_with_the_old_one(sources, tmp_path):
    make, _ = RESULTS["D.ds"]
    make(sources, 0, tmp_path / "D.ds", False)
    write_plain = {"boundary_token_id": 499, "vocab_size": 500}
    with HDF5ShardWriter(tmp_path / "plain.h5", **write_plain) as writer:
        writer.write_document(np.arange(TOKENS))
    convert(tmp_path / "plain.h5", "datatrove", tmp_path / "D.ds", force=True)
    assert not (tmp_path / "D.ds.loss").exists()
    assert open_corpus(tmp_path / "D.ds").fields == ()


@pytest.mark.parametrize("target", ["bin", "llmc"])
def test_an_index_of_megatron_goes_with_its_ids_also_where_the_new_ones_have_none(target, sources, tmp_path):
    for seed, name in enumerate(("megatron", target)):
        how = {"tokens_only": True, "force": seed == 1}
        convert(sources / f"stream-{seed}.h5", name, tmp_path / "D.bin", **how)
    assert names(tmp_path) == ["D.bin"]


def test_the_mask_of_old_ids_of_olmo_goes_with_them(sources, tmp_path):
    path, mask = tmp_path / "token_ids_part_0.npy", tmp_path / "labels_mask_part_0.npy"
    for seed in (0, 1):
        convert(sources / f"stream-{seed}.h5", "olmo", path, tokens_only=True, force=seed == 1)
        with open_corpus(path, read_as=ReadAs(source_dtype="uint16")) as stream:
            assert stream.fields == ()
        mask.write_bytes(bytes(path.stat().st_size // 2))
        with open_corpus(path, read_as=ReadAs(source_dtype="uint16")) as stream:
            assert [field.name for field in stream.fields] == ["loss_mask"]


def test_a_folder_of_files_without_masks_replaces_one_with_masks(sources, tmp_path):
    with HDF5ShardWriter(tmp_path / "plain.h5", boundary_token_id=499, vocab_size=500) as writer:
        writer.write_document(np.arange(TOKENS))
    convert(sources / "stream-0.h5", "datatrove", tmp_path / "D", tokens_only=True, shards=1)
    assert len(names(tmp_path / "D")) == 4
    convert(tmp_path / "plain.h5", "datatrove", tmp_path / "D", shards=1, force=True)
    assert not [name for name in names(tmp_path / "D") if name.endswith(".loss")]


def test_a_link_in_the_place_of_the_old_files_is_refused(sources, tmp_path):
    make, _ = RESULTS["D.bin"]
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "D.bin").write_text("precious")
    for suffix in ("replaced", "replacing"):
        link = tmp_path / f".D.bin.{suffix}"
        link.symlink_to(tmp_path / "victim")
        with pytest.raises(ConvertError, match="found a link; remove it"):
            make(sources, 0, tmp_path / "D.bin", False)
        assert (tmp_path / "victim" / "D.bin").read_text() == "precious"
        link.unlink()
    assert names(tmp_path) == ["victim"]


@pytest.mark.slow
def test_a_repair_that_is_killed_between_its_files_is_made_again(sources, tmp_path):
    (tmp_path / "begun").mkdir()
    shutil.copy(sources / "packed-0.h5", tmp_path / "begun" / "x.h5.partial")
    for ending in ("pieces", "documents"):
        shutil.copy(sources / f"packed-0.h5.{ending}", tmp_path / "begun" / f"x.h5.partial.{ending}")
    shutil.copytree(tmp_path / "begun", tmp_path / "whole")
    repair_file(tmp_path / "whole" / "x.h5.partial")
    expected = files_in(tmp_path / "whole")
    assert {"x.h5", "x.h5.pieces", "x.h5.documents"} <= expected.keys()
    for step in count(1):
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "begun", folder)
        was_ended = ended_after(step, signal.SIGKILL, lambda folder=folder: repair_file(folder / "x.h5.partial"))
        repair_file(folder / "x.h5.partial")
        assert files_in(folder) == expected, step
        if not was_ended:
            break
    assert step > 6
