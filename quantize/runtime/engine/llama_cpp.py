"""Generates samples whose logits llama.cpp computes; this runtime does everything else.

`llama-diffusion-gemma-server` of unslothai/llama.cpp loads a GGUF file once. For each denoising step it
reads one line on stdin, the name FILE of a request file:

    FILE        int32: prompt length P, canvas length C, whether the step is self-conditioned; float32:
                the step's temperature; int32: ids of the P prompt tokens and C canvas tokens
    FILE.resp   the answer: float32 logits [C, vocabulary], soft-capped, not divided by the temperature.
                Once the file is written, the line "OK C" follows on stdout

The server keeps a step's logits and temperature for the next step's self-conditioning. Sampler, noise,
chat template and EOS are those of the engines, so an answer differs from transformers' only by
llama.cpp's logits. llama.cpp rounds activations to BF16 for products with BF16 weights, and to 8 bits
with one scale per 32 values for products with Q8_0 and NVFP4. Its GELU is a table in F16.
"""

import os
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fused_dequant import sample
from fused_dequant.sampler.canvas import random_tokens
from torch import Tensor

from quantize.errors import InputError, ResourceError
from quantize.runtime.sampler.sample import Sample, canvas_budgets
from quantize.runtime.sampler.sampler import Sampler

MAGIC = b"GGUF"
FINGERPRINT = "quantize.fingerprint"  # the key that says which checkpoint a file was made from
BEGINNING = 4096  # bytes at the start of a file, which contain that key
MAX_LENGTH = 2048  # tokens of a sample; the program's buffers grow with the square of this
SETTINGS = {"DG_KVCACHE": "1"}  # the prompt is computed once for all steps of a canvas


def made_from(file: Path) -> str | None:
    """Return the fingerprint of the checkpoint that a GGUF file was made from; None if it names none.

    Raise InputError if the file cannot be read, or is no GGUF file.
    """
    try:
        with file.open("rb") as opened:
            beginning = opened.read(BEGINNING)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    if not beginning.startswith(MAGIC):
        raise InputError(f"{file}: not a GGUF file")
    _, fingerprint, behind = beginning.partition(FINGERPRINT.encode())
    if not fingerprint:
        return None
    length = int.from_bytes(behind[4:12], "little")  # behind the type, U32
    return behind[12 : 12 + length].decode(errors="replace")


class LlamaCpp:
    """One process of `llama-diffusion-gemma-server`, which answers one prompt at a time.

    `program` is the built program, `file` the GGUF file, `canvas_length` the tokens of one canvas.
    Raise ResourceError if the program cannot be started, or cannot load the file.
    """

    def __init__(self, program: Path, file: Path, canvas_length: int) -> None:
        self.canvas_length = canvas_length
        self.program = program
        self._folder = tempfile.TemporaryDirectory()
        self._request = Path(self._folder.name) / "request"
        self._log = Path(self._folder.name) / "log"
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [program, file],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=os.environ | SETTINGS | {"MAXTOK": str(MAX_LENGTH)},
                )
        except OSError as error:
            raise ResourceError(f"{program}: cannot be started ({error.strerror})") from error
        word, *sizes = self._reply().split()
        if word != "READY":
            raise self._fault(word)
        self.vocabulary = int(sizes[0])

    def close(self) -> None:
        """End the process and delete its temporary files."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    def answer(
        self, prompt: Sequence[int], seed: int, *, max_new_tokens: int, sampler: Sampler
    ) -> Sample:
        """Return one sample, as `batch.generate` would for this one prompt.

        Raise InputError if no token fits after the prompt within MAX_LENGTH or the sampler's limit, and
        ResourceError if the program refuses the request or ends.
        """
        (budget,) = canvas_budgets(
            [prompt], max_new_tokens, sampler, MAX_LENGTH, self.canvas_length
        )
        answer, tokens = Sample(), list(prompt)
        while answer.finish != "eos" and answer.canvases < budget:
            canvas, steps = self._canvas(tokens, seed, answer.canvases, sampler)
            answer.commit(canvas, steps, sampler)
            tokens += canvas
        return answer

    def _canvas(
        self, tokens: Sequence[int], seed: int, index: int, sampler: Sampler
    ) -> tuple[list[int], int]:
        """Denoise canvas `index` after `tokens`; return its tokens and its number of steps."""
        seeds, schedule = torch.tensor([seed]), sampler.schedule()
        noise = random_tokens(seeds, index, self.canvas_length, self.vocabulary)
        state, step = sampler.begin(noise, seeds, index), 0
        while step < sampler.max_denoising_steps and not state.finished.any():
            logits = self.logits(
                tokens,
                state.canvas[0].tolist(),
                conditioned=step > 0,
                temperature=float(schedule[step]),
            )
            step += 1
            sampler.decide(sample(logits[None], state, schedule), state, schedule)
        return state.argmax[0].tolist(), step

    def logits(
        self, prompt: Sequence[int], canvas: Sequence[int], *, conditioned: bool, temperature: float
    ) -> Tensor:
        """Return the logits float32 [C, vocabulary] of one step of `canvas` after `prompt`, on the CPU.

        If `conditioned`, the canvas' previous step conditions this step. The program keeps this step's
        `temperature` for the next step. Raise ResourceError if it refuses the request or ends.
        """
        ids = np.asarray([*prompt, *canvas], dtype="<i4").tobytes()
        head = struct.pack("<iiif", len(prompt), len(canvas), conditioned, temperature)
        self._request.write_bytes(head + ids)
        answer = self._reply(f"{self._request}\n")
        if answer != f"OK {len(canvas)}":
            raise self._fault(answer)
        values: Any = np.fromfile(f"{self._request}.resp", dtype="<f4")
        return torch.from_numpy(values).view(len(canvas), self.vocabulary)

    def _reply(self, line: str = "") -> str:
        """Send `line`, if any; return the program's next line, or "nothing" if it has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(line)
            stdin.flush()
        except OSError:
            return "nothing"
        return stdout.readline().strip() or "nothing"

    def _fault(self, answer: str) -> ResourceError:
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["nothing on stderr"]
        self.close()
        return ResourceError(f"{self.program}: answered {answer!r}, and last wrote: {lines[-1]}")
