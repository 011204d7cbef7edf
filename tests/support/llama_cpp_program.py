"""A stand-in for llama.cpp's `llama-diffusion-gemma-server`: its protocol, our model's logits.

Written from the protocol's description; `install` makes an executable of it. With LLAMA_CPP_FAULT it
has no model: the first step's logits are 0, and the second step is answered with that line, or it ends
with "no memory" when that says `end`.
"""

import os
import sys
from pathlib import Path


def install(folder: Path) -> Path:
    """Write an executable that runs this file with this Python."""
    program = folder / "llama-diffusion-gemma-server"
    path = os.pathsep.join(filter(None, sys.path))
    program.write_text(
        f"#!/bin/sh\nPYTHONPATH='{path}' exec '{sys.executable}' '{__file__}' \"$1\"\n"
    )
    program.chmod(0o755)
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


def serve() -> None:
    import numpy as np
    import torch
    from modules_oracle.passes import decode_canvas, encode_prompts

    from quantize.bundled import CHECKPOINT
    from quantize.checkpoints.load import load

    torch.set_num_threads(1)
    model = load(CHECKPOINT)
    print("READY 1024", flush=True)
    kept = None
    for line in sys.stdin:
        request = Path(line.strip()).read_bytes()
        prompt, canvas, conditioned = np.frombuffer(request[:12], "<i4").tolist()
        temperature = float(np.frombuffer(request[12:16], "<f4")[0])
        ids = torch.from_numpy(np.frombuffer(request[16:], "<i4").astype(np.int64))
        prefix = encode_prompts(model, [ids[:prompt].tolist()])
        before = kept if conditioned else None
        logits = decode_canvas(model, prefix, ids[None, prompt:], before)
        kept = logits / temperature
        Path(f"{line.strip()}.resp").write_bytes(logits[0].float().numpy().tobytes())
        print(f"OK {canvas}", flush=True)


if __name__ == "__main__":
    if fault := os.environ.get("LLAMA_CPP_FAULT"):
        fail(fault)
    else:
        serve()
