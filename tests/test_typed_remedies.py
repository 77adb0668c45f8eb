"""Each remedy is met by a real failure, and each line that its message names is typed, as it stands, and cures it.

`MET` has the failures of each `Remedy`, and the lines are read out of the message that was printed: a command in
quotes, or the line that failed with the options that the message names. `CALLED` has those whose words of Python name
an argument, which is passed in the same way. A remedy that nobody can type here is in `NOT_TYPED`.

`commands/test_wrong_doors.py` types more lines about files of other formats, and `test_typed_errors.py` those of the
page of errors.
"""

import ast
import contextlib
import hashlib
import inspect
import json
import os
import re
import shlex
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import pytest
from commandline import commands_of, run_zb
from contents import write_batches, write_stream
from processes import killed_after

import zb_hdf5
from zb_hdf5 import Loader, convert, open_corpus, open_field_set, open_writer
from zb_hdf5.commands.zb import zb
from zb_hdf5.console import TYPED
from zb_hdf5.converters.merge import merge_parts
from zb_hdf5.errors import Remedy
from zb_hdf5.read_as import AS_STORED
from zb_hdf5.spec import INDEX_NAME

# --- how a message is read -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A line that a message names, when it is typed."""

    #: Words that it prints, or the lines after it.
    prints: str
    code: int = 0
    #: Lines that are typed after it; each succeeds.
    then: tuple[str, ...] = ()


@dataclass(frozen=True)
class Met:
    """A failure, and the ways out of it that its message names, in order."""

    #: Makes the files in the current folder.
    files: Callable[[], None]
    line: str
    ways: tuple[Way, ...]
    code: int = 1
    #: The line that the options of the message belong to; "": the one that failed.
    base: str = ""
    #: Placeholders of the message, and options without a value -> what the reader types for them.
    filled: dict[str, str] = field(default_factory=dict)
    #: What happens while the line runs.
    meanwhile: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    marks: tuple[pytest.MarkDecorator, ...] = ()


def words_of(remedy, ends="$"):
    """Return the pattern of the words of a remedy at the end of a line; its object is a group."""
    return re.compile(re.escape(TYPED[remedy]).replace(re.escape("{at}"), r"(?P<at>.+?)") + ends, re.MULTILINE)


def advice_in(printed):
    """Return the remedy whose words end a line, and these words: the longest, as one may end with another's."""
    found = [(remedy, match) for remedy in Remedy for match in words_of(remedy).finditer(printed)]
    assert found, printed
    remedy, match = max(found, key=lambda each: (len(each[1][0]), -len("".join(each[1].groups()))))
    return remedy, match[0]


#: A command in a message: a path in it has double quotes if it has other characters than a word.
IN_QUOTES = re.compile(r"""'((?:zb|export) (?:"(?:[^"\\]|\\.)*"|[^'"])+)'""")
FLAGS = {
    name for _, command in commands_of(zb) for option in command.params if getattr(option, "is_flag", False)
    for name in option.opts
}  # fmt: skip
COMMANDS = {name for name, _ in commands_of(zb)}


def lines_named(advice, base, filled):
    """Yield each line that some words name: what is between two "or" is one way out, and may have no line."""
    for way in re.split(r"\bor\b", advice):
        commands = [each for each in IN_QUOTES.findall(way) if each.removeprefix("zb ") not in COMMANDS]
        if commands:
            [command] = commands
            yield with_placeholders(command, base, filled)
        elif "--" in way:
            yield with_options(re.sub(r"'[^']*'", "", way), base, filled)


def with_placeholders(command, base, filled):
    """Return a command as a reader types it: "..." are the other words of the command that failed."""
    if " ..." in command:
        begin, _, end = command.partition(" ...")
        begun, words = begin.split(), shlex.split(base)
        rest = words[len(begun) :] if words[: len(begun)] == begun else words[len(command_of(words)) :]
        command = with_options(end, shlex.join([*begun, *rest]), filled)
    for name, value in filled.items():
        command = re.sub(rf"(?<!\S){re.escape(name)}(?!\S)", value, command)
    return command


def command_of(words):
    """Return the words that name the command of a line."""
    return max((words[:count] for count in range(len(words)) if " ".join(words[1:count]) in COMMANDS), key=len)


def with_options(advice, line, filled):
    """Return a line with the options that some words name, and without those that they tell to leave out."""
    typed = shlex.split(line)
    added = []
    for left_out, name, value in re.findall(r"(no |leave out )?(?<!\S)(--[\w-]+)(?: ((?!--)\S*[^\s;,)]))?", advice):
        while name in typed:
            place = typed.index(name)
            del typed[place : place + (1 if name in FLAGS else 2)]
        if not left_out:
            added += [name] if name in FLAGS else [name, filled.get(name) or filled.get(value, value)]
    return shlex.join([*typed, *added])


