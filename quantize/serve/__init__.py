"""An OpenAI-compatible server on the denoising runtime: `quantize serve CHECKPOINT`.

    HTTP -> guard: host, key, body size -> app: validates a request -> service: one job per choice
      -> scheduler: one thread that drives the engine; a job gets a slot when one is free, all slots
         denoise together, and each finished canvas becomes text that never changes
      -> exchange: collects the events of a request's jobs -> one JSON answer, or server-sent events

Diffusion commits one canvas at a time (256 tokens in the 26B model), so the canvas is the unit of
streaming, batching and cancelling. Parameters of token-by-token sampling (temperature, top_p,
penalties) have no meaning here. The server ignores them and names them in a header; with `--strict`
it refuses them. Other unsupported fields are refused, with what to do instead (`unsupported`).
"""
