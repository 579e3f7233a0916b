"""A server that speaks as llama-server does (llama.cpp of 2026-08), as far as it is used.

It has /health, /props, /completion and /v1/embeddings.

Run as a program it takes llama-server's options; it notes them and every request in the file that LOG names. Answers
wait for each other, as slots of one batch do: no token comes before all requests have begun. What MODE says
goes wrong: `short`, `refuse`, `words`, `quiet`, `half`.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODE = os.environ.get("MODE", "")
STEP_S = 0.005  # of the model that it does not have: a reader that is late for one token is not late for forty
words = [word for word in sys.argv[1:] if word != "--embedding"]
given = dict(zip(words[::2], words[1::2], strict=False))


def note(what: Any) -> None:
    with open(os.environ["LOG"], "a") as file:
        file.write(json.dumps(what) + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    decode_prompts: threading.Barrier
    looks = 0

    def log_message(self, *args: Any) -> None:
        pass

    def reply(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        Handler.looks += 1
        if self.path == "/props":
            self.reply({"build_info": "b7031-0c1e570"})
        elif Handler.looks == 1:
            self.reply({"error": {"message": "Loading model", "code": 503}}, 503)
        else:
            self.reply({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note({"path": self.path, **body})
        if MODE == "refuse":
            return self.reply({"error": {"message": "no slot"}}, 400)
        if self.path == "/v1/embeddings":
            row = base64.b64encode(struct.pack("<2f", 0.6, 0.8)).decode()
            return self.reply({"data": [{"index": i, "embedding": row} for i in range(len(body["input"]))]})
        if MODE == "quiet":
            threading.Event().wait()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = body["n_predict"] - (MODE == "short")
        for n in range(1, tokens + 1):
            self.decode_prompts.wait()
            time.sleep(STEP_S)
            self.event({"content": "x", "tokens": [7], "stop": False, "tokens_predicted": n})
        if MODE == "half":
            self.close_connection = True
            return None
        self.event({"content": "", "tokens": [], "stop": True, "tokens_predicted": tokens, "timings": {}})
        self.wfile.write(b"0\r\n\r\n")
        return None

    def event(self, value: Any) -> None:
        """In two chunks, to be hard on the reader."""
        text = b"data: hello\n\n" if MODE == "words" else b"data: " + json.dumps(value).encode() + b"\n\n"
        for part in (text[:9], text[9:]):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))


if __name__ == "__main__":
    note({"options": {key: value for key, value in given.items() if key != "--port"}})
    if MODE == "crash":
        sys.exit("cannot load the model")
    Handler.decode_prompts = threading.Barrier(int(given["-np"]))
    ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
