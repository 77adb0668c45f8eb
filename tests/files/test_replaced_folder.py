"""A folder is replaced as a whole, whatever ends the process, and no link under a name of ours is followed."""

import os
import shutil
import signal
from itertools import count

import numpy as np
import pytest
from contents import files_in, names
from interrupted import ended_after

from zb_hdf5 import ConvertError, convert
from zb_hdf5.files import replaced_folder
from zb_hdf5.files.publishing import PartialDirectory, scratch_directory


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for seed in (0, 1):
        np.save(folder / f"{seed}.npy", np.random.default_rng(seed).integers(0, 900, (64, 16)).astype("<u2"))
    return folder


def make(sources, seed, path, force=False):
    how = {"batch_size": 4, "seq_len": 16, "shards": 2, "force": force, "workers": 1}
    convert(sources / f"{seed}.npy", "hdf5", path, **how)


@pytest.fixture(params=["exchange", "renames"])
def way(request, monkeypatch):
    """Exchange the folders, or rename one after the other as a file system needs it that cannot."""
    if request.param == "renames":
        monkeypatch.setattr(replaced_folder, "exchanged", lambda *_: False)
    return request.param


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.thin
def test_no_step_loses_a_store_and_the_next_run_leaves_nothing_hidden(number, way, sources, tmp_path, capfd):
    for name, seed in (("old", 0), ("new", 1)):
        make(sources, seed, tmp_path / name)
    old, new = files_in(tmp_path / "old"), files_in(tmp_path / "new")
    seen = set()
    said = ""
    for step in count(1):
        folder = tmp_path / "at work"
        folder.mkdir()
        shutil.copytree(tmp_path / "old", folder / "D")
        was_ended = ended_after(step, number, lambda folder=folder: make(sources, 1, folder / "D", True))
        found = {name: data for name, data in files_in(folder / "D").items() if not name.startswith("journal")}
        if number == signal.SIGKILL and way == "renames":
            kept = [old] * any(files_in(each / "D") == old for each in folder.glob(".D.replaced-*"))
            assert found in (old, new) or (found == {} and kept == [old])
        else:
            assert found in (old, new)
        seen.add(found == new)
        hidden = [each for each in folder.glob(".D.replaced-*") if (each / "D").is_dir()]
        make(sources, 1, folder / "D", True)
        assert (files_in(folder / "D"), names(folder)) == (new, ["D"]), step
        said += capfd.readouterr().err  # a note is printed once
        assert not hidden or "killed" in said
        shutil.rmtree(folder)
        if not was_ended:
            break
    assert seen == {True, False}


def test_links_under_names_of_ours_are_refused_and_what_they_lead_to_stays(sources, tmp_path):
    make(sources, 0, tmp_path / "other")
    before = files_in(tmp_path / "other")
    for name in ("train.partial", "train"):
        link = tmp_path / name
        link.symlink_to(tmp_path / "other")
        with pytest.raises(ConvertError, match=rf"{name}: expected .* found a link to .*other; name that"):
            make(sources, 1, tmp_path / "train", force=name == "train")
        assert files_in(tmp_path / "other") == before
        link.unlink()
    (tmp_path / "train.partial").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConvertError, match="found a link to"):
        make(sources, 1, tmp_path / "train")
    for maker in (PartialDirectory, scratch_directory):
        with pytest.raises(ConvertError, match="found a link to"), maker(tmp_path / "train"):
            pytest.fail("the link was followed")
    assert names(tmp_path) == ["other", "train.partial"]


def test_a_lone_result_does_not_replace_a_link(sources, tmp_path):
    how = {"batch_size": 4, "seq_len": 16}
    convert(sources / "0.npy", "hdf5", tmp_path / "real.h5", **how)
    before = (tmp_path / "real.h5").read_bytes()
    (tmp_path / "D.h5").symlink_to(tmp_path / "real.h5")
    with pytest.raises(ConvertError, match=r"D\.h5: expected .* found a link to .*real\.h5"):
        convert(sources / "1.npy", "hdf5", tmp_path / "D.h5", force=True, **how)
    assert (tmp_path / "real.h5").read_bytes() == before


@pytest.mark.parametrize("kind", ["link", "fifo"])
@pytest.mark.parametrize("target", ["D.bin", "folder"])
def test_the_note_of_the_progress_is_a_file_of_its_own(kind, target, sources, tmp_path):
    make(sources, 0, tmp_path / "store")
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    if target == "folder":
        (tmp_path / "folder.partial").mkdir()
        note = tmp_path / "folder.partial" / "train-00000-of-00001.bin.progress"
    else:
        note = tmp_path / "D.bin.progress"
    os.mkfifo(note) if kind == "fifo" else note.symlink_to(victim)
    how = {"tokens_only": True, "workers": 1, **({"shards": 1} if target == "folder" else {})}
    convert(tmp_path / "store", "megatron", tmp_path / target, **how)
    assert victim.read_text() == "precious"
    # a lone file is written by the process that waits for it, and has no note: this one is of somebody else
    assert os.path.lexists(note) == (target == "D.bin")
