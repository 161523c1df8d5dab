"""The few endpoints of the hub by which a repository is made and files are committed to it, on this machine."""

import base64
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
        path = self.path.split("?")[0]
        self.server.requests.append((path, self.headers.get("Authorization")))
        if path.startswith("/api/models/"):
            return self.reply(200, {"id": "me/m", "sha": "0" * 40, "siblings": [], "private": False})
        self.reply(404, {"error": path})

    do_HEAD = do_GET

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
def serve(token):
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address, hub.token = f"http://127.0.0.1:{hub.server_port}", token
    hub.requests, hub.files, hub.created = [], {}, None
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
