"""A writer in the child of a fork is refused at once, and the parent finishes a right file, however the child ends."""

import numpy as np
import pytest
from contents import require_good
from interpreter import run_program
from numbered import numbered_batches
from processes import PROGRAMS

from zb_hdf5 import open_corpus, open_reader

SHAPE = (2, 64)
KINDS = ("h5", "gzip", "batch", "live", "stream")
#: How the child ends: as any script, also when the file is finished, by an error in the `with` block, or by leaving it.
ENDS = ("exit", "late", "error", "leave")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thin
def test_a_writer_in_a_child_is_refused_and_harms_nothing(kind, end, tmp_path):
    done = run_program(PROGRAMS / "fork_with_writer.py", kind, tmp_path, end, timeout=60)
    assert done.returncode == 0, done.stderr
    told = {"error": "KeyError: 'of the child'", "leave": "belongs to the process that has made it"}.get(end, "")
    assert told in done.stderr if told else not done.stderr
    assert done.stdout == ("1\n" if told else "0\n")
    [path] = [path for path in tmp_path.iterdir() if path.suffix in ("", ".h5", ".batch")]
    expected = numbered_batches(0, 6, SHAPE)
    require_good(path)
    assert not list(tmp_path.rglob("*.partial"))
    if kind == "stream":
        with open_corpus(path) as store:
            np.testing.assert_array_equal(store.tokens[0 : store.num_tokens], expected.reshape(-1))
    else:
        with open_reader(path, verify="batch") as reader:
            np.testing.assert_array_equal(np.stack(list(reader)), expected)
