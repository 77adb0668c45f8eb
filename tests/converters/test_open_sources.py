"""The files of a source are open for one conversion, in each process that reads them, and not longer."""

import json
import pickle
import shutil

import pytest
from descriptors import open_descriptors, open_files
from golden import DATA

from zb_hdf5 import ConvertError, convert
from zb_hdf5.converters.plan import SentOnce, forget_received
from zb_hdf5.converters.text_source import Recipe, TextSource
from zb_hdf5.text.text_corpus import open_documents
from zb_hdf5.trainers.hf import open_hf


def write_lines(path, *documents):
    path.write_text("".join(json.dumps(each) + "\n" for each in documents))
    return path


def test_a_conversion_that_fails_leaves_no_file_of_its_source_open(tmp_path):
    """Also while its error, and so its traceback, is there."""
    path = write_lines(tmp_path / "a.jsonl", {"input_ids": [1, 2]}, {"input_ids": "no list"})
    before = open_descriptors()
    with pytest.raises(ConvertError, match="expected a list of ids") as caught:
        convert(path, "stream", tmp_path / "out", workers=1)
    assert open_descriptors() == before
    assert caught.value is not None


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.parquet", "saved"])
def test_a_source_that_was_converted_is_read_again(name, tmp_path):
    shutil.copytree(DATA / "trainers" / "hf", tmp_path / "in")
    source = open_hf([tmp_path / "in" / name])
    reports = [convert(source, "stream", tmp_path / f"out-{number}", workers=1) for number in range(2)]
    assert reports[0].tokens_stored == reports[1].tokens_stored > 0
    assert not [path for path in open_files().values() if path.startswith(str(tmp_path))]


def test_a_source_is_unpickled_once_for_all_tasks_of_a_process(tmp_path):
    source = TextSource(
        open_documents([write_lines(tmp_path / "a.jsonl", {"text": "one"})]), "jsonl", Recipe("byte", 256)
    )
    sent = SentOnce(source)
    tasks = [pickle.dumps((sent, number)) for number in range(3)]
    source.max_dropped = 0.25  # not sent: it was pickled for the first task
    received = [pickle.loads(task)[0] for task in tasks]
    assert len({id(each.source) for each in received}) == 1
    assert received[0].source is not source
    assert received[0].source.max_dropped != 0.25
    other = pickle.loads(pickle.dumps(SentOnce(source)))
    assert other.source.max_dropped == 0.25
    before = open_descriptors()
    [*other.source.read(other.source.groups[0], None, 1)]
    assert len(open_descriptors() - before) == 1
    del other
    forget_received()
    assert open_descriptors() == before
