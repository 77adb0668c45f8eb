"""The pages about buckets run as they stand: the tutorial with its own server, the others with these."""

import contextlib
import json
import re
import urllib.request

import numpy as np
import pytest
from modules import ROOT
from pages import TEXT, ran, run_page, untagged_in, variables_in
from processes import environment, python

from zb_hdf5 import HDF5ShardWriter, Loader, convert

PAGE = ROOT / "docs" / "tutorials" / "buckets.md"


@pytest.mark.slow
def test_the_tutorial_of_buckets_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("moto")
    text = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"AWS_\w+", text):  # the page sets them
        monkeypatch.setenv(name, "")
    run_page(text, {"__name__": "__main__"}, capsys)


@pytest.fixture
def lines_of_page(tmp_path, monkeypatch, served, upload, s3):
    """Return the lines of the page, in a folder with the files that they name, beside two buckets with stores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "run").mkdir()
    # 64 ranks take 2,048 records in a step
    np.save("tokens/0.npy", np.random.default_rng(3).integers(0, 50_000, (2112, 2048), dtype=np.uint16))
    convert("tokens", "hdf5", "train-h5", seq_len=2048)
    upload(tmp_path / "train-h5", "s3://bucket/train-h5")
    with Loader("train-h5", seed=42, batch_size=32, rank=8, world_size=64) as loader:
        (tmp_path / "run" / "loader.json").write_text(json.dumps(loader.state_dict()))
    (served.folder / "bucket").mkdir()
    with HDF5ShardWriter(tmp_path / "0.h5", dtype="uint16") as writer:
        writer.write_document(np.arange(2048 * 33) % 50_000)
    convert(tmp_path / "0.h5", "stream", served.folder / "bucket" / "stream")
    account = {"gcs_base_url": served.url, "disable_oauth": True, "client_email": "", "private_key_id": ""}
    account |= {"private_key": ""}
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    return [line for block in untagged_in(TEXT["remote.md"]) for line in block.splitlines()]


@pytest.mark.slow
def test_the_lines_of_the_page_of_buckets_run(lines_of_page, s3, moto, monkeypatch):
    """The server of the page is the one of this machine."""
    left = []
    for line in lines_of_page:
        if line.startswith("zb "):
            if line.startswith("zb convert"):
                emptied(moto)
            ran([line])
        elif line.startswith("export "):
            for name, value in variables_in(line).items():
                monkeypatch.setenv(name, {"http://minio.cluster:9000": s3.url, "...": "test"}.get(value, value))
        elif line.startswith(("loader = ", "windows = ")):
            names = {"Loader": Loader}
            exec(line, names)
            with contextlib.closing(names[line.partition(" ")[0]]) as loader:
                next(loader)
        else:
            left.append(line)
    # it needs an account of AWS
    assert left == ['eval "$(aws configure export-credentials --profile NAME --format env)"']


def emptied(moto):
    for url, method in (("moto-api/reset", "POST"), ("bucket", "PUT")):
        request = urllib.request.Request(f"http://127.0.0.1:{moto}/{url}", method=method)
        urllib.request.urlopen(request).close()


def test_a_server_without_tls_is_read_after_the_line_of_the_page_of_errors(s3, upload, tmp_path, monkeypatch):
    np.save(tmp_path / "tokens.npy", np.zeros((64, 16), np.uint16))
    convert(tmp_path / "tokens.npy", "hdf5", tmp_path / "train-h5")
    upload(tmp_path / "train-h5", "s3://bucket/train-h5")
    _, section = TEXT["errors.md"].split("its server has no TLS: export …ALLOW_HTTP=true to read it so")
    line = untagged_in(section)[0]
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    program = "from zb_hdf5.commands.zb import zb; zb()"  # what is exported, the next program has
    failed = python(program, "info", "s3://bucket/train-h5")
    assert "its server has no TLS: export AWS_ALLOW_HTTP=true to read it so" in failed.stderr
    done = python(program, "info", "s3://bucket/train-h5", env=environment(**variables_in(line)))
    assert done.returncode == 0, done.stderr
