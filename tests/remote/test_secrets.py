"""Passwords and signatures in URLs: the server gets them, and nothing that is printed or stored has them."""

import http.server
import json
import pickle
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
from commandline import run_zb
from contract import random_tokens

from zb_hdf5 import Loader, ZbError, convert, load_tokenizer, open_reader
from zb_hdf5.files.objects import RemoteObject
from zb_hdf5.files.paths import RemotePath, any_path
from zb_hdf5.files.urls import without_secrets

SECRET = "S3CR3TPW"
TOKENS = random_tokens(30, 4, 256)


@pytest.mark.parametrize(("text", "expected"), [
    ("http://user:pw@host/a", "http://***@host/a"),
    ("https://token@host:8080/a.h5", "https://***@host:8080/a.h5"),
    ("http://user:p@w@host/a", "http://***@host/a"),
    ("s3://key:secret@bucket/a", "s3://***@bucket/a"),
    ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net/a"),
    ("https://host/a.h5?X-Amz-Signature=1&sig=2", "https://host/a.h5?***"),
    ("https://h/{:05d}.parquet?sig=1", "https://h/{:05d}.parquet?***"),
    ("found http://u:p@h/a and http://v:q@h/b (see ftp://x:y@z)", "found http://***@h/a and http://***@h/b (see ftp://***@z)"),
    ("s3://bucket/train", "s3://bucket/train"),
    ("user@host:/a?b", "user@host:/a?b"),
    ("http://user:a/pw@host/a", "http://***@host/a"),
    ("http://user:a pw@host/a", "http://***@host/a"),
    ("s3://key:sec/re?t#+@bucket/a: denied", "s3://***@bucket/a: denied"),
    ("http:/user:pw@host/a", "http:/***@host/a"),
    ("https://host/a.h5#token: no", "https://host/a.h5#***: no"),
    ("http://host:8080/a/b@2.h5", "http://host:8080/a/b@2.h5"),
    ("http://[::1]:80/a?sig=1, or b", "http://[::1]:80/a?***, or b"),
    ("https://host?sig=1", "https://host?***"),
    ("http://host:80: ask me@host", "http://host:80: ask me@host"),
])  # fmt: skip
def test_all_that_may_be_secret_is_hidden(text, expected):
    assert without_secrets(text) == expected


def test_the_text_of_a_path_has_no_password_and_its_parts_go_on_with_it():
    url = f"http://user:{SECRET}@host/store"
    path = any_path(url)
    for each in (path, path / "x.h5", path.parent, path.with_name("y"), pickle.loads(pickle.dumps(path))):
        assert isinstance(each, RemotePath)
        assert SECRET not in f"{each}{each!r}{each.as_posix()}{json.dumps(str(each))}"
        assert f"user:{SECRET}@host" in each.url
    assert (path / "x.h5").url == f"{url}/x.h5"
    for plain in ("s3://bucket/train-h5", "http://host/a/b.h5", "abfss://c@account/x"):
        assert (str(any_path(plain)), any_path(plain).url) == (plain, plain)  # a cache goes on


@pytest.fixture
def secret_store(private, write_store):
    """Return the URL of a store that needs the password in it."""
    write_store(private.folder / "store", TOKENS, (11,))
    return f"{private.url}/store"


def require_no_secret(folder, *texts):
    for text in texts:
        assert SECRET not in text
    for path in folder.rglob("*"):
        assert SECRET not in path.name
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


#: The first ones do their work, the others are refused.
COMMANDS = [
    ("info", "URL"),
    ("verify", "URL"),
    ("show", "URL"),
    ("which", "URL", "--batch", 1),
    ("report", "URL", "-o", "page.html"),
    ("doctor", "URL"),
    ("info", "URL/shard-00000.h5"),
    ("stage", "URL", "staged", "--batch-size", 4),
    ("convert", "URL", "out.h5", "--batch-size", 4, "--seq-len", 256),
    ("fetch", "URL/shard-{:05d}.h5", "-n", 1, "-o", "fetched"),
    ("cache", "ls", "cache"),
    ("info", "URL/nothing.h5"),
    ("info", "URL/nowhere"),
    ("info", "URL?X-Amz-Signature=S3CR3TPW"),
    ("verify", "URL/nowhere"),
    ("repair", "URL"),
    ("index", "rebuild", "URL"),
    ("convert", "URL/nowhere", "other"),
    ("convert", "URL", "stream", "--to", "megatron"),
    ("fetch", "URL/{:05d}.bin", "-n", 1, "-o", "fetched"),
    ("fetch", "URL/x.bin", "-n", 1, "-o", "fetched"),
    ("fetch", "URL/{:05d}.bin?sig=S3CR3TPW", "-n", 1, "-o", "fetched"),
    ("info", "http:/user:S3CR3TPW@host/x"),
]
NUM_DONE = COMMANDS.index(("cache", "ls", "cache")) + 1


