# The app on a CPU: `docker build -t fisedit . && docker run --rm -p 127.0.0.1:7860:7860 -e FISEDIT_TOKEN=... fisedit`.
# Sessions lie in /sessions: mount a volume there to keep them.
FROM python:3.11-slim AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /dist

FROM python:3.11-slim
RUN useradd --create-home --uid 1000 fisedit && mkdir /sessions && chown fisedit /sessions
COPY --from=build /dist/*.whl /tmp/
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$(ls /tmp/*.whl)[app,lora]" && rm /tmp/*.whl
USER fisedit
ENV HF_HUB_OFFLINE=1
EXPOSE 7860
VOLUME /sessions
# Others reach a container's port, so a token is needed: FISEDIT_TOKEN, of 16 letters or more.
CMD ["fisedit", "app", "--host", "0.0.0.0", "--sessions", "/sessions", "--allowed-host", "localhost"]
