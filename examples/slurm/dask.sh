#!/bin/bash
# A dask cluster inside one allocation; with dask-jobqueue, point --scheduler-file at the cluster that it has started.
#SBATCH --job-name=convert-dask
#SBATCH --nodes=4 --ntasks-per-node=8 --mem=16G
#SBATCH --time=04:00:00 --requeue
set -euo pipefail
scheduler=$(mktemp --tmpdir="$PWD" scheduler-XXXXXX.json)
trap 'rm -f "$scheduler"; kill $(jobs -p) 2>/dev/null' EXIT
dask scheduler --scheduler-file "$scheduler" &
srun dask worker --scheduler-file "$scheduler" --nthreads 1 --no-nanny &
convert npy-to-hdf5 "$1" "$2" --shard-size 4GiB --memory 48GiB --executor dask --scheduler-file "$scheduler" --resume
