#!/usr/bin/env bash
# Runs one part of the study, then writes all reports. If started again, it skips complete runs and resumes the others
# from their checkpoints. docs/protocol.md says what each part is for.
#   bash docs/results/study.sh rivals      # one part; see the cases below
#   bash docs/results/study.sh keep        # starts no run: copies the complete runs and writes all reports
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}

sweep() { # a script, the place of its runs, then its options: two runs at a time, one thread each
    OMP_NUM_THREADS=1 "$python" "$1" -m "hydra.sweep.dir=runs/study/$2" hydra/launcher=joblib \
        hydra.launcher.n_jobs=2 logger=csv "${@:3}"
}

first() { # of the first study, whose targets moved with the actor; the names of its runs do not say so
    sweep "$1" "$2" target_interval=2 "${@:3}" \
        'hydra.job.config.override_dirname.exclude_keys=[logger,threads,device,compile,video,checkpoint_every,resume,target_interval]'
}

offline() { # the same, on the rows of `data`; the names of the runs do not repeat their path
    sweep "$1" "$2" 'data.source=runs/study/data/${env.name}' "${@:3}" \
        'hydra.job.config.override_dirname.exclude_keys=[logger,threads,device,compile,video,checkpoint_every,resume,data.source]'
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
case ${1:?rivals, suite, ratio20, walkers, sac, crossq, droq, sac_norm, bf16, data, offline, offline_online, learn, main, pendulum, baseline, baseline5, pairings or keep} in
rivals) # not compiled, since its first runs were not
    sweep recipes/td3.py rivals seed='range(5)' env=HalfCheetah replay=uniform,nmer,ct,1nn,mixup \
        total_frames=30000 random_frames=5000 replay_ratio=5 compile=false
    ;;
suite)
    sweep recipes/td3.py suite seed='range(4)' env=dm_control \
        env.name=walker-walk,walker-run,cheetah-run,finger-spin replay=uniform,nmer,ct \
        total_frames=30000 random_frames=3000 replay_ratio=5
    ;;
ratio20)
    sweep recipes/td3.py ratio20 seed='range(4)' env=HalfCheetah replay=uniform,nmer,ct \
        total_frames=30000 random_frames=5000 replay_ratio=20
    ;;
walkers)
    sweep recipes/td3.py walkers seed='range(4)' env=Walker2d replay=uniform,nmer \
        total_frames=100000 replay_ratio=5
    sweep recipes/td3.py walkers seed='range(4)' env=Ant env.version=v4 replay=uniform,nmer \
        total_frames=100000 replay_ratio=5
    ;;
sac)
    sweep recipes/sac.py sac seed='range(4)' env=HalfCheetah replay=uniform,nmer \
        total_frames=30000 random_frames=5000 replay_ratio=5
    sweep recipes/sac.py sac seed='range(4)' env=Walker2d replay=uniform,nmer \
        total_frames=60000 random_frames=5000 replay_ratio=5
    ;;
# Other agents, each with the settings of its paper
crossq)
    sweep recipes/crossq.py crossq seed='range(4)' env=HalfCheetah,Walker2d replay=uniform,nmer \
        total_frames=50000 'critic_hidden=[256,256]'
    ;;
droq)
    sweep recipes/redq.py droq seed='range(3)' env=HalfCheetah replay=uniform,nmer \
        total_frames=20000 num_critics=2 dropout=0.01 layer_norm=true
    ;;
sac_norm)
    sweep recipes/sac.py sac_norm seed='range(3)' env=HalfCheetah replay=uniform,nmer \
        total_frames=20000 random_frames=5000 replay_ratio=20 layer_norm=true
    ;;
bf16) # a check of a setting, with one kind of replay
    sweep recipes/td3.py bf16 seed='range(5)' env=HalfCheetah replay=uniform precision=float32,bf16 \
        total_frames=30000 random_frames=5000 replay_ratio=5
    ;;
