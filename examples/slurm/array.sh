#!/bin/bash
# A job array without any engine. Submit it, then the merge behind it:
#   job=$(sbatch --parsable --array=0-15 examples/slurm/array.sh tokens/ train-h5)
#   sbatch --dependency=afterok:$job --wrap "zb index merge train-h5"
#SBATCH --job-name=convert-array
#SBATCH --ntasks=1 --cpus-per-task=8 --mem=16G
#SBATCH --time=04:00:00 --requeue
set -euo pipefail
# the array must begin at 0
part="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
srun convert npy-to-hdf5 "$1" "$2" --shards 256 --memory 12GiB --shard-range "$part" --resume
