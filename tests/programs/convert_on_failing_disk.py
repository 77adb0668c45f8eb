"""Converts on a disk that fails: a fork for each write that fails; it says why, converts elsewhere, and ends.

    python convert_on_failing_disk.py FOLDER FAULTS SOURCE TARGET OPTIONS

FAULTS is a JSON list of the writes that fail, each with its errno; SOURCE and OPTIONS are the JSON of the arguments of
`convert`. Prints a line of JSON for each: number, exit code, stderr. Exit codes of a fork: 0 no such write, 9 the disk
failed, 8 the same and then another conversion was right, 7 that one was wrong. `failing_disk.c` is preloaded.
"""

import ctypes
import gc
import importlib
import json
import os
import shutil
import sys

from zb_hdf5 import convert, verify_store

#: Loaded before the forks, which then have nothing to import.
PRELOADED = (
    "zb_hdf5.commands.zb",
    "zb_hdf5.converters.source_records",
    "zb_hdf5.converters.run",
    "zb_hdf5.converters.text_source",
    "zb_hdf5.formats.h5_writer",
    "zb_hdf5.formats.stream_writer",
    "zb_hdf5.store.verify",
)
shim = ctypes.CDLL(None)


def convert_once(at, error, place, source, target, options):
    """Convert while write number `at` fails; return the exit code."""
    shim.arm(ctypes.c_long(at), error)
    try:
        convert(source, "hdf5", f"{place}/{target}", workers=1, **options)
    except OSError as failure:
        if failure.errno != error:
            raise
        if at % 2 == 0:
            return 9
        shim.arm(ctypes.c_long(0), 0)  # the disk is well again
        convert(source, "hdf5", f"{place}/again", workers=1, **options)
        is_right = all(each.problem is None for each in verify_store(f"{place}/again"))
        return 8 if is_right else 7
    return 0


for module in PRELOADED:
    importlib.import_module(module)
gc.collect()
gc.freeze()  # a collection in a fork would copy each page of what is imported
folder, faults, source, target, options = sys.argv[1:]
for at, error in json.loads(faults):
    place = f"{folder}/{at}"
    os.mkdir(place)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(f"{place}/log", os.O_CREAT | os.O_WRONLY), 2)
        sys.exit(convert_once(at, error, place, json.loads(source), target, json.loads(options)))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f"{place}/log") as log:
        said = log.read()
    shutil.rmtree(place)
    print(json.dumps([at, code, said]), flush=True)
    if code == 0:
        break
