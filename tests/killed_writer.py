"""A process that writes numbered batches to a file until it is killed."""

import inspect
from functools import partial

from numbered import numbered_batches

B, S = 32, 64  # a batch of uint16 is one page

batches = partial(numbered_batches, shape=(B, S))
#: The start of every process's code: it writes and expects the same batches as this process.
COMMON = f"""
import functools
import numpy as np
B, S = {B}, {S}
{inspect.getsource(numbered_batches)}
batches = functools.partial(numbered_batches, shape=(B, S))
"""
#: Prints "ready", and the number of batches after each write.
WRITER = f"""{COMMON}
import random, sys
from zb_hdf5 import open_writer
with open_writer(sys.argv[1], batch_size=B, seq_len=S, dtype="uint16") as writer:
    print("ready", flush=True)
    while True:
        writer.write(batches(writer.num_batches, random.randint(1, 5)))
        print(writer.num_batches, flush=True)
"""
