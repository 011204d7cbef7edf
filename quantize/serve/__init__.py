"""An OpenAI-compatible server on the denoising runtime: `quantize serve CHECKPOINT`.

    HTTP (guard: host, key, body size) -> app: a request, validated -> a job for each choice
      -> scheduler: one thread that drives the engine; a job gets a slot when one is free, all slots
         denoise together, each finished canvas goes back as text that never changes
      -> exchange: the events of a request's jobs -> one JSON answer, or server-sent events

Diffusion commits a canvas at a time (256 tokens in the real model), so canvases are the unit of
streaming, of batching and of cancelling. Parameters of token-by-token sampling (temperature, top_p,
penalties) have no meaning here: the server ignores and names them, or refuses them with `--strict`.
Requests for a shape or content that it cannot give are refused, with the way out (`unsupported`).
"""
