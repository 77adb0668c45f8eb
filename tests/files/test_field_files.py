"""Files that are named as fields beside files of ids: fields where the format pairs them, else refused, never ids."""

import gzip

import h5py
import numpy as np
import pytest
from commandline import one_error, run_zb
from reading import reading

from zb_hdf5 import FormatError, IncompleteError, Loader, ReadAs, ShardIndex, convert, open_corpus, open_reader
from zb_hdf5.files.field_files import is_named_as_field

SHAPE = {"batch_size": 2, "seq_len": 5}
IDS = np.arange(100, 200, dtype="<u4")
MASK = (np.arange(100) % 3 > 0).astype("u1")


@pytest.mark.parametrize(
    "name",
    [
        "labels_mask_part_0000.npy", "loss_mask.npy", "labels.npy", "attention_mask.npy", "position_ids.npy",
        "token_type_ids.npy", "train-labels-0001.h5", "Loss-Mask.npy", "lossmask.npy", "part_0_label_mask.npy",
        "segment_ids.npy", "targets.npy", "labels/0.npy", "attn_mask_3.npy", "loss_weights.npy", "mask.bin",
        "doc_ids.npy", "document-ids-0.npy", "offsets.npy", "doc_lens.npy", "seq_lengths.npy", "cu_seqlens.npy",
        "lengths/0.npy", "weights.npy", "sample_weights.h5",
    ],
)  # fmt: skip
def test_the_names_of_fields(name):
    assert is_named_as_field(name)


@pytest.mark.parametrize(
    "name",
    [
        "input_ids.npy", "token_ids_part_0000.npy", "tokens.npy", "part-0-00000.npy", "masked_lm_train.bin", "ids.npy",
        "unmasked.npy", "labelled_corpus.npy", "train_text_document.bin", "positions.npy", "target_domain.bin",
        "documents_0.npy", "doc_tokens.npy", "lenses.bin", "variable_length_docs.npy",
    ],
)  # fmt: skip
def test_the_names_of_ids(name):
    assert not is_named_as_field(name)


def write_npy(path, values):
    np.save(path.with_suffix(".npy"), values)


def write_npy_records(path, values):
    np.save(path.with_suffix(".npy"), values.reshape(-1, 5))


def write_bin(path, values):
    path.with_suffix(".bin").write_bytes(values.tobytes())


def write_hdf5(path, values):
    with h5py.File(path.with_suffix(".h5"), "w") as h5:
        h5["tokens"] = values


#: The writer of a file of each format, the options that open it, and whether it is read in place.
FORMATS = {
    "npy": (write_npy, {}, True),
    "records": (write_npy_records, {}, False),
    "bin": (write_bin, {"source_dtype": "uint32"}, True),
    "hdf5": (write_hdf5, {}, True),
}
FIELDS = ("loss_mask", "labels", "attention_mask", "position_ids", "token_type_ids")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_field_beside_ids_is_refused_by_name_in_place_and_converted(tmp_path, kind, field):
    write, options, in_place = FORMATS[kind]
    folder = tmp_path / "labels"  # the name of the folder itself tells nothing
    folder.mkdir()
    write(folder / "input_ids", IDS)
    write(folder / field, IDS)
    if in_place:
        with pytest.raises(
            FormatError, match=rf"{field}\.\w+: is named as a field, .* such as .*input_ids\.\w+, or move"
        ):
            Loader(folder, **SHAPE, **reading(options))
    with pytest.raises(FormatError, match=rf"{field}\.\w+: is named as a field"):
        convert(folder, "hdf5", tmp_path / "out", **SHAPE, **options)
    assert not (tmp_path / "out").exists()
    next(folder.glob(f"{field}.*")).rename(folder / "other.old")
    convert(folder, "hdf5", tmp_path / "out", **SHAPE, **options)
    with open_reader(tmp_path / "out") as reader:
        assert sorted(np.concatenate([reader.read_batch(k) for k in range(10)]).reshape(-1).tolist()) == IDS.tolist()


