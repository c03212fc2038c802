# The trainer as an image: `docker build --target cpu -t trainer:cpu .`, and `--target gpu` for NVIDIA GPUs.
#
# Nothing here needs a registry beyond the base image, nor BuildKit. Any base with Python 3.10 to 3.13 and its venv will
# do. With wheels in wheels/ (`make wheels`) nothing is fetched, and `--network none` can be added.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS build
COPY requirements wheels* /build/

FROM build AS build-cpu
RUN sh /build/install.sh cpu /opt/libraries

FROM ${BASE_IMAGE} AS source
COPY conf /opt/trainer/conf
COPY trainer /opt/trainer/trainer
RUN python3 -m compileall -q /opt/trainer

FROM ${BASE_IMAGE} AS runtime
LABEL org.opencontainers.image.title="trainer" \
      org.opencontainers.image.description="A declarative trainer for distributed TensorFlow" \
      org.opencontainers.image.licenses="Apache-2.0"
# A container's root may be read-only: what libraries want to keep goes to /tmp.
ENV PATH=/opt/libraries/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN mkdir -m 1777 /work
WORKDIR /work
ENTRYPOINT ["python3", "-m", "trainer"]
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s CMD ["python3", "-m", "trainer.observe.health"]
USER 10001:10001

FROM runtime AS cpu
COPY --from=build-cpu /opt/libraries /opt/libraries
COPY --from=source /opt/trainer /opt/trainer

# The tests, run where the trainer runs: docker run --rm trainer:test
FROM build AS build-test
RUN sh /build/install.sh dev /opt/libraries

FROM runtime AS test
COPY --from=build-test /opt/libraries /opt/libraries
COPY --from=source /opt/trainer /opt/trainer
COPY . /work
ENTRYPOINT ["python3", "-m", "pytest", "-p", "no:cacheprovider"]
CMD ["-n", "2", "-m", "not cluster"]

# Shows the events of a run, and holds nothing else.
FROM build AS build-tensorboard
RUN sh /build/install.sh tensorboard /opt/libraries

FROM ${BASE_IMAGE} AS tensorboard
COPY --from=build-tensorboard /opt/libraries /opt/libraries
ENV PATH=/opt/libraries/bin:$PATH HOME=/tmp
ENTRYPOINT ["tensorboard", "--bind_all", "--port=6006", "--logdir"]
USER 10001:10001

FROM build AS build-gpu
RUN sh /build/install.sh gpu /opt/libraries

FROM runtime AS gpu
COPY --from=build-gpu /opt/libraries /opt/libraries
COPY --from=source /opt/trainer /opt/trainer
