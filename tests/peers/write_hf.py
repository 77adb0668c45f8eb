"""Hugging Face datasets: `save_to_disk` folders and Parquet with a list column of ids, labels and masks."""

import sys
from pathlib import Path

from datasets import Dataset, Features, List, Value
from truth import SMALL_VOCAB, documents, labels, loss_mask, write_truth

folder = Path(sys.argv[1])
found = documents(SMALL_VOCAB)
rows = {
    "input_ids": [document.tolist() for document in found],
    "labels": [labels(document).tolist() for document in found],
    "attention_mask": [[1] * len(document) for document in found],
    "loss_mask": [loss_mask(document).tolist() for document in found],
    "url": [f"https://example.org/{number}" for number in range(len(found))],
}
features = Features(
    input_ids=List(Value("int32")),
    labels=List(Value("int64")),
    attention_mask=List(Value("int8")),
    loss_mask=List(Value("int8")),
    url=Value("string"),
)
dataset = Dataset.from_dict(rows, features=features)
folder.mkdir(parents=True)
dataset.save_to_disk(str(folder / "saved"), num_shards=2)
dataset.to_parquet(str(folder / "corpus.parquet"))
dataset.select_columns(["input_ids", "labels"]).select(range(10)).to_json(str(folder / "corpus.jsonl"))
write_truth(folder, found, vocab_size=SMALL_VOCAB)
records = [row for row in found if len(row) >= 64]
Dataset.from_dict({"input_ids": [row[:64].tolist() for row in records]}).to_parquet(str(folder / "records.parquet"))
