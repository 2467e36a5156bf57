# One image for every role; the command picks it: docker run kvxfer coordinator | worker | router ... (see deploy/compose.yaml)
#
#   docker build -t kvxfer .
#   docker build -t kvxfer --build-arg TORCH_INDEX=<index with a CPU-only torch> .

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS builder
RUN apt-get update \
    && apt-get install --yes --no-install-recommends cmake g++ ninja-build \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG PIP_ARGS=
RUN PIP_CONSTRAINT=/src/constraints.txt pip wheel --no-cache-dir --no-deps ${PIP_ARGS} --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS runtime
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin kvxfer \
    && install --directory --owner=kvxfer --group=kvxfer --mode=0700 \
        /var/lib/kvxfer /var/lib/kvxfer/cache /var/lib/kvxfer/state
ARG PIP_ARGS=
ARG TORCH_INDEX=
RUN --mount=type=bind,from=builder,source=/wheels,target=/wheels \
    --mount=type=bind,from=builder,source=/src/constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir --constraint /constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} ${PIP_ARGS} \
        "$(echo /wheels/kvxfer-*.whl)[router,engine]"
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
