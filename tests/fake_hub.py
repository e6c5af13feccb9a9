"""A hub on this machine: the few requests of huggingface_hub that a download makes.

It serves repositories from memory, and fails as it is told to.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Files by name, at each commit, and the commits that branches mean."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gguf: dict | None = None


@dataclass
class FakeHub:
    """A server of repositories by id.

    `faults` has what a path that contains its key is answered with: a status and headers. `cuts`
    has after how many bytes the connection breaks, once each, for a file's name. `requests` has
    what was asked.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    faults: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    slow_s: float = 0.0  # between pieces of a file
    requests: list[str] = field(default_factory=list)
    sent: Counter = field(default_factory=Counter)  # bytes by file

    def add(self, repo: str, files: dict[str, bytes], branch: str = "main", **more) -> str:
        """Commits files on a branch, and returns the commit."""
        repository = self.repositories.setdefault(repo, Repository({}, {}, **more))
        commit = hashlib.sha1(repr((repo, branch, sorted(files.items()))).encode()).hexdigest()
        repository.commits[commit] = files
        repository.refs[branch] = commit
        return commit

    def __enter__(self) -> "FakeHub":
        class Handler(BaseHTTPRequestHandler):
            hub = self
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.hub._answer(self)

            def do_HEAD(self):
                self.hub._answer(self)

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

    def _answer(self, handler):
        path = unquote(urlsplit(handler.path).path)
        self.requests.append(f"{handler.command} {path}")
        for part, (status, headers) in self.faults.items():
            if part in path:
                _reply(handler, status, b"{}", headers)
                return
        if path.startswith("/api/models/"):
            self._answer_info(handler, path.removeprefix("/api/models/"))
        else:
            repo, _, rest = path[1:].partition("/resolve/")
            self._answer_file(handler, repo, rest)

    def _answer_info(self, handler, rest):
        repo, _, revision = rest.partition("/revision/")
        if repo not in self.repositories:
            _reply(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        repository = self.repositories[repo]
        commit = repository.refs.get(revision or "main", revision)
        if commit not in repository.commits:
            _reply(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = []
        for name, data in repository.commits[commit].items():
            digest = hashlib.sha256(data).hexdigest()
            lfs = {"size": len(data), "sha256": digest, "pointerSize": 134}
            siblings.append({"rfilename": name, "size": len(data), "blobId": digest, "lfs": lfs})
        info = {"id": repo, "sha": commit, "siblings": siblings}
        if repository.gguf:
            info["gguf"] = repository.gguf
        _reply(handler, 200, json.dumps(info).encode())

    def _answer_file(self, handler, repo, rest):
        repository = self.repositories.get(repo)
        revision, _, name = rest.partition("/")
        commit = repository and repository.refs.get(revision, revision)
        if repository is None or name not in repository.commits.get(commit, {}):
            _reply(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = repository.commits[commit][name]
        handler.send_response(200)
        handler.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        handler.send_header("X-Repo-Commit", commit)
        handler.send_header("X-Linked-Size", str(len(data)))
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        cuts = self.cuts.get(name, [])
        end = cuts.pop(0) if cuts else len(data)
        for start in range(0, end, 65536):
            piece = data[start : min(end, start + 65536)]
            try:
                handler.wfile.write(piece)
            except OSError:  # the client has gone
                break
            self.sent[name] += len(piece)
            time.sleep(self.slow_s)
        if end < len(data):
            handler.wfile.flush()
            handler.close_connection = True


def _reply(handler, status, body, headers=()):
    handler.send_response(status)
    for name, value in dict(headers).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
