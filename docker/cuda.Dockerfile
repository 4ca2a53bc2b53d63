# SGLang on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t asyncrl:cuda .
FROM nvidia/cuda:12.9.1-devel-ubuntu24.04

# SGLang compiles kernels when it starts: they need nvcc, a C++ compiler and the headers of Python and libnuma.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv python3-dev g++ ninja-build libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/asyncrl
ENV PATH=/opt/asyncrl/bin:$PATH

RUN useradd --uid 10001 --create-home asyncrl && install -d -o asyncrl /runs
COPY pyproject.toml README.md LICENSE /src/
COPY topics /src/topics
COPY actors /src/actors
COPY asyncrl /src/asyncrl
RUN pip install --no-cache-dir "/src[sglang]" && rm -r /src
COPY --chmod=755 docker/start /usr/local/bin/start

USER asyncrl
WORKDIR /
VOLUME /runs
EXPOSE 8321
STOPSIGNAL SIGTERM
ENTRYPOINT ["start"]
CMD ["up", "chat", "--set", "model.path=/model", "--set", "gateway.host=0.0.0.0", "--set", "engine.kind=sglang"]
