"""Makes a file, arms the failing disk, and goes on: a fork for each write, since importing takes longer than the rest.

    python hit_commit.py KIND FOLDER ERROR NUMBERS ARGUMENTS

KIND is "batches" or "stream", ERROR the errno of the disk (0: the process is killed), NUMBERS a JSON list of the writes
of the commit that are hit, ARGUMENTS a JSON object of the arguments of the function KIND. Prints the first number at
which the commit had no such write. `failing_disk.c` is preloaded.
"""

import ctypes
import json
import os
import sys

from numbered import FIELDS, documents_of, fields_of, numbered_batches

from zb_hdf5 import HDF5ShardWriter, open_writer

shim = ctypes.CDLL(None)


def batches(path, arm, shape, before, count, expected, fields=None, codec=None):
    """Commit `before` batches, arm the disk, and commit `count` more; or finish, if `count` is 0."""
    size = {"batch_size": shape[0], "seq_len": shape[1], "dtype": "uint16", "expected_batches": expected}
    writer = open_writer(path, **size, fields=fields, codec=codec)

    def write(first, count):
        tokens = numbered_batches(first, count, shape)
        writer.write(tokens, fields and fields_of(tokens))

    if before:
        write(0, before)
    arm(writer)
    if count:
        write(before, count)
    else:
        writer.finish()


def stream(path, arm, chunk, length, before, count, fields=None, codec=None):
    """Do the same with documents of `length` tokens."""
    writer = HDF5ShardWriter(path, chunk_tokens=chunk, fields=fields, codec=codec)

    def write(first, count):
        tokens = documents_of(first, count, length)
        writer.write_documents(tokens, [length] * count, fields and fields_of(tokens))

    write(0, before)
    arm(writer)
    if count:
        write(before, count)
    else:
        writer.finish()


def hit(kind, folder, at, error, arguments):
    """Run the commit, whose write number `at` is hit; say in a file how it went. A kill ends this process."""
    os.makedirs(folder)
    os.dup2(os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY), 2)
    armed = []

    def arm(writer):
        armed.append(writer)
        shim.arm(ctypes.c_long(at), error)

    with open(f"{folder}/said", "w") as said:
        try:
            {"batches": batches, "stream": stream}[kind](f"{folder}/x.h5", arm, **arguments)
            said.write("done")
        except OSError as failure:
            said.write(f"{failure.errno} {failure.filename}\n")
            said.flush()
            shim.arm(ctypes.c_long(0), 0)  # the disk is well again
            said.write(write_again(armed[0], arguments))


def write_again(writer, arguments):
    """Write another batch to a writer whose disk has failed; return how that went."""
    try:
        tokens = numbered_batches(0, 1, arguments["shape"])
        writer.write(tokens, arguments.get("fields") and fields_of(tokens))
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "written again"


def main(kind, folder, error, numbers, arguments):
    arguments = json.loads(arguments)
    if arguments.pop("with_fields", False):
        arguments["fields"] = FIELDS
    for at in json.loads(numbers):
        child = os.fork()
        if child == 0:
            hit(kind, f"{folder}/{at}", at, int(error), arguments)
            os._exit(7)
        os.waitpid(child, 0)
        with open(f"{folder}/{at}/said") as said:
            if said.read() == "done":
                break
    print(at)


main(*sys.argv[1:])
