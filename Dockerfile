# One image for every role; the first argument says which:
# router, prefill_worker, decode_worker, or `splitserve.models fetch`.
ARG BASE_IMAGE=python:3.12-slim

# Empty, unless the build gets a folder as the additional context "wheels": pip then looks there too.
FROM scratch AS wheels

# Only the requirements leave this stage: another change of pyproject.toml keeps the long layer below.
FROM ${BASE_IMAGE} AS requirements
COPY deploy/requirements.py pyproject.toml /
RUN python /requirements.py /pyproject.toml serve > /requirements.txt

FROM ${BASE_IMAGE} AS package
COPY constraints.txt /
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /build && /build/bin/pip install --quiet --constraint /constraints.txt hatchling
COPY pyproject.toml README.md LICENSE /source/
COPY splitserve /source/splitserve
COPY kvtransfer /source/kvtransfer
COPY router /source/router
COPY prefill_worker /source/prefill_worker
COPY decode_worker /source/decode_worker
RUN /build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /dist /source

FROM ${BASE_IMAGE} AS cpu
ENV PATH=/opt/splitserve/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
# An index of torch's builds. One of CPU builds keeps gigabytes of CUDA libraries out of the image.
ARG TORCH_INDEX=
# torch comes first and alone, so that no other package's range picks its build.
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=bind,from=requirements,source=/requirements.txt,target=/requirements.txt \
    --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/splitserve \
    && pip install --quiet --find-links /wheels ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --constraint /constraints.txt torch \
    && pip install --quiet --constraint /constraints.txt --requirement /requirements.txt
# The user's number is fixed, because volumes keep it. A volume that is mounted here empty takes over owner and mode.
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin splitserve \
    && install --directory --owner splitserve --group splitserve /var/cache/splitserve
COPY deploy/healthcheck.py /opt/
RUN --mount=type=bind,from=package,source=/dist,target=/dist pip install --quiet --no-deps --no-index /dist/*.whl
ENV PYTHONUNBUFFERED=1 \
    GRPC_VERBOSITY=ERROR \
    PIP_NO_CACHE_DIR=1 \
    SPLITSERVE_CACHE=/var/cache/splitserve \
    HF_HOME=/var/cache/splitserve/huggingface
USER splitserve
WORKDIR /home/splitserve
VOLUME /var/cache/splitserve
EXPOSE 50051 8000
# -P keeps the working directory off the import path.
ENTRYPOINT ["python", "-P", "-m"]
CMD ["router", "--help"]
