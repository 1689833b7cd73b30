"""What is the least a server must answer so that huggingface_hub can push to it and load from it over real HTTP?

`visited_hub` lets huggingface_hub of this very process talk to it, and fail as a test orders.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
import types
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import huggingface_hub
import yaml

WRITE_TOKEN = "hf_localwritetoken"
READ_TOKEN = "hf_localreadtoken"
OWNER = "someone"


@dataclass
class Repository:
    private: bool = False
    commits: list = field(default_factory=lambda: [("0" * 40, {})])  # (sha, {path: bytes}), oldest first
    branches: dict = field(default_factory=lambda: {"main": 0})  # name -> position in commits
    uploads: list = field(default_factory=list)  # the paths that each commit brought

    def at(self, revision):
        """(sha, files) of a branch name or a commit; None when there is no such revision."""
        if revision in self.branches:
            return self.commits[self.branches[revision]]
        return next((commit for commit in self.commits if commit[0] == revision), None)

    def add(self, changed, branch="main"):
        files = {**self.at(branch)[1], **changed}
        content = "".join(f"{path}{blob_id(data)}" for path, data in sorted(files.items()))
        sha = hashlib.sha1(f"{len(self.commits)}{content}".encode()).hexdigest()
        self.commits.append((sha, files))
        self.branches[branch] = len(self.commits) - 1
        self.uploads.append(sorted(changed))
        return sha


@dataclass
class LocalHub:
    url: str = ""
    repositories: dict = field(default_factory=dict)
    requests: list = field(default_factory=list)  # "METHOD /path", as they came
    blobs: dict = field(default_factory=dict)  # sha256 of a large file -> its bytes
    failures: list = field(default_factory=list)  # what `fail` ordered
    sent_bytes: int = 0  # of datasets' files
    pauses: list = field(default_factory=list)  # seconds that a visitor waited

    def files(self, repo_id, revision="main"):
        return self.repositories[repo_id].at(revision)[1]

    def fail(self, request, status, headers=None, times=1):
        """Answers the next `times` requests that match the pattern so. Status "drop": reads 90% and hangs up."""
        self.failures += [(re.compile(request), status, headers or {})] * times

    def ordered(self, request):
        """(status, headers) of the first failure that was ordered for such a request, or None."""
        for number, (pattern, status, headers) in enumerate(self.failures):
            if pattern.fullmatch(request):
                del self.failures[number]
                return status, headers
        return None


class HubError(Exception):
    """An answer that is not 200: (status, X-Error-Code or "", words, headers)."""


def blob_id(data):
    """Git's name for a file's content, which the Hub uses as ETag."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *args):
        """Keep pytest's output clean."""

    def handle_request(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        status, headers = self.hub.ordered(f"{self.command} {path}") or (None, {})
        if status == "drop":
            self.rfile.read(int(self.headers.get("Content-Length") or 0) * 9 // 10)
            self.close_connection = True
            return None
        data = self._body()
        try:
            if status is not None:
                raise HubError(status, "", "the test asked for this failure", headers)
            for pattern, answer in ROUTES:
                if match := re.fullmatch(pattern, f"{self.command} {path}"):
                    named = {name: value for name, value in match.groupdict().items() if value is not None}
                    return answer(self, data, **named)
            raise HubError(404, "", f"no such endpoint here: {self.command} {path}", {})
        except HubError as error:
            status, code, words, headers = error.args
            named = {"X-Error-Code": code} if code else {}
            self._send(json.dumps({"error": words}).encode(), status, {"X-Error-Message": words, **named, **headers})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def _body(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, body, status=200, headers=None):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value, status=200):
        self._send(json.dumps(value).encode(), status)

    def _token(self):
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _require_write(self):
        if self._token() not in (WRITE_TOKEN, READ_TOKEN):
            raise HubError(401, "", "Invalid username or password.", {})
        if self._token() == READ_TOKEN:
            raise HubError(403, "", "Forbidden: this token may only read.", {})

    def _repository(self, repo_id):
        """As on the Hub, a private repository looks missing to those who may not read it."""
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and self._token() not in (WRITE_TOKEN, READ_TOKEN)):
            raise HubError(404 if self._token() else 401, "RepoNotFound", "Repository not found", {})
        return repository

    def _commit_at(self, repo_id, revision):
        commit = self._repository(repo_id).at(revision)
        if commit is None:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}", {})
        return commit

    def whoami(self, data):
        if self._token() not in (WRITE_TOKEN, READ_TOKEN):
            raise HubError(401, "", "Invalid username or password.", {})
        role = "write" if self._token() == WRITE_TOKEN else "read"
        self._json({"type": "user", "name": OWNER, "orgs": [], "auth": {"accessToken": {"role": role}}})

    def may_write(self, data, repo_id):
        self._repository(repo_id)
        self._require_write()
        self._json({})

    def create(self, data):
        self._require_write()
        asked = json.loads(data)
        repo_id = f"{asked.get('organization') or OWNER}/{asked['name']}"
        url = f"{self.hub.url}/{repo_id}"
        if repo_id in self.hub.repositories:
            return self._json({"error": "You already created this model repo", "url": url}, status=409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repositories[repo_id] = Repository(private)
        return self._json({"url": url, "name": repo_id})

    def validate_yaml(self, data):
        """The Hub refuses a card whose front matter is no YAML or whose base_model is no Hub id."""
        parts = json.loads(data)["content"].split("---\n")
        errors = []
        try:
            card = yaml.safe_load(parts[1]) if len(parts) > 2 and not parts[0] else {}
        except yaml.YAMLError as error:
            card, errors = {}, [{"message": str(error)}]
        base_model = card.get("base_model")
        if base_model is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", base_model):
            errors = [{"message": f'"base_model" with value "{base_model}" is not valid. Use a model id'}]
        self._json({"errors": errors, "warnings": []}, status=400 if errors else 200)

    def preupload(self, data, repo_id, revision):
        self._require_write()
        files = self._commit_at(repo_id, revision)[1]
        self._json({"files": [self._upload_mode(asked["path"], files) for asked in json.loads(data)["files"]]})

    def _upload_mode(self, path, files):
        large = path.endswith(".safetensors")
        known = (sha256 if large else blob_id)(files[path]) if path in files else None
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": known}

    def lfs_batch(self, data, repo_id):
        self._require_write()
        objects = json.loads(data)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self.hub.blobs:
                wanted["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, data, oid):
        if sha256(data) != oid:
            raise HubError(400, "", "another content than announced", {})
        self.hub.blobs[oid] = data
        self._json({})

    def branch(self, data, repo_id, revision):
        self._require_write()
        repository = self._repository(repo_id)
        if revision in repository.branches:
            raise HubError(409, "", "Reference already exists", {})
        repository.branches[revision] = repository.branches["main"]
        self._json({}, status=201)

    def commit(self, data, repo_id, revision):
        self._require_write()
        repository = self._repository(repo_id)
        lines = [json.loads(line) for line in data.splitlines() if line.strip()]
        values = {key: [line["value"] for line in lines if line["key"] == key] for key in ("file", "lfsFile")}
        files = {file["path"]: base64.b64decode(file["content"]) for file in values["file"]}
        files |= {file["path"]: self.hub.blobs[file["oid"]] for file in values["lfsFile"]}
        sha = repository.add(files, revision)
        url = f"{self.hub.url}/{repo_id}/commit/{sha}"
        self._json({"success": True, "commitOid": sha, "commitUrl": url, "pullRequestUrl": None})

    def tree(self, data, repo_id, revision):
        files = self._commit_at(repo_id, revision)[1]
        self._json([{"type": "file", "path": p, "size": len(b), "oid": blob_id(b)} for p, b in sorted(files.items())])

    def info(self, data, repo_id, revision=None):
        sha, files = self._commit_at(repo_id, revision or "main")
        siblings = [{"rfilename": path} for path in sorted(files)]
        private = self._repository(repo_id).private
        self._json({"id": repo_id, "sha": sha, "private": private, "siblings": siblings, "tags": []})

    def dataset_info(self, data, repo_id, revision="main"):
        self.info(data, f"datasets/{repo_id}", revision)

    def dataset_tree(self, data, repo_id, revision, folder=""):
        """As HfFileSystem walks them: one level with its folders, or all files below."""
        files = self._commit_at(f"datasets/{repo_id}", revision)[1]
        prefix = f"{folder}/" if folder else ""
        inner = [path.removeprefix(prefix) for path in sorted(files) if path.startswith(prefix)]
        if "recursive=true" in self.path.lower():
            return self._json([self._entry(prefix + path, files) for path in inner])
        names = dict.fromkeys(path.split("/")[0] for path in inner if "/" in path)
        folders = [{"type": "directory", "path": prefix + name, "oid": ""} for name in names]
        found = [self._entry(prefix + path, files) for path in inner if "/" not in path]
        return self._json([*folders, *found])

    def dataset_paths(self, data, repo_id, revision):
        files = self._commit_at(f"datasets/{repo_id}", revision)[1]
        asked = json.loads(data)["paths"]
        self._json([self._entry(path, files) for path in asked if path in files])

    def _entry(self, path, files):
        return {"type": "file", "path": path, "size": len(files[path]), "oid": blob_id(files[path])}

    def dataset_file(self, data, repo_id, revision, path):
        """The bytes that Range asks for."""
        content = self._commit_at(f"datasets/{repo_id}", revision)[1][path]
        first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups()
        part = content[int(first) : int(last) + 1]
        self.hub.sent_bytes += len(part)
        self._send(part, 206, {"Content-Range": f"bytes {first}-{last}/{len(content)}"})

    def resolve(self, data, repo_id, revision, path):
        sha, files = self._commit_at(repo_id, revision)
        if path not in files:
            raise HubError(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": sha})
        headers = {"ETag": f'"{blob_id(files[path])}"', "X-Repo-Commit": sha, "Accept-Ranges": "none"}
        self._send(files[path], headers={**headers, "Content-Type": "application/octet-stream"})


_REPO, _REVISION = r"(?P<repo_id>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES = [
    (r"GET /api/whoami-v2", _Handler.whoami),
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate_yaml),
    (rf"POST /api/models/{_REPO}/preupload/{_REVISION}", _Handler.preupload),
    (rf"POST /api/models/{_REPO}/commit/{_REVISION}", _Handler.commit),
    (rf"POST /api/models/{_REPO}/branch/{_REVISION}", _Handler.branch),
    (rf"POST /{_REPO}.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"PUT /lfs/(?P<oid>\w+)", _Handler.lfs_put),
    (rf"GET /api/models/{_REPO}/auth-check/write", _Handler.may_write),
    (rf"GET /api/models/{_REPO}/tree/{_REVISION}/?", _Handler.tree),
    (rf"GET /api/models/{_REPO}/revision/{_REVISION}", _Handler.info),
    (rf"GET /api/models/{_REPO}", _Handler.info),
    (rf"GET /api/datasets/{_REPO}(/revision/{_REVISION})?", _Handler.dataset_info),
    (rf"GET /api/datasets/{_REPO}/tree/{_REVISION}(/(?P<folder>.*))?", _Handler.dataset_tree),
    (rf"POST /api/datasets/{_REPO}/paths-info/{_REVISION}", _Handler.dataset_paths),
    (rf"GET /datasets/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", _Handler.dataset_file),
    (rf"(GET|HEAD) /{_REPO}/resolve/{_REVISION}/(?P<path>.+)", _Handler.resolve),
]


@contextlib.contextmanager
def local_hub():
    """Serve an empty Hub on a free port of this machine until the block ends."""
    hub = LocalHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def visit(monkeypatch, hub, folder):
    """Lets huggingface_hub of this process talk to `hub`, with no token of this machine and no real pauses.

    Args:
        monkeypatch: pytest's.
        hub: a `LocalHub`, maybe of another process.
        folder: `pathlib.Path` for huggingface_hub's own files.
    """
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    no_pauses = types.SimpleNamespace(**{**vars(time), "sleep": hub.pauses.append})
    monkeypatch.setattr("huggingface_hub.utils._http.time", no_pauses)
    monkeypatch.setattr("adaptiveload_hf.hub.time", no_pauses)
    huggingface_hub.close_session()  # its clients keep connections to a hub that is gone


@contextlib.contextmanager
def visited_hub(monkeypatch, folder):
    """A `local_hub` that this process visits."""
    with local_hub() as hub:
        visit(monkeypatch, hub, folder)
        yield hub
