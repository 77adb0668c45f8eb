"""Servers that run in processes of their own, and buckets of S3."""

import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager


def wait_for(port):
    for _ in range(500):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)
    raise TimeoutError(f"nothing listens on {port}")


@contextmanager
def serving(port, *command):
    """Run a server until it is not needed any more."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield
    finally:
        process.terminate()
        process.wait(10)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def serving_s3():
    """Serve S3, and give the port."""
    port = free_port()
    with serving(port, sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)):
        yield port


def empty_bucket(port, url):
    """Make an empty bucket "bucket"; return the variables by which it is reached at a URL."""
    for path, method in (("moto-api/reset", "POST"), ("bucket", "PUT")):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", method=method)
        urllib.request.urlopen(request).close()
    facts = {"ENDPOINT": url, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}
    return {f"AWS_{name}": value for name, value in {**facts, "REGION": "us-east-1"}.items()}


def put_files(folder, url):
    """Put the files of a folder into a bucket; return their URL."""
    import obstore  # an extra, which most tests do without

    store = obstore.store.from_url(url)
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(store, str(path.relative_to(folder)), path)
    return url
