"""A stand-in for llama.cpp's `llama-diffusion-gemma-server`: its protocol, our model's logits.

Written from the protocol's description; `install` makes an executable of it, which hands each request
to a thread of the tests' process, where the model is loaded once. With LLAMA_CPP_FAULT it has no model:
the first step's logits are 0, and the second step is answered with that line, or it ends with "no
memory" when that says `end`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread


def install(folder: Path) -> Path:
    """Write the executable, and answer what it is asked."""
    program, asked, said = (folder / n for n in ("llama-diffusion-gemma-server", "asked", "said"))
    program.write_text(
        f"""#!/bin/sh
[ -z "$LLAMA_CPP_FAULT" ] || exec '{sys.executable}' '{__file__}'
echo READY 1024
while read -r request; do
    echo "$request" > '{asked}'
    cat '{said}'
done
"""
    )
    program.chmod(0o755)
    os.mkfifo(asked)
    os.mkfifo(said)
    Thread(target=serve, args=(asked, said, answering()), daemon=True).start()
    return program


def fail(fault: str) -> None:
    print("READY 1024", flush=True)
    first = sys.stdin.readline().strip()
    Path(f"{first}.resp").write_bytes(bytes(4 * 64 * 1024))
    print("OK 64", flush=True)
    sys.stdin.readline()
    if fault == "end":
        sys.exit("no memory")
    print(fault, flush=True)
    sys.stdin.readline()


def answering() -> Callable[[Path], str]:
    """Load the model; return what answers one request."""
    import numpy as np
    import torch

    from quantize.bundled import CHECKPOINT
    from quantize.checkpoints.load import load
    from tests.support.modules_oracle.passes import decode_canvas, encode_prompts

    model, kept, read, prefix = load(CHECKPOINT), None, [], None

    def answer(file: Path) -> str:
        nonlocal kept, read, prefix
        request = file.read_bytes()
        prompt, canvas, conditioned = np.frombuffer(request[:12], "<i4").tolist()
        temperature = float(np.frombuffer(request[12:16], "<f4")[0])
        ids = torch.from_numpy(np.frombuffer(request[16:], "<i4").astype(np.int64))
        if read != (read := ids[:prompt].tolist()):
            prefix = encode_prompts(model, [read])
        logits = decode_canvas(model, prefix, ids[None, prompt:], kept if conditioned else None)
        kept = logits / temperature
        Path(f"{file}.resp").write_bytes(logits[0].float().numpy().tobytes())
        return f"OK {canvas}"

    return answer


def serve(asked: Path, said: Path, answer: Callable[[Path], str]) -> None:
    """Answer requests, one a line, without an end."""
    while True:
        for line in asked.read_text().splitlines():
            try:
                told = answer(Path(line))
            except Exception as error:
                told = f"ERR {error}"
            said.write_text(f"{told}\n")


if __name__ == "__main__":
    fail(os.environ["LLAMA_CPP_FAULT"])
