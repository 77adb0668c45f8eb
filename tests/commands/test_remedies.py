"""Remedies: the library names them in the words of Python, the command line by the command to type."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

import pytest
from commandline import run_zb

from zb_hdf5 import ExistsError, FormatError, IncompleteError, ZbError
from zb_hdf5.console import TYPED, message_of
from zb_hdf5.errors import Remedy


def fail_in_worker(path):
    error = IncompleteError(f"{path}: cut", remedy=Remedy.REPAIR, at=path)
    error.add_note("a note")
    raise error


def find_in_worker(path):
    raise ExistsError(f"{path}: exists already")


def test_the_command_to_type_takes_the_place_of_the_words_but_not_in_a_quoted_error():
    assert set(TYPED) == set(Remedy)
    assert len(set(Remedy)) == len(list(Remedy))
    for remedy in Remedy:
        error = FormatError("/a{b}: expected 1, found 2", remedy=remedy, at="/a{b}")
        assert str(error) == f"/a{{b}}: expected 1, found 2; {remedy.about('/a{b}')}"
        assert error.facts == "/a{b}: expected 1, found 2"
        assert message_of(error) == f"{error.facts}; {TYPED[remedy].replace('{at}', '/a{b}')}"
        assert re.search(r"'zb \w+|--\w+|'export \w+=", message_of(error))
    for remedy in (Remedy.REPAIR, Remedy.REBUILD, Remedy.REBUILD_FORCE, Remedy.CRC32):  # which refuse a URL
        message = message_of(FormatError("expected 1, found 2", remedy=remedy, at="s3://bucket/train"))
        assert "s3://" not in message
        assert message.endswith(" COPY', where COPY is it, copied to this machine")
    assert "'zb verify s3://b/t'" in message_of(FormatError("x", remedy=Remedy.VERIFY, at="s3://b/t"))
    # an error that another one quotes has no path
    error = FormatError(f"x: {FormatError('y: bad', remedy=Remedy.VERIFY, at='y')}")
    assert message_of(error) == str(error)
    error = ZbError("a: b")
    assert (str(error), error.facts, message_of(error), error.remedy) == ("a: b", "a: b", "a: b", None)


def test_a_path_with_spaces_is_one_word_of_a_command():
    error = IncompleteError("a b$/x.h5: its writer has not finished", remedy=Remedy.REPAIR, at="a b$/x.h5")
    assert message_of(error).endswith("run 'zb repair \"a b\\$/x.h5\"'")
    assert message_of(FormatError("no", remedy=Remedy.VERIFY, at="tøkens/x.h5")).endswith("run 'zb verify tøkens/x.h5'")
    left_out = FormatError("bad", remedy=Remedy.LEAVE_OUT, at="25 batches")
    assert "leave its 25 batches out" in message_of(left_out)


def test_a_remedy_survives_the_way_out_of_a_process(tmp_path):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(IncompleteError) as caught:
            pool.submit(fail_in_worker, tmp_path).result()
        with pytest.raises(ExistsError) as found:
            pool.submit(find_in_worker, tmp_path).result()
    error = caught.value
    assert (error.facts, error.remedy, error.at) == (f"{tmp_path}: cut", Remedy.REPAIR, str(tmp_path))
    assert "a note" in error.__notes__
    assert message_of(error) == f"{tmp_path}: cut; if no writer is at work on it, run 'zb repair {tmp_path}'"
    assert message_of(found.value) == f"{tmp_path}: exists already; pass --force to replace it"


def test_text_without_a_tokenizer_names_the_command_that_makes_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    result = run_zb("convert", tmp_path / "a.jsonl", tmp_path / "out", "--seq-len", 4, code=2)
    assert "need --tokenizer, which 'zb tokenizer train' makes of text; " in result.output