def test_the_lines_that_a_message_names_are_read_out_of_it():
    base = "zb convert jsonl-to-hdf5 a.jsonl out --seq-len 8 --tokenizer byte"
    for words, filled, expected in (
        ("run 'zb repair \"a b\"'", {}, ['zb repair "a b"']),
        ("restore it, or pass --force to leave it out", {}, [f"{base} --force"]),
        ("pass --seq-len 4", {}, ["zb convert jsonl-to-hdf5 a.jsonl out --tokenizer byte --seq-len 4"]),
        ("pass --from hf, and no --tokenizer", {}, ["zb convert jsonl-to-hdf5 a.jsonl out --seq-len 8 --from hf"]),
        ("go on with --resume, or start over with --force", {}, [f"{base} --resume", f"{base} --force"]),
        ("go on with --resume --force", {}, [f"{base} --resume --force"]),
        ("pass --max-line 1GiB to 'zb convert' or 'zb info'", {}, [f"{base} --max-line 1GiB"]),
        ("run 'zb convert npy-to-hdf5 ...'", {}, [base.replace("jsonl-to", "npy-to")]),
        ("run 'zb convert ... --shard-range I/N --force'", {"I/N": "1/2"},
         [f"{base} --shard-range 1/2 --force"]),
        ("make one with 'zb tokenizer train TEXT -o x.json'", {"TEXT": "t"}, ["zb tokenizer train t -o x.json"]),
        ("pass --text-column with one of their keys: a", {"--text-column": "a"}, [f"{base} --text-column a"]),
        ("restore it", {}, []),
    ):  # fmt: skip
        assert list(lines_named(words, base, filled)) == expected


# --- the failures ----------------------------------------------------------------------------------------------------

SHAPE = {"batch_size": 2, "seq_len": 8, "dtype": "uint16"}
LAST = "shard-00001-of-00002.h5"


def nothing():
    pass


def arrays():
    """Write 16 records of 8 ids."""
    np.save("a.npy", np.arange(128, dtype="<u2").reshape(16, 8))


def converted():
    arrays()
    convert("a.npy", "hdf5", "st", batch_size=4)


def flip(path, place):
    """Flip a bit, and leave the time of the file as it was."""
    content, before = bytearray(path.read_bytes()), path.stat()
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def damaged():
    converted()
    [shard] = Path("st").glob("*.h5")
    with h5py.File(shard) as h5:
        place = h5["batches"].id.get_chunk_info(0).byte_offset
    flip(shard, place)


def damaged_ids(name, *options):
    """Return what writes a file of ids, its digests, and then damages it."""

    def write():
        Path("data").mkdir()
        np.save("data/a.npy", np.arange(128, dtype="<u2"))
        np.arange(128, dtype="<u2").tofile("data/raw.bin")
        run_zb("index", "digests", f"data/{name}", "-o", "made.json", *options, code=0)
        flip(Path("data", name), 200)

    return write


def unfinished_shard():
    Path("st").mkdir()
    write_batches(Path("st/shard-00000-of-00002.h5"), np.ones((3, 2, 8), np.uint16))
    write_batches(Path("st/other.h5"), np.ones((3, 2, 8), np.uint16)).path.rename(f"st/{LAST}.partial")


def unfinished_file():
    Path("a b's").mkdir()
    killed_after(lambda: open_writer("a b's/x.h5", **SHAPE).write(np.ones((3, 2, 8), np.uint16)))


def killed_live_writer():
    def write():
        writer = open_writer("live", live=True, shard_batches=4, **SHAPE)
        writer.write(np.ones((3, 2, 8), np.uint16))

    killed_after(write)


def two_shards(damage):
    """Return what writes a store of two shards, and then damages it."""

    def write():
        Path("st").mkdir()
        for number in range(2):
            write_batches(Path(f"st/shard-0000{number}-of-00002.h5"), np.ones((3, 2, 8), np.uint16))
        run_zb("index", "rebuild", "st", code=0)
        damage(Path("st"))

    return write


def edit_index(store):
    text = (store / INDEX_NAME).read_text()
    (store / INDEX_NAME).write_text(text.replace('"seq_len": 8', '"seq_len": 4'))


def empty_index(store):
    (store / INDEX_NAME).write_bytes(b"")


def swap_shard(store):
    write_batches(store / "other.h5", np.zeros((3, 2, 8), np.uint16))
    os.replace(store / "other.h5", store / LAST)


def cut(store):
    os.truncate(store / LAST, (store / LAST).stat().st_size - 500)


def lose(*names):
    return lambda store: [(store / name).unlink() for name in names]


def with_field_sets():
    converted()
    for name in "vw":
        with open_field_set("st", name, {"w": "f4"}) as values:
            for step in values.missing(batch_size=4, quiet=True):
                values.write(step["records"], w=step["tokens"].float())
            values.finish()


