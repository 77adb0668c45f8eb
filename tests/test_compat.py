"""The seeds' own usage snippets: their code, in which nothing but the import and the sizes of the data changed."""

import itertools
import types
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract import is_refused

from zb_hdf5 import ArgumentError, ConvertError, ExistsError, compat, train_tokenizer
from zb_hdf5.compat import (
    BatchFileReader,
    BatchNativeLoader,
    DatasetLoader,
    HDF5ShardWriter,
    MmapTokenStore,
    ShardedTokenizationPipeline,
    SlidingWindowDataloader,
    Tokenizer,
    get_dist_info,
    get_tokenizer,
    list_parquet_files,
    parquets_iter_batched,
    tokenizing_distributed_data_loader,
    write_batch_dataset,
    write_batch_file,
)

SEQ_LEN, BATCH = 16, 4
RECORDS = np.random.default_rng(3).integers(0, 500, (42, SEQ_LEN), dtype=np.uint32)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_zerobatch_writes_and_reads(folder):
    tokens = RECORDS
    num_batches = write_batch_file(
        output_path="dataset.batch",
        tokens_array=tokens,  # np.ndarray, shape (N, seq_len), dtype uint32
        batch_size=4,
        seq_len=16,
        seed=42,
    )
    assert num_batches == 10

    reader = BatchFileReader("dataset.batch")
    assert (reader.num_batches, reader.batch_size, reader.seq_len) == (10, 4, 16)
    arr = reader.read_batch(0)
    assert (arr.shape, arr.dtype) == ((4, 16), np.uint32)
    tensor = reader.read_batch_torch(0)
    assert (tensor.shape, tensor.dtype) == ((4, 16), torch.int64)

    # its own read_batch: offset = HEADER_SIZE + batch_index * padded_batch_bytes
    raw = (folder / "dataset.batch").read_bytes()
    for batch_index in range(reader.num_batches):
        offset = 4096 + batch_index * reader.padded_batch_bytes
        end = offset + reader.batch_size * reader.seq_len * 4
        found = np.frombuffer(raw[offset:end], dtype=np.uint32).reshape(reader.batch_size, reader.seq_len)
        np.testing.assert_array_equal(found, reader.read_batch(batch_index))
    reader.close()


def test_zerobatch_writes_a_stream_of_records():
    def token_generator():
        yield from RECORDS

    num_batches = write_batch_dataset(
        output_path="dataset.batch",
        tokens_iter=token_generator(),  # yields 1D arrays of shape (seq_len,)
        total_records=len(RECORDS),
        batch_size=4,
        seq_len=16,
        seed=42,
    )
    assert num_batches == write_batch_file("again.batch", RECORDS, 4, 16, 42)
    with open("dataset.batch", "rb") as one, open("again.batch", "rb") as two:
        assert one.read() == two.read()


def test_zerobatch_loader_takes_its_arguments_by_name_and_a_file_has_the_attributes_of_its_header():
    write_batch_file("dataset.batch", RECORDS, 4, 16, 42)
    # block_size: batches per super-block
    with BatchNativeLoader(path="dataset.batch", block_size=256, shuffle=True, seed=42, epoch=0) as loader:
        assert [(batch.dtype, batch.shape) for batch in loader] == [(torch.int64, (4, 16))] * 10
    with BatchFileReader("dataset.batch") as reader:
        assert (reader.version, reader.seed, reader.total_records) == (1, 42, 42)
        offset = 4096 + 3 * reader.padded_batch_bytes
        found = np.frombuffer(reader.mm[offset : offset + 256], np.uint32).reshape(4, 16)
        np.testing.assert_array_equal(found, reader.read_batch(3))
    with BatchNativeLoader("dataset.batch") as loader:
        assert loader.path == "dataset.batch"


