# One image for every task of a cluster: see docs/how-to/containers.md.
#   docker build -t tfdist .                               TensorFlow for the CPU
#   docker build -t tfdist:cuda --build-arg EXTRA=cuda .   TensorFlow for NVIDIA GPUs, CUDA included
FROM docker.io/library/python:3.11-slim-bookworm AS build
ARG EXTRA=cpu
WORKDIR /src
RUN python -m venv /venv
# The dependencies are a separate layer, so that a change of tfdist's code does not rebuild it: it is built without the
# files of the demo, which the wheel includes. Headers for compiling operations are removed.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN sed -i '/force-include/,/^$/d' pyproject.toml \
    && mkdir tfdist_cli && touch tfdist_cli/__init__.py \
    && /venv/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRA}]" \
    && rm -rf /venv/lib/python3*/site-packages/tensorflow/include
COPY pyproject.toml ./
COPY configs configs
COPY recipes recipes
COPY tfdist_cli tfdist_cli
RUN /venv/bin/pip install --no-cache-dir --no-deps --force-reinstall .

FROM docker.io/library/python:3.11-slim-bookworm
RUN useradd --create-home --uid 1000 tfdist \
    && mkdir -p /tfdist/runs && chown tfdist:tfdist /tfdist /tfdist/runs
COPY --from=build /venv /venv
COPY configs /tfdist/configs
COPY recipes /tfdist/recipes
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
USER tfdist
WORKDIR /tfdist
VOLUME /tfdist/runs
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s CMD ["python", "-m", "tfdist_cli.task.health"]
ENTRYPOINT ["tfdist"]
CMD ["--help"]
