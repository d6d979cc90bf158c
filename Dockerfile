# Images of Quire: `scheduler` and `gateway` without torch, `worker` with torch, `worker-gpu` with the compiler that Triton needs.
#
#   docker build --target scheduler -t quire-scheduler .
#   docker build --target gateway -t quire-gateway .
#   docker build --target worker -t quire-worker .
#   docker build --target worker-gpu -t quire-worker-gpu .    with a torch built for CUDA, which brings Triton
#
# Build arguments:
#   BASE          image with Python 3.11 or later and its venv module.
#   BUILDER       the same with a C++ compiler, to build the native kernels. The other images need no compiler.
#   TORCH_INDEX   package index for torch, e.g. PyTorch's index of CPU builds. Default: pip's own.
#   PIP_NO_INDEX  1: install only from the wheels in the folder `wheels/` beside this file.
#
# Dependencies and our code are separate layers, so that a change of code moves a megabyte, not torch.

ARG BASE=docker.io/library/python:3.11-slim
ARG BUILDER=docker.io/library/python:3.11

FROM ${BASE} AS base
# A numeric user lets an orchestrator verify that it is not root.
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
COPY constraints.txt ./

# Of the worker alone, and before anything that changes more often.
FROM venv AS torch-venv
ARG TORCH_INDEX
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch

# Installs only the dependencies: without code the distribution itself is empty, and is removed again.
FROM venv AS scheduler-venv
COPY pyproject.toml README.md LICENSE hatch_build.py ./
RUN pip install -c constraints.txt '.[cli,scheduler]' && pip uninstall -y quire-llm

FROM venv AS gateway-venv
COPY pyproject.toml README.md LICENSE hatch_build.py ./
RUN pip install -c constraints.txt '.[cli,gateway]' && pip uninstall -y quire-llm

FROM torch-venv AS worker-venv
COPY pyproject.toml README.md LICENSE hatch_build.py ./
RUN pip install -c constraints.txt '.[cli,worker]' && pip uninstall -y quire-llm

# Our code, with native kernels for each usual kind of processor.
FROM ${BUILDER} AS code
ARG PIP_NO_INDEX
ENV PIP_NO_INDEX=${PIP_NO_INDEX} PIP_FIND_LINKS=/tmp/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /srv/quire
# First, and alone, since it takes minutes: a change of other code does not compile them again.
COPY kernels/__init__.py kernels/__init__.py
COPY kernels/native kernels/native
RUN mkdir /opt/kernels && python3 -m kernels.native.prebuilding /opt/kernels
RUN python3 -m venv /opt/venv
COPY constraints.txt wheel[s] /tmp/wheels/
COPY pyproject.toml README.md LICENSE hatch_build.py ./
COPY common common
COPY gateway_svc gateway_svc
COPY kernels kernels
COPY quire quire
COPY scheduler_svc scheduler_svc
COPY worker_svc worker_svc
RUN QUIRE_BUILD_KERNELS=required QUIRE_BUILT_KERNELS=/opt/kernels /opt/venv/bin/pip install --no-deps --target /opt/quire .

FROM base AS scheduler
COPY --from=scheduler-venv /opt/venv /opt/venv
COPY --from=code /opt/quire /opt/quire
USER 10001:10001
EXPOSE 7847
# Health of the process, not of the Inference service: without a worker the scheduler must wait, not be restarted.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["quire", "health", "127.0.0.1:7847", "--service", ""]
ENTRYPOINT ["python", "-m", "scheduler_svc"]

FROM base AS gateway
COPY --from=gateway-venv /opt/venv /opt/venv
COPY --from=code /opt/quire /opt/quire
USER 10001:10001
EXPOSE 8000
# Health of the process: it waits for a scheduler, and a restart would not bring one. A proxy of the environment is not asked.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "gateway_svc"]

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
# Triton compiles its launchers when the worker starts; its cache must be on a file system that allows execution.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
  && install --directory --owner=10001 --group=10001 /var/cache/quire
ENV TRITON_CACHE_DIR=/var/cache/quire NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
