"""An OpenAI-compatible server on the denoising runtime: `quantize serve CHECKPOINT`.

    HTTP (guard: host, key, body size) -> app: a request, validated -> jobs, one a choice
      -> scheduler: one thread that drives the engine; a job gets a slot when one is free, all slots
         denoise together, each finished canvas goes back as text that never changes
      -> exchange: the events of a request's jobs -> one JSON answer, or server-sent events

Diffusion commits a canvas at a time (256 tokens of the real model), so that is the unit of streaming,
of batching and of cancelling. What steers sampling token by token (temperature, top_p, penalties)
has no meaning there: it is ignored and named, or with `--strict` refused. What would change an answer's
shape or meaning and cannot be done is refused by name with the way out (`unsupported`).
"""
