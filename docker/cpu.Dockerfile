# The embedded engine on a CPU: docker build -f docker/cpu.Dockerfile -t asyncrl:cpu .
FROM python:3.12-slim

# A package index with a CPU build of torch, which is several GB smaller; empty: the index that pip knows.
ARG TORCH_INDEX=""

RUN useradd --uid 10001 --create-home asyncrl && install -d -o asyncrl /runs
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY topics /src/topics
COPY actors /src/actors
COPY asyncrl /src/asyncrl
RUN pip install --no-cache-dir -c /src/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir -c /src/constraints.txt /src \
    && rm -r /src
COPY --chmod=755 docker/start /usr/local/bin/start

USER asyncrl
WORKDIR /
VOLUME /runs
EXPOSE 8321
STOPSIGNAL SIGTERM
ENTRYPOINT ["start"]
CMD ["up", "chat", "--set", "model.path=/model", "--set", "gateway.host=0.0.0.0"]
