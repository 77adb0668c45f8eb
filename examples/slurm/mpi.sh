#!/bin/bash
# Many nodes through mpi4py: rank 0 hands out shards, the others write them.
#SBATCH --job-name=convert-mpi
#SBATCH --nodes=4 --ntasks-per-node=8 --mem=16G
#SBATCH --time=04:00:00 --requeue
set -euo pipefail
# --memory is divided by the ranks that work: 4 nodes of 12 GiB
srun convert npy-to-hdf5 "$1" "$2" --shard-size 4GiB --memory 48GiB --executor mpi --resume
