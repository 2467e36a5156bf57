# One image for every role of the service; the command picks it: docker run kvxfer coordinator | worker | router ... (see
# deploy/compose.yaml). Engines have an image each, which is theirs with kvxfer in it.
#
#   docker build -t kvxfer .
#   docker build -t kvxfer --build-arg TORCH_INDEX=<index with a CPU-only torch> .
#   docker build -t kvxfer-vllm --target vllm --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0 .
#   docker build -t kvxfer-sglang --target sglang --build-arg SGLANG_IMAGE=lmsysorg/sglang:v0.5.23 .

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23

# The native core is built by each engine's own Python; what the engine has is not replaced by another version.
FROM ${VLLM_IMAGE} AS vllm-builder
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG PIP_ARGS=
RUN python3 -m pip wheel --no-cache-dir --no-deps ${PIP_ARGS} --wheel-dir /wheels .

FROM ${VLLM_IMAGE} AS vllm
ARG PIP_ARGS=
RUN --mount=type=bind,from=vllm-builder,source=/wheels,target=/wheels \
    python3 -m pip list --format=freeze > /tmp/engine.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/engine.txt ${PIP_ARGS} /wheels/kvxfer-*.whl \
    && rm /tmp/engine.txt
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin kvxfer \
    && install --directory --owner=kvxfer --group=kvxfer --mode=0700 \
        /var/lib/kvxfer /var/lib/kvxfer/cache /var/lib/kvxfer/state
ENV PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/lib/kvxfer/cache \
    XDG_STATE_HOME=/var/lib/kvxfer/state
USER kvxfer
WORKDIR /var/lib/kvxfer
VOLUME ["/var/lib/kvxfer/cache"]
EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]

FROM ${SGLANG_IMAGE} AS sglang-builder
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG PIP_ARGS=
RUN python3 -m pip wheel --no-cache-dir --no-deps ${PIP_ARGS} --wheel-dir /wheels .

FROM ${SGLANG_IMAGE} AS sglang
ARG PIP_ARGS=
RUN --mount=type=bind,from=sglang-builder,source=/wheels,target=/wheels \
    python3 -m pip list --format=freeze > /tmp/engine.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/engine.txt ${PIP_ARGS} /wheels/kvxfer-*.whl \
    && rm /tmp/engine.txt
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin kvxfer \
    && install --directory --owner=kvxfer --group=kvxfer --mode=0700 \
        /var/lib/kvxfer /var/lib/kvxfer/cache /var/lib/kvxfer/state
ENV PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/lib/kvxfer/cache \
    XDG_STATE_HOME=/var/lib/kvxfer/state
USER kvxfer
WORKDIR /var/lib/kvxfer
VOLUME ["/var/lib/kvxfer/cache"]
EXPOSE 8000
ENTRYPOINT ["python3", "-m", "sglang.launch_server"]

FROM ${PYTHON_IMAGE} AS builder
RUN apt-get update \
    && apt-get install --yes --no-install-recommends cmake g++ ninja-build \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG PIP_ARGS=
RUN PIP_CONSTRAINT=/src/constraints.txt pip wheel --no-cache-dir --no-deps ${PIP_ARGS} --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS service
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin kvxfer \
    && install --directory --owner=kvxfer --group=kvxfer --mode=0700 \
        /var/lib/kvxfer /var/lib/kvxfer/cache /var/lib/kvxfer/state
ARG PIP_ARGS=
ARG TORCH_INDEX=
RUN --mount=type=bind,from=builder,source=/wheels,target=/wheels \
    --mount=type=bind,from=builder,source=/src/constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir --constraint /constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} ${PIP_ARGS} \
        "$(echo /wheels/kvxfer-*.whl)[router,engine,etcd]"
ENV PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/lib/kvxfer/cache \
    XDG_STATE_HOME=/var/lib/kvxfer/state
USER kvxfer
WORKDIR /var/lib/kvxfer
VOLUME ["/var/lib/kvxfer/cache"]
# Workers and the router answer /ready: 503 while they take no requests. The compose file asks the coordinator with
# `kvxfer doctor` instead. To restart what hangs, probe /live: a router without workers is live and not ready.
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=3)"]
ENTRYPOINT ["kvxfer"]
CMD ["--help"]
