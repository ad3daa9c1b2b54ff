#!/bin/sh
# One node: make its save_dir resumable, say in one line from what. Run once per node, before any daemon is started,
# so that no node commits while another chooses. Exit code 0: "resume TAG" or "fresh"; anything else: do not train.
# RESUME_OPTIONS: more options of `ckptd resume`, the same on each node.
set -u
# what epilog.sh needs, on nodes that have a place for it
notes=${CKPTD_EPILOG:-/var/spool/ckptd-epilog}
[ ! -d "$notes" ] ||
    (umask 077; export -p | grep -E '^export (PATH|CKPTD_|SLURM_|SLURMD_)' > "$notes/$SLURM_JOB_ID")
path=$(ckptd resume "$CKPTD_JOB" --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" \
    --world-size "$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE))" ${RESUME_OPTIONS:-})
code=$?
case $code in
    0) echo "resume $(basename "$path")" ;;
    4) echo "fresh" ;;
    *) echo "${SLURMD_NODENAME:-node}: ckptd resume ended with $code: not training" >&2
       exit "$code" ;;
esac