@pytest.mark.slow
def test_zerobatch_trains():
    write_batch_file("dataset.batch", RECORDS, 4, 16, 42)
    num_epochs = 2
    vocab_size = 500
    seen = []

    class MyModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(vocab_size, 8)
            self.head = torch.nn.Linear(8, vocab_size)

        def forward(self, tokens):
            seen.append(tokens)
            return self.head(self.embedding(tokens))

    loader = BatchNativeLoader("dataset.batch", seed=42)
    model = MyModel()
    optimizer = torch.optim.Adam(model.parameters())

    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            # batch: torch.LongTensor, shape (batch_size, seq_len)
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.view(-1, vocab_size), batch[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert [batch.shape for batch in seen] == [(4, 15)] * 20
    assert torch.is_tensor(next(loader))
    loader.close()


def test_dataset_loader_gives_the_published_batch(folder, capsys):
    (folder / "data").mkdir()
    np.save("data/0.npy", np.array([1202, 850, 149, 4211, 769, 1839, 3521, 4879, 2035], np.uint16))

    # Small example
    loader = DatasetLoader(
        batch=2,  # Number of sequences in a batch
        seq_len=4,  # Number of tokens per sequence
        process_rank=0,  # Single-process case
        num_processes=1,
        dataset_dir="data",
        device="cpu",
    )

    x, y = loader.get_batch()
    print("x:", x)
    print("y:", y)

    assert x.tolist() == [[1202, 850, 149, 4211], [769, 1839, 3521, 4879]]
    assert y.tolist() == [[850, 149, 4211, 769], [1839, 3521, 4879, 2035]]
    assert capsys.readouterr().out.startswith("x: tensor([[1202,  850,  149, 4211],")
    loader.close()


def test_dataset_loader_says_where_it_stands(folder):
    (folder / "data").mkdir()
    for name, size in (("a.npy", 30), ("b.npy", 70)):
        np.save(f"data/{name}", np.arange(size, dtype=np.uint16) + (30 if name == "b.npy" else 0))

    loader = DatasetLoader(2, 4, 1, 2, "data", "cpu")
    assert (loader.batch, loader.seq_len, loader.device) == (2, 4, "cpu")
    assert (loader.process_rank, loader.num_processes) == (1, 2)
    assert loader.filepaths == ["data/a.npy", "data/b.npy"]
    assert (loader.file_idx, loader.tok_idx) == (0, 2 * 4 * 1)
    for _ in range(2 * len(loader)):  # through the end of the data too
        before = int(loader.file_data[loader.tok_idx])
        x, y = loader.get_batch()
        assert x[0, 0] == before
        torch.testing.assert_close(x.flatten()[1:], y.flatten()[:-1])
    assert next(loader)[0].shape == (2, 4)
    loader.close()


def corpus():
    return [f"document {number} of a tiny corpus " * 5 for number in range(40)]


def test_the_corpus_demo_runs(capsys):
    """Builds a tiny in-memory corpus, tokenizes it into two shards, opens them, and runs ten batches."""
    ShardedTokenizationPipeline(corpus(), num_shards=2).run("outputs")
    store = MmapTokenStore("outputs")
    dataloader = SlidingWindowDataloader(store, window_size=64, batch_size=4, order="random", seed=0)
    for batch, (input_ids, target_ids) in zip(range(10), dataloader, strict=False):
        print(batch, input_ids.shape, zlib.crc32(input_ids.tobytes()))
        np.testing.assert_array_equal(input_ids[:, 1:], target_ids[:, :-1])
    assert capsys.readouterr().out.count("(4, 64)") == 10
    assert store.get_slice(0, 10).tobytes().decode("utf-16-le") == "document 0"
    assert len(store.paths) == 2
    assert store.document_count == 40
    store.close()


def test_an_iterable_of_texts_is_tokenized_whole(folder):
    ShardedTokenizationPipeline((text for text in corpus()), "byte", num_shards=3).run("outputs")
    with MmapTokenStore("outputs") as store:
        found = [bytes(store.document(number)[:-1].astype(np.uint8)).decode() for number in range(40)]
        assert all(store.document(number)[-1] == 256 for number in range(40))
    assert found == [text for first in range(3) for text in corpus()[first::3]]
    assert sorted(path.name for path in folder.iterdir()) == ["outputs"]  # and nothing else is left


def test_values_that_are_no_text_are_refused(folder):
    is_refused(ArgumentError, lambda: ShardedTokenizationPipeline("a text"), match="one text")
    is_refused(ArgumentError, lambda: ShardedTokenizationPipeline(["a text"], num_shards=0), match="num_shards")
    with pytest.raises(ArgumentError, match="document 1: expected a text, found 7"):
        ShardedTokenizationPipeline(["a text", 7]).run("outputs")
    is_refused(ConvertError, lambda: ShardedTokenizationPipeline([]).run("outputs"), match="document")
    assert [path.name for path in folder.iterdir() if path.name == "outputs"] == []
    ShardedTokenizationPipeline(["a text"]).run("outputs")
    is_refused(ExistsError, lambda: ShardedTokenizationPipeline(["a text"]).run("outputs"), match="outputs")


def test_a_store_that_grows_is_refreshed():
    with HDF5ShardWriter("shard.h5", chunk_tokens=8) as writer:
        writer.write_document(np.arange(8))
        store = MmapTokenStore("shard.h5.partial")
        assert store.num_tokens == 8
        writer.write_document(np.arange(100, 124))
        assert store.num_tokens == 8
        assert store.refresh() == store.num_tokens == 32
        assert store.get_slice(7, 10).tolist() == [7, 100, 101]
        store.close()


@pytest.fixture
def base_dir(folder, monkeypatch):
    """Make the folders that its users have: text, and a tokenizer."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder))
    for name in ("base_data", "tokenizer"):
        (folder / name).mkdir()
    for number in range(3):
        texts = table({"text": [f"{number} {text}" for text in corpus()]})
        parquet.write_table(texts, folder / "base_data" / f"shard_{number:05}.parquet", row_group_size=10)
    train_tokenizer(folder / "base_data", folder / "tokenizer" / "tokenizer.json", 270)
    return folder


def test_the_streaming_loop_runs(base_dir):
    device_batch_size = 2
    max_seq_len = 24
    num_iterations = 3
    grad_accum_steps = 2

    # Data loading
    train_loader = tokenizing_distributed_data_loader(
        device_batch_size, max_seq_len, split="train", tokenizer_threads=4, tokenizer_batch_size=128
    )
    x, y = next(train_loader)  # Kick off load of the very first batch

    for _step in range(num_iterations + 1):
        for _micro_step in range(grad_accum_steps):
            assert (x.dtype, y.dtype) == (torch.int32, torch.int64)
            assert x.shape == y.shape == (device_batch_size, max_seq_len)
            torch.testing.assert_close(x.flatten()[1:].long(), y.flatten()[:-1])
            # Prefetch next batch while GPU is busy with forward/backward
            x, y = next(train_loader)
    train_loader.close()


def test_a_new_validation_loader_begins_anew(base_dir):
    device_batch_size = 2
    max_seq_len = 24
    eval_steps = 2

    def build_val_loader():
        return tokenizing_distributed_data_loader(device_batch_size, max_seq_len, split="val")

    seen = []
    for _ in range(2):
        val_loader = build_val_loader()
        seen.append([next(val_loader)[0] for _ in range(eval_steps)])
        val_loader.close()
    torch.testing.assert_close(*seen)
    bos = val_loader.tokenizer.special_token_id("<|endoftext|>")
    assert seen[0][0][0, 0] == bos  # in front of each document


def test_the_texts_of_a_rank_are_listed(base_dir):
    (base_dir / "base_data" / "shard_00009.parquet.tmp").touch()
    files = list_parquet_files()
    assert files == [str(base_dir / "base_data" / f"shard_{number:05}.parquet") for number in range(3)]
    assert list_parquet_files(base_dir / "base_data") == files

    ddp_rank, ddp_world_size = 1, 2
    found = list(parquets_iter_batched(split="train", start=ddp_rank, step=ddp_world_size))
    texts = corpus()
    expected = [[f"{k} {text}" for text in texts[a : a + 10]] for k, a in itertools.product((0, 1), (10, 30))]
    assert found == expected
    assert sum(map(len, parquets_iter_batched("val"))) == 40
    is_refused(ValueError, lambda: list(parquets_iter_batched("test")), match="split")


def test_the_lesson_s_tokenizer_gives_a_list(folder):
    tokenizer = Tokenizer()
    assert tokenizer.encode("añ") == [97, 195, 177]
    assert (tokenizer.decode([97, 98]), tokenizer.vocab_size) == ("ab", 257)
    ShardedTokenizationPipeline(corpus(), tokenizer).run("outputs")
    with MmapTokenStore("outputs") as store:
        assert store.get_slice(0, 8).tolist() == tokenizer.encode("document")


def test_the_pipeline_s_tokenizer_prepends_and_appends(base_dir):
    tokenizer = get_tokenizer()
    bos = tokenizer.get_bos_token_id()
    assert bos == tokenizer.encode_special("<|endoftext|>")
    plain = tokenizer.encode("a tiny corpus")
    assert tokenizer.encode("a tiny corpus", prepend=bos) == [bos, *plain]
    texts = ["a tiny corpus", "", "of"]
    rows = tokenizer.encode(texts, prepend="<|endoftext|>", append=7, num_threads=2)
    assert rows == [[bos, *tokenizer.encode(text), 7] for text in texts]
    assert tokenizer.encode([]) == []
    assert tokenizer.decode(plain) == "a tiny corpus"
    assert get_dist_info() == (False, 0, 0, 1)


def test_ranks_deal_the_row_groups_of_each_file(base_dir, monkeypatch):
    """The loop of the pipeline, written out: its tokens are those of the loader, rank by rank."""
    tokenizer = get_tokenizer()
    B, T = (2, 24)
    for rank in range(3):  # four row groups a file: they do not divide
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert get_dist_info() == (True, rank, rank, 3)
        stream = [
            token
            for batch in parquets_iter_batched("train", start=rank, step=3)
            for tokens in tokenizer.encode(batch, prepend=tokenizer.get_bos_token_id())
            for token in tokens
        ]
        with tokenizing_distributed_data_loader(B, T, "train") as loader:
            for step in range(len(stream) // (B * T) - 1):
                x, y = next(loader)
                at = step * B * T
                assert x.flatten().tolist() == stream[at : at + B * T]
                assert y.flatten().tolist() == stream[at + 1 : at + B * T + 1]


def test_a_file_of_the_corpus_is_downloaded_once(base_dir, monkeypatch):
    asked = []
    monkeypatch.setattr(compat, "fetch_shards", lambda *a, **k: asked.append((a, k)) or [compat_report(None)])
    assert compat.download_single_file(7) is True
    (template, count, folder), options = asked[0]
    assert (template.format(7), count) == (f"{compat.BASE_URL}/shard_00007.parquet", 1)
    assert (folder, options["first"]) == (base_dir / "base_data", 7)
    monkeypatch.setattr(compat, "fetch_shards", lambda *a, **k: [compat_report(OSError("x"))])
    assert compat.download_single_file(8) is False


def compat_report(problem):
    return types.SimpleNamespace(problem=problem)
