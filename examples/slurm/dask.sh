#!/bin/bash
# A dask cluster inside one allocation: SRC DST [options]. With dask-jobqueue, point --scheduler-file at the cluster that
# it has started. What dask logs goes to a file of its own; the job's output has the report.
#SBATCH --job-name=convert-dask
#SBATCH --nodes=4 --ntasks-per-node=8 --mem=16G
#SBATCH --time=04:00:00 --requeue --open-mode=append --signal=B:USR1@60
set -euo pipefail
[ -z "${ZB_VENV:-}" ] || source "$ZB_VENV/bin/activate"  # else the zb of sbatch's own PATH
scheduler=$(mktemp --tmpdir="$PWD" scheduler-XXXXXX.json)
log="dask-$SLURM_JOB_ID.log"
trap 'rm -f "$scheduler"; kill $(jobs -p) 2>/dev/null || true' EXIT
trap 'scontrol requeue "$SLURM_JOB_ID"; wait' USR1       # before the time is over: the next run goes on
dask scheduler --scheduler-file "$scheduler" >>"$log" 2>&1 &
srun dask worker --scheduler-file "$scheduler" --nthreads 1 --no-nanny >>"$log" 2>&1 &
zb convert npy-to-hdf5 "$1" "$2" --shard-size 4GiB --memory 48GiB --executor dask --scheduler-file "$scheduler" \
    --resume "${@:3}" &
wait $!
