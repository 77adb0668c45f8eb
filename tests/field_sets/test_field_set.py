"""Values of a field set: written by jobs, read with the tokens in every order and shape, and bound to these tokens.

The reference is NumPy: each value follows from its token and its place in the record, by `teacher`.
"""

import json
import os
import shutil
import subprocess
from contextlib import closing

import h5py
import numpy as np
import pytest
import torch

from zb_hdf5 import (
    ArgumentError,
    BackendError,
    ChecksumError,
    ConvertError,
    Field,
    FormatError,
    IncompleteError,
    Loader,
    MixedLoader,
    UnavailableError,
    UnverifiableError,
    convert,
    open_corpus,
    open_field_set,
)
from zb_hdf5.errors import NotFoundError
from zb_hdf5.store.set_index import parts_in

SEQ_LEN = 32
FIELDS = {"ids": ("i4", (4,)), "logprobs": ("f2", (4,))}
NAMES = ["teacher/ids", "teacher/logprobs"]
#: Bytes of a part: each set below has several.
PART_BYTES = 40_000


def teacher(tokens):
    """Return what a teacher says at each token: it depends on the token alone, and differs from token to token."""
    tokens = np.asarray(tokens).astype(np.int64)[..., None]
    return {
        "ids": (tokens * 10 + np.arange(4)).astype(np.int32),
        "logprobs": (-(tokens % 97) / 7 - np.arange(4)).astype(np.float16),
    }


def fill(path, name="teacher", fields=FIELDS, values=teacher, batch_size=8, **options):
    """Write all records of a set that are missing, finish it, and return its digest."""
    with open_field_set(path, name, fields, part_bytes=PART_BYTES, **options) as found:
        for step in found.missing(batch_size=batch_size, quiet=True):
            found.write(step["records"], **values(step["tokens"]))
        assert found.num_missing == 0
        return found.finish()


def require_values(step, values=teacher, names=NAMES):
    """See that each value of a step is the one of its token."""
    expected = values(step["tokens"])
    for name in names:
        found = step[name].numpy()
        assert found.dtype == expected[name.rpartition("/")[2]].dtype
        np.testing.assert_array_equal(found, expected[name.rpartition("/")[2]], name)


@pytest.fixture(scope="module")
def tokens():
    # no two tokens of the corpus are equal in the first 65,536
    return np.random.default_rng(7).permutation(2**16)[: 600 * SEQ_LEN].astype(np.uint16)


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokens):
    """A store with a finished set, a stream with another, and the same tokens as a lone `.npy`; nobody writes here."""
    folder = tmp_path_factory.mktemp("sets")
    np.save(folder / "rows.npy", tokens.reshape(-1, SEQ_LEN))
    np.save(folder / "flat.npy", tokens[:-5])
    convert(folder / "rows.npy", "hdf5", folder / "store", batch_size=8, shards=3)
    convert(folder / "store", "batch", folder / "native")
    fill(folder / "store")
    fill(folder / "flat.npy", seq_len=64, stride=16)
    return folder