@contextlib.contextmanager
def interrupting():
    """Interrupt what saves an index."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zb_hdf5.store.index.ShardIndex.save", interrupt)
        yield


def interrupted():
    """Stop a conversion when its shard is there, and before it is published."""
    arrays()
    with interrupting():
        run_zb(*shlex.split(CONVERT)[1:], code=130)


def begun():
    arrays()
    Path("out.partial").mkdir()


def interrupted_with_a_lost_shard():
    interrupted()
    next(Path("out.partial").glob("shard-*")).unlink()


def interrupted_with_a_damaged_journal():
    interrupted()
    [journal] = Path("out.partial").glob("journal-*")
    journal.write_text(f"{{{journal.read_text()}")


def part_of_two(*options):
    """Return what writes the first of two parts, and the second one with more options, if there are some."""

    def write():
        arrays()
        run_zb(*shlex.split(PART)[1:], "--shard-range", "0/2", code=0)
        if options:
            run_zb(*shlex.split(PART)[1:], "--shard-range", "1/2", *options, code=0)

    return write


@contextlib.contextmanager
def killing_a_worker():
    """Kill the first process that writes into `out.partial`."""
    begun = os.path.realpath("out.partial")
    is_over = threading.Event()

    def writers():
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if any(os.readlink(opened).startswith(f"{begun}/shard") for opened in (process / "fd").iterdir()):
                    yield int(process.name)

    def kill():
        while not is_over.wait(0.005):
            for number in {*writers()} - {os.getpid()}:
                os.kill(number, signal.SIGKILL)
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def long_array():
    np.save("a.npy", np.zeros((400_000, 128), "<u2"))


def stream_without_documents():
    """Write a file of ids that counts those it has, as the lesson about HDF5 has it."""
    Path("lesson").mkdir()
    ids = np.arange(1000, dtype="<u2")
    facts = {"token_count": 1000, "document_count": 3, "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
    with h5py.File("lesson/shard-0000.h5", "w", libver="latest") as h5:
        stored = h5.create_dataset("tokens", (1024,), "<u2", maxshape=(None,), chunks=(512,))
        stored[:1000] = ids
        stored.attrs.update(facts)
    row = {"shard_id": "shard-0000", "path": "shard-0000.h5", "global_start": 0, **facts}
    index = {"chunk_size": 512, "shards": [row], "total_tokens": 1000, "version": 1}
    Path("lesson/shards.json").write_text(json.dumps(index))


def tokens_with_a_mask():
    mask = np.ones((1, 2, 4), int)
    write_batches(Path("x.h5"), mask, {"mask": mask}, fields={"mask": "u1"})


def documents_of_their_own():
    write_stream(Path("s.h5"), np.arange(100), [25] * 4)


def other_fields():
    Path("theirs").mkdir()
    for number in range(2):
        with h5py.File(f"theirs/{number}.h5", "w") as h5:
            h5["tokens"] = np.ones((4, 8), "<u2")
            if number == 0:
                h5["loss_mask"] = np.ones((4, 8), "u1")


def ids_without_digests():
    np.save("s.npy", np.arange(128, dtype="<u2"))


def lone_batch_file():
    write_batches(Path("x.batch"), np.ones((3, 2, 8), np.uint16))
    Path("x.batch.crc32").unlink()


def other_files():
    Path("pictures").mkdir()
    Path("pictures/read.me").write_text("nothing")


def two_datasets():
    with h5py.File("x.h5", "w") as h5:
        h5["tokens"], h5["mask"] = np.ones((2, 4), "<u2"), np.ones((2, 3), "u1")


def channels():
    with h5py.File("c.h5", "w") as h5:
        h5["tokens"] = np.ones((4, 3, 8), "<u2")


def short_rows():
    np.save("r.npy", np.ones((10, 2), "<u2"))


def folder_of_arrays():
    arrays()
    Path("tokens").mkdir()
    os.replace("a.npy", "tokens/a.npy")


def never_written():
    with h5py.File("u.h5", "w") as h5:
        h5.create_dataset("x", (64, 8), "<u2", chunks=(8, 8))[:8] = 1


def values_never_written():
    with h5py.File("u.h5", "w") as h5:
        h5.create_dataset("values", (80,), "<u2", chunks=(20,))[:20] = 1
        h5["indptr"] = np.arange(0, 81, 10)


def no_header():
    np.arange(64, dtype="<u2").tofile("raw.bin")


def lines_of(**columns):
    return lambda: Path("t.jsonl").write_text(f"{json.dumps(columns)}\n" * 9)


def ranks_alone():
    lines_of(text="abc abd")()
    Path("x.tiktoken").write_text("aGk= 0\n")


def folder_of_lines():
    Path("texts").mkdir()
    Path("texts/t.jsonl").write_text('{"text": "abc"}\n' * 9)


def batches_of_hdf5():
    write_batches(Path("x.h5"), np.ones((3, 2, 8), np.uint16))


def large_ids():
    write_batches(Path("x.h5"), np.full((2, 2, 8), 70_000))


def ids_of_one_byte():
    np.save("b.npy", np.ones((8, 8), "u1"))


def long_text():
    Path("t.jsonl").write_text(json.dumps({"text": "a" * 5000}))
    Path("p.txt").write_text("a" * 5000)


def state_of_other_ids():
    converted()
    with Loader("st", rank=0, world_size=1) as loader:
        Path("loader.json").write_text(json.dumps({**loader.state_dict(), "dtype": "uint32"}))


def digests_there():
    ids_without_digests()
    run_zb("index", "digests", "s.npy", "-o", "d.json", code=0)


def report_there():
    converted()
    run_zb("report", "st", "-o", "r.html", code=0)


def tokenizer_there():
    lines_of(text="abc abd")()
    Path("tok.json").write_text("{}")


@contextlib.contextmanager
def bounded():
    """Bound the size of what is read whole, as a reader who has set it too low."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZB_MAX_LINE", "100")
        yield


SLOW = (pytest.mark.slow,)
CONVERT = "zb convert a.npy out --batch-size 4"
PART = f"{CONVERT} --shards 2 --no-shuffle"
TEXT = "zb convert t.jsonl out --tokenizer byte --seq-len 8 --batch-size 2"
VERIFIED = "verified: the file is as it was written"
BOTH_VERIFIED = "verified: 2 of 2 files are as they were written"

