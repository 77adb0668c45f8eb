"""A writer in the child of a fork is refused at once, and the parent finishes a right file, however the child ends."""

import os
from pathlib import Path

import numpy as np
import pytest
from contents import numbered_batches, require_good
from processes import python

from zb_hdf5 import MmapTokenStore, open_reader

SHAPE = (2, 64)
KINDS = {
    "h5": "open_writer(folder + '/x.h5', **shape)",
    "gzip": "open_writer(folder + '/x.h5', codec='gzip', **shape)",
    "batch": "open_writer(folder + '/x.batch', **shape)",
    "live": "open_writer(folder + '/x', live=True, shard_batches=4, **shape)",
    "stream": "HDF5ShardWriter(folder + '/x.h5', chunk_tokens=64, dtype='uint16')",
}
#: How the child ends: as any script, also when the file is finished, by an error in the `with` block, or by leaving it.
ENDS = {
    "exit": "sys.exit(0)",
    "late": "os.read(receiving, 1), sys.exit(0)",
    "error": "raise KeyError('of the child')",
    "leave": "pass",
}
#: Writes three batches, forks, and writes three more, while the child tries everything that a writer has.
SCRIPT = """
import os, signal, sys
import numpy as np
from contents import numbered_batches
from zb_hdf5 import ClosedError, HDF5ShardWriter, open_writer
folder = sys.argv[1]
shape = {{"batch_size": 2, "seq_len": 64, "dtype": "uint16"}}
def write(first):
    for batch in numbered_batches(first, 3, (2, 64)):
        if isinstance(writer, HDF5ShardWriter):
            writer.write_document(batch.reshape(-1), id=f"{{first}} {{batch[0, 0]}}")
        else:
            writer.write(batch)
def refused(use):
    try:
        use()
    except ClosedError as error:
        assert "process" in str(error), error
    else:
        raise AssertionError(f"{{use}} was not refused")
with {writer} as writer:
    write(0)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os.close(sending)
        for use in (lambda: write(3), writer.finish, writer.abort, writer.close):
            refused(use)
        if hasattr(writer, "sha256"):
            refused(writer.sha256)
        {end}
    else:
        ended = os.waitpid(child, 0) if {waits} else None
        write(3)
if child:
    os.close(sending)
    print(os.waitstatus_to_exitcode((ended or os.waitpid(child, 0))[1]))
"""


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thin
def test_a_writer_in_a_child_is_refused_and_harms_nothing(kind, end, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    code = SCRIPT.format(writer=KINDS[kind], end=ENDS[end], waits=end != "late")
    done = python(code, tmp_path, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    told = {"error": "KeyError: 'of the child'", "leave": "belongs to the process that has made it"}.get(end, "")
    assert told in done.stderr if told else not done.stderr
    assert done.stdout == ("1\n" if told else "0\n")
    [path] = [path for path in tmp_path.iterdir() if path.suffix in ("", ".h5", ".batch")]
    expected = numbered_batches(0, 6, SHAPE)
    require_good(path)
    assert not list(tmp_path.rglob("*.partial"))
    if kind == "stream":
        with MmapTokenStore(path) as store:
            np.testing.assert_array_equal(store.get_slice(0, store.num_tokens), expected.reshape(-1))
    else:
        with open_reader(path, verify="batch") as reader:
            np.testing.assert_array_equal(np.stack(list(reader)), expected)
