# The package with its recipes.
#   docker build -t nmer .                                                            CPU
#   docker build -t nmer --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu22.04 .      CUDA, with the headers that KeOps compiles against
#   docker run --rm -v "$PWD/runs:/home/nmer/runs" nmer python recipes/sac.py env=InvertedPendulum total_frames=15000 replay_ratio=1 logger=csv
# and on a GPU with `docker run --gpus all`.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# KeOps and torch.compile need g++ and Python's headers, rendering needs EGL. The CPU's base has its own Python.
# Versions of packages differ between the bases.
# hadolint ignore=DL3008
RUN export DEBIAN_FRONTEND=noninteractive && apt-get update \
    && apt-get install --yes --no-install-recommends g++ libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0 \
    && (command -v python3.11 || apt-get install --yes --no-install-recommends python3.11 python3.11-dev python3.11-venv) \
    && rm -rf /var/lib/apt/lists/*

RUN python3.11 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics

# This comes before the recipes, so that a change of a recipe does not repeat the installation.
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY nmer_torchrl nmer_torchrl
RUN pip install --no-cache-dir -c constraints.txt ".[recipes]"

# Do not run as root. With --build-arg UID="$(id -u)", runs in a mounted directory belong to you.
ARG UID=1000
RUN useradd --create-home --uid "${UID}" nmer
USER ${UID}
WORKDIR /home/nmer
RUN mkdir runs
COPY --chown=${UID} recipes recipes

CMD ["python", "recipes/sac.py", "--help"]
