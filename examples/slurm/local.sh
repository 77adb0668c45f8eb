#!/bin/bash
# One node, all its cores. Slurm may end or requeue this job at any moment: the next run goes on.
#SBATCH --job-name=convert
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=16 --mem=16G
#SBATCH --time=04:00:00 --requeue --signal=TERM@60
set -euo pipefail
srun convert npy-to-hdf5 "$1" "$2" --shard-size 4GiB --memory 12GiB --resume
