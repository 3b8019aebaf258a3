# Two images: `api` (API, control worker, migrations; no torch) and `worker` (runs jobs).
#
#   docker build --target api -t tuneyard-api .
#   docker build --target worker -t tuneyard-worker .

FROM python:3.11-slim AS base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home tuneyard \
 # Named volumes take the owner of the folder they are first mounted over.
 && install -d -o tuneyard -g tuneyard /var/lib/tuneyard /var/lib/tuneyard/storage /var/lib/tuneyard/workspace \
 && install -d -o tuneyard -g tuneyard /home/tuneyard/.cache /home/tuneyard/.cache/huggingface
ENV PYTHONUNBUFFERED=1 PYTHONPATH=/srv/tuneyard TUNEYARD_DATA_DIR=/var/lib/tuneyard
WORKDIR /srv/tuneyard
# Packages before source, so that a change of source installs nothing again. s3fs serves s3:// storage.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --no-cache-dir --constraint constraints.txt . s3fs
# -s: also a good parent where Compose puts its own init in front.
ENTRYPOINT ["tini", "-s", "--"]

FROM base AS api
COPY migrations migrations
COPY worker worker
COPY app app
USER tuneyard
EXPOSE 8000
CMD ["uvicorn", "--factory", "app.main:create_app", "--host", "0.0.0.0", "--port", "8000"]

FROM base AS worker
# On x86-64 torch's wheel brings its CUDA libraries along. The host needs the NVIDIA driver and container toolkit only.
RUN pip install --no-cache-dir --constraint constraints.txt "$(grep '^torch==' constraints.txt)" \
 && pip install --no-cache-dir --constraint constraints.txt ".[worker,tracking]"
COPY migrations migrations
COPY worker worker
COPY app app
USER tuneyard
CMD ["tuneyard", "node"]
