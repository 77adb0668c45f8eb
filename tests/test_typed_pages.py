"""The lines of the pages are typed, in their order, over files of the names that they have.

`test_docs.py` types the lines of tutorials and of pages with Python, `test_typed_errors.py` those of the page of
errors, and `remote/test_tutorial.py` those of the pages about buckets. A line that none types is in `NOT_TYPED`.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import mds_folder
import numpy as np
import pytest
from byte_files import write_megatron
from contents import write_stream
from pages import BLOCK, COMMANDS_RUN, ROOT, TEXT, names_a_file, ran, untagged_in, with_any_numbers
from processes import killed

from zb_hdf5 import Loader, MixedLoader, convert, open_writer

#: Tokens of each of two files; a boundary token ends each thousand.
TOKENS = 350_000
BOUNDARY = 50_256


def tokens_of(seed):
    tokens = np.random.default_rng(seed).integers(0, BOUNDARY, TOKENS, dtype=np.uint16)
    tokens[999::1000] = BOUNDARY
    return tokens


def arrays():
    Path("tokens").mkdir()
    for number in range(2):
        np.save(f"tokens/{number}.npy", tokens_of(number))


def stored_batches():
    arrays()
    convert("tokens", "hdf5", "train-h5", batch_size=32, shards=4)


def hdf5_files():
    Path("theirs").mkdir()
    for number, name in enumerate("ab"):
        with h5py.File(f"theirs/{name}.h5", "w") as h5:
            h5["tokens"] = tokens_of(number)
        with h5py.File(f"{name}.h5", "w") as h5:
            h5["data/ids"] = tokens_of(number).reshape(-1, 50)
    with h5py.File("ragged.h5", "w") as h5:
        h5["train/values"] = tokens_of(3)
        h5["train/indptr"] = np.arange(0, TOKENS + 1, 1000)


def rows_of_ids():
    table = pytest.importorskip("pyarrow").table
    parquet = pytest.importorskip("pyarrow.parquet")
    stream("train-stream")
    convert("train-stream", "hf", "saved")
    rows = tokens_of(4).reshape(-1, 1000)
    parquet.write_table(
        table({"input_ids": rows.tolist(), "url": [f"u/{k}" for k in range(len(rows))]}), "corpus.parquet"
    )
    Path("packed").mkdir()
    parquet.write_table(table({"input_ids": rows[:, :128].tolist()}), "packed/0.parquet")
    Path("mds").mkdir()
    samples = [(row.astype("<i8").tobytes(),) for row in rows]
    mds_folder.write(Path("mds/train"), samples, {"tokens": "bytes"})


def stream(path):
    arrays()
    convert("tokens", "stream", path, boundary_token_id=BOUNDARY)


def documents():
    pytest.importorskip("tokenizers")
    stream("train-stream")
    shutil.copytree("train-stream", "chats-stream")
    rows = [{"text": f"document {number} has the words {number * 7} and {number * 13}"} for number in range(4000)]
    Path("corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ran(["zb tokenizer train corpus.jsonl --vocab-size 300 -o tok.json"])


def books_with_a_state():
    """Make the files of the page of operation: documents in rows of which 8 ranks take over 1,200 steps."""
    arrays()
    words = np.random.default_rng(5).choice(
        ["the", "river", "at", "night", "was", "wide", "and", "brown", "and", "we", "saw", "no", "boat"], (1500, 400)
    )
    rows = [{"id": f"Roughing It#{number}", "text": " ".join(row)} for number, row in enumerate(words)]
    Path("s.jsonl").write_text("\n".join(map(json.dumps, rows)))
    os.mkdir("books")
    rows_of = "--seq-len 128 --batch-size 2 --packing best-fit"
    ran(
        [
            f"zb convert s.jsonl train-h5 --tokenizer byte --id-column id {rows_of}",
            "zb convert tokens books/h5",
            "zb convert tokens books/batch --to batch",
            "zb convert tokens x.batch",
        ]
    )
    write_megatron(Path("corpus.bin"), tokens_of(6), [1000] * (TOKENS // 1000), 8)
    ran(["zb index digests corpus.idx -o corpus.digests.json"])
    Path("x.batch.crc32").unlink()
    write_stream(Path("stream.h5"), tokens_of(5), [1000] * (TOKENS // 1000), dtype="uint16")
    with Loader("train-h5", rank=0, world_size=8) as loader:
        Path("loader.json").write_text(json.dumps(loader.state_dict()))


def killed_writer(name="train.h5"):
    killed(f"""
