"""A hub on this machine: the few requests of huggingface_hub that a download makes.

It serves repositories from memory, and fails in the ways that a network and the real hub do.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


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
    has after how many bytes the connection breaks, once each, for a file's name. `silent` is
    what a request contains that is never answered. `requests` has what was asked.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    faults: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    silent: str = ""
    signature: str = ""  # if set, weights are at a signed address of another host
    tokens_at_cdn: int = 0
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

        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler):
        path = unquote(urlsplit(handler.path).path)
        asked_range = handler.headers.get("Range", "")
        self.requests.append(f"{handler.command} {path} {asked_range}".strip())
        if self.silent and self.silent in f"{handler.command} {path}":
            self._closing.wait(30)
            handler.close_connection = True
            return
        for part, (status, headers) in self.faults.items():
            if part in path:
                _reply(handler, status, b"{}", headers)
                return
        if path == "/api/models":
            query = parse_qs(urlsplit(handler.path).query)
            author, search = query.get("author", [""])[0], query.get("search", [""])[0].lower()
            ids = [id for id in self.repositories if id.startswith(author) and search in id.lower()]
            _reply(handler, 200, json.dumps([{"id": id} for id in ids]).encode())
        elif path.startswith("/api/models/"):
            self._answer_info(handler, path.removeprefix("/api/models/"))
        elif path.startswith("/cdn/"):
            self.tokens_at_cdn += "Authorization" in handler.headers
            repo, _, rest = path.removeprefix("/cdn/").partition("/resolve/")
            self._answer_file(handler, repo, rest)
        else:
            repo, _, rest = path[1:].partition("/resolve/")
            if self.signature and rest.endswith(".safetensors"):
                self._redirect(handler, repo, rest)
            else:
                self._answer_file(handler, repo, rest)

    def _redirect(self, handler, repo, rest):
        commit, _, name = rest.partition("/")
        data = self.repositories[repo].commits[commit][name]
        place = f"/cdn/{repo}/resolve/{rest}?X-Signature={self.signature}"
        headers = {
            "Location": self.url.replace("127.0.0.1", "localhost") + place,
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
        }
        _reply(handler, 302, b"", headers)

    def _answer_info(self, handler, rest):
        repo, _, revision = rest.partition("/revision/")
        repo, slash, _ = repo.partition("/refs")
        if repo not in self.repositories:
            _reply(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        repository = self.repositories[repo]
        if slash:
            branches = [{"name": name} for name in repository.refs]
            _reply(handler, 200, json.dumps({"branches": branches, "tags": []}).encode())
            return
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
        begin = int(handler.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        handler.send_response(206 if begin else 200)
        handler.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        handler.send_header("X-Repo-Commit", commit)
        handler.send_header("X-Linked-Size", str(len(data)))
        handler.send_header("Content-Length", str(len(data) - begin))
        if begin:
            handler.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        handler.end_headers()
        if handler.command == "HEAD":
            return
        cuts = self.cuts.get(name, [])
        end = min(len(data), begin + cuts.pop(0)) if cuts else len(data)
        for start in range(begin, end, 65536):
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
