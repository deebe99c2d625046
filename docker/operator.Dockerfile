# The operator: `surefoot-operator`, and the companion of the memory tier. No torch, no compiler, no pip; nobody is root.
#
#   docker build --file docker/operator.Dockerfile --tag surefoot/operator:0.1.0 .
FROM python:3.12.13-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml LICENSE ./
COPY operator ./operator
COPY runtime ./runtime
COPY docker/operator.txt ./docker/operator.txt
RUN python -m venv --without-pip /opt/surefoot \
 && pip --python /opt/surefoot/bin/python install --no-cache-dir --disable-pip-version-check \
        --constraint docker/operator.txt '.[operator]'

FROM python:3.12.13-slim-bookworm
LABEL org.opencontainers.image.title="surefoot operator" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/surefoot /opt/surefoot
ENV PATH=/opt/surefoot/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# by number: a kubelet cannot know that a name is not root
USER 65532:65532
EXPOSE 8443 8080
ENTRYPOINT ["surefoot-operator"]
