"""Mistakes that type checkers see: each line with a comment is one. Not run."""

from zb_hdf5 import DocumentLoader, Loader, MixedLoader, TextLoader, convert, open_reader

Loader("store", shuffle="globl")  # wrong
Loader("store", verify="never")  # wrong
Loader("store", last="pad")  # wrong
Loader("store", suffle="global")  # wrong
Loader("store", batch_size="8")  # wrong
Loader("store", documents=["cu_seqlen"])  # wrong
next(Loader("store", documents=True))["cu_seqlen"]  # wrong
Loader("store", shuffle=("records", 4))  # wrong
Loader("store", read_as={"dataset": "ids"})  # wrong
MixedLoader({"a": "a"}, {"a": 1.0}, device="cuda")  # wrong
TextLoader("text", tokenizer="byte", batch_size=8, seq_len=8, split=1)  # wrong
DocumentLoader("stream", collate="packed", max_tokens=8)  # wrong
open_reader("store", access="map")  # wrong
convert("tokens", "hdf5", "store", packing="bestfit")  # wrong
x, y, z = next(Loader("store", targets=True))  # wrong