#: Remedy -> the failures in whose message it stands.
MET = {
    Remedy.VERIFY: (
        Met(damaged, "zb show st --batch 0", (Way("batch 0 is the first bad one", 3),), 3),
        Met(damaged, "zb convert st out --to batch", (Way("batch 0 is the first bad one", 3),), 3, marks=SLOW),
    ),
    Remedy.VERIFY_DIGESTS: (
        Met(
            damaged_ids("a.npy"),
            "zb show data/a.npy --digests made.json",
            (Way("chunk 0 is the first bad one", 3),),
            3,
            filled={"FILE": "made.json"},
        ),
        Met(
            damaged_ids("raw.bin", "--source-dtype", "uint16"),
            "zb show data/raw.bin --source-dtype uint16 --digests made.json",
            (Way("such as --source-dtype uint16", 1),),
            3,
            filled={"FILE": "made.json"},
            marks=SLOW,
        ),
    ),
    Remedy.REPAIR: (
        Met(
            unfinished_shard,
            "zb index rebuild st",
            (Way(BOTH_VERIFIED, then=("zb index rebuild st", "zb verify st")),),
            4,
        ),
        Met(unfinished_file, 'zb verify "a b\'s/x.h5.partial"', (Way("3 batches"),), 4, marks=SLOW),
        Met(killed_live_writer, "zb verify live", (Way(VERIFIED, then=("zb verify live",)),), 4),
    ),
    Remedy.REBUILD: (
        Met(two_shards(lose(INDEX_NAME)), "zb info st", (Way(BOTH_VERIFIED, then=("zb verify st",)),)),
        Met(two_shards(empty_index), "zb verify st", (Way(BOTH_VERIFIED, then=("zb verify st",)),), 3),
        Met(two_shards(edit_index), "zb verify st", (Way(BOTH_VERIFIED, then=("zb verify st",)),), 3),
    ),
    Remedy.REBUILD_FORCE: (Met(two_shards(swap_shard), "zb repair st", (Way(BOTH_VERIFIED, then=("zb verify st",)),)),),
    Remedy.DO_WITHOUT: (
        Met(two_shards(lose(LAST, INDEX_NAME)), "zb index rebuild st", (Way(VERIFIED, then=("zb verify st",)),), 4),
    ),
    Remedy.LEAVE_OUT: (
        Met(two_shards(lose(LAST)), "zb repair st", (Way(VERIFIED, then=("zb verify st",)),)),
        Met(two_shards(cut), "zb repair st", (Way(VERIFIED, then=("zb verify st",)),), 4),
    ),
    Remedy.DROP_SETS: (Met(with_field_sets, "zb convert a.npy st --force --batch-size 8", (Way("2 of 8 x 8"),)),),
    Remedy.LEAVE_SETS: (Met(with_field_sets, "zb convert st out --seq-len 4", (Way("of 4 x 4 uint16"),)),),
    Remedy.REPLACE: (
        Met(two_shards(lose()), "zb index rebuild st", (Way(BOTH_VERIFIED, then=("zb verify st",)),)),
        Met(converted, "zb convert a.npy st --batch-size 8", (Way("2 of 8 x 8"),), marks=SLOW),
        Met(digests_there, "zb index digests s.npy -o d.json", (Way("1 file, 128 tokens"),), marks=SLOW),
        Met(report_there, "zb report st -o r.html", (Way("r.html"),), marks=SLOW),
        Met(tokenizer_there, "zb tokenizer train t.jsonl --vocab-size 260 -o tok.json", (Way("wrote"),), marks=SLOW),
    ),
    Remedy.RESUME: (Met(interrupted, "zb verify out.partial", (Way("go on with the same command and --resume"),), 4),),
    Remedy.RESUME_OR_RESTART: (
        Met(interrupted, CONVERT, (Way("kept 1 shard, wrote 0"), Way("wrote    out"))),
        Met(
            arrays,
            CONVERT,
            (Way("kept 1 shard, wrote 0"), Way("wrote    out")),
            130,
            meanwhile=interrupting,
            marks=SLOW,
        ),
    ),
    Remedy.RESUME_FORCED: (
        Met(arrays, f"{CONVERT} --force", (Way("kept 1 shard, wrote 0"),), 130, meanwhile=interrupting),
    ),
    Remedy.RESTART: (
        Met(interrupted_with_a_damaged_journal, f"{CONVERT} --resume", (Way("4 of 4 x 8"),), base=CONVERT),
    ),
    Remedy.SAME_OR_RESTART: (
        Met(interrupted, f"{CONVERT} --resume --seed 3", (Way("4 of 4 x 8"),), base=f"{CONVERT} --seed 3"),
    ),
    Remedy.FEWER_WORKERS: (
        Met(
            long_array,
            f"{CONVERT} --shards 4 --workers 2",
            (Way("100,000 of 4 x 128"),),
            5,
            filled={"--workers": "1"},
            meanwhile=killing_a_worker,
            marks=SLOW,
        ),
    ),
    Remedy.RESUME_WHOLE: (
        Met(interrupted_with_a_lost_shard, "zb index merge out", (Way("4 of 4 x 8"),), base=CONVERT),
        Met(begun, "zb info out.partial", (Way("4 of 4 x 8"),), 4, base=CONVERT),
    ),
    Remedy.PARTS_FIRST: (
        Met(
            arrays,
            "zb index merge out",
            (Way("merged  out: 2 shards, 4 batches", then=(f"{PART} --shard-range 1/2", "zb index merge out")),),
            base=PART,
            filled={"I/N": "0/2"},
        ),
    ),
    Remedy.MISSING_PARTS: (
        Met(
            part_of_two(),
            "zb index merge out",
            (Way("merged  out: 2 shards, 4 batches", then=("zb index merge out",)),),
            base=PART,
            filled={"I/N": "1/2"},
        ),
    ),
    Remedy.OTHER_PART: (
        Met(
            part_of_two("--batch-size", "2", "--force"),
            "zb index merge out",
            (Way("merged  out: 2 shards, 4 batches", then=("zb index merge out",)),),
            base=PART,
        ),
    ),
    Remedy.DROP_REMAINDER: (
        Met(
            stream_without_documents,
            "zb convert hdf5-to-hdf5 lesson out --seq-len 32 --batch-size 4 --remainder error",
            (Way("7 of 4 x 32"),),
        ),
    ),
    Remedy.TOKENS_ONLY: (
        Met(tokens_with_a_mask, "zb convert hdf5-to-batch x.h5 out", (Way("1 of 2 x 4"),)),
        Met(documents_of_their_own, "zb convert s.h5 out.bin --to bin", (Way("100 stored"),), marks=SLOW),
    ),
    Remedy.ONE_KIND: (
        Met(other_fields, "zb convert theirs out --dataset tokens --batch-size 4", (Way("2 of 4 x 8"),)),
    ),
    Remedy.DIGESTS: (
        Met(
            ids_without_digests,
            "zb verify s.npy",
            (Way(VERIFIED, then=("zb verify s.npy --digests made.json",)),),
            6,
            filled={"FILE": "made.json"},
        ),
        Met(
            two_datasets,
            "zb verify x.h5 --dataset mask",
            (Way("pass --dataset to", 1),),
            6,
            filled={"FILE": "made.json"},
            marks=SLOW,
        ),
    ),
    Remedy.CRC32: (Met(lone_batch_file, "zb verify x.batch", (Way(VERIFIED, then=("zb verify x.batch",)),), 6),),
    Remedy.CONVERT: (Met(other_files, "zb info pictures", (Way("jsonl"),)),),
    Remedy.DATASET: tuple(
        Met(two_datasets, line, (Way(prints),), filled={"--dataset": "mask"})
        for line, prints in (
            ("zb info x.h5", "dataset      mask"),
            ("zb show x.h5", "1 1 1"),
            ("zb convert x.h5 out --batch-size 2", "1 of 2 x 3"),
        )
    ),
    Remedy.CHANNELS: tuple(
        Met(channels, line, (Way(one), Way(all_of_them)))
        for line, one, all_of_them in (
            ("zb info c.h5", "4 of 1 x 8", "4 of 3 x 8"),
            ("zb convert c.h5 out --batch-size 4", "1 of 4 x 8", "3 of 4 x 8"),
            ("zb index digests c.h5 -o made.json", "32 tokens", "96 tokens"),
        )
    ),
    Remedy.UNWRITTEN: tuple(
        Met(never_written, line, (Way(dropped), Way(filled)))
        for line, dropped, filled in (
            ("zb info u.h5", "8 of 1 x 8", "64 of 1 x 8"),
            ("zb convert u.h5 out --batch-size 8", "1 of 8 x 8", "8 of 8 x 8"),
        )
    ),
    Remedy.RECORD_AXES: (Met(short_rows, "zb info r.npy", (Way("10 of 1 x 2"),)),),
    Remedy.FILL: (Met(values_never_written, "zb convert u.h5 out --to stream", (Way("80 stored"),)),),
    Remedy.SOURCE_DTYPE: (
        Met(no_header, "zb info raw.bin", (Way("64 uint16"),)),
        Met(no_header, "zb convert raw.bin out --seq-len 8 --batch-size 4", (Way("2 of 4 x 8"),), marks=SLOW),
    ),
    Remedy.TEXT_COLUMN: (Met(lines_of(body="abc abc"), TEXT, (Way("of 2 x 8"),), filled={"--text-column": "body"}),),
    Remedy.IDS: (
        Met(lines_of(input_ids=[1, 2, 3]), "zb convert t.jsonl out --to stream --tokenizer byte", (Way("27 stored"),)),
    ),
    Remedy.TRAIN: (
        Met(
            ranks_alone,
            TEXT.replace("byte", "x.tiktoken"),
            (Way("of 2 x 8", then=(TEXT.replace("byte", "x.tiktoken"),)),),
            2,
            filled={"TEXT": "t.jsonl"},
        ),
    ),
    Remedy.TOKENIZER: (
        Met(
            lines_of(text="abc abd"),
            TEXT.replace("byte", "tok.json"),
            (Way("of 2 x 8", then=(TEXT.replace("byte", "tok.json"),)),),
            2,
            filled={"TEXT": "t.jsonl"},
        ),
        Met(
            lines_of(text="abc abd"),
            TEXT.replace("byte", "gpt2"),
            (Way("of 2 x 8", then=(TEXT.replace("byte", "tok.json"),)),),
            2,
            filled={"TEXT": "t.jsonl"},
            marks=SLOW,
        ),
    ),
    Remedy.OTHER_KIND: (
        Met(
            folder_of_lines,
            "zb convert parquet-to-hdf5 texts out --tokenizer byte --seq-len 4 --batch-size 2",
            (Way("of 2 x 4"),),
        ),
        Met(batches_of_hdf5, "zb convert batch-to-hdf5 x.h5 out", (Way("3 of 2 x 8"),), marks=SLOW),
    ),
    Remedy.REMAINDER: (
        Met(arrays, "zb convert a.npy out --batch-size 5 --remainder error", (Way("3 of 5 x 8"), Way("4 of 5 x 8"))),
    ),
    Remedy.FILL_A_BATCH: (
        Met(
            arrays,
            "zb convert a.npy out --batch-size 64",
            (Way("2 of 8 x 8"), Way("1 of 64 x 8")),
            filled={"--batch-size": "8"},
        ),
    ),
    Remedy.FILL_THE_SHARDS: (Met(arrays, f"{CONVERT} --shards 9", (Way("out (4 shards)"),), filled={"--shards": "4"}),),
    Remedy.RECORD_LENGTH: (Met(arrays, f"{CONVERT} --seq-len 5", (Way("4 of 4 x 8"),)),),
    Remedy.KEEP_DTYPE: (Met(large_ids, "zb convert x.h5 out --dtype uint16", (Way("2 of 2 x 8 uint32"),)),),
    Remedy.HDF5_FOR_UINT8: (
        Met(
            ids_of_one_byte,
            "zb convert b.npy out --to batch --batch-size 2 --dtype uint8",
            (Way("4 of 2 x 8 uint8"), Way("4 of 2 x 8 uint16")),
            2,
        ),
    ),
    Remedy.MAX_LINE: (
        Met(long_text, "zb convert t.jsonl out --to stream --tokenizer byte --max-line 1000", (Way("5,001 stored"),)),
        Met(
            long_text,
            "zb convert p.txt out --to stream --tokenizer byte --max-line 1000",
            (Way("5,001 stored"),),
            marks=SLOW,
        ),
        Met(
            long_text,
            "zb tokenizer train t.jsonl p.txt --vocab-size 260 --max-line 1000 -o tok.json",
            (Way("wrote"),),
            marks=SLOW,
        ),
    ),
    Remedy.BOUND: (Met(converted, "zb info st", (Way("4 of 4 x 8", then=("zb info st",)),), meanwhile=bounded),),
    Remedy.FORCE: (Met(state_of_other_ids, "zb which st --state loader.json --step 0", (Way("128 uint16"),)),),
}
#: Remedies that nobody can type here -> why, and who does.
NOT_TYPED = {Remedy.MPI_WORLD: "needs ranks that srun starts with an MPI library: cluster/test_slurm_jobs.py"}


