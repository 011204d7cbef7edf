"""Which replica gets a request; Ray's processes import this file, so it loads nothing heavy."""

import json
from hashlib import sha256

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class LeastLoaded(RequestRouter):
    """Ranks replicas for a request: the least loaded first, but a chat's own before it.

    A chat's replica follows from its beginning alone, so nothing is remembered. It is passed over if
    it has over `batch` more open requests than another one.
    """

    def initialize_state(self, batch: int = 0) -> None:
        """Take `request_router_kwargs`."""
        self.batch, self.turn = batch, 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, the preferred first; Serve takes a group's least loaded.

        Of equal ones it takes the first. They come in turn, as it counts a request of a burst only
        after it has chosen for the next ones.
        """
        self.turn += 1
        first = self.turn % max(len(candidate_replicas), 1)
        candidate_replicas = [*candidate_replicas[first:], *candidate_replicas[:first]]
        chat = pending_request and pending_request.metadata.session_id
        if not chat or not candidate_replicas:
            return [candidate_replicas]

        def weight(replica: RunningReplica) -> bytes:
            return sha256(f"{chat} {replica.replica_id.unique_id}".encode()).digest()

        def open_requests(replica: RunningReplica) -> int:
            return self.replica_queue_len_cache.get(replica.replica_id) or 0

        home = max(candidate_replicas, key=weight)
        if open_requests(home) > self.batch + min(map(open_requests, candidate_replicas)):
            return [candidate_replicas]
        return [[home], candidate_replicas]


def beginning(body: bytes) -> bytes | None:
    """Return a digest of a chat's tools and its messages up to the user's first; None: it has none."""
    try:
        asked = json.loads(body)
        messages = asked.get("messages") or asked.get("input")
        ends = next(i for i, message in enumerate(messages) if message["role"] == "user")
    except (ValueError, AttributeError, TypeError, KeyError, StopIteration, RecursionError):
        return None
    chat = json.dumps([asked.get("tools"), messages[: ends + 1]])
    return sha256(chat.encode()).hexdigest().encode()