def test_the_line_of_the_message_works_when_it_is_typed(tmp_path):
    write_npy(tmp_path / "input_ids", IDS)
    write_npy(tmp_path / "labels", IDS)
    message = one_error(run_zb("info", tmp_path), 1)
    named = message.partition("such as ")[2].partition(",")[0]
    assert run_zb("info", named).exit_code == 0
    assert run_zb("info", tmp_path / "labels.npy").exit_code == 0  # as it was named
    both = [tmp_path / "input_ids.npy", tmp_path / "labels.npy"]
    assert "labels.npy: is named as a field" in one_error(run_zb("convert", *both, tmp_path / "out"), 1)


def test_a_folder_of_fields_alone_has_no_ids(tmp_path):
    write_npy(tmp_path / "labels", IDS)
    write_npy(tmp_path / "attention_mask", IDS)
    with pytest.raises(FormatError, match=r"attention_mask.npy: is named as a field, and its values are not ids"):
        Loader(tmp_path, **SHAPE)


@pytest.mark.parametrize("kind", ["npy", "records"])
def test_bytes_beside_wider_ids_are_a_mask(tmp_path, kind):
    write, options, in_place = FORMATS[kind]
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "a", IDS)
    write(folder / "b", MASK)
    if in_place:
        with pytest.raises(
            FormatError, match=r"b.npy: expected ids of uint32, as a.npy has them, found uint8, as a mask has"
        ):
            Loader(folder, **SHAPE, **reading(options))
    with pytest.raises(FormatError, match=r"b.npy: expected ids of uint32.*a mask has.*such as .*a.npy, or move it"):
        convert(folder, "hdf5", tmp_path / "out", **SHAPE, **options)


@pytest.mark.parametrize("kind", ["npy", "records", "hdf5"])
def test_a_file_of_another_dtype_than_the_rest_is_no_ids_unless_it_is_named(tmp_path, kind):
    write, options, in_place = FORMATS[kind]
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "a", IDS.astype("<i8"))  # the first one, such as the starts of documents
    write(folder / "b", IDS)
    write(folder / "c", IDS.astype(">u4"))
    first, *_ = files = sorted(folder.iterdir())
    words = rf"{first.name}: expected ids of uint32, as b\.\w+ has them, found .*, as a field, or another corpus, has"
    if in_place and kind != "hdf5":  # whose folders have one dtype, in the words of its table
        with pytest.raises(FormatError, match=words):
            Loader(folder, **SHAPE, **reading(options))
    with pytest.raises(FormatError, match=words):
        convert(folder, "hdf5", tmp_path / "out", **SHAPE, **options)
    convert(files, "hdf5", tmp_path / "out", **SHAPE, **options)
    with open_reader(tmp_path / "out") as reader:
        assert reader.num_batches == 30


@pytest.fixture
def olmo(tmp_path):
    """A folder as open-instruct writes it for OLMo-core: two parts of ids, their documents, and a mask of each."""
    folder = tmp_path / "oi"
    folder.mkdir()
    for part in range(2):
        (IDS + 1000 * part).tofile(folder / f"token_ids_part_{part:04}.npy")
        MASK.astype(bool).tofile(folder / f"labels_mask_part_{part:04}.npy")
        (folder / f"token_ids_part_{part:04}.csv.gz").write_bytes(gzip.compress(b"0,40\n40,100\n"))
    return folder


def check_masked(stream):
    assert stream.tokens[0:200].tolist() == [*IDS, *(IDS + 1000)]
    assert stream.field("loss_mask").tokens[0:200].tolist() == [*MASK, *MASK]
    assert stream.doc_offsets.tolist() == [0, 40, 100, 140, 200]


