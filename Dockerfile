# `quantize serve` on an NVIDIA GPU:
#   docker build -t diffusiongemma-quantize .
#   docker run --gpus all -p 8000:8000 -e QUANTIZE_API_KEY -v /models:/models:ro diffusiongemma-quantize /models/MODEL
# torch brings its own CUDA libraries; Triton compiles kernels at run time and needs gcc and Python's headers.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY quantize quantize
COPY recipes recipes
COPY kernels kernels
COPY evaluation/recovery evaluation/recovery
RUN pip install --no-cache-dir torch==2.13.0 -c constraints.txt \
    && pip install --no-cache-dir '.[serve]' -c constraints.txt

RUN useradd --create-home --uid 10001 quantize
USER 10001
WORKDIR /home/quantize

EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# A key is required on any other host than this one: QUANTIZE_API_KEY.
ENTRYPOINT ["quantize", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["bundled"]
