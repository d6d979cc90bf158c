# Quire as images: `scheduler` without torch, `worker` with it, `worker-gpu` with what Triton compiles kernels by.
#
#   docker build --target scheduler -t quire-scheduler .
#   docker build --target worker -t quire-worker .
#   docker build --target worker-gpu -t quire-worker-gpu .    with a torch built for CUDA, which brings Triton
#
# Build arguments:
#   BASE          image with Python 3.11 or later and its venv module.
#   BUILDER       image with the same and a C++ compiler, which builds the native kernels. The others need no compiler.
#   TORCH_INDEX   package index to take torch from, e.g. PyTorch's index of CPU builds. Default: pip's own.
#   PIP_NO_INDEX  1: install from nothing but the wheels in the folder `wheels/` beside this file.
#
# What is installed and what is ours are layers of their own, so that a change of code moves a megabyte, not torch.

ARG BASE=docker.io/library/python:3.11-slim
ARG BUILDER=docker.io/library/python:3.11

FROM ${BASE} AS base
# The number, not the name, lets an orchestrator see that this is not root.
RUN useradd --uid 10001 --no-log-init --create-home --shell /usr/sbin/nologin quire
ENV PATH=/opt/quire/bin:/opt/venv/bin:$PATH PYTHONPATH=/opt/quire PYTHONUNBUFFERED=1 GRPC_ENABLE_FORK_SUPPORT=0
WORKDIR /srv/quire

FROM base AS venv
ARG PIP_NO_INDEX
# pip takes an empty variable for an absent one.
ENV PIP_NO_INDEX=${PIP_NO_INDEX} PIP_FIND_LINKS=/tmp/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/venv
# The glob lets the folder be absent.
COPY constraints.txt wheel[s] /tmp/wheels/
COPY pyproject.toml README.md LICENSE constraints.txt hatch_build.py ./

# Only the metadata is here yet: the distribution that comes along with its dependencies is empty, and removed.
FROM venv AS scheduler-venv
RUN pip install -c constraints.txt '.[cli,scheduler]' && pip uninstall -y quire-llm

FROM venv AS worker-venv
ARG TORCH_INDEX
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch
RUN pip install -c constraints.txt '.[cli,worker]' && pip uninstall -y quire-llm

# Ours, with the native kernels in a variant for each usual kind of processor.
FROM ${BUILDER} AS code
ARG PIP_NO_INDEX
ENV PIP_NO_INDEX=${PIP_NO_INDEX} PIP_FIND_LINKS=/tmp/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /srv/quire
RUN python3 -m venv /opt/venv
COPY constraints.txt wheel[s] /tmp/wheels/
COPY pyproject.toml README.md LICENSE hatch_build.py ./
COPY common common
COPY kernels kernels
COPY quire quire
COPY scheduler_svc scheduler_svc
COPY worker_svc worker_svc
RUN QUIRE_BUILD_KERNELS=required /opt/venv/bin/pip install --no-deps --target /opt/quire .

FROM base AS scheduler
COPY --from=scheduler-venv /opt/venv /opt/venv
COPY --from=code /opt/quire /opt/quire
USER 10001:10001
EXPOSE 7847
# Of the process, not of its ability to generate: without a worker it must wait, not be restarted.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["quire", "health", "127.0.0.1:7847", "--service", ""]
ENTRYPOINT ["python", "-m", "scheduler_svc"]

FROM base AS worker
COPY --from=worker-venv /opt/venv /opt/venv
COPY --from=code /opt/quire /opt/quire
USER 10001:10001
EXPOSE 7848
# Healthy once the model is loaded.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s CMD ["quire", "health", "127.0.0.1:7848", "--service", "quire.v1.Worker"]
ENTRYPOINT ["python", "-m", "worker_svc"]

FROM worker AS worker-gpu
USER root
# Triton compiles its launchers when the worker starts, and keeps them and the kernels where they can be executed.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
  && install --directory --owner=10001 --group=10001 /var/cache/quire
ENV TRITON_CACHE_DIR=/var/cache/quire NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
