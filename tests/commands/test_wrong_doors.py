"""Wrong doors: files of known formats are never ids without a header, and each message ends in a line that works."""

import gzip
import json
import os
import pickle
import re
import struct
import subprocess

import h5py
import numpy as np
import pytest
from commandline import one_error, run_zb
from contract import is_refused
from doors import CHAT, CHAT_TEXT, DOCUMENTS, DOORS, IDS, TABLE, items, litdata, litgpt, made, parquet_of, raw, tfrecord
from interpreter import run_program
from pyarrow import parquet
from reading import looking

from zb_hdf5 import Loader, ReadAs, convert, errors, open_corpus
from zb_hdf5.files.look import Look
from zb_hdf5.files.signatures import SIGNATURES, signature_of

#: The last line of a message.
LINE = re.compile(r".*: ((?:zb convert|python -[cm]|mkdir|gzip|bzip2|xz|zstd) .*)$")


#: The shell expands a line, and opens its files. `zb` and `python` are functions of it: they leave their words to this
#: process, wait until it has run them, and give out what they have printed.
OURS = """
exec 3>&1 >/dev/null
ours() { printf '%s\\0' "$@" >"$SCRATCH/words"; echo >&3; read -r code; cat "$SCRATCH/output"; return "$code"; }
zb() { ours zb "$@"; }
python() { ours python "$@"; }
"""


def run_words(words, folder):
    """Run the words of a command in a fork of an interpreter that has imported the package."""
    if words[:2] == ["python", "-c"]:
        return run_program(words[2], *words[3:], folder=folder)
    assert words[0] == "zb"
    return run_program("from zb_hdf5.__main__ import zb; zb()", *words[1:], folder=folder)


