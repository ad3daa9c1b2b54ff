#!/bin/sh
# One node of a job that torchrun starts by hand, or Kubernetes: NNODES, NODE_RANK, RANKS_PER_NODE, CKPTD_JOB.
# Usage, on each node: node.sh TRAIN_COMMAND…   Trains on exit codes 0 and 4 of `ckptd resume`, on nothing else.
# RESUME_OPTIONS: more options of `ckptd resume`, the same on each node; take `--tag` out again after that start.
# Every node must be started anew together: a node that still uploads would let others choose another checkpoint.
set -u
path=$(ckptd resume "$CKPTD_JOB" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
    --world-size "$((NNODES * RANKS_PER_NODE))" ${RESUME_OPTIONS:-})
code=$?
case $code in
    0) CKPTD_CHOICE="resume $(basename "$path")" ;;
    4) CKPTD_CHOICE="fresh" ;;
    *) echo "node $NODE_RANK: ckptd resume ended with $code: not training" >&2
       exit "$code" ;;
esac
export CKPTD_CHOICE
ckptd run --job "$CKPTD_JOB" --drain 15m &
daemon=$!
"$@" &
trainer=$!
trap 'kill -TERM $trainer 2>/dev/null' TERM
wait $trainer
code=$?
while kill -0 $trainer 2>/dev/null; do wait $trainer; code=$?; done
kill -TERM $daemon 2>/dev/null
while kill -0 $daemon 2>/dev/null; do wait $daemon; done
exit $code