def typed(line):
    """Type a line; return its exit code and all that it prints."""
    words = shlex.split(line)
    if words[0] == "export":
        name, _, value = words[1].partition("=")
        os.environ[name] = value
        return 0, ""
    assert words[0] == "zb"
    done = run_zb(*words[1:])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("remedy", "met"),
    [
        pytest.param(remedy, met, id=f"{remedy.name}-{number}", marks=met.marks)
        for remedy, all_met in MET.items()
        for number, met in enumerate(all_met)
    ],
)
def test_each_line_that_a_message_names_is_typed_and_cures(remedy, met, tmp_path, monkeypatch):
    monkeypatch.setenv("ZB_MAX_LINE", "256MiB")  # what a line exports ends with the test
    for number, way in enumerate(met.ways):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        met.files()
        with met.meanwhile():
            code, printed = typed(met.line)
        found, advice = advice_in(printed)
        assert (code, found) == (met.code, remedy), printed
        assert not Path("out").exists()
        lines = list(lines_named(advice, met.base or met.line, met.filled))
        assert len(lines) == len(met.ways), lines
        code, printed = typed(lines[number])
        assert code == way.code, (lines[number], printed)
        for line in way.then:
            code, more = typed(line)
            assert code == 0, (line, more)
            printed += more
        assert way.prints in printed, (lines[number], printed)


