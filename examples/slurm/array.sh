#!/bin/bash
# A job array of N parts without any engine: SRC DST N [options], of at least N shards. Submit it, then the merge behind it:
#   job=$(sbatch --parsable --array=0-15 examples/slurm/array.sh tokens/ train-h5 16 --shards 64)
#   sbatch --dependency=afterok:$job --wrap "zb index merge train-h5"
# The merge names parts that are missing. To write part 3 again: sbatch --array=3, and the same N.
#SBATCH --job-name=convert-array
#SBATCH --ntasks=1 --cpus-per-task=8 --mem=16G
#SBATCH --time=04:00:00 --requeue --open-mode=append --signal=B:USR1@60
set -euo pipefail
[ -z "${ZB_VENV:-}" ] || source "$ZB_VENV/bin/activate"  # else the zb of sbatch's own PATH
trap 'scontrol requeue "$SLURM_JOB_ID"; wait' USR1       # before the time is over: the next run goes on
part="$SLURM_ARRAY_TASK_ID/$3"
srun zb convert npy-to-hdf5 "$1" "$2" --memory 12GiB --shard-range "$part" --resume "${@:4}" &
wait $!
