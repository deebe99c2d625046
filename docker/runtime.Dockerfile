# What training images stand on: torch, surefoot and an example. Add your program, and name the image in the job's template.
#
#   docker build --file docker/runtime.Dockerfile --tag surefoot/runtime:0.1.0 .
#   docker build … --build-arg PIP_EXTRA_INDEX_URL=URL    torch's CPU build, from PyTorch's index of such builds
#   docker build … --secret id=pip.conf,src=$HOME/.config/pip/pip.conf    behind an index of your own; no layer keeps it
#   docker run --rm surefoot/runtime:0.1.0 surefoot local -f examples/gpt.yaml --run-folder /tmp/run    three nodes in it
#
# The package index has torch's CUDA build (5 GB with its libraries), which trains on CPUs too. An image of yours that has
# torch needs three lines instead: docs/install.md. No compiler is left: a program that calls torch.compile adds one.
ARG BASE=python:3.12.13-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
COPY docker/runtime.txt ./docker/runtime.txt
# a build with a local version, such as 2.15.0+cpu, is preferred to the plain one of the same number
ARG PIP_EXTRA_INDEX_URL
# torch alone first: a changed line of surefoot is no reason to fetch it again
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    python3 -m venv /opt/surefoot \
 && /opt/surefoot/bin/python -m pip install --no-cache-dir --disable-pip-version-check --only-binary :all: \
        --constraint docker/runtime.txt torch
COPY pyproject.toml LICENSE ./
COPY operator ./operator
COPY runtime ./runtime
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    /opt/surefoot/bin/python -m pip install --no-cache-dir --disable-pip-version-check --only-binary :all: \
        --constraint docker/runtime.txt '.[runtime,cli,embedded-redis]' \
 && /opt/surefoot/bin/python -m pip uninstall --yes pip

FROM ${BASE}
RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
 && groupadd --gid 1000 trainer \
 && useradd --uid 1000 --gid 1000 --create-home trainer
COPY --from=build /opt/surefoot /opt/surefoot
COPY examples/gpt.py examples/gpt.yaml /workspace/examples/
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="surefoot runtime" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/surefoot/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1
WORKDIR /workspace
# by number: a kubelet cannot know that a name is not root
USER 1000:1000
# a job's template states the trainer's command; the operator puts the agent in front of it
CMD ["surefoot-agent"]
