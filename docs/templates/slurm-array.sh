#!/bin/bash
# One campaign on each machine of an array, for an hour:
#
#   job=$(sbatch --parsable slurm-array.sh)
#   sbatch --dependency=afterany:"$job" slurm-merge.sh "$job"
#
# Submit it from the project's folder.
#SBATCH --job-name=attnfuzz
#SBATCH --array=0-7
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:15:00
#SBATCH --signal=TERM@120
set -u

cd "$SLURM_SUBMIT_DIR" || exit 2
. .venv/bin/activate
# A local disk: thousands of small files are compiled, and locks on a network drive are slow.
export TRITON_CACHE_DIR=${TMPDIR:-/tmp}/triton-$USER

# Each task of the array is a shard, with a folder of its own there.
srun attnfuzz ci --nightly --output "runs/$SLURM_ARRAY_JOB_ID" --workers auto
status=$?
# 1 means findings, which are the merging job's to report; 2 is a machine that cannot run kernels.
[ "$status" -eq 1 ] && exit 0
exit "$status"