# Recorded rows
data) # what the next two parts learn from: all rows that TD3 stores in 100,000 frames
    for env in HalfCheetah Hopper Walker2d; do
        test -e "runs/study/data/$env/checkpoint.pt" && continue # which is not kept with the project
        rm -rf "runs/study/data/$env"
        OMP_NUM_THREADS=1 "$python" recipes/td3.py env=$env replay=uniform total_frames=100000 \
            replay_ratio=1 logger=csv "run_dir=runs/study/data/$env"
    done
    ;;
offline) # after `data`
    for recipe in td3_bc iql; do
        offline recipes/$recipe.py offline_$recipe seed='range(5)' env=HalfCheetah,Hopper,Walker2d \
            data.rows=5000,20000,100000 replay=uniform,nmer,ct,s4rl,noisy
    done
    ;;
offline_online) # after `data`
    offline recipes/sac.py offline_online seed='range(5)' env=Walker2d data.rows=20000 replay=uniform,nmer \
        total_frames=30000 random_frames=1000 replay_ratio=5 layer_norm=true
    ;;
learn) # whether each agent learns at all: one seed, no comparison
    sweep recipes/ddpg.py learn env=InvertedPendulum,HalfCheetah replay=uniform \
        total_frames=30000 random_frames=5000
    sweep recipes/crossq.py learn env=InvertedPendulum replay=uniform \
        total_frames=8000 random_frames=1500 'critic_hidden=[256,256]'
    sweep recipes/redq.py learn env=InvertedPendulum replay=uniform \
        total_frames=8000 random_frames=1500 replay_ratio=1 lr=0.0003,0.001
    sweep recipes/redq.py learn env=InvertedPendulum replay=uniform num_critics=2 dropout=0.01 \
        layer_norm=true total_frames=8000 random_frames=1500 replay_ratio=1 lr=0.0003,0.001
    sweep recipes/redq.py learn env=InvertedPendulum replay=uniform \
        total_frames=4000 random_frames=1500 replay_ratio=10
    sweep recipes/redq.py learn env=InvertedPendulum replay=uniform num_critics=2 dropout=0.01 \
        layer_norm=true total_frames=4000 random_frames=1500 replay_ratio=10
    sweep recipes/sunrise.py learn env=InvertedPendulum replay=uniform total_frames=12000 lr=0.001
    sweep recipes/sunrise.py learn env=HalfCheetah replay=uniform total_frames=30000
    sweep recipes/redq.py learn env=HalfCheetah replay=uniform total_frames=17000
    ;;
# The first study
main)
    first recipes/td3.py main seed='range(4)' env=HalfCheetah,Walker2d,Hopper replay=uniform,nmer \
        total_frames=30000 random_frames=5000 replay_ratio=5
    ;;
pendulum)
    first recipes/td3.py pendulum seed='range(10)' env=InvertedDoublePendulum replay=uniform,nmer \
        total_frames=10000 random_frames=1500 replay_ratio=5
    ;;
baseline)
    # Theirs first: without `pip install stable-baselines3` it ends here, and not after hours.
    first recipes/benchmarks/baseline.py baseline seed='range(3)' env=HalfCheetah,Hopper \
        total_frames=50000 replay_ratio=1
    first recipes/td3.py baseline seed='range(3)' env=HalfCheetah,Hopper replay=uniform \
        total_frames=50000 replay_ratio=1
    ;;
baseline5) # at the ratio of main
    first recipes/benchmarks/baseline.py baseline5 seed='range(4)' env=HalfCheetah \
        total_frames=30000 random_frames=5000 replay_ratio=5
    ;;
pairings)
    first recipes/td3.py pairings seed='range(4)' env=HalfCheetah replay=1nn,mixup,ct \
        total_frames=30000 random_frames=5000 replay_ratio=5
    ;;
keep) ;;
*)
    echo "study.sh: there is no part $1; the cases of this script are the parts" >&2
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
    "$python" recipes/report.py "${runs[@]}" --out "${part%/}" --no-pdf # so that the project stays small
done
"$python" docs/why.py >/dev/null # the figure of the section "Why"
