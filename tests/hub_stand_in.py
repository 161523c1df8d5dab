"""A stand-in for the Hugging Face hub on this machine, which serves files."""

import hashlib
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answers(BaseHTTPRequestHandler):
    def send(self, status, data, headers={}):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


class Handler(Answers):
    def do_GET(self):
        """Send a file, or call `hub.fault`. Large files come from another host, as from the real hub."""
        hub = self.server
        path = self.path.split("?")[0]
        name = path.removeprefix("/cdn")
        if name not in hub.served:
            return self.send(404, b"{}", {"Content-Type": "application/json"})
        data = hub.served[name]
        sha256 = hub.sha256.get(name, hashlib.sha256(data).hexdigest())
        headers = {"ETag": f'"{sha256}"', "X-Linked-Size": str(len(data)), "X-Repo-Commit": "1" * 40}
        if name == path and name.endswith(".bin"):
            headers |= {"X-Linked-Etag": f'"{sha256}"', "Location": f"http://localhost:{hub.server_port}/cdn{path}"}
            return self.send(302, b"", headers)
        if self.command == "GET":
            hub.fetched.append(name.rsplit("/", 1)[1])
            if hub.faults:
                hub.faults -= 1
                return hub.fault(self, data)
        start = int(self.headers.get("Range", "bytes=0-")[len("bytes=") : -1])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send(206 if start else 200, data[start:], headers)

    do_HEAD = do_GET


@contextmanager
def serve():
    """Run the hub. `served` and `sha256` hold files and wrong checksums by path; `fetched` lists the downloads.

    `fault` replaces the next `faults` answers to GET.
    """
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{hub.server_port}"
    hub.served, hub.sha256, hub.fetched = {}, {}, []
    hub.faults = 0
    threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