def test_each_remedy_is_met_or_has_a_reason():
    assert sorted([*MET, *NOT_TYPED]) == sorted(Remedy)
    assert all(met.ways for all_met in MET.values() for met in all_met)
    assert len(NOT_TYPED) == 1


# --- the words of Python ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Called:
    """A call that fails, and what comes of each call that its message names, in order."""

    files: Callable[[], None]
    call: str
    #: Words of what it returns, or of what `zb info` prints of the path that was made.
    gives: tuple[str, ...]
    made: str = ""
    #: The call that the arguments of the message belong to; "": the one that failed.
    base: str = ""
    #: Placeholders of the message, and arguments without a value -> what the reader passes for them.
    filled: dict[str, str] = field(default_factory=dict)
    then: str = ""
    meanwhile: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    marks: tuple[pytest.MarkDecorator, ...] = ()


def tokens_of(path, read_as=AS_STORED):
    with open_corpus(path, read_as=read_as) as corpus:
        return f"{corpus.num_tokens} tokens"


def take_position(path, **options):
    with Loader(path, rank=0, world_size=1) as loader:
        loader.load_state_dict(json.loads(Path("loader.json").read_text()), **options)
        return loader.state_dict()["dtype"]


def written_to(path, **options):
    with open_writer(path, **options) as writer:
        writer.write(np.ones((3, 2, 8), np.uint8))
        return f"{path} {writer.meta.dtype.name}"


NAMES = {
    **{name: getattr(zb_hdf5, name) for name in zb_hdf5.__all__}, "merge_parts": merge_parts, "tokens_of": tokens_of,
    "take_position": take_position, "open_writer": written_to,
}  # fmt: skip
#: A call in a message, and an argument with its value, if it has one.
CALL = re.compile(r"\b\w+\((?:[^()]|\([^()]*\))+\)")
ARGUMENT = re.compile(r"\b(\w+)=('[^']*'|\([^)]*\)|\{[^}]*\}|\w+)?")


