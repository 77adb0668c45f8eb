#!/bin/bash
# One node, all its cores:   sbatch examples/slurm/local.sh tokens/ train-h5 [options of zb convert npy-to-hdf5]
# Slurm may end or requeue this job at any moment, and it requeues itself before its time is over: the next run goes on.
#SBATCH --job-name=convert
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=16 --mem=16G
#SBATCH --time=04:00:00 --requeue --open-mode=append --signal=B:USR1@60
set -euo pipefail
[ -z "${ZB_VENV:-}" ] || source "$ZB_VENV/bin/activate"  # else the zb of sbatch's own PATH
trap 'scontrol requeue "$SLURM_JOB_ID"; wait' USR1       # not TERM: that one comes from scancel, too
srun zb convert npy-to-hdf5 "$1" "$2" --memory 12GiB --resume "${@:3}" &
wait $!
