# What training images stand on: torch and surefoot. Add your program, and name the image in the job's template.
#
#   docker build --file docker/runtime.Dockerfile --tag surefoot/runtime:0.1.0 .
#   docker build --file docker/runtime.Dockerfile --build-arg BASE=an-image-with-torch:1 --tag my/runtime:1 .
#
# With the default base, torch and the CUDA libraries come from the package index (5 GB); a base that has torch keeps its own.
ARG BASE=python:3.12.13-slim-bookworm

FROM python:3.12.13-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml LICENSE ./
COPY operator ./operator
COPY runtime ./runtime
RUN pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheels .

FROM ${BASE}
LABEL org.opencontainers.image.title="surefoot runtime" \
      org.opencontainers.image.licenses="Apache-2.0"
SHELL ["/bin/sh", "-euc"]
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir --disable-pip-version-check "$(echo /wheels/surefoot-*.whl)[runtime]"
RUN groupadd --gid 1000 trainer \
 && useradd --uid 1000 --gid 1000 --create-home trainer
ENV PYTHONUNBUFFERED=1
WORKDIR /home/trainer
# by number: a kubelet cannot know that a name is not root
USER 1000:1000
# a job's template states the trainer's command; the operator puts the agent in front of it
CMD ["surefoot-agent"]