def type_line(line, folder, scratch):
    """Run a line in a shell, as it stands."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    variables = {**os.environ, "SCRATCH": str(scratch)}
    errors = ""
    with subprocess.Popen(["sh", "-c", OURS + line], cwd=folder, text=True, env=variables, **pipes) as shell:
        for _ in shell.stdout:
            done = run_words((scratch / "words").read_text().split("\0")[:-1], folder)
            (scratch / "output").write_text(done.stdout)
            errors += done.stderr
            print(done.returncode, file=shell.stdin, flush=True)
        errors += shell.stderr.read()
    assert shell.returncode == 0, (line, errors)


def ids_below(folder):
    """Return the ids of the stream or the array that a line has made, or a text of its bytes."""
    if (folder / "DST").exists():
        with open_corpus(folder / "DST") as stream:
            return np.array(stream.tokens[0 : stream.num_tokens])
    arrays = [path for path in folder.rglob("*.npy")]
    if arrays:
        return np.load(arrays[0]).reshape(-1)
    lines = next(path for path in folder.rglob("*.jsonl") if path.name.count(".") > 1)
    convert(lines, "stream", folder / "DST", tokenizer=None if "input_ids" in lines.read_text() else "byte")
    return ids_below(folder)


def line_of(name, folder, monkeypatch):
    """Return the line in which the message of a door ends."""
    monkeypatch.chdir(folder)
    message = one_error(run_zb("info", name))
    line = LINE.match(message)
    assert line is not None, message
    return line[1]


@pytest.mark.parametrize("name", DOORS)
def test_a_message_ends_in_a_line(name, tmp_path, monkeypatch):
    made(name, tmp_path)
    assert line_of(name, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.thin
def test_a_message_ends_in_a_line_that_works_when_it_is_typed(name, tmp_path, tmp_path_factory, monkeypatch):
    path = made(name, tmp_path)
    expected = DOORS[name][1]
    line = line_of(name, tmp_path, monkeypatch)
    type_line(line, tmp_path, tmp_path_factory.mktemp("shell"))
    if expected == "records":
        with Loader(tmp_path / "DST", shuffle="sequential") as loader:
            rows = np.concatenate([batch.numpy() for batch in loader])
        assert {*map(tuple, rows)} <= {*map(tuple, DOCUMENTS)}
        return
    found = ids_below(tmp_path)
    if expected == "ids":
        np.testing.assert_array_equal(found, IDS)
    else:
        assert bytes(found[found < 256].astype(np.uint8)).decode() == expected
    assert path.exists()


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_file_of_a_known_format_is_never_ids_without_a_header(name, dtype, tmp_path):
    if name in ("a.idx", "several", "several mds", "tables", "texts", "arrays", "chats"):
        pytest.skip("its ids have no header, or are below the folder")
    path = made(name, tmp_path)
    words = "source_dtype is for files without a header, found"
    is_refused(
        errors.ArgumentError,
        lambda: open_corpus(path, read_as=ReadAs(source_dtype=dtype)),
        lambda: Loader(path, read_as=ReadAs(source_dtype=dtype), batch_size=1, seq_len=8),
        match=words,
    )
    shape = {"stream": {"tokens_only": True}, "hdf5": {"seq_len": 8, "batch_size": 1}}
    for target, options in shape.items():
        with pytest.raises(errors.ZbError, match=words):
            convert(path, target, tmp_path / "out", source_dtype=dtype, source_format="bin", **options)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a.npz", "a.parquet", "tables", "litdata", "several mds", "text.jsonl"])
def test_verify_and_index_digests_name_the_format_too(name, tmp_path):
    path = made(name, tmp_path)
    np.save(tmp_path / "ids.npy", IDS)
    digests = tmp_path / "digests.json"
    run_zb("index", "digests", tmp_path / "ids.npy", "-o", digests, code=0)
    expected = one_error(run_zb("verify", path))
    assert LINE.match(expected), expected
    assert one_error(run_zb("verify", path, "--digests", digests)) == expected
    assert one_error(run_zb("index", "digests", path, "-o", tmp_path / "other.json")) == expected
    assert not (tmp_path / "other.json").exists()


def test_a_store_needs_no_digests(tmp_path):
    np.save(tmp_path / "ids.npy", IDS)
    (tmp_path / "both").mkdir()
    for target in ("hdf5", "batch"):
        convert(tmp_path / "ids.npy", target, tmp_path / "both" / target, seq_len=50, batch_size=2)
    for path in (tmp_path / "both", tmp_path / "both/hdf5"):
        message = one_error(run_zb("index", "digests", path, "-o", tmp_path / "other.json"))
        assert message.endswith("found others: stores have digests")


def test_the_chunks_of_a_folder_are_known_without_its_index(tmp_path):
    litdata(tmp_path / "lit")
    (tmp_path / "lit" / "index.json").unlink()
    (tmp_path / "shard.00000.mds").write_bytes(items(head=b'{"column_names": ["ids"]}'))
    for path, noun in ((tmp_path / "lit/chunk-0-0.bin", "litdata"), (tmp_path / "shard.00000.mds", "MDS")):
        is_refused(
            errors.ArgumentError, lambda path=path: open_corpus(path, read_as=ReadAs(source_dtype="uint32")), match=noun
        )
    is_refused(
        errors.ArgumentError,
        lambda: open_corpus(tmp_path / "lit", read_as=ReadAs(source_dtype="uint16")),
        match="litdata",
    )


def test_one_file_of_a_folder_of_ids_is_enough(tmp_path):
    raw(tmp_path / "a.bin")
    (tmp_path / "b.bin").write_bytes(gzip.compress(IDS.astype("<u2").tobytes()))
    is_refused(
        errors.ArgumentError,
        lambda: open_corpus(tmp_path, read_as=ReadAs(source_dtype="uint16")),
        match=r"b\.bin: .* gzip",
    )


def test_a_folder_of_olmo_needs_the_dtype_and_not_its_documents(tmp_path):
    """The documents of each file are packed, and their names come first."""
    ids = np.arange(1, 401, dtype="<u2")
    ids.tofile(tmp_path / "part-0-00000.npy")
    (tmp_path / "part-0-00000.csv.gz").write_bytes(gzip.compress(b"0,400,a,b.json.gz,1\n"))
    message = run_zb("info", tmp_path, code=1).output
    assert message.endswith("if it has ids and no header, pass their dtype, such as --source-dtype uint16\n")
    run_zb("info", tmp_path, "--source-dtype", "uint16")


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4", "<i8", "u1"])
def test_ids_have_no_signature(dtype, tmp_path):
    random = np.random.default_rng(3)
    path = tmp_path / "ids.bin"
    for vocabulary in (2, 100, 256, 50_257, 65_536, 128_000):
        high = min(vocabulary, np.iinfo(dtype).max)
        for values in (random.integers(0, high, 3000), np.arange(3000) % high, np.full(3000, high - 1)):
            path.write_bytes(values.astype(dtype).tobytes())
            assert looking(signature_of, path) is None or dtype == "u1"
    path.write_bytes(np.full(3000, -1).astype("<i4").tobytes())
    assert looking(signature_of, path) is None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_is_known_whatever_its_name_is(protocol, tmp_path):
    for values in (IDS.tolist(), {"ids": IDS.tolist()}, IDS):
        (tmp_path / "ids.bin").write_bytes(pickle.dumps(values, protocol))
        assert looking(signature_of, tmp_path / "ids.bin").noun == "a pickle"


def test_an_lz4_file_and_the_index_of_megatron_are_known(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\x04\x22\x4d\x18" + bytes(16))
    is_refused(
        errors.ArgumentError,
        lambda: open_corpus(tmp_path / "a.bin", read_as=ReadAs(source_dtype="uint16")),
        match=r"lz4 -dk .*a\.bin",
    )
    (tmp_path / "a.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, 0, 1) + bytes(8))
    is_refused(
        errors.ArgumentError,
        lambda: open_corpus(tmp_path / "a.idx", read_as=ReadAs(source_dtype="uint16")),
        match="Megatron: leave it",
    )


def test_text_may_be_ids_of_one_byte(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"It was a dark night.\n" * 9)
    assert open_corpus(path, read_as=ReadAs(source_dtype="uint8")).num_tokens == 21 * 9
    is_refused(
        errors.ArgumentError,
        lambda: open_corpus(path, read_as=ReadAs(source_dtype="uint16")),
        match="found text; tokenize it",
    )


def test_the_header_of_lit_gpt_is_left_out_if_it_is_named(tmp_path):
    litgpt(tmp_path / "a.bin")
    with open_corpus(tmp_path / "a.bin", read_as=ReadAs(source_dtype="uint16", skip_bytes=24)) as stream:
        np.testing.assert_array_equal(stream.tokens[0:4000], IDS)
    is_refused(
        errors.ArgumentError,
        lambda: open_corpus(tmp_path / "a.bin", read_as=ReadAs(source_dtype="uint16", skip_bytes=2)),
        match="found a file of lit-gpt; its ids follow a header: .*source_dtype='uint16', skip_bytes=24",
    )


def test_a_format_that_only_its_library_reads_is_named(tmp_path):
    tfrecord(tmp_path / "a.tfrecord")
    (tmp_path / "a.db").write_bytes(b"SQLite format 3\x00" + bytes(84))
    (tmp_path / "a.array_record").write_bytes(b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f" + bytes(56))
    for name, noun in {"a.tfrecord": "TFRecords", "a.db": "SQLite", "a.array_record": "array_record"}.items():
        message = one_error(run_zb("info", tmp_path / name))
        assert noun in message
        assert message.endswith("as Parquet, JSON lines or .npy")


def test_every_signature_that_is_not_read_has_a_way():
    read = {each.noun for each in SIGNATURES if each.way is None}
    assert read == {
        "a .batch file", "an HDF5 file", "a .npy file of numpy", "an .idx file of Megatron", "a Parquet file",
        "an Arrow file", "an Arrow stream", "a shard of MDS", "a chunk of litdata", "JSON",
    }  # fmt: skip


# --- conversions ---------------------------------------------------------------------------------------------------


#: The words after `zb convert`, and the format of the result.
CONVERSIONS = {
    "both.parquet d": "stream",
    "mine.jsonl d --tokenizer byte": "stream",
    "mine.jsonl d --tokenizer byte --text-column mine": "stream",
    "a.parquet d --tokenizer byte --text-column input_ids": "stream",
    "chat.jsonl d --tokenizer byte": "text",
    "chat.jsonl d --tokenizer byte --text-column messages": "text",
    "chat.jsonl.gz d --tokenizer byte --text-column messages": "text",
    "chat.jsonl.zst d --tokenizer byte --text-column messages": "text",
    "chat.parquet d --tokenizer byte": "text",
    "chat.parquet d --tokenizer byte --text-column messages": "text",
    "a.parquet x.parquet --to hf": "parquet",
    "a.parquet out.idx": "megatron",
    "a.parquet x.zarr --to stream": "stream",
    "a.parquet x.tar.gz --to stream": "stream",
    "a.parquet x.safetensors --to stream": "stream",
    "splits d --to stream": "stream",
    "ids.npy d --from megatron --seq-len 50 --batch-size 2 --no-shuffle": "batches",
}


@pytest.mark.parametrize("words", CONVERSIONS)
@pytest.mark.thin
def test_a_conversion_that_is_refused_ends_in_a_line_that_works(words, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, *options = words.split()
    if source == "ids.npy":
        np.save(source, IDS)
    else:
        made(source, tmp_path)
    result = run_zb("convert", source, *options)
    assert result.exit_code in (1, 2)
    last = result.output.strip().splitlines()[-1]
    line = LINE.match(last)
    assert line is not None, result.output
    assert not [path for path in tmp_path.iterdir() if path.name == options[0]]
    monkeypatch.undo()
    type_line(line[1], tmp_path, tmp_path_factory.mktemp("shell"))
    if CONVERSIONS[words] == "batches":
        with Loader(tmp_path / "d", shuffle="sequential") as loader:
            np.testing.assert_array_equal(np.concatenate([batch.numpy().reshape(-1) for batch in loader]), IDS)
        return
    if CONVERSIONS[words] == "text":
        rows = (tmp_path / f"{source}.text.jsonl").read_text().splitlines()
        assert {json.loads(row)["text"] for row in rows} == {CHAT_TEXT}
        return
    if CONVERSIONS[words] == "parquet":
        assert parquet.read_table(tmp_path / "x.parquet")["input_ids"].to_pylist() == DOCUMENTS
        return
    name = {"out.idx": "out.bin", "d": "d" if (tmp_path / "d").exists() else "DST"}.get(options[0], "x")
    with open_corpus(tmp_path / name) as stream:
        np.testing.assert_array_equal(stream.tokens[0 : stream.num_tokens], IDS)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_that_have_a_name_too_are_chats(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps({"id": "one", "messages": []}) + "\n" + json.dumps({"id": "x", "messages": CHAT}))
    else:
        parquet_of(id=["one", "x"], messages=[[], CHAT])(path)
    lines = {
        LINE.match(one_error(run_zb("convert", path, tmp_path / "d", "--tokenizer", "byte", *named)))[1]
        for named in ((), ("--text-column", "messages"), ("--text-column", "mesages"))
    }
    assert len(lines) == 1
    assert "<|im_start|>" in lines.pop()
    convert(path, "stream", tmp_path / "d", tokenizer="byte", text_column="id")


def test_texts_after_a_list_are_texts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ["a list"]}\n' + '{"text": "hello"}\n' * 2)
    convert(tmp_path / "a.jsonl", "stream", tmp_path / "d", tokenizer="byte")
    assert (tmp_path / "d").exists()


def test_the_line_that_was_typed_is_no_advice(tmp_path):
    raw(tmp_path / "a.npy")
    for dtype in ("uint16", "uint32"):
        options = ("--from", "olmo", "--source-dtype", dtype, "--to", "stream")
        result = run_zb("convert", tmp_path / "a.npy", tmp_path / "out", *options)
        assert "may have" not in result.output
        assert "--boundary-token-id" in result.output


def test_files_of_olmo_without_documents_are_cut_into_records(tmp_path):
    raw(tmp_path / "a.npy")
    shape = {"seq_len": 50, "batch_size": 1, "shuffle": False}
    for number, named in enumerate(({}, {"source_format": "olmo"}, {"source_format": "bin"})):
        convert(tmp_path / "a.npy", "hdf5", tmp_path / f"{number}.h5", source_dtype="uint16", **shape, **named)
        with Loader(tmp_path / f"{number}.h5", shuffle="sequential") as loader:
            np.testing.assert_array_equal(np.concatenate([batch.numpy()[0] for batch in loader]), IDS)


def test_a_command_that_is_misspelt_names_the_one_that_is_meant():
    assert "Did you mean 'zb verify'?" in run_zb("verfy", "x").output.replace("\n", " ")
    assert "Did you mean" not in run_zb("qqqqq", "x").output


def test_the_list_of_formats_does_not_deny_llmc(tmp_path):
    rows = dict(line.split(None, 1) for line in run_zb("convert", "--list", code=0).output.splitlines())
    assert rows["llmc"].split()[:3] == ["yes", "yes", "yes"]
    raw(tmp_path / "a.bin")
    run_zb("convert", tmp_path / "a.bin", tmp_path / "b.bin", "--to", "llmc", "--source-dtype", "uint16", code=0)
    run_zb("convert", tmp_path / "b.bin", tmp_path / "c", "--from", "llmc", "--to", "stream", "--tokens-only", code=0)
    with open_corpus(tmp_path / "b.bin") as ours, open_corpus(tmp_path / "c") as theirs:
        np.testing.assert_array_equal(ours.tokens[0:4000], theirs.tokens[0:4000])


@pytest.mark.parametrize(("target", "suffix"), [("megatron", ".bin"), ("datatrove", ".ds")])
def test_a_prefix_is_a_path(target, suffix, tmp_path):
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    convert(tmp_path / "a.parquet", target, tmp_path / f"corpus{suffix}")
    prefix = tmp_path / "corpus"
    with open_corpus(prefix) as stream:
        np.testing.assert_array_equal(stream.tokens[0:4000], IDS)
    with Loader(prefix, batch_size=1, seq_len=50, shuffle="sequential") as loader:
        assert next(loader).tolist() == [DOCUMENTS[0]]
    assert str(tmp_path / f"corpus{suffix}") in run_zb("info", prefix, code=0).output
    run_zb("convert", prefix, tmp_path / "out", "--to", "stream", code=0)
    run_zb("index", "digests", prefix, "-o", tmp_path / "digests.json", code=0)
    run_zb("verify", prefix, "--digests", tmp_path / "digests.json", code=0)
    convert(prefix, "stream", tmp_path / "again")
    with open_corpus(tmp_path / "out") as ours, open_corpus(tmp_path / "again") as same:
        np.testing.assert_array_equal(ours.tokens[0:4000], same.tokens[0:4000])


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_more_bytes_than_a_header_has_are_as_wrong_as_fewer(tmp_path):
    for axes in (1, 2):
        with open(tmp_path / "a.npy", "wb") as file:
            np.save(file, IDS if axes == 1 else IDS.reshape(80, 50))
            np.save(file, IDS)
        is_refused(errors.FormatError, lambda: open_corpus(tmp_path / "a.npy"), match="more than one array")
        is_refused(
            errors.FormatError,
            lambda: convert(tmp_path / "a.npy", "hdf5", tmp_path / "o.h5", seq_len=50, batch_size=1),
            match="more than one array",
        )


@pytest.mark.parametrize("cut", ["halved", "another"])
def test_metadata_of_datatrove_decide_about_the_dtype(cut, tmp_path):
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    convert(tmp_path / "a.parquet", "datatrove", tmp_path / "a.ds", vocab_size=400)
    index = tmp_path / "a.ds.index"
    ends = np.fromfile(index, "<u8")
    if cut == "halved":  # 4,000 ids of 2 bytes are 2,000 of 4
        ends[:40].tofile(index)
    else:
        (tmp_path / "a.ds.metadata").write_text("gpt2|4\n4000\n4.00 kT")
    is_refused(errors.FormatError, lambda: open_corpus(tmp_path / "a.ds"), match=r"as a\.ds\.metadata has it, found")
    (tmp_path / "a.ds.metadata").write_text("an older one")
    ends.tofile(index)
    with open_corpus(tmp_path / "a.ds") as stream:
        np.testing.assert_array_equal(stream.tokens[0:4000], IDS)


def test_an_index_names_a_file_once(tmp_path):
    litdata(tmp_path / "lit")
    index = json.loads((tmp_path / "lit/index.json").read_text())
    (tmp_path / "lit/index.json").write_text(json.dumps({**index, "chunks": index["chunks"] * 2}))
    is_refused(
        errors.FormatError, lambda: convert(tmp_path / "lit", "stream", tmp_path / "out"),
        match=r"names the file 'chunk-0-0\.bin' 2 times",
    )  # fmt: skip
    index["chunks"][0]["dim"] = None
    (tmp_path / "lit/index.json").write_text(json.dumps(index))
    is_refused(
        errors.FormatError, lambda: convert(tmp_path / "lit", "stream", tmp_path / "out"),
        match="found none: it was written without TokensLoader; write it again with optimize",
    )  # fmt: skip


def hdf5_after(user_block):
    def write(path):
        with h5py.File(path, "w", userblock_size=user_block) as h5:
            h5["tokens"] = IDS

    return write


@pytest.mark.parametrize("user_block", [0, 512, 2048, 4096, 1 << 20])
@pytest.mark.parametrize("num_bytes", [0, 5000])
def test_hdf5_is_known_behind_each_user_block(user_block, num_bytes, tmp_path):
    hdf5_after(user_block)(tmp_path / "a.h5")
    with (tmp_path / "a.h5").open("ab") as file:
        file.write(bytes(num_bytes))
    with Look(tmp_path / "a.h5") as look:
        assert signature_of(look).noun == "an HDF5 file"
    (tmp_path / "b.bin").write_bytes((tmp_path / "a.h5").read_bytes().replace(b"\x89HDF", b"\x88HDF"))
    with Look(tmp_path / "b.bin") as look:
        assert signature_of(look) is None or signature_of(look).noun != "an HDF5 file"


def picture(path):
    pytest.importorskip("PIL.Image").new("RGB", (32, 32)).save(path)


def bytes_of(head):
    return lambda path: path.write_bytes(head + bytes(512))


def sidecar(dtype):
    def write(path):
        path.write_bytes(np.arange(96).astype(dtype).tobytes())

    return write


#: Name, its writer, and the words of the refusal.
NO_IDS = {
    "a.7z": (bytes_of(b"7z\xbc\xaf\x27\x1c\0\4"), "a 7z archive; take its files out of it: 7z x "),
    "a.gguf": (bytes_of(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)), "a GGUF file; it has no ids"),
    "a.png": (picture, "PNG"),
    "a.jpg": (picture, "JPEG"),
    "a.gif": (picture, "GIF"),
    "a.webp": (picture, "RIFF"),
    "a.pdf": (bytes_of(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n"), "PDF"),
    "a.so": (bytes_of(b"\x7fELF\2\1\1\0"), "ELF"),
    "classic.nc": (bytes_of(struct.pack(">4sIIII", b"CDF\1", 0, 10, 1, 1)), "netCDF"),
    "offsets.nc": (bytes_of(struct.pack(">4sIIII", b"CDF\2", 0, 0, 0, 12)), "netCDF"),
    "data.nc": (bytes_of(struct.pack(">4sQIQ", b"CDF\5", 0, 10, 1)), "netCDF"),
    "a.mat": (bytes_of(b"MATLAB 5.0 MAT-file, Platform: GLNXA64".ljust(124) + b"\0\1IM"), "MATLAB"),
    "a.ds.index": (sidecar("<u8"), r"belongs to a file of ids; pass .*a\.ds$"),
    "a.batch.crc32": (sidecar("<u4"), r"belongs to a file of ids; pass .*a\.batch$"),
    "a.h5": (hdf5_after(8192), "hdf5"),
    "b.h5": (hdf5_after(1 << 20), "hdf5"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_IDS)
def test_other_files_are_never_ids_without_a_header(name, tmp_path):
    write, words = NO_IDS[name]
    path = tmp_path / name
    write(path)
    for dtype in ("uint16", "uint32"):
        is_refused(
            errors.ZbError,
            lambda dtype=dtype: open_corpus(path, read_as=ReadAs(source_dtype=dtype)),
            lambda dtype=dtype: convert(
                path, "stream", tmp_path / "out", source_dtype=dtype, source_format="bin", tokens_only=True
            ),
            match=words,
        )
