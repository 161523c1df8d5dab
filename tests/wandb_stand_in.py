"""A server on this machine in place of wandb's. It can disappear in the middle of a run."""

import gzip
import json
import threading
from http.server import ThreadingHTTPServer

from hub_stand_in import Answers

DATA = """{"data": {
    "upsertBucket": {"inserted": true, "bucket": {
        "id": "1", "name": "NAME", "displayName": "n", "config": "{}",
        "historyLineCount": 0, "logLineCount": 0, "eventsLineCount": 0,
        "project": {"id": "1", "name": "p", "entity": {"id": "1", "name": "e"}}
    }},
    "createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []},
    "viewer": {"id": "1", "entity": "e", "username": "u", "email": "u@e", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"features": [], "cliVersionInfo": {"max_cli_version": "99.0.0"}},
    "model": {"bucket": null}
}}"""  # one answer to every question


class Handler(Answers):
    protocol_version = "HTTP/1.1"

    def content(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def answer(self, record):
        if self.server.lost.is_set():
            self.close_connection = True  # without a word
            return
        self.send(200, json.dumps(record).encode(), {"Content-Type": "application/json"})

    def do_GET(self):
        if self.path == "/lose":
            self.answer({})
            self.server.lost.set()

    def do_POST(self):
        content = json.loads(self.content() or "{}")
        if self.path == "/graphql":
            name = (content.get("variables") or {}).get("name") or "n"
            return self.answer(json.loads(DATA.replace("NAME", name)))
        if not self.server.lost.is_set():
            lines = content.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server.history += map(json.loads, lines)
        self.answer({})


class StandIn(ThreadingHTTPServer):
    """`history`: the records that have come. After GET /lose, requests get no answer: their connections are closed."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lost, self.history = threading.Event(), []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self):
        return dict(WANDB_BASE_URL=f"http://127.0.0.1:{self.server_port}", WANDB_API_KEY="a" * 40, NO_PROXY="127.0.0.1")

    def handle_error(self, *args):
        """Clients leave when they like."""

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()
