"""A hub on this machine: what huggingface_hub asks, answered of files in memory."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http


class FakeHub:
    """A server of repositories, as a context.

    `faults`: the status and the error code with which a path that contains the key is answered.
    `requests`: the method and path of each request.
    """

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}  # by repository and commit
        self.newest: dict[str, str] = {}
        self.faults: dict[str, tuple[int, str]] = {}
        self.requests: list[str] = []

    def add(self, repo: str, files: dict[str, bytes]) -> str:
        """Commits files on the branch main, and returns the commit."""
        commit = hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest()
        self.commits[repo, commit] = files
        self.newest[repo] = commit
        return commit

    def serve_to(self, monkeypatch, cache: Path) -> None:
        """Makes huggingface_hub ask this hub, with a cache of its own and without waits."""
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        impatient = SimpleNamespace(time=file_download.time.time, sleep=lambda seconds: None)
        for library in (file_download, _http):
            monkeypatch.setattr(library, "time", impatient)

    def __enter__(self) -> "FakeHub":
        class Handler(BaseHTTPRequestHandler):
            hub = self

            def do_GET(self):
                path = unquote(urlsplit(self.path).path)
                self.hub.requests.append(f"{self.command} {path}")
                status, headers, body = self.hub._answer(path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def do_HEAD(self):
                self.do_GET()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        _http.close_session()

    def _answer(self, path) -> tuple[int, dict[str, str], bytes]:
        for part, (status, code) in self.faults.items():
            if part in path:
                return status, {"X-Error-Code": code}, b"{}"
        owner, name, kind, revision, *rest = (
            path.removeprefix("/api/models").strip("/") + "/revision/main"
        ).split("/")
        repo = f"{owner}/{name}"
        if repo not in self.newest:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = self.newest[repo] if revision == "main" else revision
        files = self.commits.get((repo, commit))
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        listed = []
        for file, data in files.items():
            oid = hashlib.sha1(data).hexdigest()
            listed.append({"type": "file", "path": file, "size": len(data), "oid": oid})
        if kind == "tree":
            return 200, {}, json.dumps(listed).encode()
        if kind == "revision":
            siblings = [{"rfilename": file} for file in files]
            return 200, {}, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
        data = files["/".join(rest[:-2])]
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        return 200, {"ETag": etag, "X-Repo-Commit": commit}, data
