"""A server on this machine in place of wandb's. It can disappear in the middle of a run."""

import gzip
import json
import threading
from http.server import ThreadingHTTPServer

from hub_stand_in import Answers


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
            return self.answer(dict(data=self.data(content["query"], content.get("variables") or {})))
        if not self.server.lost.is_set():
            lines = content.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server.history += map(json.loads, lines)
        self.answer({})

    def data(self, query, variables):
        project = dict(id="1", name="p", entity=dict(id="1", name="e"))
        bucket = dict(id="1", name=variables.get("name") or "n", displayName="n", config="{}", project=project)
        return dict(
            upsertBucket=dict(bucket=bucket, inserted=True),
            createRunFiles=dict(runID="1", uploadHeaders=[], files=[]),
            viewer=dict(id="1", entity="e", username="u"),
            serverInfo=dict(features=[]),
            model=dict(bucket=None),
        )


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