def test_the_masks_of_olmo_core_are_the_field_loss_mask_in_place(olmo):
    with open_corpus(olmo, read_as=ReadAs(source_dtype="uint32")) as stream:
        assert stream.field("loss_mask").document_count == 4  # which no one has counted yet
        check_masked(stream)
    with Loader(
        olmo, read_as=ReadAs(source_dtype="uint32"), shuffle="sequential", targets=True, batch_size=1, seq_len=8
    ) as loader:
        x, y = next(loader)
        assert x[0].tolist() == IDS[:8].tolist()
        assert y[0].tolist() == [int(token) if kept else -100 for token, kept in zip(IDS[1:9], MASK[1:9], strict=True)]
    with Loader(
        olmo / "token_ids_part_0001.npy", read_as=ReadAs(source_dtype="uint32"), fields=["loss_mask"], **SHAPE
    ) as loader:
        assert next(loader)["loss_mask"].shape == (2, 5)


def test_the_masks_of_olmo_core_are_the_field_loss_mask_when_converted(olmo, tmp_path):
    options = {"source_format": "olmo", "source_dtype": "uint32"}
    convert(olmo, "stream", tmp_path / "st", **options)
    with open_corpus(tmp_path / "st") as stream:
        assert [field.name for field in stream.fields] == ["loss_mask"]
        assert stream.tokens[0:200].tolist() == [*IDS, *(IDS + 1000)]
        assert stream.field("loss_mask").tokens[0:200].tolist() == [*MASK, *MASK]
        assert stream.doc_offsets.tolist() == [0, 40, 100, 140, 200]
    report = convert(olmo, "hdf5", tmp_path / "rows", batch_size=1, seq_len=50, packing="best-fit", **options)
    assert report.left_out == ()
    assert [field.name for field in ShardIndex.load(tmp_path / "rows").meta.fields] == ["loss_mask"]


def test_a_mask_that_does_not_fit_its_ids_is_refused(olmo, tmp_path):
    mask = olmo / "labels_mask_part_0001.npy"
    mask.write_bytes(b"\x01" * 99)
    with pytest.raises(IncompleteError, match=r"part_0001.npy: expected a byte for each of 100 ids, found 99 bytes"):
        Loader(olmo, read_as=ReadAs(source_dtype="uint32"), **SHAPE)
    mask.unlink()
    with pytest.raises(FormatError, match=r"token_ids_part_0001.npy: expected loss_mask"):
        Loader(olmo, read_as=ReadAs(source_dtype="uint32"), **SHAPE)
    MASK.tofile(olmo / "labels_mask_part_0007.npy")
    with pytest.raises(FormatError, match=r"labels_mask_part_0007.npy: is named as a field"):
        Loader(olmo, read_as=ReadAs(source_dtype="uint32"), **SHAPE)
    with pytest.raises(FormatError, match=r"labels_mask_part_0000.npy: is named as a field"):
        convert(olmo, "hdf5", tmp_path / "out", source_format="bin", source_dtype="uint32", **SHAPE)


def test_a_mask_without_documents_ends_in_the_line_that_keeps_it(olmo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for documents in olmo.glob("*.csv.gz"):
        documents.unlink()
    command = ["convert", "oi", "rows", "--source-dtype", "uint32", "--seq-len", 5, "--batch-size", 1]
    message = one_error(run_zb(*command), 2)
    run_zb(*message.rpartition(": zb ")[2].split(), code=0)
    run_zb("convert", "DST", "rows", "--packing", "concat", "--no-shuffle", *command[-4:], code=0)
    with Loader(tmp_path / "rows", targets=True, shuffle="sequential") as loader:
        _, y = next(loader)
        assert y[0].tolist() == [int(t) if kept else -100 for t, kept in zip(IDS[1:5], MASK[1:5], strict=True)]


def test_a_mask_is_not_lost_where_a_token_cuts_documents(olmo, tmp_path):
    for documents in olmo.glob("*.csv.gz"):
        documents.unlink()
    cut = ["convert", olmo, tmp_path / "st", "--from", "olmo", "--source-dtype", "uint32", "--to", "stream"]
    message = one_error(run_zb(*cut, "--boundary-token-id", 139), 2)
    assert "has the field loss_mask, which is left behind" in message
    run_zb(*cut, "--boundary-token-id", 139, "--tokens-only", code=0)
