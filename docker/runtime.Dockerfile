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

FROM scratch AS source
COPY pyproject.toml LICENSE docker/runtime.txt /
COPY operator /operator
COPY runtime /runtime

# pip and its environment stay here
FROM ${BASE} AS tools
RUN python3 -m venv /opt/tools

FROM tools AS torch
COPY docker/runtime.txt /
# a build with a local version, such as 2.15.0+cpu, is preferred to the plain one of the same number
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    python3 -m venv --without-pip /opt/surefoot \
 && /opt/tools/bin/python -m pip --python /opt/surefoot/bin/python install --no-cache-dir --disable-pip-version-check \
        --only-binary :all: --constraint /runtime.txt torch

FROM ${BASE}
RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
 && groupadd --gid 1000 trainer \
 && useradd --uid 1000 --gid 1000 --create-home trainer
# a layer of its own: another version of surefoot is a few MB to fetch, not torch again
COPY --from=torch /opt/surefoot /opt/surefoot
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,from=source,target=/run/source,rw \
    /opt/tools/bin/python -m pip --python /opt/surefoot/bin/python install --no-cache-dir --disable-pip-version-check \
        --only-binary :all: --constraint /run/source/runtime.txt '/run/source[runtime,local,embedded-redis]'
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