def calls_named(advice, base, filled):
    """Yield each call that some words name: what is between two "or" is one way out, and may have none."""
    for name, value in filled.items():
        advice = advice if name.endswith("=") else advice.replace(name, value)
    for way in re.split(r"\bor\b", advice):
        call = ast.parse(base, mode="eval").body
        named = CALL.search(way)
        if named:
            words = ast.parse(named[0], mode="eval").body
            is_same = words.func.id == call.func.id
            positional = [each for each in words.args if not isinstance(each, ast.Constant) or each.value is not ...]
            call = ast.Call(words.func, positional or call.args, call.keywords if is_same else [])
            way = named[0]
        given = ARGUMENT.findall(way)
        call.keywords = [each for each in call.keywords if each.arg not in re.findall(r"\bno (\w+)", way)]
        for name, value in given:
            if name.isupper():
                os.environ[name] = value
                continue
            pass_argument(call, name, ast.parse(value or filled[f"{name}="], mode="eval").body)
        if named or given:
            yield ast.unparse(call)


def pass_argument(call, name, value):
    """Pass an argument to a call, or to the `ReadAs` that it takes."""
    parameters = inspect.signature(NAMES[call.func.id]).parameters
    if name not in parameters and "read_as" in parameters:
        [*asked] = [each.value for each in call.keywords if each.arg == "read_as"]
        read_as = asked[0] if asked else ast.Call(ast.Name("ReadAs"), [], [])
        pass_argument(read_as, name, value)
        name, value = "read_as", read_as
    call.keywords = [*(each for each in call.keywords if each.arg != name), ast.keyword(name, value)]


def test_the_calls_that_a_message_names_are_read_out_of_it():
    base = "convert('a.npy', 'hdf5', 'out', batch_size=4)"
    for words, filled, expected in (
        ("go on with resume=True, or start over with force=True", {},
         [f"{base[:-1]}, resume=True)", f"{base[:-1]}, force=True)"]),
        ("go on with resume=True and force=True", {}, [f"{base[:-1]}, resume=True, force=True)"]),
        ("if it is so, rebuild the index with rebuild_index(force=True)", {},
         ["rebuild_index('a.npy', 'hdf5', 'out', force=True)"]),
        ("run convert('{at}', 'hdf5', destination)", {"destination": "'out'"},
         ["convert('{at}', 'hdf5', 'out', batch_size=4)"]),
        ("pass batch_size=8, channels={'a': 1, 'b': 2}; or axes='a,b'", {},
         ["convert('a.npy', 'hdf5', 'out', batch_size=8, channels={'a': 1, 'b': 2})", f"{base[:-1]}, axes='a,b')"]),
        ("pass dataset= to ReadAs or convert", {"dataset=": "'x'"}, [f"{base[:-1]}, dataset='x')"]),
        ("pass seed=3, and no batch_size", {}, ["convert('a.npy', 'hdf5', 'out', seed=3)"]),
        ("restore it", {}, []),
    ):  # fmt: skip
        assert list(calls_named(words, base, filled)) == expected
    [call] = calls_named("pass axes='record,token' to ReadAs", "tokens_of('a', read_as=ReadAs(channel=1))", {})
    assert call == "tokens_of('a', read_as=ReadAs(channel=1, axes='record,token'))"


CONVERT_CALL = "convert('a.npy', 'hdf5', 'out', batch_size=4)"
PART_CALL = "convert('a.npy', 'hdf5', 'out', batch_size=4, shards=2, shuffle=False)"
TEXT_CALL = "convert('t.jsonl', 'hdf5', 'out', tokenizer='byte', seq_len=8, batch_size=2)"

