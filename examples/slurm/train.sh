#!/bin/bash
# Training whose nodes first copy what their ranks will read to their own disks, with 32 records for each rank and step:
#   sbatch --nodes=4 examples/slurm/train.sh train-h5 run [options of examples/train_gpt.py]
# Slurm may end or requeue this job at any moment, and it requeues itself before its time is over: the next run goes on.
#SBATCH --job-name=train
#SBATCH --ntasks-per-node=8 --cpus-per-task=4 --mem=64G
#SBATCH --time=04:00:00 --requeue --open-mode=append --signal=B:USR1@60
set -euo pipefail
[ -z "${ZB_VENV:-}" ] || source "$ZB_VENV/bin/activate"  # else the zb of sbatch's own PATH
trap 'scontrol requeue "$SLURM_JOB_ID"; wait' USR1       # not TERM: that one comes from scancel, too

export RANKS=$SLURM_NTASKS_PER_NODE WORLD=$SLURM_NTASKS
nodes=(--nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1)
if [ "$SLURM_NNODES" -gt 1 ]; then  # else the ranks would look for the first node for minutes, and tell of it each
    export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
    lost=$(srun "${nodes[@]}" bash -c 'getent hosts "$MASTER_ADDR" > /dev/null || hostname' | sort -u | xargs)
    if [ -n "$lost" ]; then
        echo "Error: $MASTER_ADDR has no address on $lost; export MASTER_ADDR, such as its IP" >&2
        exit 1
    fi
fi
from=(--seed 1)
[ ! -f "$2/loader.json" ] || from=(--state "$2/loader.json")  # what was trained on already is not copied
# single quotes: each node has a local folder and ranks of its own
srun "${nodes[@]}" bash -c '
    first=$((SLURM_NODEID * RANKS))
    exec zb stage "$0" "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/zb-cache" --ranks "$first-$((first + RANKS - 1))" \
        --world-size "$WORLD" --batch-size 32 "$@"' "$1" "${from[@]}" &
wait $!
srun bash -c 'exec python examples/train_gpt.py "$@" --cache "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/zb-cache"' - \
    "$1" --out "$2" --global-batch $((32 * WORLD)) --seed 1 "${@:3}" &
wait $!
