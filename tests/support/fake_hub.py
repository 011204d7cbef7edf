"""A Hugging Face Hub on the loopback: the part of its HTTP API that publishing and downloading use.

The real huggingface_hub client talks to it. It keeps repositories, commits, branches, pull requests,
tags and large files in memory, checks tokens and parents as the Hub does, records every request, and
fails on demand (`Fault`). Large files go by LFS (`part_bytes` cuts them into parts), or by Xet into a
folder: the token endpoint then names `local://FOLDER`, a store that hf_xet writes without a server.

It proves order, content and the handling of errors; it proves nothing about quotas or gating.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_PlantedTokenThatNobodyMaySee"
LARGE = 100_000  # bytes from which a file is large; *.safetensors always are
EMPTY_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
SIGNATURE = "?X-Amz-Signature=SignedByTheStore"
DATE = "2026-01-01T00:00:00.000Z"


@dataclass
class Blob:
    """A file in a commit: `content` is None when a large file lies in the Xet store."""

    size: int
    sha256: str
    content: bytes | None
    large: bool

    @property
    def git_sha1(self) -> str:
        assert self.content is not None
        return hashlib.sha1(b"blob %d\0" % self.size + self.content).hexdigest()


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    refs: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def add(self, ref: str, files: dict[str, Blob], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid] = files
        self.messages.append(message)
        self.refs[ref] = oid
        return oid


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Fault:
    """Fail the requests whose "METHOD path" matches `pattern`, `times` times after `skip` others.

    `status` answers with that code; `reset` cuts the connection in the middle of the body; `lost` does
    what was asked and then cuts the connection; `hang` waits in the body until the hub closes;
    `before` is called first, for an event at just that moment.
    """

    pattern: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    reset: bool = False
    lost: bool = False
    hang: bool = False
    before: Callable[[], None] | None = None
    times: int = 1
    skip: int = 0


class FailureError(Exception):
    def __init__(self, status: int, code: str = "", text: str = "") -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, text or code


class FakeHub:
    """`with FakeHub(token) as hub`: serves at `hub.url` until the block ends."""

    def __init__(self, token: str, *, part_bytes: int | None = None) -> None:
        self.token = token
        self.part_bytes = part_bytes
        self.may_write = True
        self.xet_folder: Path | None = None
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.garbled: set[str] = set()
        self.events: list[str] = []
        self.closing = threading.Event()
        self.hanging = threading.Event()
        self.lock = threading.RLock()

    def __enter__(self) -> "FakeHub":
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def create(self, name: str, *, private: bool = True) -> Repo:
        repo = self.repos[name] = Repo(private)
        attributes = Blob(len(EMPTY_ATTRIBUTES), "", EMPTY_ATTRIBUTES, large=False)
        repo.add("main", {".gitattributes": attributes}, "initial commit")
        return repo

    def put(self, name: str, ref: str, path: str, content: bytes) -> str:
        """Commit a file as somebody else would."""
        repo = self.repos[name]
        blob = Blob(len(content), hashlib.sha256(content).hexdigest(), content, large=False)
        files = {**repo.commits[repo.refs[ref]], path: blob}
        return repo.add(ref, files, f"somebody else: {path}")

    def files(self, name: str, ref: str = "main") -> dict[str, Blob]:
        repo = self.repos[name]
        return repo.commits[repo.refs.get(ref, ref)]

    def paths(self, pattern: str) -> list[str]:
        """The "METHOD path" of recorded requests that match."""
        lines = [f"{request.method} {request.path}" for request in self.requests]
        return [line for line in lines if re.search(pattern, line)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = (
        -1
    )  # head and body in one segment: else each answer waits 40 ms for an acknowledgement
    disable_nagle_algorithm = True
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_HEAD = do_GET  # noqa: N815

    def _serve(self) -> None:
        line = f"{self.command} {self.path}"
        fault = self._fault(line)
        if fault and (fault.reset or fault.hang):
            self._break_off(fault)
            return
        body = self._body()
        with self.hub.lock:
            self.hub.requests.append(Request(self.command, self.path, dict(self.headers), body))
        if fault and fault.before:
            fault.before()
        if fault and fault.status:
            self._answer(fault.status, fault.text.encode(), fault.headers)
            return
        try:
            with self.hub.lock:
                status, content, headers = self._route(body)
        except FailureError as failure:
            headers = {"X-Error-Code": failure.code, "X-Error-Message": failure.text}
            text = json.dumps({"error": failure.text, "url": f"{self.hub.url}/org/name"}).encode()
            self._answer(failure.status, text, {k: v for k, v in headers.items() if v})
            return
        if fault and fault.lost:
            self._cut()
            return
        self._answer(status, content, headers)

    def _fault(self, line: str) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if re.search(fault.pattern, line) and fault.times > 0:
                    if fault.skip > 0:
                        fault.skip -= 1
                        return None
                    fault.times -= 1
                    return fault
        return None

    def _break_off(self, fault: Fault) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.rfile.read(min(length // 2, 65536))
        if fault.hang:
            self.hub.hanging.set()
            self.hub.closing.wait(60)
        self._cut()

    def _cut(self) -> None:
        # A zero linger makes close() send RST, so that the client sees a reset and not an end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close_connection = True
        self.connection.close()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _route(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        # A dataset and a model of one name are one repository here.
        path = url.path.replace("/api/datasets/", "/api/models/").removeprefix("/datasets")
        if path.startswith("/store/"):
            return self._store(path, body)
        if path == "/api/validate-yaml":
            return _json(self._validate(json.loads(body)["content"]))
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise FailureError(401, text="Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            return _json({"type": "user", "name": "alice", "orgs": [{"name": "org"}]})
        self._check_rights(path)
        for pattern, method in ROUTES:
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                return method(self, body, *(unquote(group) for group in found.groups()))
        raise FailureError(404, "EntryNotFound", f"the fake has no {self.command} {path}")

    def _check_rights(self, path: str) -> None:
        harmless = self.command in ("GET", "HEAD") or "paths-info" in path
        if not harmless and not self.hub.may_write:
            raise FailureError(403, text="your token has no write access")

    def _validate(self, content: str) -> dict[str, Any]:
        head = yaml.safe_load(content.split("---\n")[1])
        if not isinstance(head.get("license"), str) or not isinstance(head.get("tags"), list):
            raise FailureError(400, text="license or tags are malformed")
        return {"errors": [], "warnings": []}

    def _repo(self, name: str) -> Repo:
        if name not in self.hub.repos:
            raise FailureError(404, "RepoNotFound")
        return self.hub.repos[name]

    def _commit_of(self, repo: Repo, revision: str) -> str:
        found = repo.refs.get(revision) or repo.tags.get(revision)
        found = found or (revision if revision in repo.commits else None)
        if found is None:
            raise FailureError(404, "RevisionNotFound")
        return found

    def create_repo(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        wanted = json.loads(body)
        if wanted["organization"] not in ("org", "alice"):
            raise FailureError(404, text="no such organization")
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repos:
            raise FailureError(409, text="You already created this model repo")
        self.hub.create(name, private=wanted.get("visibility") == "private")
        self.hub.events.append("create")
        return _json({"url": f"{self.hub.url}/{name}", "name": name})

    def info(
        self, _: bytes, name: str, revision: str = "main"
    ) -> tuple[int, bytes, dict[str, str]]:
        repo = self._repo(name)
        oid = self._commit_of(repo, revision)
        siblings = [{"rfilename": path} for path in repo.commits[oid]]
        found = {"id": name, "sha": oid, "private": repo.private, "siblings": siblings, "tags": []}
        return _json({**found, "downloads": 0, "likes": 0, "lastModified": DATE})

    def refs(self, _: bytes, name: str) -> tuple[int, bytes, dict[str, str]]:
        repo = self._repo(name)
        kinds: dict[str, Any] = {"branches": [], "converts": [], "pullRequests": [], "tags": []}
        for ref, oid in repo.refs.items():
            kind = "pullRequests" if ref.startswith("refs/pr/") else "branches"
            kinds[kind].append({"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": oid})
        for tag, oid in repo.tags.items():
            kinds["tags"].append({"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": oid})
        return _json(kinds)

    def tree(self, _: bytes, name: str, revision: str) -> tuple[int, bytes, dict[str, str]]:
        repo = self._repo(name)
        files = repo.commits[self._commit_of(repo, revision)]
        return _json([self._listed(path, blob) for path, blob in files.items()])

    def _listed(self, path: str, blob: Blob) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": blob.size}
        sha256 = "0" * 64 if path in self.hub.garbled else blob.sha256
        if blob.large:
            lfs = {"oid": sha256, "size": blob.size, "pointerSize": 134}
            return {**entry, "oid": "f" * 40, "lfs": lfs}
        return {**entry, "oid": "0" * 40 if path in self.hub.garbled else blob.git_sha1}

    def preupload(self, body: bytes, name: str, revision: str) -> tuple[int, bytes, dict[str, str]]:
        repo = self._repo(name)
        present = repo.commits[self._commit_of(repo, revision)]
        files: list[dict[str, Any]] = []
        for file in json.loads(body)["files"]:
            large = file["path"].endswith(".safetensors") or file["size"] >= LARGE
            entry = {"path": file["path"], "uploadMode": "lfs" if large else "regular"}
            blob = present.get(file["path"])
            oid = (blob.sha256 if blob.large else blob.git_sha1) if blob else None
            files.append({**entry, "shouldIgnore": False} | ({"oid": oid} if oid else {}))
        return _json({"files": files})

    def batch(self, body: bytes, name: str) -> tuple[int, bytes, dict[str, str]]:
        self._repo(name)
        objects = [self._actions(o["oid"], o["size"]) for o in json.loads(body)["objects"]]
        return _json({"transfer": "multipart", "objects": objects})

    def _actions(self, oid: str, size: int) -> dict[str, Any]:
        if oid in self.hub.large:
            return {"oid": oid, "size": size}
        upload: dict[str, Any] = {"href": f"{self.hub.url}/store/whole/{oid}{SIGNATURE}"}
        if step := self.hub.part_bytes:
            upload = {
                "href": f"{self.hub.url}/store/complete/{oid}",
                "header": {"chunk_size": step},
            }
            for part in range(1, -(-size // step) + 1):
                upload["header"][str(part)] = f"{self.hub.url}/store/part/{oid}/{part}{SIGNATURE}"
        verify = {"href": f"{self.hub.url}/api/verify"}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}

    def _store(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        kind, oid, *part = path.removeprefix("/store/").split("/")
        if kind == "part":
            self.hub.parts.setdefault(oid, {})[int(part[0])] = body
            return 200, b"", {"ETag": f'"{part[0]}"'}
        if kind == "complete":
            pieces = self.hub.parts[oid]
            wanted = [entry["partNumber"] for entry in json.loads(body)["parts"]]
            body = b"".join(pieces[number] for number in wanted)
        if hashlib.sha256(body).hexdigest() != oid:
            raise FailureError(400, text="the content does not have this checksum")
        self.hub.large[oid] = body
        return 200, b"{}", {}

    def verify(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        wanted = json.loads(body)
        if len(self.hub.large.get(wanted["oid"], b"")) != wanted["size"]:
            raise FailureError(404, text="not stored")
        return _json({})

    def commit(self, body: bytes, name: str, revision: str) -> tuple[int, bytes, dict[str, str]]:
        repo = self._repo(name)
        head = self._commit_of(repo, revision)
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit", head) != head:
            raise FailureError(
                412, text="A commit has happened since. Please refresh and try again."
            )
        files = dict(repo.commits[head])
        for line in lines[1:]:
            self._apply(files, line["key"], line["value"])
        oid = repo.add(revision, files, header["summary"])
        self.hub.events.append(f"commit {header['summary']}")
        url = f"{self.hub.url}/{name}/commit/{oid}"
        return _json({"success": True, "commitOid": oid, "commitUrl": url})

    def _apply(self, files: dict[str, Blob], key: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if key == "deletedFile":
            if files.pop(path, None) is None:
                raise FailureError(404, "EntryNotFound", "A file with this name doesn't exist")
        elif key == "lfsFile":
            content = self.hub.large.get(value["oid"])
            if content is None and self.hub.xet_folder is None:
                raise FailureError(400, text=f"{path}: its content was never uploaded")
            files[path] = Blob(value["size"], value["oid"], content, large=True)
        else:
            content = base64.b64decode(value["content"])
            sha256 = hashlib.sha256(content).hexdigest()
            files[path] = Blob(len(content), sha256, content, large=False)

    def branch(self, body: bytes, name: str, branch: str) -> tuple[int, bytes, dict[str, str]]:
        repo = self._repo(name)
        if branch in repo.refs:
            raise FailureError(409, text="branch exists")
        start = json.loads(body or b"{}").get("startingPoint", "main")
        repo.refs[branch] = self._commit_of(repo, start)
        return _json({})

    def tag(self, body: bytes, name: str, revision: str) -> tuple[int, bytes, dict[str, str]]:
        repo, tag = self._repo(name), json.loads(body)["tag"]
        if tag in repo.tags:
            raise FailureError(409, text="tag exists")
        repo.tags[tag] = self._commit_of(repo, revision)
        self.hub.events.append(f"tag {tag}")
        return _json({})

    def settings(self, body: bytes, name: str) -> tuple[int, bytes, dict[str, str]]:
        self._repo(name).private = json.loads(body)["visibility"] == "private"
        self.hub.events.append("settings")
        return _json({})

    def discussions(self, _: bytes, name: str) -> tuple[int, bytes, dict[str, str]]:
        found = self._repo(name).requests
        return _json({"count": len(found), "start": 0, "discussions": found})

    def discuss(self, body: bytes, name: str) -> tuple[int, bytes, dict[str, str]]:
        repo, wanted = self._repo(name), json.loads(body)
        number = len(repo.requests) + 1
        found = {"num": number, "title": wanted["title"], "status": "draft", "events": []}
        repo.requests.append(
            {**found, "author": {"name": "alice"}, "createdAt": DATE, "isPullRequest": True}
            | {"repo": {"name": name, "type": "model"}, "filesWithConflicts": False}
            | {"changes": {"base": "refs/heads/main"}}
        )
        repo.refs[f"refs/pr/{number}"] = repo.refs["main"]
        return _json({"num": number})

    def discussion(self, _: bytes, name: str, number: str) -> tuple[int, bytes, dict[str, str]]:
        return _json(self._repo(name).requests[int(number) - 1])

    def status(self, body: bytes, name: str, number: str) -> tuple[int, bytes, dict[str, str]]:
        new = json.loads(body)["status"]
        self._repo(name).requests[int(number) - 1]["status"] = new
        self.hub.events.append(f"request {new}")
        event = {"id": "1", "type": "status-change", "createdAt": DATE, "data": {"status": new}}
        return _json({"newStatus": {**event, "author": {"name": "alice"}}})

    def xet_token(self, _: bytes, name: str, revision: str) -> tuple[int, bytes, dict[str, str]]:
        if self.hub.xet_folder is None:
            raise FailureError(404, text="no Xet here")
        self._commit_of(self._repo(name), revision)
        found = {"casUrl": f"local://{self.hub.xet_folder}", "accessToken": "x", "exp": 4102444800}
        headers = {
            "X-Xet-Cas-Url": found["casUrl"],
            "X-Xet-Access-Token": "x",
            "X-Xet-Token-Expiration": "4102444800",
        }
        return 200, json.dumps(found).encode(), headers

    def resolve(
        self, _: bytes, name: str, revision: str, path: str
    ) -> tuple[int, bytes, dict[str, str]]:
        repo = self._repo(name)
        oid = self._commit_of(repo, revision)
        blob = repo.commits[oid].get(path)
        if blob is None or blob.content is None:
            raise FailureError(404, "EntryNotFound")
        etag = blob.sha256 if blob.large else blob.git_sha1
        return 200, blob.content, {"ETag": f'"{etag}"', "X-Repo-Commit": oid}


def _json(value: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


MODEL = r"/api/models/([^/]+/[^/]+)"
ROUTES: list[tuple[str, Callable[..., tuple[int, bytes, dict[str, str]]]]] = [
    (r"POST /api/repos/create", Handler.create_repo),
    (r"POST /api/verify", Handler.verify),
    (rf"GET {MODEL}", Handler.info),
    (rf"GET {MODEL}/revision/([^/]+)", Handler.info),
    (rf"GET {MODEL}/refs", Handler.refs),
    (rf"GET {MODEL}/tree/([^/]+)", Handler.tree),
    (rf"POST {MODEL}/preupload/([^/]+)", Handler.preupload),
    (rf"POST {MODEL}/commit/([^/]+)", Handler.commit),
    (rf"POST {MODEL}/branch/([^/]+)", Handler.branch),
    (rf"POST {MODEL}/tag/([^/]+)", Handler.tag),
    (rf"PUT {MODEL}/settings", Handler.settings),
    (rf"GET {MODEL}/discussions", Handler.discussions),
    (rf"POST {MODEL}/discussions", Handler.discuss),
    (rf"GET {MODEL}/discussions/(\d+)", Handler.discussion),
    (rf"POST {MODEL}/discussions/(\d+)/status", Handler.status),
    (rf"GET {MODEL}/xet-write-token/([^/]+)", Handler.xet_token),
    (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", Handler.batch),
    (r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)", Handler.resolve),
]