#: Remedy whose words of Python name an argument -> a call that it stands in the message of.
CALLED = {
    Remedy.REBUILD_FORCE: Called(two_shards(swap_shard), "repair('st')", ("6 of 2 x 8",), "st"),
    Remedy.DO_WITHOUT: Called(two_shards(lose(LAST, INDEX_NAME)), "rebuild_index('st')", ("3 of 2 x 8",), "st"),
    Remedy.LEAVE_OUT: Called(two_shards(lose(LAST)), "repair('st')", ("3 of 2 x 8",), "st"),
    Remedy.DROP_SETS: Called(
        with_field_sets, "convert('a.npy', 'hdf5', 'st', batch_size=8, force=True)", ("2 of 8 x 8",), "st"
    ),
    Remedy.LEAVE_SETS: Called(with_field_sets, "convert('st', 'hdf5', 'out', seq_len=4)", ("of 4 x 4",), "out"),
    Remedy.RESUME_OR_RESTART: Called(interrupted, CONVERT_CALL, ("4 of 4 x 8", "4 of 4 x 8"), "out"),
    Remedy.RESUME_FORCED: Called(
        arrays, f"{CONVERT_CALL[:-1]}, force=True)", ("4 of 4 x 8",), "out", meanwhile=interrupting
    ),
    Remedy.RESTART: Called(interrupted_with_a_damaged_journal, CONVERT_CALL, ("4 of 4 x 8",), "out"),
    Remedy.SAME_OR_RESTART: Called(
        interrupted, f"{CONVERT_CALL[:-1]}, seed=3, resume=True)", ("4 of 4 x 8",), "out",
        base=f"{CONVERT_CALL[:-1]}, seed=3)",
    ),
    Remedy.FEWER_WORKERS: Called(
        long_array, f"{CONVERT_CALL[:-1]}, shards=4, workers=2)", ("100,000 of 4 x 128",), "out",
        meanwhile=killing_a_worker, marks=SLOW,
    ),
    Remedy.RESUME_WHOLE: Called(
        interrupted_with_a_lost_shard, "merge_parts('out')", ("4 of 4 x 8",), "out", base=CONVERT_CALL
    ),
    Remedy.PARTS_FIRST: Called(
        arrays, "merge_parts('out')", ("1 of 2 shards",), "out.partial", base=PART_CALL, filled={"(i, n)": "(0, 2)"}
    ),
    Remedy.MISSING_PARTS: Called(
        part_of_two(), "merge_parts('out')", ("4 of 4 x 8",), "out", base=PART_CALL, filled={"(i, n)": "(1, 2)"},
        then="merge_parts('out')",
    ),
    Remedy.OTHER_PART: Called(
        part_of_two("--batch-size", "2", "--force"), "merge_parts('out')", ("4 of 4 x 8",), "out",
        base=f"{PART_CALL[:-1]}, shard_range=(1, 2))", then="merge_parts('out')",
    ),
    Remedy.DROP_REMAINDER: Called(
        stream_without_documents,
        "convert('lesson', 'hdf5', 'out', source_format='hdf5', seq_len=32, batch_size=4, remainder='error')",
        ("7 of 4 x 32",), "out",
    ),
    Remedy.CONVERT: Called(
        folder_of_arrays, "ShardIndex.load('tokens')", ("4 of 4 x 8",), "out", filled={"destination": "'out'"},
        base=CONVERT_CALL,
    ),
    Remedy.DATASET: Called(two_datasets, "tokens_of('x.h5')", ("6 tokens",), filled={"dataset=": "'mask'"}),
    Remedy.CHANNELS: Called(channels, "tokens_of('c.h5')", ("32 tokens", "96 tokens")),
    Remedy.UNWRITTEN: Called(never_written, "tokens_of('u.h5')", ("64 tokens", "512 tokens")),
    Remedy.RECORD_AXES: Called(short_rows, "tokens_of('r.npy')", ("20 tokens",)),
    Remedy.FILL: Called(values_never_written, "convert('u.h5', 'stream', 'out')", ("80 uint16",), "out"),
    Remedy.SOURCE_DTYPE: Called(no_header, "tokens_of('raw.bin')", ("64 tokens",)),
    Remedy.TEXT_COLUMN: Called(
        lines_of(body="abc abc"), TEXT_CALL, ("of 2 x 8",), "out", filled={"text_column=": "'body'"}
    ),
    Remedy.IDS: Called(
        lines_of(input_ids=[1, 2, 3]), "convert('t.jsonl', 'stream', 'out', tokenizer='byte')", ("27 uint32",), "out",
    ),
    Remedy.REMAINDER: Called(
        arrays, "convert('a.npy', 'hdf5', 'out', batch_size=5, remainder='error')", ("3 of 5 x 8", "4 of 5 x 8"), "out"
    ),
    Remedy.FILL_A_BATCH: Called(arrays, "convert('a.npy', 'hdf5', 'out', batch_size=64)", ("1 of 64 x 8",), "out"),
    Remedy.HDF5_FOR_UINT8: Called(
        nothing, "open_writer('train.batch', batch_size=2, seq_len=8, dtype='uint8')",
        ("train.h5 uint8", "train.batch uint16"),
    ),
    Remedy.MAX_LINE: Called(
        long_text, "convert('t.jsonl', 'stream', 'out', tokenizer='byte', max_line=1000)", ("5,001 uint16",), "out"
    ),
    Remedy.BOUND: Called(converted, "tokens_of('st')", ("128 tokens",), meanwhile=bounded),
    Remedy.FORCE: Called(state_of_other_ids, "take_position('st')", ("uint16",)),
}  # fmt: skip


def failure_of(call):
    """Return the words of a call that fails: of its error, and of the notes of this."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - an interruption too; its words are compared
        eval(call, dict(NAMES))
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())]), getattr(caught.value, "at", "")


@pytest.mark.parametrize(
    ("remedy", "called"),
    [pytest.param(remedy, called, id=remedy.name, marks=called.marks) for remedy, called in CALLED.items()],
)
def test_each_argument_that_a_message_names_is_passed_and_cures(remedy, called, tmp_path, monkeypatch):
    monkeypatch.setenv("ZB_MAX_LINE", "256MiB")  # what a message names for the environment ends with the test
    for number, given in enumerate(called.gives):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        called.files()
        with called.meanwhile():
            message, at = failure_of(called.call)
        advice = remedy.about(at)
        assert message.endswith(advice), message
        calls = list(calls_named(advice, called.base or called.call, called.filled))
        assert len(calls) == len(called.gives), calls
        result = eval(calls[number], dict(NAMES))
        if called.then:
            eval(called.then, dict(NAMES))
        text = run_zb("info", called.made, code=0).output if called.made else result
        assert given in text, (calls[number], text)


def test_each_remedy_that_names_an_argument_is_passed():
    assert {remedy for remedy in Remedy if re.search(r"\w[=(]", remedy)} == {*CALLED}


def test_a_remedy_names_what_there_is():
    known = {*zb_hdf5.__all__, *inspect.signature(convert).parameters}
    named = {word for remedy in Remedy for word in re.findall(r"(?<![\w.'])[a-z]+_[a-z_0-9]+(?![\w.'])", remedy)}
    assert named - known == {"field_channels"} - known
