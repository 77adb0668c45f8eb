"""This build writes HDF5 files of each kind, and the contents that it finds: python write_our_hdf5.py FOLDER."""

import json
import sys
from pathlib import Path

from h5_contents import contents, hdf5_files
from truth import LARGE_VOCAB, SMALL_VOCAB, documents, loss_mask

from zb_hdf5 import HDF5ShardWriter, convert

folder = Path(sys.argv[1])
folder.mkdir(parents=True)
for name, vocab_size, dtype, codec in (
    ("plain", SMALL_VOCAB, "uint16", None),
    ("gzip", LARGE_VOCAB, "uint32", "gzip"),  # zstd takes a filter that neither Debian's tools nor most wheels have
):
    stream = folder / f"stream-{name}.h5"
    how = {"dtype": dtype, "vocab_size": vocab_size, "codec": codec, "fields": {"loss_mask": "u1"}}
    with HDF5ShardWriter(stream, **how) as writer:
        for document in documents(vocab_size):
            writer.write_document(document, {"loss_mask": loss_mask(document)})
    convert(stream, "hdf5", folder / f"batches-{name}", seq_len=64, batch_size=4, workers=1, codec=codec)
found = {str(path.relative_to(folder)): contents(path) for path in hdf5_files(folder)}
Path(folder, "contents.json").write_text(json.dumps(found))
print(f"{len(found)} HDF5 files of this build: {', '.join(found)}")
