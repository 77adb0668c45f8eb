"""Writes three batches, forks, and writes three more, while the child tries everything that a writer has.

    python fork_with_writer.py KIND FOLDER END

KIND is a key of WRITERS; END is the end of the child: "exit" and "late" as any script (late: when the file is
finished), "error" by an error in the `with` block, "leave" by leaving it. Prints the exit code of the child.
"""

import os
import signal
import sys

from numbered import numbered_batches

from zb_hdf5 import ClosedError, HDF5ShardWriter, open_writer

kind, folder, end = sys.argv[1:]
SHAPE = {"batch_size": 2, "seq_len": 64, "dtype": "uint16"}
WRITERS = {
    "h5": lambda: open_writer(f"{folder}/x.h5", **SHAPE),
    "gzip": lambda: open_writer(f"{folder}/x.h5", codec="gzip", **SHAPE),
    "batch": lambda: open_writer(f"{folder}/x.batch", **SHAPE),
    "live": lambda: open_writer(f"{folder}/x", live=True, shard_batches=4, **SHAPE),
    "stream": lambda: HDF5ShardWriter(f"{folder}/x.h5", chunk_tokens=64, dtype="uint16"),
}


def write(first):
    """Write the batches `first` to `first + 2`, or as many documents."""
    for batch in numbered_batches(first, 3, (2, 64)):
        if isinstance(writer, HDF5ShardWriter):
            writer.write_document(batch.reshape(-1), id=f"{first} {batch[0, 0]}")
        else:
            writer.write(batch)


def refused(use):
    """Call a method of the writer, which must raise the error of another process."""
    try:
        use()
    except ClosedError as error:
        if "process" not in str(error):
            raise
    else:
        raise AssertionError(f"{use} was not refused")


def make_no_file(event, arguments):
    """End the child where it makes a file, as a hook of the interpreter: its locks are in the way of its parent."""
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT:
        print(f"the child has made {arguments[0]}", file=sys.stderr, flush=True)
        os._exit(3)


def end_child():
    """End the child as it was asked for; an "error" and "leave" end it in the `with` block of the writer."""
    if end == "late":
        os.read(receiving, 1)
    if end in ("exit", "late"):
        sys.exit(0)
    if end == "error":
        raise KeyError("of the child")


with WRITERS[kind]() as writer:
    write(0)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os.close(sending)
        sys.addaudithook(make_no_file)
        for use in (lambda: write(3), writer.finish, writer.abort, writer.close):
            refused(use)
        if hasattr(writer, "sha256"):
            refused(writer.sha256)
        end_child()
    else:
        ended = None if end == "late" else os.waitpid(child, 0)
        write(3)
if child:
    os.close(sending)
    print(os.waitstatus_to_exitcode((ended or os.waitpid(child, 0))[1]))
