#!/usr/bin/env bash
# Makes every table of docs/benchmarks.md, one after another. Run it on a machine with nothing else running. It takes
# hours. docs/benchmarks/machine.txt then says when and where it ran.
#   python -m venv peers && peers/bin/pip install sbx-rl "gymnasium[mujoco]"
#   PEERS=peers/bin/python bash docs/benchmarks/run.sh          # all of it
#   bash docs/benchmarks/run.sh sample train                    # some of it
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
streams=${STREAMS:-runs/streams} # recorded once
all=(loops causes denormals train sample upkeep build build2 million query feed recall save)
export OMP_NUM_THREADS=1

record() { # a task, frames, and updates per frame, as a stream of that name
    mkdir -p "$streams"
    test -f "$streams/$4.npz" ||
        "$python" recipes/benchmarks/streams.py --env "$1" --frames "$2" --ratio "$3" --out "$streams/$4.npz"
}

record HalfCheetah-v5 200000 0.1 HalfCheetah-v5
record Hopper-v5 30000 1 Hopper-v5
record Ant-v5 30000 0.1 Ant-v5
graph() { "$python" recipes/benchmarks/graph.py "$@"; }
search() { "$python" recipes/benchmarks/search.py "$@"; }
for part in "${@:-${all[@]}}"; do
    case $part in
    loops) "$python" recipes/benchmarks/loops.py --peers "${PEERS:-$python}" --algorithms td3 sac --updates 800 ;;
    causes) "$python" recipes/benchmarks/causes.py ;;
    denormals) graph denormals --stream "$streams/HalfCheetah-v5.npz" ;;
    train) graph train --stream "$streams/HalfCheetah-v5.npz" ;;
    sample) search sample --most 8e7 ;;
    upkeep) search upkeep ;;
    build) graph build --stream "$streams/HalfCheetah-v5.npz" "$streams/Ant-v5.npz" --rounds 1 ;;
    build2) # with two threads
        OMP_NUM_THREADS=2 graph build --stream "$streams/HalfCheetah-v5.npz" --rounds 1 --threads 2 --name build2
        ;;
    million)
        record HalfCheetah-v5 1000000 0.01 million
        OMP_NUM_THREADS=2 graph build --stream "$streams/million.npz" --sizes 1000000 --rounds 1 --threads 2 \
            --name build_million
        ;;
    query) search query --most 4e7 --sizes 10000 100000 ;;
    feed) graph feed --stream "$streams/HalfCheetah-v5.npz" --rows 100000 ;;
    recall) graph recall --stream "$streams/HalfCheetah-v5.npz" "$streams/Hopper-v5.npz" ;;
    save) graph save --stream "$streams/HalfCheetah-v5.npz" ;;
    *)
        echo "There is no part $part; the parts are ${all[*]}." >&2
        exit 2
        ;;
    esac
done
{
    date -u +%F
    grep -m 1 'model name' /proc/cpuinfo | sed 's/.*: //'
    "$python" -c 'import torch, torchrl; print(f"torch {torch.__version__}, torchrl {torchrl.__version__}")'
    git rev-parse --short HEAD 2>/dev/null || echo 'not a clone'
} >docs/benchmarks/machine.txt