@pytest.mark.parametrize("is_json", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["text", "json"])
def test_no_command_prints_or_stores_a_password(is_json, secret_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Loader(secret_store, cache="cache") as loader:
        next(iter(loader))
    for number, command in enumerate(COMMANDS):
        words = [str(word).replace("URL", secret_store) for word in command]
        done = run_zb(*words, *(["--json"] if is_json else []))
        assert (done.exit_code == 0) == (number < NUM_DONE), done.output
        require_no_secret(tmp_path, done.output, done.stderr)
    assert "***@" in next((tmp_path / "cache").glob("zb-cache-*/source")).read_text()


def test_loaders_read_with_the_password_also_in_other_processes_and_do_not_show_it(secret_store, tmp_path):
    with (
        Loader(secret_store, shuffle="sequential", cache=tmp_path / "cache") as loader,
        open_reader(secret_store) as reader,
    ):
        shown = f"{loader!r}{loader}{reader!r}{reader.path}{json.dumps(loader.state_dict())}"
        copy = pickle.loads(pickle.dumps(loader))
        np.testing.assert_array_equal(np.concatenate([step.numpy() for step in copy]), TOKENS.reshape(-1, 256))
        copy.close()
        convert(secret_store, "batch", tmp_path / "copy", workers=2)
    require_no_secret(tmp_path, shown)


def test_no_traceback_has_a_password(secret_store):
    for read, url in (
        (open_reader, f"{secret_store}/nothing.h5"),
        (open_reader, f"{secret_store}/nowhere"),
        (open_reader, f"{secret_store}/x.h5?sig={SECRET}"),
        (open_reader, f"gopher://u:{SECRET}@h/x"),
        (open_reader, {"path": f"http://u:{SECRET}@h/x"}),
        (open_reader, Path(f"http://u:{SECRET}@h/x")),
        (Loader, [f"http://u:{SECRET * 12}@h/x"]),
        (load_tokenizer, f"hf:http://u:{SECRET}@h/x"),
        (load_tokenizer, f"http://u:{SECRET}@h/x"),
    ):
        with pytest.raises((ZbError, OSError)) as caught:
            read(url)
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_password_is_asked_for_in_the_words_of_a_web_server(private, secret_store):
    for user in ("", f"user:{SECRET}@", f"{SECRET}@"):
        url = f"{private.open_url.replace('//', f'//{user}')}/store"
        with pytest.raises(ZbError, match="access denied: expected a user and a password that may read it") as caught:
            open_reader(url)
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_note_of_a_store_has_no_password(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(64))
    url = f"http://u:{SECRET}@h/x"
    convert(tmp_path / "a.npy", "hdf5", tmp_path / "out", batch_size=2, seq_len=8, note=f"copied from {url}")
    require_no_secret(tmp_path, run_zb("info", tmp_path / "out", code=0).output)


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Sends each reader on to another place."""

    def do_GET(self):
        scheme = self.path.split("/")[1]
        self.send_response(302)
        self.send_header("Location", f"{scheme}://host/x?sig={SECRET}")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("scheme", ["ftp", "gopher"])
def test_an_answer_that_leads_elsewhere_is_named(scheme):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            with pytest.raises(ZbError, match="sends readers on to a URL that is refused") as caught:
                RemoteObject(f"http://u:{SECRET}@127.0.0.1:{server.server_port}/{scheme}/x.h5").num_bytes  # noqa: B018
        finally:
            server.shutdown()
            serving.join()
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert "ALLOW_HTTP" not in str(caught.value)
