#!/bin/bash
# Brings together what the machines of an array have found: sbatch --dependency=afterany:JOB slurm-merge.sh JOB
#SBATCH --job-name=attnfuzz-merge
#SBATCH --gpus=1
#SBATCH --time=00:30:00
set -u

cd "$SLURM_SUBMIT_DIR" || exit 2
. .venv/bin/activate
# Fails if there is a bug, so that its mail is worth reading.
shopt -s nullglob
found=(runs/"$1"/*/findings)
if [ "${#found[@]}" -eq 0 ]; then
    echo "nothing was found by job $1"
    exit 0
fi
attnfuzz merge "${found[@]}" --output regressions
