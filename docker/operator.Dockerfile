# The operator: `surefoot-operator`, and the companion of the memory tier. No torch, no compiler, no pip; nobody is root.
#
#   docker build --file docker/operator.Dockerfile --tag surefoot/operator:0.1.0 .
#   docker build … --secret id=pip.conf,src=$HOME/.config/pip/pip.conf    behind an index of your own; no layer keeps it
#
# `make images` does both images, looks into them and writes down what is in them. BASE is any image with Python 3.11 or newer
# and its venv module as `python3`.
ARG BASE=python:3.12.13-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
COPY docker/operator.txt ./docker/operator.txt
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    python3 -m venv /opt/surefoot \
 && /opt/surefoot/bin/python -m pip install --no-cache-dir --disable-pip-version-check --only-binary :all: \
        --require-hashes --requirement docker/operator.txt
COPY pyproject.toml LICENSE ./
COPY operator ./operator
COPY runtime ./runtime
# the wheel stays in the image: an image of yours that has torch takes surefoot from here (docs/install.md)
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    /opt/surefoot/bin/python -m pip wheel --no-cache-dir --disable-pip-version-check --no-deps \
        --wheel-dir /opt/surefoot/wheels . \
 && /opt/surefoot/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --no-index \
        /opt/surefoot/wheels/*.whl \
 && /opt/surefoot/bin/python -m pip uninstall --yes setuptools pip

FROM ${BASE}
# nothing here becomes another user
RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} +
COPY --from=build /opt/surefoot /opt/surefoot
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="surefoot operator" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/surefoot/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# by number: a kubelet cannot know that a name is not root
USER 65532:65532
EXPOSE 8443 8080
ENTRYPOINT ["surefoot-operator"]
