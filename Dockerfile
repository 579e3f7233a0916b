# The worker on a CPU. Not run: there is no container runtime where this file was written.
#   docker build -t llm-worker-rbee . && docker run -p 8080:8080 -e LLM_WORKER_API_KEY=... llm-worker-rbee
FROM python:3.12-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY llm_worker_rbee ./llm_worker_rbee
COPY llm_worker_bench ./llm_worker_bench
RUN pip install --no-cache-dir ".[compile]" && useradd --create-home worker
USER worker
WORKDIR /home/worker
ENV LLM_WORKER_KERNEL_CACHE=/home/worker/kernels LLORCH_LOG_FORMAT=json
VOLUME ["/home/worker/.cache", "/home/worker/kernels"]
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=120s CMD ["python", "-c", \
    "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=3)"]
ENTRYPOINT ["llm-worker-rbee"]
CMD ["serve", "--host", "0.0.0.0"]
