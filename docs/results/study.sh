#!/usr/bin/env bash
# The runs of a study of NMER beside uniform replay. Started again it skips what is complete and goes on with the rest.
#   bash docs/results/study.sh main        # one part; see the cases below
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}

sweep() { # a script, the place of its runs, then its options: two runs at a time, one thread each
    OMP_NUM_THREADS=1 "$python" "$1" -m "hydra.sweep.dir=runs/study/$2" hydra/launcher=joblib \
        hydra.launcher.n_jobs=2 logger=csv "${@:3}"
}

copy() { # the small files of complete runs, which are what is kept with the project
    find "$1" -name summary.json -printf '%P\n' | while read -r file; do
        run=$(dirname "$file")
        mkdir -p "$2/$run"
        cp "$1/$run"/{config.yaml,metrics.csv,summary.json} "$2/$run"
    done
}

mkdir -p runs/study
copy docs/results runs/study # so that no run is made twice
case ${1:?main, pendulum, baseline, baseline5, longer, pairings, ratio20, sac, ant or keep} in
main)
    sweep recipes/td3.py main seed='range(4)' env=HalfCheetah,Walker2d,Hopper replay=uniform,nmer \
        total_frames=30000 random_frames=5000 replay_ratio=5
    ;;
pendulum)
    sweep recipes/td3.py pendulum seed='range(10)' env=InvertedDoublePendulum replay=uniform,nmer \
        total_frames=10000 random_frames=1500 replay_ratio=5
    ;;
baseline)
    # Theirs first: without `pip install stable-baselines3` it ends here, and not after hours.
    sweep recipes/benchmarks/baseline.py baseline seed='range(3)' env=HalfCheetah,Hopper \
        total_frames=50000 replay_ratio=1
    sweep recipes/td3.py baseline seed='range(3)' env=HalfCheetah,Hopper replay=uniform \
        total_frames=50000 replay_ratio=1
    ;;
baseline5) # at the ratio of main
    sweep recipes/benchmarks/baseline.py baseline5 seed='range(4)' env=HalfCheetah \
        total_frames=30000 random_frames=5000 replay_ratio=5
    ;;
longer)
    sweep recipes/td3.py longer seed='range(4)' env=Walker2d replay=uniform,nmer \
        total_frames=60000 random_frames=5000 replay_ratio=5 eval_every=300
    ;;
pairings)
    sweep recipes/td3.py pairings seed='range(4)' env=HalfCheetah replay=1nn,mixup,ct \
        total_frames=30000 random_frames=5000 replay_ratio=5
    ;;
ratio20)
    sweep recipes/td3.py ratio20 seed='range(4)' env=HalfCheetah,Hopper replay=uniform,nmer \
        total_frames=15000 random_frames=5000 replay_ratio=20
    ;;
sac)
    sweep recipes/sac.py sac seed='range(4)' env=HalfCheetah,Walker2d replay=uniform,nmer \
        total_frames=30000 random_frames=5000 replay_ratio=5
    ;;
ant)
    sweep recipes/td3.py ant seed='range(4)' env=Ant replay=uniform,nmer \
        total_frames=30000 random_frames=5000 replay_ratio=5
    ;;
keep) ;; # no run: what has been completed so far
*)
    echo "no part $1" >&2
    exit 2
    ;;
esac

copy runs/study docs/results
for part in docs/results/*/; do
    runs=("${part%/}")
    case $part in # what they are compared with
    */pairings/) runs+=(docs/results/main/env=HalfCheetah*) ;;
    */baseline5/) runs+=(docs/results/main/env=HalfCheetah*replay=uniform*) ;;
    esac
    "$python" recipes/report.py "${runs[@]}" --out "${part%/}"
done
