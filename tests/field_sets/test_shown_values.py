"""`zb show --field-set`: values beside the ids, and of records and documents; and `zb which` of such a loader."""

import json
import shutil

import h5py
import numpy as np
import pytest
from commandline import one_error, report_of, run_zb, succeed

from zb_hdf5 import Field, Loader, convert, open_field_set
from zb_hdf5.commands.zb import zb

SEQ_LEN = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A store of bytes with documents, whose set has the ids twice, and a number for each record; and codes."""
    folder = tmp_path_factory.mktemp("shown")
    rows = [{"text": chr(97 + number % 26) * (2 + number % 9), "lang": "ed"[number % 2]} for number in range(60)]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"tokenizer": "byte", "seq_len": SEQ_LEN, "batch_size": 4, "metadata_columns": ("lang",)}
    convert(folder / "t.jsonl", "hdf5", folder / "st", **options)
    fields = [
        Field("w", np.dtype("f4"), (6,)),
        Field("half", np.dtype("u2"), kind="bfloat16"),
        Field("score", np.dtype("f8"), unit="record"),
    ]
    with open_field_set(folder / "st", "teacher", fields) as found:
        for step in found.missing(quiet=True, batch_size=8):
            ids = step["tokens"].numpy().astype("f4")
            w = ids[..., None] * 2 + np.arange(6, dtype="f4")
            found.write(step["records"], w=w, half=ids, score=step["records"].double() / 4)
        found.finish()
    succeed(zb, "fields", "make", folder / "st", "lang", "--meta", "lang")
    return folder / "st"


def joined(row, name=""):
    """Return the values of a field in all parts of a row, or the ids."""
    return [each for part in row["parts"] for each in (part["fields"][name] if name else part["tokens"])]


def test_the_values_of_a_batch_stand_beside_its_ids(path):
    with h5py.File(next(path.glob("shard-*.h5"))) as h5:
        tokens = h5["batches"][1]
    found = report_of(zb, "show", path, "--batch", 1, "--field-set", "teacher", "--field-set", "lang", "--all")
    assert len(found["rows"]) == 4
    for number, (row, ids) in enumerate(zip(found["rows"], tokens.tolist(), strict=True), 4):
        assert joined(row) == ids
        assert joined(row, "teacher/w") == [[2.0 * each + k for k in range(6)] for each in ids]
        assert joined(row, "teacher/half") == [float(each) for each in ids]
        assert row["field_sets"]["teacher/score"] == [{"number": number, "value": number / 4}]
        documents = {part["document"] for part in row["parts"] if part.get("document") is not None}
        codes = {each["number"]: each["value"] for each in row["field_sets"]["lang/code"]}
        assert codes == {each: each % 2 for each in documents}
    text = succeed(zb, "show", path, "--batch", 1, "--field-set", "teacher", "--tokenizer", "byte").stdout
    first = tokens[0, 0]
    assert "teacher/score of 4: 1" in text
    numbers = " ".join(f"{2 * first + k:.4g}" for k in range(4))
    assert any(line.split()[:2] == ["0", str(first)] and f"{numbers} … 6" in line for line in text.splitlines())


def test_a_document_is_shown_with_its_values(path):
    found = report_of(zb, "show", path, "--document", 7, "--field-set", "teacher")
    [row] = found["rows"]
    assert [each[0] for each in joined(row, "teacher/w")] == [2.0 * each for each in joined(row)]
    assert row["field_sets"]["teacher/score"]


def test_the_values_of_a_set_that_is_written_are_shown(path, tmp_path):
    shutil.copytree(path, tmp_path / "st")
    with open_field_set(
        tmp_path / "st", "begun", [Field("w", np.dtype("f4")), Field("i", np.dtype("i4"), fill=-7)]
    ) as made:
        step = next(made.missing(quiet=True, batch_size=4))
        made.write(step["records"], w=step["tokens"].float() + 0.5, i=step["tokens"].int())
    done = run_zb("show", tmp_path / "st", "--batch", 1, "--field-set", "begun", "--json", code=0)
    assert "the field set begun is not finished" in done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {value for row in rows for value in joined(row, "begun/w")} == {0.0}
    assert {value for row in rows for value in joined(row, "begun/i")} == {-7}
    for row in report_of(zb, "show", tmp_path / "st", "--batch", 0, "--field-set", "begun")["rows"]:
        assert joined(row, "begun/w") == [each + 0.5 for each in joined(row)]


def test_a_set_that_is_not_there_is_named(path):
    done = run_zb("show", path, "--field-set", "x")
    assert "there is no field set 'x'; of" in one_error(done)


def test_the_state_of_a_loader_with_values_names_its_rows(path, tmp_path):
    with Loader(path, fields=["teacher/w"], rank=0, world_size=1) as loader:
        step = loader.get_batch()
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    found = report_of(zb, "which", path, "--state", tmp_path / "state.json", "--step", 0)
    [batch] = [row["batch"] for each in found["batches"] for row in each["rows"]]
    shown = report_of(zb, "show", path, "--batch", batch, "--all", "--field-set", "teacher")
    assert [joined(row, "teacher/w") for row in shown["rows"]] == step["teacher/w"].tolist()
