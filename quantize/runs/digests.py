"""Digests of files: every byte counts, whatever the size, and no large file is read twice.

A digest must be the same on every machine, since scores, packs and GGUF files name it. So a large file
counts by its sha256. conversion.json, verification.json and the Hub have that digest too, and it covers
every byte. A core hashes 1.1 to 1.5 GB/s, and files are hashed side by side.

The user's cache remembers the sha256 of a large file by the file's identity: device, inode, size, and
the times of its last change and of its inode's last change, in ns. A file whose times are younger than
SETTLED is not remembered: it might change again within one tick of the file system's clock. Bytes that
rot on a disk change no time; stages that take over another's files read them whole (`round_weights`,
`verify`).
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash
from platformdirs import user_cache_dir

from quantize.host.files import write_json
from quantize.host.locks import in_turn
from quantize.host.progress import say
from quantize.host.units import size

TOGETHER = 2_000_000_000  # bytes up to which a set of files is hashed as one stream
LARGE = 1 << 22  # bytes from which a file of a larger set counts by its sha256
SETTLED = 2_000_000_000  # ns
REMEMBERED = Path(user_cache_dir("diffusiongemma-quantize", appauthor=False)) / "digests.json"
MOST_REMEMBERED = 4096  # files
ANNOUNCED_FROM = 4_000_000_000  # bytes from which reading takes long enough to be told
HASHED_AT_ONCE = 1 << 24
SAMPLE, SAMPLES = 65536, 64  # of `sampled`: bytes of a sample, samples of a file


def hashed(files: Mapping[str, Path]) -> str:
    """Return a sha256 over names, sizes and bytes; above TOGETHER over each file's sha256."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if sum(sizes.values()) <= TOGETHER:
        return _stream(files, sizes)
    large = {name: path for name, path in files.items() if sizes[name] >= LARGE}
    known = dict(zip(large, sha256_of_all(list(large.values())), strict=True))
    digest = hashlib.sha256(b"every byte\n")
    for name, path in files.items():
        digest.update(f"{name} {sizes[name]} {known.get(name) or sha256_of(path)}\n".encode())
    return digest.hexdigest()


def sampled(files: Mapping[str, Path]) -> str:
    """Return what versions up to 268631d took for the digest of files above TOGETHER: of samples."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    steps = {name: max(SAMPLE, size // SAMPLES) for name, size in sizes.items()}
    return _stream(files, sizes, steps)


def _stream(
    files: Mapping[str, Path], sizes: Mapping[str, int], steps: Mapping[str, int] | None = None
) -> str:
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(f"{name} {sizes[name]}\n".encode())
        with path.open("rb") as file:
            for position in range(0, sizes[name], steps[name] if steps else SAMPLE):
                file.seek(position)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes as they are now, in hexadecimal."""
    # In large blocks, since other threads that compute take the interpreter after each block.
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256", _bufsize=HASHED_AT_ONCE).hexdigest()


def xxh3_of(path: Path) -> str:
    """Return the XXH3 digest (128 bits) of a file's bytes now; it finds rot, not forgery."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(HASHED_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def sha256_of_all(paths: Iterable[Path]) -> list[str]:
    """Return the sha256 of each file; a file that was read before and has not changed is not read.

    Of several processes that ask at once, one reads, and the others wait for what it remembers.
    """
    identities = [(path, _identity(path)) for path in paths]
    known = _recall()
    if all(identity in known for _, identity in identities):
        return [known[identity] for _, identity in identities]
    with in_turn(REMEMBERED.with_suffix(".lock")):
        return _read_unless_known(identities)


def _read_unless_known(identities: Sequence[tuple[Path, str]]) -> list[str]:
    known = _recall()
    unread = [path for path, identity in identities if identity not in known]
    if (count := sum(path.stat().st_size for path in unread)) >= ANNOUNCED_FROM:
        say(f"{unread[0].parent}: {size(count)} are read for their digests, once")
    began = time.time_ns()
    with ThreadPoolExecutor() as pool:
        read = dict(zip(unread, pool.map(sha256_of, unread), strict=True))
    digests = [read[path] if path in read else known[identity] for path, identity in identities]
    fresh = {
        identity: read[path]
        for path, identity in identities
        if path in read and _is_settled(path, identity, began)
    }
    _remember(fresh)
    return digests


def remember(digests: Mapping[Path, str]) -> None:
    """Remember sha256 digests of files, as a writer or a reader of all their bytes found them."""
    if sum(path.stat().st_size for path in digests) <= TOGETHER:
        return  # `hashed` reads them whole
    now = time.time_ns()
    identities = {path: _identity(path) for path in digests}
    _remember({i: digests[path] for path, i in identities.items() if _is_settled(path, i, now)})


def identities(files: Iterable[Path]) -> list[str]:
    """Return a text for each file that changes when the file is written, replaced or moved here."""
    return [_identity(path) for path in files]


def _identity(path: Path) -> str:
    stat = path.stat()
    facts = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return " ".join(map(str, facts))


def _is_settled(path: Path, identity: str, began: int) -> bool:
    """Return whether a file still has an identity, and had it for long at the time `began` in ns."""
    *_, changed, inode_changed = map(int, identity.split())
    return _identity(path) == identity and max(changed, inode_changed) < began - SETTLED


def _recall() -> dict[str, str]:
    """Return identity -> sha256 of the remembered files; a damaged memory is an empty one."""
    with suppress(OSError, ValueError, AttributeError):
        remembered: Any = json.loads(REMEMBERED.read_text("utf-8"))
        return {str(key): str(value) for key, value in remembered.items()}
    return {}


def _remember(digests: Mapping[str, str]) -> None:
    if not digests:
        return
    kept = [item for item in _recall().items() if item[0] not in digests]
    kept = kept[-(MOST_REMEMBERED - len(digests)) :] if len(digests) < MOST_REMEMBERED else []
    with suppress(OSError):  # a cache that cannot be written costs only time
        write_json(REMEMBERED, dict(kept) | dict(digests))
