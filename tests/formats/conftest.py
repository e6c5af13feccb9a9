"""A hub on this machine: what huggingface_hub asks, answered of files in memory."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http


class FakeHub:
    """Repositories; a/gated has a licence that nobody has accepted.

    `requests`: the method and path of each request.
    """

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}  # by repository and commit
        self.newest: dict[str, str] = {}
        self.requests: list[str] = []

    def add(self, repo: str, files: dict[str, bytes]) -> str:
        """Commits files on the branch main, and returns the commit."""
        commit = hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest()
        self.commits[repo, commit] = files
        self.newest[repo] = commit
        return commit

    def answer(self, path) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body of what is asked for."""
        if "a/gated/resolve" in path:
            return 401, {"X-Error-Code": "GatedRepo"}, b"{}"
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
        if kind == "tree":
            listed = []
            for file, data in files.items():
                listed.append({"type": "file", "path": file, "size": len(data), "oid": sha(data)})
            return 200, {}, json.dumps(listed).encode()
        if kind == "revision":
            siblings = [{"rfilename": file} for file in files]
            return 200, {}, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
        data = files["/".join(rest[:-2])]
        return 200, {"ETag": f'"{sha(data)}"', "X-Repo-Commit": commit}, data


def sha(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that huggingface_hub asks, with an empty cache and without waits."""
    fake = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            fake.requests.append(f"{self.command} {path}")
            status, headers, body = fake.answer(path)
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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    impatient = SimpleNamespace(time=file_download.time.time, sleep=lambda seconds: None)
    for library in (file_download, _http):
        monkeypatch.setattr(library, "time", impatient)
    monkeypatch.setenv("HF_TOKEN", "hf_a-token-that-no-message-has")
    monkeypatch.chdir(tmp_path)
    yield fake
    server.shutdown()
    server.server_close()
    _http.close_session()
