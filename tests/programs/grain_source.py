"""Read documents or records by grain's DataLoader with two workers, and print them: KIND PATH MASK DTYPE COUNT [STATE].

COUNT of them are taken, or all, and the state after them is written to the file STATE; a state that is there is
loaded first. MASK is the name of a field, DTYPE that of the ids in files without a header; "" is none.
"""

import json
import sys
from pathlib import Path

import grain
import numpy as np

from zb_hdf5 import ReadAs, StoreRecords, open_corpus


class DocumentAsText(grain.transforms.Map):
    """Makes of a document the text of its values, which a worker sends."""

    def __init__(self, mask):
        self.mask = mask

    def map(self, document):
        values = {"ids": document.ids.tolist(), "id": document.id, "metadata": document.metadata}
        return json.dumps(values | ({"mask": document.field(self.mask).tolist()} if self.mask else {}))


class RecordAsText(grain.transforms.Map):
    """Makes the text of the values of a record."""

    def map(self, record):
        return json.dumps(record, default=np.ndarray.tolist)


def main(kind, path, mask, dtype, count, state=None):
    if kind == "documents":
        source = open_corpus(path, read_as=ReadAs(source_dtype=dtype or None)).documents
        as_text = DocumentAsText(mask)
    else:
        source = StoreRecords(path, fields=(mask,), documents=True, metadata=True)
        as_text = RecordAsText()
    sampler = grain.samplers.IndexSampler(len(source), shuffle=True, seed=3, num_epochs=1)
    steps = iter(grain.DataLoader(data_source=source, sampler=sampler, operations=[as_text], worker_count=2))
    if state and Path(state).exists():
        steps.set_state(Path(state).read_bytes())
    for number, each in enumerate(steps, 1):
        print(each)
        if number == int(count):
            break
    if state:
        Path(state).write_bytes(steps.get_state())


if __name__ == "__main__":
    main(*sys.argv[1:])
