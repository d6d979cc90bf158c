# Two images from one list of stages: `scheduler` without torch, `worker` with it.
#
#   docker build --target scheduler -t quire-scheduler .
#   docker build --target worker -t quire-worker .
#
# TORCH_INDEX is a package index to take torch from, e.g. PyTorch's index of CPU builds. Wheels laid into a folder
# `wheels/` beside this file are preferred; with PIP_NO_INDEX=1 they are all that is used.

ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS base
ENV PYTHONUNBUFFERED=1 GRPC_ENABLE_FORK_SUPPORT=0 PATH=/opt/quire/bin:$PATH
RUN useradd --system --uid 10001 --create-home quire
WORKDIR /srv/quire

FROM base AS build
ARG PIP_NO_INDEX
ENV PIP_FIND_LINKS=/tmp/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/quire
COPY constraints.txt wheel[s] /tmp/wheels/
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY protos protos
COPY common common
COPY kernels kernels
COPY quire quire
COPY scheduler_svc scheduler_svc
COPY worker_svc worker_svc

FROM build AS build-scheduler
RUN pip install -c constraints.txt '.[cli,scheduler]'

FROM build AS build-worker
ARG TORCH_INDEX
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} torch
RUN pip install -c constraints.txt '.[cli,worker]'

FROM base AS scheduler
COPY --from=build-scheduler /opt/quire /opt/quire
USER quire
EXPOSE 7847
HEALTHCHECK --interval=2s --timeout=3s --start-period=30s CMD ["quire", "health", "127.0.0.1:7847"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "scheduler_svc"]

FROM base AS worker
COPY --from=build-worker /opt/quire /opt/quire
USER quire
EXPOSE 7848
HEALTHCHECK --interval=2s --timeout=3s --start-period=120s CMD ["quire", "health", "127.0.0.1:7848", "--service", "quire.v1.Worker"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "worker_svc"]
