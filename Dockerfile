# The service in a container: docker build -t brim . ; compose.yaml runs it beside PostgreSQL with one GPU.
# PyTorch's wheels bring CUDA's libraries; the driver comes from the host (NVIDIA Container Toolkit).
FROM python:3.12-slim-trixie AS build
COPY constraints.txt pyproject.toml README.md LICENSE /src/
COPY src /src/src
# CUDA or CPU wheels of torch: the index of the GPU's CUDA version, or https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu128
RUN python -m venv /opt/brim \
 && /opt/brim/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" 'torch>=2.11' \
 && /opt/brim/bin/pip install --no-cache-dir '/src[service]'

FROM python:3.12-slim-trixie
# Debian 13: with Python 3.12 durable jobs need SQLite 3.42, and Debian 12 has 3.40. A C compiler for Triton, which builds
# a launcher for its kernels; OpenMP for torch.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home --shell /usr/sbin/nologin brim \
 && install --directory --owner brim --group brim --mode 0700 /data
COPY --from=build /opt/brim /opt/brim
ENV PATH=/opt/brim/bin:$PATH \
    BRIM_DATA=/data \
    PYTHONUNBUFFERED=1
USER brim
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=4 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["brim"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