@pytest.fixture
def fresh(tmp_path, made):
    """A store of its own, without sets."""
    shutil.copytree(made / "store", tmp_path / "store", ignore=shutil.ignore_patterns("fields"))
    return tmp_path / "store"


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["global", "records", "block", "sequential"])
@pytest.mark.parametrize("shape", [{}, {"batch_size": 5}, {"seq_len": SEQ_LEN // 2}, {"targets": True}])
@pytest.mark.parametrize("access", ["auto", "mmap", "pread", "h5py"])
def test_each_value_comes_with_its_token_in_every_order_and_shape(made, shuffle, shape, access):
    with Loader(made / "store", shuffle=shuffle, fields=NAMES, access=access, last="fill", **shape) as loader:
        steps = list(loader)
    assert len(steps) * steps[0]["tokens"].numel() >= 600 * SEQ_LEN
    for step in steps:
        require_values(step)


@pytest.mark.parametrize("path", ["native", "flat.npy"])
def test_a_set_in_another_folder_fits_the_same_tokens_in_another_format(made, path):
    """Digests decide, not names: the set of the HDF5 store fits the `.batch` store."""
    name = "store" if path == "native" else path
    folder = made / ("store/fields/teacher/train" if name == "store" else "flat.npy.fields/teacher/train")
    shape = {} if path == "native" else {"batch_size": 3, "seq_len": 48}
    corpus = open_corpus(made / path)
    with closing(corpus.with_fields("teacher", path=folder)) as found, Loader(found, fields=NAMES, **shape) as loader:
        for step in loader:
            require_values(step)


@pytest.mark.parametrize("shape", [(2, 64, None), (4, 40, 13), (1, 7, 7)])
@pytest.mark.parametrize("targets", [False, True])
def test_values_of_a_stream_are_read_in_any_windows(made, shape, targets):
    batch_size, seq_len, stride = shape
    with open_corpus(made / "flat.npy") as corpus:
        batches = corpus.batches(batch_size, seq_len, stride)
        with Loader(batches, fields=NAMES, targets=targets, last="short" if not targets else "masked") as loader:
            count = 0
            for step in loader:
                rows = int((step["targets"] != -100).any(dim=1).sum()) if targets else len(step["tokens"])
                require_values({name: each[:rows] for name, each in step.items()})
                count += rows
    assert count == batches.for_targets().num_records if targets else batches.num_records


def test_ranks_and_a_resumed_state_give_the_values_of_their_records(made):
    with Loader(made / "store", shuffle="records", fields=NAMES, rank=1, world_size=3) as loader:
        steps = iter(loader)
        for _ in range(4):
            require_values(next(steps))
        state = loader.state_dict()
    with Loader(made / "store", shuffle="records", fields=NAMES, rank=0, world_size=2) as loader:
        loader.load_state_dict(state)
        for step in loader:
            require_values(step)


def test_other_ways_to_read_give_the_values_too(made):
    """A mixture, a `DataLoader` with workers, names of one's own, and a corpus that was pickled."""
    sources = {"a": made / "store", "b": made / "store"}
    with MixedLoader(sources, {"a": 1.0, "b": 2.0}, fields=NAMES) as mixed:
        for _ in range(5):
            require_values(next(mixed))
    with Loader(made / "store", fields={"ids": NAMES[0], "logprobs": NAMES[1]}) as loader:
        step = next(loader)
        assert step.keys() == {"tokens", "ids", "logprobs"}
        require_values(step, names=["ids", "logprobs"])
        for batch in torch.utils.data.DataLoader(loader.dataset(), batch_size=None, num_workers=2):
            require_values(batch, names=["ids", "logprobs"])
    with pytest.raises(ArgumentError, match="choose another name"):
        Loader(made / "store", fields={"targets": NAMES[0]})


def test_rows_of_padding_have_the_fill_value(fresh):
    field = Field("weight", np.dtype("f4"), fill=-1.0)
    fill(fresh, "w", [field], lambda tokens: {"weight": np.asarray(tokens, np.float32)}, about="token")
    with Loader(fresh, fields=["w/weight"], targets=True, last="masked", batch_size=7) as loader:
        last = list(loader)[-1]
    is_padding = (last["targets"] == -100).all(dim=1)
    assert is_padding.any()
    assert (last["w/weight"][is_padding] == -1).all()


def test_a_value_about_the_token_belongs_to_the_target(fresh, made):
    """`about="token"`: at each place the value of the next token, since that is the target there."""
    weights = {"weight": "f4"}
    values = lambda tokens: {"weight": np.asarray(tokens, np.float32)}  # noqa: E731
    fill(fresh, "w", weights, values, about="token")
    with Loader(fresh, fields=["w/weight"], targets=True) as loader:
        for step in loader:
            there = step["targets"] != -100
            assert torch.equal(step["w/weight"][there], step["targets"][there].float())
            assert (step["w/weight"][:, -1] == 0).all()  # its target is -100
    with Loader(fresh, fields=["w/weight"]) as loader:
        step = next(loader)
        assert torch.equal(step["w/weight"], step["tokens"].float())
    shutil.copy(made / "flat.npy", fresh.parent / "s.npy")
    fill(fresh.parent / "s.npy", "w", weights, values, about="token", seq_len=32)
    with Loader(fresh.parent / "s.npy", batch_size=4, seq_len=10, fields=["w/weight"], targets=True) as loader:
        for step in loader:
            assert torch.equal(step["w/weight"], step["targets"].float())


def test_values_of_records_and_of_documents(tmp_path):
    lengths = np.random.default_rng(3).integers(5, 60, 50)
    texts = [{"text": "x" * int(length), "id": str(k)} for k, length in enumerate(lengths)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, texts)))
    convert(tmp_path / "t.jsonl", "hdf5", tmp_path / "st", tokenizer="byte", seq_len=64, batch_size=4, remainder="pad")
    reward = Field("reward", np.dtype("f4"), unit="record")
    sums = lambda tokens: {"reward": np.asarray(tokens).sum(axis=1).astype(np.float32)}  # noqa: E731
    fill(tmp_path / "st", "rewards", [reward], sums)
    with open_field_set(tmp_path / "st", "quality", [Field("score", np.dtype("i8"), (2,), unit="document")]) as found:
        for step in found.missing(batch_size=7, quiet=True):
            numbers = step["documents"].numpy()
            found.write(numbers, score=np.stack([numbers, lengths[numbers]], axis=1))
        found.finish()
    names = ["rewards/reward", "quality/score"]
    for seq_len in (64, 32):
        with Loader(
            tmp_path / "st", fields=names, documents=("documents", "seq_lens"), seq_len=seq_len, shuffle="records"
        ) as loader:
            for step in loader:
                if seq_len == 64:
                    assert torch.equal(step["rewards/reward"], step["tokens"].sum(dim=1).float())
                known = step["documents"] >= 0
                assert known.any()
                numbers = step["documents"][known]
                expected = torch.stack([numbers, torch.from_numpy(lengths)[numbers]], dim=1)
                assert torch.equal(step["quality/score"][known], expected)
                assert (step["quality/score"][~known] == 0).all()
    with pytest.raises(ArgumentError, match="a step has it beside its documents"):
        Loader(tmp_path / "st", fields=["quality/score"])


def test_a_value_of_each_window_of_a_stream(fresh, made):
    shutil.copy(made / "flat.npy", fresh.parent / "s.npy")
    path = fresh.parent / "s.npy"
    reward = Field("reward", np.dtype("f8"), unit="record")
    sums = lambda tokens: {"reward": np.asarray(tokens).sum(axis=1).astype(np.float64)}  # noqa: E731
    fill(path, "rewards", [reward], sums, seq_len=64, stride=32)
    with open_corpus(path) as corpus, Loader(corpus.batches(3, 64, 32), fields=["rewards/reward"]) as loader:
        for step in loader:
            assert torch.equal(step["rewards/reward"], step["tokens"].sum(dim=1).double())
    with pytest.raises(ArgumentError, match="each window of 64 tokens every 32"):
        Loader(path, batch_size=3, seq_len=64, fields=["rewards/reward"])


def test_bfloat16_is_stored_as_its_bits(fresh):
    logits = lambda tokens: {"logits": (torch.as_tensor(tokens)[..., None] / 3).bfloat16()}  # noqa: E731
    fill(fresh, "t", {"logits": ("bfloat16", (1,))}, logits)
    with Loader(fresh, fields=["t/logits"]) as loader:
        step = next(loader)
    assert step["t/logits"].dtype == torch.bfloat16
    assert torch.equal(step["t/logits"], logits(step["tokens"])["logits"])
    with h5py.File(parts_in(fresh / "fields/t/train")[0][1]) as h5:
        assert h5["values/logits"].dtype == np.uint16
        assert h5["values/logits"].attrs["zb_dtype"] == b"bfloat16"


# --- writing ---------------------------------------------------------------------------------------------------------


def test_h5py_reads_the_values_while_they_are_written(fresh):
    with open_field_set(fresh, "teacher", FIELDS, part_bytes=PART_BYTES) as found:
        step = next(found.missing(batch_size=8, quiet=True))
        found.write(step["records"], **teacher(step["tokens"]))
        [(first, path)] = parts_in(found.folder)
        with h5py.File(path) as h5:
            assert (first, h5.attrs["first_record"]) == (0, 0)
            np.testing.assert_array_equal(h5["values/ids"][:8], teacher(step["tokens"])["ids"])
            np.testing.assert_array_equal(h5["marks"][:9], [SEQ_LEN] * 8 + [0])


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed")
def test_h5dump_reads_the_values_while_they_are_written(fresh):
    with open_field_set(fresh, "teacher", FIELDS, part_bytes=PART_BYTES) as found:
        step = next(found.missing(batch_size=8, quiet=True))
        found.write(step["records"], **teacher(step["tokens"]))
        [(_, path)] = parts_in(found.folder)
        command = ["h5dump", "-d", "/values/ids", "-s", "3,7,0", "-c", "1,1,4", "-y", "-w", "0", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ", ".join(map(str, teacher(step["tokens"])["ids"][3, 7].tolist())) in done.stdout


def test_jobs_share_the_parts_and_a_later_one_writes_what_is_missing(fresh):
    one = open_field_set(fresh, "teacher", FIELDS, part_bytes=PART_BYTES)
    two = open_field_set(fresh, "teacher", FIELDS, part_bytes=PART_BYTES)
    firsts, seconds = (each.missing(8, job=job, num_jobs=2, quiet=True) for job, each in enumerate((one, two)))
    seen = []
    for _ in range(12):
        for found, steps in ((one, firsts), (two, seconds)):
            step = next(steps)
            seen += step["records"].tolist()
            found.write(step["records"], **teacher(step["tokens"]))
    assert len(set(seen)) == len(seen) == 2 * 12 * 8
    step = next(firsts)
    with pytest.raises(UnavailableError, match="is written by process"):
        two.write(step["records"], **teacher(step["tokens"]))
    one.close()
    two.close()
    fill(fresh)
    with Loader(fresh, fields=NAMES) as loader:
        for step in loader:
            require_values(step)


def test_what_others_write_is_left_to_them_and_counted(fresh, capsys):
    one = open_field_set(fresh, "teacher", FIELDS, part_bytes=PART_BYTES)
    step = next(one.missing(batch_size=1, quiet=True))
    with open_field_set(fresh, "teacher") as two:
        count = 0
        for other in two.missing(batch_size=8, quiet=True):
            two.write(other["records"], **teacher(other["tokens"]))
            count += len(other["records"])
        left = one.facts.part_records
        assert count == 600 - left
        assert f"{left} records of other jobs are not written yet" in capsys.readouterr().err
        with pytest.raises(UnavailableError, match="still writes"):
            two.finish()
        one.write(step["records"], **teacher(step["tokens"]))
        one.close()
        with pytest.raises(IncompleteError, match=f"{left - 1} records are missing"):
            two.finish()


def test_records_are_written_once_more_if_that_is_asked_for(fresh):
    fill(fresh)
    wrong = lambda tokens: {name: each + 1 for name, each in teacher(tokens).items()}  # noqa: E731
    with open_field_set(fresh, "teacher") as found:
        with pytest.raises(ArgumentError, match=r"record 3 is written: pass overwrite=\(3, 4\)"):
            found.write([3], **teacher(np.zeros((1, SEQ_LEN))))
        given = []
        for step in found.missing(batch_size=4, overwrite=(100, 110), quiet=True):
            given += step["records"].tolist()
            with pytest.raises(IncompleteError, match="it is not finished"):  # its index would have the old values
                Loader(fresh, fields=NAMES)
            found.write(step["records"], **wrong(step["tokens"]))
        assert given == [*range(100, 110)]
        found.finish()
    with Loader(fresh, fields=NAMES, shuffle="sequential", batch_size=10) as loader:
        steps = list(loader)
    require_values(steps[9])
    require_values(steps[10], wrong)
    require_values(steps[11])


def test_tokens_that_came_later_are_missing(tmp_path, tokens):
    folder = tmp_path / "more"
    folder.mkdir()
    np.save(folder / "0.npy", tokens[:5000])
    fill(folder, seq_len=64)
    np.save(folder / "1.npy", tokens[5000:9999])
    with pytest.raises(IncompleteError, match="of later files are missing"):
        Loader(folder, batch_size=2, seq_len=50, fields=NAMES)
    with open_corpus(folder) as corpus:
        some = corpus.with_fields("teacher", allow_missing={"ids": -1, "logprobs": float("nan")})
        with Loader(some, batch_size=1, seq_len=64, shuffle="sequential", fields=NAMES) as loader:
            steps = list(loader)
    require_values(steps[0])
    assert (steps[-1]["teacher/ids"] == -1).all()
    assert steps[-1]["teacher/logprobs"].isnan().all()
    fill(folder, seq_len=64)
    with Loader(folder, batch_size=2, seq_len=50, fields=NAMES) as loader:
        for step in loader:
            require_values(step)


def test_missing_records_have_the_value_that_is_named(fresh):
    with open_field_set(fresh, "teacher", FIELDS, part_bytes=PART_BYTES) as found:
        written = []
        for number, step in enumerate(found.missing(batch_size=8, quiet=True)):
            if number % 3 == 0:
                found.write(step["records"], **teacher(step["tokens"]))
                written += step["records"].tolist()
    with pytest.raises(IncompleteError, match="is not finished"):
        Loader(fresh, fields=NAMES)
    with open_corpus(fresh) as corpus:
        with pytest.raises(ArgumentError, match="expected a value of logprobs for missing records"):
            corpus.with_fields("teacher", allow_missing={"ids": 0}).field(NAMES[1])
        some = corpus.with_fields("teacher", allow_missing={"ids": -7, "logprobs": 0})
        for shuffle in ("sequential", "records"):
            with Loader(some, shuffle=shuffle, fields=NAMES) as loader:
                there = 0
                for step in loader:
                    rows = (step["teacher/ids"] != -7).all(dim=(1, 2))
                    require_values({name: each[rows] for name, each in step.items()})
                    assert (step["teacher/ids"][~rows] == -7).all()
                    there += int(rows.sum())
            assert there == len(written)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_values_of_other_tokens_are_refused(fresh, made, tokens):
    other = fresh.parent / "other"
    np.save(fresh.parent / "o.npy", (tokens ^ 1).reshape(-1, SEQ_LEN))
    convert(fresh.parent / "o.npy", "hdf5", other, batch_size=8, shards=3)
    with open_corpus(other) as corpus, pytest.raises(ChecksumError, match="belong to other tokens"):
        corpus.with_fields("teacher", path=made / "store/fields/teacher/train")
    with pytest.raises(ChecksumError, match="belong to other tokens"):
        open_field_set(other, "teacher", FIELDS, path=made / "store/fields/teacher/train")


def test_a_job_that_asks_for_another_set_is_refused_by_what_differs(fresh):
    open_field_set(fresh, "teacher", FIELDS, maker={"model": "a"}).close()
    for options, found in [
        ({"fields": {"ids": ("i4", (5,)), "logprobs": ("f2", (4,))}}, "fields="),
        ({"about": "token"}, "about="),
        ({"maker": {"model": "b"}}, "maker="),
    ]:
        arguments = {"fields": FIELDS, "maker": {"model": "a"}, **options}
        with pytest.raises(ArgumentError, match=f"was made with {found}"):
            open_field_set(fresh, "teacher", **arguments)
    with pytest.raises(ArgumentError, match="was made with name='teacher', found name='student'"):
        open_field_set(fresh, "student", FIELDS, maker={"model": "a"}, path=fresh / "fields/teacher/train")


def test_what_is_wrong_is_named(fresh, made):
    with open_field_set(fresh, "teacher", FIELDS) as found:
        right = teacher(np.zeros((1, SEQ_LEN)))
        bad = {**right, "logprobs": np.full((1, SEQ_LEN, 4), np.nan, np.float16)}
        cases = [
            (([0], {"ids": right["ids"]}), ArgumentError, "expected the fields ids, logprobs"),
            (([600], right), ArgumentError, r"expected records in 0\.\.599"),
            (
                ([0, 0], {name: np.repeat(each, 2, 0) for name, each in right.items()}),
                ArgumentError,
                "each record once",
            ),
            (([0], bad), ConvertError, "logprobs: expected numbers, found NaN"),
            (([0], {**right, "ids": right["ids"][:, :9]}), ArgumentError, "expected shape"),
            (([0], {**right, "ids": right["ids"].astype("f4")}), ArgumentError, "expected int32, found float32"),
        ]
        for (records, values), kind, message in cases:
            with pytest.raises(kind, match=message):
                found.write(records, **values)
        assert found.num_missing == 600
    with pytest.raises(NotFoundError, match="there is no field set 'nobody'"):
        Loader(fresh, fields=["nobody/x"])
    with pytest.raises(ArgumentError, match="expected a field of the field set teacher"):
        Loader(made / "store", fields=["teacher/x"])
    with pytest.raises(ArgumentError, match="pass the seq_len of the windows"):
        open_field_set(made / "flat.npy", "other", FIELDS)
    with pytest.raises(ArgumentError, match="a stride that divides seq_len=64"):
        open_field_set(made / "flat.npy", "other", FIELDS, seq_len=64, stride=60)
    with pytest.raises(ArgumentError, match="leave out seq_len and stride"):
        open_field_set(fresh, "other", FIELDS, seq_len=16)
    with pytest.raises(UnverifiableError, match="no digest of its tokens"):
        open_field_set(made / "rows.npy", "other", FIELDS, require_digests=True)
    fields = [Field("a", np.dtype("f4")), Field("b", np.dtype("f4"), unit="document")]
    with pytest.raises(ArgumentError, match="a set of their own"):
        open_field_set(fresh, "other", fields)
    with pytest.raises(BackendError, match="holds no documents"):
        open_field_set(fresh, "other", fields[1:])


def test_fields_of_one_name_are_refused(fresh):
    with pytest.raises(ArgumentError, match="ids"):
        open_field_set(fresh, "twice", [Field("ids", np.dtype("i4")), Field("ids", np.dtype("i8"))])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 0),
        ({"RANK": "1", "WORLD_SIZE": "3"}, 1),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, 2),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, 0),  # of a batch script, which is one process outside of any step
        ({"ARRAY": "30 10 10 3"}, 2),
        ({"ARRAY": "5 4 1 3", "RANK": "0", "WORLD_SIZE": "3"}, 1),
    ],
)
def test_a_job_begins_with_the_parts_of_its_number(fresh, monkeypatch, environment, expected):
    names = [f"SLURM_ARRAY_TASK_{each}" for each in ("ID", "MIN", "STEP", "COUNT")]
    for name in (*names, "RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    of_array = environment.pop("ARRAY", "").split() if "ARRAY" in environment else []
    for name, value in {**environment, **dict(zip(names, of_array, strict=False))}.items():
        monkeypatch.setenv(name, value)
    with open_field_set(fresh, "teacher", FIELDS, part_bytes=PART_BYTES) as found:
        step = next(iter(found.missing(batch_size=8, quiet=True)))
        assert int(step["records"][0]) == (0, 192, 384)[expected]  # the first records of thirds of the parts


@pytest.mark.parametrize(
    ("file", "section", "change", "said"),
    [
        ("index.json", "parts", lambda parts: {**parts, "records": parts["records"][:-1]}, "records"),
        (
            "index.json",
            "parts",
            lambda parts: {**parts, "path": ["other.values", *parts["path"][1:]]},
            "names of parts",
        ),
        ("index.json", "field ids", lambda arrays: {**arrays, "crc32": ["x"] * len(arrays["crc32"])}, "crc32"),
        ("index.json", "version", lambda _: 99, "version"),
        ("set.json", "files", lambda files: {**files, "digest": files["digest"][1:]}, "digest"),
        ("set.json", "fields", lambda _: [], "fields"),
        ("set.json", "words", lambda _: [1], "words"),
    ],
)
def test_descriptions_of_a_set_that_no_version_wrote_are_named(fresh, file, section, change, said):
    """A text without the seal may be somebody's own."""
    fill(fresh)
    path = fresh / "fields/teacher/train" / file
    value = json.loads(path.read_text())
    del value["check"]
    value[section] = change(value[section])
    path.write_text(json.dumps(value))
    with pytest.raises(FormatError, match=said) as refused, Loader(fresh, fields=NAMES):
        pass
    assert str(path) in str(refused.value)


def test_tokens_and_the_index_of_a_store_are_never_touched(fresh):
    before = {path.name: path.stat().st_mtime_ns for path in fresh.iterdir()}
    with Loader(fresh) as loader:
        state = loader.state_dict()
    fill(fresh)
    after = {path.name: path.stat().st_mtime_ns for path in fresh.iterdir()}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"fields"}
    with Loader(fresh, fields=NAMES) as loader:
        assert loader.state_dict() == state


def test_a_damaged_value_or_row_is_never_given(fresh):
    """Flips in values, in rows of crc32, and in the metadata of HDF5: an error, or the right values."""
    fill(fresh)
    parts = [path for _, path in parts_in(fresh / "fields/teacher/train")]
    rng = np.random.default_rng(11)
    refused = 0
    for number in range(40):
        path = parts[number % len(parts)]
        data = bytearray(path.read_bytes())
        place = int(rng.integers(len(data)))
        data[place] ^= 1 << int(rng.integers(8))
        whole = path.read_bytes()
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        path.write_bytes(data)
        os.utime(path, ns=times)
        for shuffle in ("global", "records"):
            with Loader(fresh, shuffle=shuffle, fields=NAMES) as loader:
                try:
                    for step in loader:
                        require_values(step)
                except ChecksumError:
                    refused += 1
        path.write_bytes(whole)
    assert refused > 40
