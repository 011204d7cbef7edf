"""A plugin that makes vLLM encode DiffusionGemma's finished canvases from plain embeddings.

vLLM calls `register` in each of its processes before it looks up a model. `register` only names our
class. So our module `model`, and what it repairs, are imported only if a DiffusionGemma is served.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
HEADER, REPAIRED = "x-diffusiongemma-commit-pass", "repaired"

Message = MutableMapping[str, Any]
Call = Callable[..., Awaitable[Any]]


def register() -> None:
    """Make vLLM build the repaired model for DiffusionGemma; may be called repeatedly."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(
        ARCHITECTURE, "diffusiongemma_vllm_repair.model:RepairedDiffusionGemma"
    )
    SaysRepaired.registered = True


class SaysRepaired:
    """ASGI middleware (vLLM's --middleware) that names the repair in a header of every response.

    It adds nothing where VLLM_PLUGINS left the plugin out, so that vLLM serves its own model.
    """

    registered = False

    def __init__(self, app: Call) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Call, send: Call) -> None:
        """Pass a request on, and add the header to its response."""

        async def named(message: Message) -> None:
            if self.registered and message["type"] == "http.response.start":
                header = (HEADER.encode(), REPAIRED.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self.app(scope, receive, named)
