# One image for every role; the first argument says which:
# router, prefill_worker, decode_worker, or `splitserve.models fetch`.
#
#   docker build --target cpu -t splitserve:cpu .
#   docker build --target cuda -t splitserve:cuda .
#   docker build --target baked --build-arg BAKE_ON=cpu -t splitserve:baked .   # has its model with it
ARG BASE_IMAGE=python:3.12-slim
ARG BAKE_ON=cpu

# Empty, unless the build gets a folder as the additional context of this name: "wheels", where pip then looks too, and
# "model", which is then baked in instead of what MODEL names.
FROM scratch AS wheels
FROM scratch AS model

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

# All but our own code.
FROM ${BASE_IMAGE} AS runtime
ENV PATH=/opt/splitserve/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
# An index of torch's builds. Without one x86 gets the build for CUDA; one of CPU builds keeps gigabytes out of the image.
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
# The user's number is fixed, because volumes keep it. A volume that is mounted empty on one of these takes over owner
# and mode.
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin splitserve \
    && install --directory --owner splitserve --group splitserve /var/cache/splitserve \
    && install --directory --owner splitserve --group splitserve --mode 0700 \
        /run/splitserve /run/splitserve/kv /run/splitserve/gpus /run/splitserve/secret
COPY deploy/healthcheck.py deploy/run_role.py /opt/
ENV PYTHONUNBUFFERED=1 \
    GRPC_VERBOSITY=ERROR \
    PIP_NO_CACHE_DIR=1 \
    SPLITSERVE_CACHE=/var/cache/splitserve \
    HF_HOME=/var/cache/splitserve/huggingface \
    TRITON_CACHE_DIR=/var/cache/splitserve/triton
WORKDIR /home/splitserve
VOLUME /var/cache/splitserve
EXPOSE 50051 8000
# -P keeps the working directory off the import path.
ENTRYPOINT ["python", "-P", "-m"]
CMD ["router", "--help"]

FROM runtime AS cpu
RUN --mount=type=bind,from=package,source=/dist,target=/dist pip install --quiet --no-deps --no-index /dist/*.whl
USER splitserve

FROM runtime AS cuda
# Triton compiles a small module against the interpreter's headers, which the base image has, when its first kernel runs.
RUN apt-get update -qq \
    && apt-get install -qq --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV CC=gcc NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=type=bind,from=package,source=/dist,target=/dist pip install --quiet --no-deps --no-index /dist/*.whl
USER splitserve

# Starts without a network: the model lies in /opt/model, and caches of kernels need no more than a writable folder.
FROM ${BAKE_ON} AS baked
ARG MODEL=SmolLM2-135M-Instruct
ARG REVISION=
USER root
RUN --mount=type=bind,from=model,target=/from \
    set -e; found=/from; \
    if [ ! -e /from/config.json ]; then \
        export SPLITSERVE_CACHE=/tmp/fetched HF_HOME=/tmp/fetched; \
        found=$(python -P -m splitserve.models fetch "$MODEL" ${REVISION:+--revision "$REVISION"}); \
    fi; \
    mkdir /opt/model && cp --recursive --dereference "$found"/. /opt/model/ && rm -rf /tmp/fetched
USER splitserve
ENV SPLITSERVE_MODEL=/opt/model SPLITSERVE_SERVED_MODEL_NAME=$MODEL HF_HUB_OFFLINE=1