writer = open_writer("{name}", batch_size=2, seq_len=8, dtype="uint16")
writer.write(np.ones((3, 2, 8), np.uint16))""")


def killed_writer_of_documents():
    Path("stream.h5").unlink()
    killed("""
writer = HDF5ShardWriter("stream.h5", dtype="uint16")
for number in range(600):
    writer.write_document(np.full(1000, number, np.uint16))""")


def killed_live_writer():
    shutil.rmtree("live")
    killed("""
writer = open_writer("live", batch_size=2, seq_len=8, dtype="uint16", live=True, shard_batches=4)
writer.write(np.ones((6, 2, 8), np.uint16))""")


def books_and_ids():
    """Make the files of the page of questions."""
    books_with_a_state()
    corpus_of_parquet()
    ran(["zb tokenizer train corpus/ --vocab-size 300 -o tok.json"])
    Path("corpus.jsonl").write_text(f"{json.dumps({'text': 'a river at night ' * 5000})}\n" * 4)
    Path("ids.jsonl").write_text(f"{json.dumps({'input_ids': [1, 2, 3] * 700})}\n" * 100)


def remove_store():
    shutil.rmtree("train-h5")


def stored_again():
    remove_store()
    os.replace("books-h5", "train-h5")


def stepped():
    """Make a store of short rows, and a state after 5,000 steps of 8 ranks."""
    ran(["zb convert s.jsonl text-h5 --tokenizer byte --seq-len 16 --batch-size 1 --packing best-fit"])
    with Loader("text-h5", rank=0, world_size=8) as loader:
        for _ in range(5000):
            next(loader)
        Path("loader.json").write_text(json.dumps(loader.state_dict()))


def flipped_bit():
    """Flip a bit of a batch, and keep a copy of its shard."""
    [shard] = Path("train-h5").glob("*.h5")
    content = bytearray(shard.read_bytes())
    Path("good.h5").write_bytes(content)
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def lost_index():
    [shard] = Path("train-h5").glob("*.h5")
    os.replace("good.h5", shard)
    Path("train-h5/shards.json").unlink()


def large_rows():
    """Make a store of as many rows of 4,096 ids as 8,192 ranks take in a step of 8; zeros take little room."""
    zeros = np.zeros((64, 16, 4096), np.uint8)
    with open_writer("train-h5", batch_size=16, seq_len=4096, dtype="uint8", codec="zstd", backend="hdf5") as writer:
        for _ in range(64):
            writer.write(zeros)


def small_rows():
    Path("train-h5").unlink()
    stored_batches()


def files_in_place():
    arrays()
    write_megatron(Path("corpus.bin"), tokens_of(6), [1000] * (TOKENS // 1000), 8)
    Path("train.bin").write_bytes(tokens_of(7).tobytes())
    Path("tokens.dat").write_bytes(bytes(512) + tokens_of(8).astype("<i4").tobytes())


def records():
    for number in range(2):
        np.save(f"tokens/{number}.npy", tokens_of(number).reshape(-1, 500))


def texts():
    """Make the files of the page of text: documents of two sources in rows of which 8 ranks take over 20,000 steps."""
    corpus_of_parquet()
    Path("texts").mkdir()
    for name, count in (("code", 1300), ("docs", 300)):
        rows = [{"text": "x" * 2000, "lang": name}] * count
        Path(f"texts/{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows_of = "--tokenizer byte --seq-len 16 --batch-size 1 --packing best-fit --metadata-columns lang"
    ran(
        [
            f"zb convert texts/ text-h5 {rows_of} --val-fraction 0.01",
            f"zb convert texts/code.jsonl code-h5 {rows_of}",
            f"zb convert texts/docs.jsonl web-h5 {rows_of}",
            "zb fields make code-h5 lang --meta lang",
            "zb fields make web-h5 lang --meta lang",
        ]
    )
    with Loader("text-h5", rank=0, world_size=8) as loader:
        Path("loader.json").write_text(json.dumps(loader.state_dict()))
    stores = {name: f"{name}-h5" for name in ("web", "code")}
    with MixedLoader(stores, {"web": 1, "code": 2}, rank=0, world_size=1) as loader:
        Path("mixed.json").write_text(json.dumps(loader.state_dict()))


def corpus_of_parquet():
    pytest.importorskip("tokenizers")
    pytest.importorskip("tiktoken")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    words = np.random.default_rng(0).integers(0, 60_000, (2, 400, 300))
    Path("corpus").mkdir()
    for number, rows in enumerate(words):
        parquet.write_table(
            table({"text": [" ".join(f"w{word}" for word in row) for row in rows]}), f"corpus/{number}.parquet"
        )


def many_texts():
    """Make a file for each shard of the stream, and ids for a batch of each shard of its rows."""
    Path("text").mkdir()
    for number in range(64):
        rows = [{"text": "§ " * 1200}] * 20  # three ids each
        Path(f"text/{number:02}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def rows_and_texts():
    """Make the files of the first page: enough for four shards."""
    arrays()
    corpus_of_parquet()


@dataclass
class Page:
    """How the lines of a page are typed."""

    #: Makes the files that its lines name.
    files: Callable[[], None]
    #: Line -> what happens before it is typed.
    before: dict[str, Callable[[], None]] = field(default_factory=dict)
    #: Line -> words that it prints.
    prints: dict[str, str] = field(default_factory=dict)
    #: The commands in its sentences are typed too, if they name a file.
    in_sentences: bool = False


PAGES = {
    "convert.md": Page(arrays),
    "convert_stores.md": Page(stored_batches),
    "forms.md": Page(arrays),
    "convert_hdf5.md": Page(hdf5_files),
    "convert_ids.md": Page(rows_of_ids),
    "convert_for_trainers.md": Page(documents),
    "index.md": Page(arrays),
    "in_place.md": Page(files_in_place, {'loader = Loader("tokens/", batch_size=32)': records}, in_sentences=True),
    "json.md": Page(stored_batches),
    "large_jobs.md": Page(large_rows, {"zb bench train-h5": small_rows}),
    "operate.md": Page(
        books_with_a_state,
        {
            "zb repair train.h5.partial": killed_writer,
            "zb repair train-h5 --dry-run": flipped_bit,
            "zb repair stream.h5.partial": killed_writer_of_documents,
            "zb index rebuild train-h5": lost_index,
            "zb repair live": killed_live_writer,
        },
        {
            "zb repair train.h5.partial": "3 batches",
            "zb repair train-h5 --dry-run": "would keep",
            "zb verify train-h5": "verified",
        },
        in_sentences=True,
    ),
    "order.md": Page(stored_batches),
    "questions.md": Page(
        books_and_ids,
        {
            "zb repair x.h5.partial": lambda: killed_writer("x.h5"),
            "zb index rebuild train-h5": lambda: Path("train-h5/shards.json").unlink(),
            "mkdir train-h5.partial": lambda: os.replace("train-h5", "books-h5"),
            "zb convert jsonl-to-hdf5 corpus.jsonl train-h5 --tokenizer tok.tiktoken --seq-len 2048": remove_store,
            "zb convert ids.jsonl train-h5 --seq-len 2048": remove_store,
            "zb which train-h5 --state loader.json --step 1200 --text": stored_again,
            "zb which text-h5 --state loader.json --last 5000 --world-size 8 --by source": stepped,
        },
        in_sentences=True,
    ),
    "README.md": Page(rows_and_texts),
    "slurm_jobs.md": Page(arrays),
    "text.md": Page(
        texts,
        {
            "zb convert text/ web-stream --to stream --tokenizer tok.json --shards 64 --shard-range I/16": many_texts,
            "zb convert web-stream web-h5 --seq-len 2048 --packing best-fit --shards 64 --shard-range I/16": (
                lambda: shutil.rmtree("web-h5")
            ),
        },
    ),
}
#: The page of lines that stand for each other: each writes the same store.
ALTERNATIVES = "convert_ids.md"
#: How a line begins that nobody types -> how many there are, and why.
NOT_TYPED = {
    "pip install": (9, "loads packages: a test below compares their names"),
    "sbatch": (9, "needs a Slurm: tests/cluster/ has one"),
    "SLURM_MPI_TYPE": (1, "needs a Slurm with MPI: tests/cluster/ has one"),
    "job=$(sbatch": (4, "needs a Slurm: tests/cluster/ has one"),
    "srun": (1, "needs a Slurm: tests/cluster/ has one"),
    "torchrun": (1, "trains in two processes: test_examples.py starts them"),
    "python examples/": (2, "trains for minutes: test_examples.py runs it with less"),
    "python -m benchmarks": (3, "measures for an hour: test_benchmarks.py runs it with less"),
    "make ": (3, "makes an environment with all packages: .ci/run does"),
    "lfs setstripe": (1, "needs a Lustre"),
    'eval "$(aws': (2, "needs an account of AWS"),
    "echo ": (3, "is for the start files of a person's shell"),
    'python -c "import stored': (1, "trains with MaxText: .ci/peers runs its lines"),
    "def train_valid_test_datasets_provider": (1, "is for a file of Megatron-LM, which needs a GPU"),
    "zb bench PATH": (1, "PATH stands for data of the reader"),
    "zb fetch": (1, "needs a server on the internet: tests/remote/test_fetch.py has one here"),
}


#: The line of a log, and the drawing of the first page: outputs of no block, which other tests compare.
LOG, DRAWING = "1,000 batches, ", "tokens  "


def is_typed(line):
    """Return whether a line of an untagged block is one that a reader types."""
    return line.startswith(("zb ", "loader = ", "mkdir ", "from zb_hdf5 ")) and not line.startswith(tuple(NOT_TYPED))


def parts_of(text, *, in_sentences):
    """Return the lines of each block, and each output that a block is said to have, in the order of the page."""
    found = []
    for language, block, command in re.findall(rf"{BLOCK.pattern}|`(zb [^`\n]+)`", text, BLOCK.flags):
        if language not in ("", "bash"):
            continue
        lines = [line for line in block.splitlines() if is_typed(line)]
        if command:
            lines = [command] if in_sentences and names_a_file(command) else []
        if lines:
            found.append(lines)
        elif block and not block.startswith((LOG, DRAWING, *NOT_TYPED)):
            found.append(block)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_run_as_they_stand(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = PAGES[page]
    case.files()
    printed = ""
    count = 0
    names = {}
    for part in parts_of(TEXT[page], in_sentences=case.in_sentences):
        if isinstance(part, str):
            require_shown(part, printed)
            continue
        printed = ""
        for line in part:
            command = line.partition("  #")[0].strip()
            case.before.get(command, lambda: None)()
            if page == ALTERNATIVES:
                shutil.rmtree("train-h5", ignore_errors=True)
            printed += typed(line, names)
            assert case.prints.get(command, "") in printed, printed
        count += len(part)
    assert count > 0


def typed(line, names):
    """Type a line, whose Python finds `names` and adds to them; return what it prints."""
    if " I/16" in line:  # I from 0 to 15, says the page
        return ran(line.replace(" I/16", f" {number}/16") for number in range(16))
    if line.startswith("zb "):
        return ran([line])
    if line.startswith("mkdir "):
        os.mkdir(line.split()[1])
        return ""
    exec(line, names)
    if line.startswith("loader = "):
        with contextlib.closing(names["loader"]) as loader:
            next(loader)
    return ""


def require_shown(output, printed):
    """See that each line of an output on a page is printed, with any numbers, or begins with the name of a file."""
    lines = {with_any_numbers(line) for line in printed.splitlines()}
    lines_shown = [line for line in output.splitlines() if line.strip(" .")]
    shown = [line for line in lines_shown if not Path(line.split()[0]).exists()]
    assert not [line for line in shown if with_any_numbers(line) not in lines], printed


@pytest.mark.parametrize("page", ["train.md", "questions.md"])
def test_a_line_for_the_log_is_what_the_loader_prints(page, tmp_path):
    np.save(tmp_path / "t.npy", np.zeros((64, 16), np.uint16))
    with Loader(tmp_path / "t.npy", batch_size=4, rank=0, world_size=1) as loader:
        for _ in range(2):  # "1 batch" has other words
            next(loader)
        printed = str(loader.stats())
    [shown] = [block for block in untagged_in(TEXT[page]) if block.startswith(LOG)]
    assert with_any_numbers(shown.strip()) == with_any_numbers(printed)


@pytest.mark.slow
def test_the_script_of_the_exit_codes_looks_for_the_damage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored_batches()
    shard = min(Path("train-h5").glob("*.h5"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # the end of the last batch
    shard.write_bytes(content)
    [script] = untagged_in(TEXT["exit_codes.md"])
    start = f'zb() {{ {sys.executable} -m zb_hdf5 "$@"; }}'
    done = subprocess.run(["bash", "-c", f"{start}\n{script}"], capture_output=True, text=True, check=False)
    assert (done.returncode, "would keep" in done.stdout) == (0, True), done


#: Pages whose lines other tests type, or the test above.
TYPED_ELSEWHERE = {"errors.md", "remote.md", "exit_codes.md"}
#: Pages of which other tests type the commands; one sets the variables.
COMMANDS_TYPED = COMMANDS_RUN | {"tutorials/buckets.md"}


def test_a_line_that_nobody_types_is_in_the_table_with_the_reason():
    blocks = [(page, block) for page, text in TEXT.items() for block in untagged_in(text)]
    assert not {(page, line) for page, block in blocks for line in left_in(page, block)}
    lines = [line for _, block in blocks for line in block.splitlines() if line.startswith(tuple(NOT_TYPED))]
    assert {name: sum(line.startswith(name) for line in lines) for name in NOT_TYPED} == {
        name: count for name, (count, _) in NOT_TYPED.items()
    }


def left_in(page, block):
    """Return the lines of a block that are not typed and not in the table."""
    if page in TYPED_ELSEWHERE or block.startswith((LOG, DRAWING, "def ")):
        return []
    lines = [line for line in block.splitlines() if line]
    commands = ("zb ", "export ") if page in COMMANDS_TYPED else ()
    left = [line for line in lines if not line.startswith((*commands, *NOT_TYPED))]
    if page not in PAGES:
        return left
    untyped = [line for line in left if not is_typed(line)]
    return untyped if len(untyped) < len(lines) else []  # a whole block is an output, which is compared


def test_what_a_page_installs_is_an_extra_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        extra
        for text in TEXT.values()
        for extras in re.findall(r"pip install '?(?:\.|zb_hdf5)\[([\w,]+)\]", text)
        for extra in extras.split(",")
    }
    assert len(named) > 5
    assert named <= project["optional-dependencies"].keys()


def test_one_page_alone_installs_from_a_checkout_or_the_file_of_a_wheel():
    found = [page for page, text in TEXT.items() if re.search(r"pip (?:install '?\./?|wheel)", text)]
    assert found == ["start.md"]
