"""Real servers: nginx and moto, and a proxy in front of them that does harm."""

import gc
import http.client
import http.server
import os
import shutil
import socket
import threading
import time
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from descriptors import open_files
from servers import empty_bucket, free_port, put_files, serving, serving_s3

obstore = pytest.importorskip("obstore")

#: Seconds that a read may take in a test, and its attempts.
LIMIT_S, ATTEMPTS = "12", 5


@pytest.fixture(scope="session", autouse=True)
def proxies():
    """Return two proxies, and start the runtime of the library: both stay open to the end of the session."""
    obstore.put(obstore.store.MemoryStore(), "a", b"a")
    made = [Proxy() for _ in range(2)]
    for proxy in made:
        threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    for proxy in made:
        proxy.shutdown()
        proxy.server_close()


@pytest.fixture(autouse=True)
def _connections_end(monkeypatch):
    """Retry for a short time only, and wait until the sockets of closed readers are closed."""
    monkeypatch.setenv("ZB_REMOTE_TIMEOUT", LIMIT_S)
    monkeypatch.setattr("zb_hdf5.files.objects.ATTEMPTS", ATTEMPTS)
    before = open_files()
    yield
    for attempt in range(200):
        if not open_files().keys() - before.keys():
            break
        if attempt == 5:
            gc.collect()  # the traceback of an expected error holds its reader
        time.sleep(0.02)


#: Who may read the folder `private` of the nginx: the password has characters that a URL spells in another way.
USER, PASSWORD = "user", "S3CR3TPW/é@%"


@pytest.fixture(scope="session")
def www(tmp_path_factory):
    """Return (folder, port) of an nginx that serves the folder; what is below `private/` needs `USER`."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("needs nginx (Debian: nginx-light)")
    place = tmp_path_factory.mktemp("nginx")
    port = free_port()
    folder = place / "www"
    folder.mkdir()
    os.chmod(place, 0o755)
    user = "user root;" if os.geteuid() == 0 else ""
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{name}_temp_path {place}/{name};" for name in names)
    (place / "users").write_text(f"{USER}:{{PLAIN}}{PASSWORD}\n")
    private = f"location /private/ {{ auth_basic private; auth_basic_user_file {place}/users; }}"
    (place / "nginx.conf").write_text(
        f"{user} daemon off; pid {place}/pid; error_log {place}/error.log; events {{}} "
        f"http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{port}; root {folder}; {private} }} }}"
    )
    with serving(port, nginx, "-p", place, "-c", place / "nginx.conf"):
        yield folder, port


class Harm(http.server.BaseHTTPRequestHandler):
    """Forwards a request, or does to it what the proxy's `fault` says."""

    protocol_version = "HTTP/1.1"
    #: Head and body are sent at once: else the client's kernel waits 40 ms. They are sent after `_handle` has ended:
    #: else a client that has the whole body asks for the next one while this one is still counted as under way.
    wbufsize, disable_nagle_algorithm = 1 << 20, True

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def _handle(self):
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with proxy.lock:
            number = len(proxy.requests)
            name = self.path.rsplit("/", 1)[1].partition("?")[0]
            proxy.requests.append((self.command, name, self.headers.get("Range")))
            proxy.under_way += 1
            proxy.most_under_way = max(proxy.most_under_way, proxy.under_way)
        try:
            self._answer(proxy.fault(number, *proxy.requests[number]) or {}, body)
        finally:
            with proxy.lock:
                proxy.under_way -= 1

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _answer(self, fault, body):
        time.sleep(fault.get("wait", 0))
        if fault.get("hang_up"):
            self.close_connection = True
            return
        if "status" in fault:
            status = fault["status"]
            headers = {}
            data = fault.get("body", b"")
        else:
            status, headers, data = self._forward(body)
            fault.get("when_done", lambda: None)()
        headers |= {"Content-Length": str(len(data))} if self.command != "HEAD" else {}
        changed = fault.get("headers", {})  # None: there is no such header
        headers = {k: v for k, v in headers.items() if k.lower() not in {name.lower() for name in changed}} | changed
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: fault.get("cut", len(data))])
            if "then" in fault:
                self.wfile.flush()
                fault["then"](self)
        if "cut" in fault:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _forward(self, body):
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=30)
        try:
            headers = {k: v for k, v in self.headers.items() if k != "Connection"}
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            data = answer.read()
            skipped = {"connection", "transfer-encoding", "server", "date"}
            skipped |= set() if self.command == "HEAD" else {"content-length"}
            return answer.status, {k: v for k, v in answer.getheaders() if k.lower() not in skipped}, data
        finally:
            upstream.close()

    def log_message(self, *args):
        pass


class Proxy(http.server.ThreadingHTTPServer):
    """Attributes: `requests`, `most_under_way`, and `fault(number, method, name, range) -> what to do, or None`."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Harm)
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.reset(0)

    def reset(self, upstream=None):
        self.upstream = self.upstream if upstream is None else upstream
        self.requests = []
        self.under_way = 0
        self.most_under_way = 0
        self.fault = lambda number, method, name, span: None

    def handle_error(self, request, client_address):
        pass


@pytest.fixture
def served(www):
    """Return the folder and the url of nginx alone, which is faster than the proxy."""
    yield SimpleNamespace(folder=www[0], url=f"http://127.0.0.1:{www[1]}")
    for path in www[0].iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def private(served):
    """Return a folder of nginx that needs a password, its url with that, and without."""
    folder = served.folder / "private"
    folder.mkdir()
    url = f"{served.url}/private"
    return SimpleNamespace(folder=folder, url=url.replace("//", f"//{USER}:{quote(PASSWORD, safe='')}@"), open_url=url)


@pytest.fixture
def web(served, www, proxies):
    """Return the proxy, which serves the files of its folder at its url."""
    proxies[0].reset(www[1])
    proxies[0].folder = served.folder
    return proxies[0]


@pytest.fixture(scope="session")
def moto():
    """Return the port of a server that speaks S3."""
    pytest.importorskip("moto.server")
    with serving_s3() as port:
        yield port


@pytest.fixture
def s3(moto, proxies, monkeypatch):
    """Return the proxy of a server that speaks S3, with an empty bucket "bucket" and its credentials."""
    proxy = proxies[1]
    proxy.reset(moto)
    for name, value in empty_bucket(moto, proxy.url).items():
        monkeypatch.setenv(name, value)
    return proxy


@pytest.fixture
def upload():
    """Return `upload(folder, url)`: put the files of a folder into a bucket."""
    return put_files
