"""A stand-in for the Hugging Face hub on this machine: makes repositories, takes commits, and serves files."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        hub, path = self.server, self.path.split("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.requests.append((path, self.headers.get("Authorization")))
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.reply(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            hub.created = json.loads(body)
            name = f"{hub.created.get('organization', 'me')}/{hub.created['name']}"
            return self.reply(200, {"url": f"{hub.address}/{name}"})
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self.reply(200, {"files": files})
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.reply(200, {"commitUrl": f"{hub.address}/me/m/commit/{'1' * 40}", "commitOid": "1" * 40})
        self.reply(404, {"error": path})

    def do_GET(self):
        hub, path = self.server, self.path.split("?")[0]
        if path.removeprefix("/cdn") in hub.served:
            return self.serve(path)
        hub.requests.append((path, self.headers.get("Authorization")))
        if path.startswith("/api/models/"):
            return self.reply(200, {"id": "me/m", "sha": "0" * 40, "siblings": [], "private": False})
        self.reply(404, {"error": path})

    do_HEAD = do_GET

    def serve(self, path):
        """Send a file, from another host if it is a large one, as the hub does; or do what `hub.fault` does instead."""
        hub, name = self.server, path.removeprefix("/cdn")
        data, fetched = hub.served[name], self.command == "GET"
        sha256 = hub.sha256.get(name, hashlib.sha256(data).hexdigest())
        headers = {"ETag": f'"{sha256}"', "X-Linked-Size": str(len(data)), "X-Repo-Commit": "1" * 40}
        if name == path and name.endswith(".bin"):
            headers |= {"X-Linked-Etag": f'"{sha256}"', "Location": f"http://localhost:{hub.server_port}/cdn{path}"}
            return self.send(302, b"", headers)
        hub.fetched += [name.rsplit("/", 1)[1]] if fetched else []
        if fetched and hub.faults:
            hub.faults -= 1
            return hub.fault(self, data)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        if start:
            headers |= {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        self.send(206 if start else 200, data[start:], headers)

    def send(self, status, data, headers):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", len(data))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def serve(token=None):
    """Run the hub. `served` has its files by path, `sha256` has wrong checksums, `fault` replaces the next `faults`
    answers to GET; `requests`, `fetched`, `files` and `created` tell what came."""
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address, hub.token = f"http://127.0.0.1:{hub.server_port}", token
    hub.requests, hub.files, hub.created = [], {}, None
    hub.served, hub.sha256, hub.fetched, hub.fault, hub.faults = {}, {}, [], None, 0
    threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
