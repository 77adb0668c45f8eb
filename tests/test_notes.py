"""Notes: lines on standard error, once a process, and none of the workers of a loader."""

from multiprocessing import get_context

from zb_hdf5.notes import note


def test_a_note_is_one_line_and_is_printed_once(capfd):
    note("corpus/: left out: 2 files")
    note("corpus/: left out: 2 files")
    note("other/: left out: 1 file")
    assert capfd.readouterr().err == "note: corpus/: left out: 2 files\nnote: other/: left out: 1 file\n"


def test_the_processes_of_a_pool_print_none(capfd):
    process = get_context("spawn").Process(target=note, args=("said by a worker",))
    process.start()
    process.join(60)
    process.close()
    assert "said by a worker" not in capfd.readouterr().err


def test_a_note_without_an_output_is_no_error(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    note("nobody hears it")
