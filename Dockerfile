# ckptd alone, without torch: the daemon needs neither the trainer's image nor its packages.
#   docker build -t ckptd .
#   docker run --rm --init --user "$(id -u):$(id -g)" -v /nvme:/nvme -v /mnt/nas:/mnt/nas \
#     ckptd run /nvme/llama-7b /mnt/nas/llama-7b
# A trainer's image needs nothing of this; ckptd/trainer.py may be copied into it (docs/integrations.md).

# Any image with Python 3.11 or later as `python`, and pip.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
WORKDIR /opt/src
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY ckptd ckptd
COPY config config
COPY systemd systemd
RUN python -m venv --without-pip /opt/ckptd
RUN python -m pip --python /opt/ckptd install --no-cache-dir -c constraints.txt '.[sftp]'

FROM ${BASE}
COPY --from=build /opt/ckptd /opt/ckptd
# Nothing is written into the image: it runs under any user id, with a read-only root.
ENV PATH=/opt/ckptd/bin:/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
HEALTHCHECK --interval=1m --timeout=30s --start-period=2m CMD ["ckptd", "status", "--live"]
ENTRYPOINT ["ckptd"]
CMD ["run", "--drain", "110s"]
