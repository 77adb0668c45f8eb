#!/bin/bash
# A job array of N parts of documents: SRC DST N [options]. Text becomes a stream, and the stream becomes rows:
#   job=$(sbatch --parsable --array=0-15 examples/slurm/documents.sh text/ web-stream 16 --to stream --tokenizer tok.json)
#   job=$(sbatch --parsable --dependency=afterok:$job --wrap "zb index merge web-stream")
#   job=$(sbatch --parsable --dependency=afterok:$job --array=0-15 examples/slurm/documents.sh web-stream web-h5 16)
#   sbatch --dependency=afterok:$job --wrap "zb index merge web-h5"
# A merge names parts that are missing. To write part 3 again: sbatch --array=3, and the same N.
#SBATCH --job-name=convert-documents
#SBATCH --ntasks=1 --cpus-per-task=8 --mem=16G
#SBATCH --time=04:00:00 --requeue --open-mode=append --signal=B:USR1@60
set -euo pipefail
[ -z "${ZB_VENV:-}" ] || source "$ZB_VENV/bin/activate"  # else the zb of sbatch's own PATH
trap 'scontrol requeue "$SLURM_JOB_ID"; wait' USR1       # before the time is over: the next run goes on
srun zb convert "$1" "$2" --shard-range "$SLURM_ARRAY_TASK_ID/$3" --resume "${@:4}" &
wait $!
