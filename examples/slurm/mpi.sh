#!/bin/bash
# Many nodes through mpi4py: rank 0 hands out shards, the others write them. SRC DST [options]
# Slurm must tell MPI which ranks there are: where its default is none, export SLURM_MPI_TYPE=pmix, or pmi2 for MPICH
# ("srun --mpi=list" shows what there is). Without it every task is an MPI world of its own, which is an error here.
#SBATCH --job-name=convert-mpi
#SBATCH --nodes=4 --ntasks-per-node=8 --mem=16G
#SBATCH --time=04:00:00 --requeue --open-mode=append --signal=B:USR1@60
set -euo pipefail
[ -z "${ZB_VENV:-}" ] || source "$ZB_VENV/bin/activate"  # else the zb of sbatch's own PATH
trap 'scontrol requeue "$SLURM_JOB_ID"; wait' USR1       # before the time is over: the next run goes on
# --memory is divided by the ranks that work: 4 nodes of 12 GiB
srun zb convert npy-to-hdf5 "$1" "$2" --memory 48GiB --executor mpi --resume "${@:3}" &
wait $!
