"""Field sets of a source that a conversion copies with its tokens, and those that it leaves behind by name."""

import json
import os
import shutil
import signal
import time

import h5py
import numpy as np
import pytest
from commandline import one_error, report_of, run_zb, succeed
from processes import killed_when

from zb_hdf5 import ConvertError, Field, Loader, convert, open_corpus, open_field_set
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.merge import merge_parts
from zb_hdf5.store.set_facts import SetFacts

RECORDS = 45
SEQ_LEN = 16
FIELDS = [Field("logprobs", np.dtype("f2"), (3,)), Field("score", np.dtype("f8"), unit="record")]
NAMES = ["teacher/logprobs", "teacher/score"]


def write_noise(path, name="teacher", fields=FIELDS, *, finish=True, **options):
    """Write noise for all records of a set, in several parts; return its folder."""
    rng = np.random.default_rng(3)
    with open_field_set(path, name, fields, part_bytes=1000, **options) as found:
        for step in found.missing(4, quiet=True):
            shape = step["tokens"].shape
            values = {
                field.name: rng.integers(-999, 999, (*(shape if field.unit == "token" else shape[:1]), *field.shape))
                for field in fields
            }
            found.write(step["records"], **{name: each.astype(float) for name, each in values.items()})
        if finish:
            found.finish()
        return found.folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A store of three shards with a finished set of several parts; nobody writes here later."""
    folder = tmp_path_factory.mktemp("source")
    tokens = np.random.default_rng(1).permutation(RECORDS * SEQ_LEN).astype(np.uint16)
    np.save(folder / "t.npy", tokens.reshape(RECORDS, SEQ_LEN))
    convert(folder / "t.npy", "hdf5", folder / "A", batch_size=3, shards=4)
    assert len(list(write_noise(folder / "A").glob("*.values"))) > 3
    return folder / "A"


def stored(path, name):
    """Return the tokens of a store of HDF5, and the values of its set, in the order of its records, read by h5py."""
    found = {}
    for kind, files, dataset in (
        ("tokens", path.glob("shard-*.h5"), "batches"),
        ("values", (path / "fields/teacher/train").glob("*.values"), f"values/{name}"),
    ):
        arrays = []
        for file in sorted(files):
            with h5py.File(file) as h5:
                arrays.append(h5[dataset][:])
        found[kind] = np.concatenate(arrays)
    return found["tokens"].reshape(-1, SEQ_LEN), found["values"]


def require_copied(source, copy, **options):
    """See that a loader of a copy gives each record of the source with its values, bit for bit, in the same order."""
    expected = {name: stored(source, name.split("/")[1]) for name in NAMES}
    with Loader(copy, fields=NAMES, shuffle="sequential", **options) as loader:
        steps = list(loader)
    found = np.concatenate([step["tokens"].numpy() for step in steps])
    for name, (tokens, values) in expected.items():
        np.testing.assert_array_equal(found, tokens)
        assert np.concatenate([step[name].numpy() for step in steps]).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("target", "name", "options"),
    [
        ("batch", "B", {}),
        ("hdf5", "B", {"codec": "gzip"}),
        ("hdf5", "B", {"dtype": "uint32"}),
        ("hdf5", "B", {"shards": 2}),
        ("batch", "B", {"shards": 7, "dtype": "uint32"}),
        ("hdf5", "B", {"batch_size": 5}),
        ("hdf5", "B.h5", {}),
        ("batch", "B.batch", {}),
    ],
)
def test_a_copy_of_the_same_records_keeps_their_set(source, tmp_path, target, name, options):
    report = convert(source, target, tmp_path / name, **options)
    assert report.to_json()["field_sets"] == ["teacher (train)"]
    assert ("field sets", "teacher (train)") in report.lines()
    require_copied(source, tmp_path / name)
    assert not list(tmp_path.glob("*.partial"))


def test_a_set_comes_back_from_a_batch_store(source, tmp_path):
    convert(source, "batch", tmp_path / "B")
    convert(tmp_path / "B", "hdf5", tmp_path / "C")
    require_copied(source, tmp_path / "C")
    with open_field_set(tmp_path / "C", "teacher", FIELDS) as found:
        assert (found.num_missing, found.verify()) == (0, [])


def test_a_lone_batch_is_bound_by_a_sample_and_its_copy_by_digests(source, tmp_path, recwarn):
    convert(source, "batch", tmp_path / "B.batch")
    (tmp_path / "B.batch.crc32").unlink()
    shutil.rmtree(tmp_path / "B.batch.fields")
    write_noise(tmp_path / "B.batch")
    convert(tmp_path / "B.batch", "hdf5", tmp_path / "C", shards=3)
    require_copied(source, tmp_path / "C")
    digests = [file.digest for file in SetFacts.load(tmp_path / "C/fields/teacher/train").files]
    assert len(digests) == 3
    assert not any(digest.startswith("sampled:") for digest in digests)


def test_jobs_copy_their_share_of_the_parts_and_a_merge_binds_them(source, tmp_path):
    for job in (1, 0, 2):
        convert(source, "batch", tmp_path / "B", shard_range=(job, 3))
    merge_parts(tmp_path / "B")
    require_copied(source, tmp_path / "B")


def test_a_merge_without_all_parts_of_a_set_is_refused(source, tmp_path):
    convert(source, "batch", tmp_path / "B", shard_range=(0, 2))
    convert(source, "batch", tmp_path / "B", shard_range=(1, 2), field_set=())
    assert "records are missing" in one_error(run_zb("index", "merge", tmp_path / "B"))
    assert not (tmp_path / "B").exists()
    convert(source, "batch", tmp_path / "B", shard_range=(1, 2), resume=True)
    merge_parts(tmp_path / "B")
    require_copied(source, tmp_path / "B")


def test_an_interrupted_copy_keeps_its_parts(source, tmp_path):
    shutil.copytree(source, tmp_path / "A")
    *_, last = sorted((tmp_path / "A/fields/teacher/train").glob("*.values"))
    last.rename(tmp_path / last.name)
    with pytest.raises(FileNotFoundError):
        convert(tmp_path / "A", "batch", tmp_path / "B")
    assert not (tmp_path / "B").exists()
    made = {path.name: path.stat().st_ino for path in (tmp_path / "B.partial/fields/teacher/train").glob("*.values")}
    assert len(made) >= 3
    (tmp_path / last.name).rename(last)
    convert(tmp_path / "A", "batch", tmp_path / "B", resume=True)
    require_copied(source, tmp_path / "B")
    assert made == {name: (tmp_path / "B/fields/teacher/train" / name).stat().st_ino for name in made}


def test_a_killed_copy_goes_on(source, tmp_path):
    sets = tmp_path / "B.partial/fields/teacher/train"

    def has_parts():
        return len(list(sets.glob("*.values"))) >= 2

    killed_when(has_parts, lambda: convert(source, "batch", tmp_path / "B"))
    assert not (tmp_path / "B").exists()
    convert(source, "batch", tmp_path / "B", resume=True)
    require_copied(source, tmp_path / "B")


def _copy_in_child(source, path):
    """Return the process that copies a store."""
    child = os.fork()
    if child == 0:
        try:
            convert(source, "batch", path, shards=2)
        finally:
            os._exit(0)
    return child


@pytest.mark.slow
def test_kills_at_any_moment_of_a_copy_lose_nothing(source, tmp_path):
    rng = np.random.default_rng(5)
    killed = 0
    began_s = time.monotonic()
    os.waitpid(_copy_in_child(source, tmp_path / "whole"), 0)
    whole_s = time.monotonic() - began_s  # of a copy on this machine: a fast one would be over before most kills
    for number in range(20):
        path = tmp_path / f"B{number}"
        child = _copy_in_child(source, path)
        time.sleep(float(rng.uniform(0, whole_s)))  # a moment as any other: nothing depends on which it is
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += not path.exists()
        convert(source, "batch", path, shards=2, resume=True)
        require_copied(source, path)
    assert killed >= 5


def test_a_merge_replaces_a_store_with_sets_only_if_they_are_named(source, tmp_path):
    convert(source, "batch", tmp_path / "B")
    for job in range(2):
        convert(source, "hdf5", tmp_path / "B", shard_range=(job, 2), force=True, drop_field_set=("teacher",))
    assert "has the field sets teacher" in one_error(run_zb("index", "merge", tmp_path / "B", "--force"))
    succeed(zb, "index", "merge", tmp_path / "B", "--force", "--drop-field-set", "teacher")
    require_copied(source, tmp_path / "B")


@pytest.mark.parametrize("options", [{"seq_len": 8}, {"batch_size": 4}])
def test_a_conversion_that_changes_records_is_refused_by_the_names_of_their_sets(source, tmp_path, options):
    with pytest.raises(ConvertError, match=r"teacher \(train\) have values of its records, and the result has other"):
        convert(source, "hdf5", tmp_path / "B", **options)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    told = run_zb("convert", source, tmp_path / "B", *words, code=1).stderr
    assert "pass --field-set none to leave them behind" in told
    assert not (tmp_path / "B").exists()
    succeed(zb, "convert", source, tmp_path / "B", *words, "--field-set", "none")
    assert not (tmp_path / "B/fields").exists()
    with pytest.raises(ConvertError, match=r"the field set teacher \(train\) cannot be copied: the result has other"):
        convert(source, "hdf5", tmp_path / "C", field_set=("teacher",), **options)
    assert not (tmp_path / "C").exists()


def test_a_set_stays_behind_by_its_name_where_the_result_is_no_store(source, tmp_path):
    report = convert(source, "npy", tmp_path / "B", tokens_only=True)
    assert "leaves behind the field sets teacher (train): " in report.to_json()["left_behind"]
    assert "field_sets" not in report.to_json()


def test_arrays_that_are_shuffled_leave_their_set_behind(source, tmp_path):
    shutil.copy(source.with_name("t.npy"), tmp_path / "t.npy")
    write_noise(tmp_path / "t.npy", seq_len=16)
    report = convert(tmp_path / "t.npy", "hdf5", tmp_path / "B", batch_size=3)
    assert "leaves behind the field sets teacher (train): the result has other records" in report.left_behind
    done = run_zb("convert", tmp_path / "t.npy", tmp_path / "C", "--field-set", "teacher")
    assert "field" in one_error(done, 2)


def test_sets_are_chosen_by_their_names(source, tmp_path):
    shutil.copytree(source, tmp_path / "A")
    write_noise(tmp_path / "A", "other", [Field("w", np.dtype("f4"))])
    write_noise(tmp_path / "A", "begun", [Field("w", np.dtype("f4"))], finish=False)
    report = report_of(zb, "convert", tmp_path / "A", tmp_path / "B", "--to", "batch")
    assert report["field_sets"] == ["other (train)", "teacher (train)"]
    assert "begun (train): not all of its values" in report["left_behind"]
    report = report_of(zb, "convert", tmp_path / "A", tmp_path / "C", "--field-set", "teacher")
    assert (report["field_sets"], report["left_behind"]) == (["teacher (train)"], "")
    assert [path.name for path in (tmp_path / "C/fields").iterdir()] == ["teacher"]
    succeed(zb, "convert", tmp_path / "A", tmp_path / "D", "--field-set", "none")
    assert not (tmp_path / "D/fields").exists()
    done = run_zb("convert", tmp_path / "A", tmp_path / "E", "--field-set", "begun")
    assert "the field set begun (train) cannot be copied: not all" in one_error(done)
    done = run_zb("convert", tmp_path / "A", tmp_path / "E", "--field-set", "x")
    assert "(begun, other, teacher), found x" in one_error(done)


def test_a_set_of_other_tokens_is_not_copied(source, tmp_path):
    shutil.copytree(source, tmp_path / "A")
    np.save(tmp_path / "u.npy", np.load(source.with_name("t.npy"))[::-1])
    convert(tmp_path / "u.npy", "hdf5", tmp_path / "O", batch_size=3, shards=4)
    shutil.copytree(tmp_path / "A/fields", tmp_path / "O/fields")
    report = convert(tmp_path / "O", "batch", tmp_path / "B")
    assert "teacher (train): its values belong to other tokens" in report.left_behind


def test_a_dry_run_counts_the_bytes_of_sets(source, tmp_path):
    plain = report_of(zb, "convert", source, tmp_path / "B", "--dry-run", "--field-set", "none")
    found = report_of(zb, "convert", source, tmp_path / "B", "--dry-run")
    sizes = [path.stat().st_size for path in (source / "fields/teacher/train").glob("*.values")]
    assert found["total_bytes"] - plain["total_bytes"] == sum(sizes)
    assert found["inodes"] - plain["inodes"] == len(sizes) + 5
    assert (found["field_sets"], "field_sets" in plain) == (["teacher (train)"], False)


def test_both_formats_of_a_folder_keep_a_set_of_their_own_or_share_one(source, tmp_path):
    shutil.copytree(source, tmp_path / "books/hdf5")
    convert(tmp_path / "books/hdf5", "batch", tmp_path / "books/batch")
    for path in (tmp_path / "books", tmp_path / "books/hdf5", tmp_path / "books/batch"):
        require_copied(source, path)
    shutil.rmtree(tmp_path / "books/batch")
    convert(tmp_path / "books/hdf5", "batch", tmp_path / "books/batch", field_set=())
    (tmp_path / "books/hdf5/fields").rename(tmp_path / "books/fields")
    for path in (tmp_path / "books", tmp_path / "books/hdf5", tmp_path / "books/batch"):
        require_copied(source, path)
    convert(tmp_path / "books/hdf5", "batch", tmp_path / "books/batch", force=True)
    assert not (tmp_path / "books/batch/fields").exists()
    assert report_of(zb, "fields", "list", tmp_path / "books")["sets"][0]["finished"]


def test_each_split_keeps_its_set(source, tmp_path):
    convert(source.with_name("t.npy"), "hdf5", tmp_path / "A", batch_size=3, val_fraction=0.3)
    for split in ("train", "val"):
        with open_corpus(tmp_path / "A", split=split) as corpus:
            write_noise(corpus)
    report = convert(tmp_path / "A", "batch", tmp_path / "B")
    assert report.field_sets == ("teacher (train)", "teacher (val)")
    for split in ("train", "val"):
        steps = []
        for path in (tmp_path / "A", tmp_path / "B"):
            with Loader(path, fields=NAMES, split=split, shuffle="sequential") as loader:
                steps.append(list(loader))
        assert len(steps[0]) == len(steps[1]) > 0
        for one, other in zip(*steps, strict=True):
            for key in ("tokens", *NAMES):
                assert one[key].numpy().tobytes() == other[key].numpy().tobytes()


def test_codes_of_documents_follow_their_documents(tmp_path):
    rows = [{"text": "y" * (3 + number % 9), "lang": "en" if number % 3 else "de"} for number in range(90)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    convert(
        tmp_path / "t.jsonl",
        "hdf5",
        tmp_path / "A",
        tokenizer="byte",
        seq_len=32,
        batch_size=4,
        metadata_columns=("lang",),
    )
    succeed(zb, "fields", "make", tmp_path / "A", "lang", "--meta", "lang")
    convert(tmp_path / "A", "hdf5", tmp_path / "B", codec="gzip")
    codes = []
    for path in (tmp_path / "A", tmp_path / "B"):
        with Loader(path, documents=("meta:lang",), shuffle="sequential") as loader:
            codes.append([step["meta:lang"].tolist() for step in loader])
            assert loader.words("lang") == ["en", "de"]
    assert codes[0] == codes[1]
    report = convert(tmp_path / "A", "batch", tmp_path / "C", tokens_only=True)
    assert "lang (train): its values belong to documents, which are left behind" in report.left_behind


def test_a_lone_file_with_sets_is_replaced_only_if_they_are_named(source, tmp_path):
    convert(source, "hdf5", tmp_path / "B.h5")
    done = run_zb("convert", source, tmp_path / "B.h5", "--force")
    assert "has the field sets teacher, whose values would be lost" in one_error(done)
    convert(source, "hdf5", tmp_path / "B.h5", force=True, drop_field_set=("teacher",), field_set=())
    assert not (tmp_path / "B.h5.fields").exists()
