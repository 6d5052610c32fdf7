#!/usr/bin/env bash
# Run one training on several nodes: start this script with the same arguments on every node.
#
#   NODES        number of nodes
#   NODE_RANK    of this node, 0 to NODES-1; node 0 is the head and trains
#   HEAD_ADDR    address of node 0 that the others reach
#   HEAD_PORT    port of Ray on node 0 (default 6379)
#   DEVICE       npu, cuda or cpu: the resource that this node registers (default npu)
#   NUM_DEVICES  devices of this node (default: npu 8; cuda: what Ray finds)
#   PATIENCE     seconds to wait for the cluster to be complete (default 600)
#   RAY_AUTH_TOKEN  if you use Ray's token authentication: the same on every node, or the same ~/.ray/auth_token
#
#   NODES=2 NODE_RANK=0 HEAD_ADDR=10.0.0.1 bash examples/launch_cluster.sh \
#       --config-name grpo_trainer_qwen25_7b rl_config.actor_resource.num_npus=16
#
# With RAY_ADDRESS set there is a cluster already: it is joined, and nothing is started or stopped.
# Each node stops the Ray node that it started, and no other process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=examples/ascend_env.sh
. examples/ascend_env.sh

if [ -n "${RAY_ADDRESS:-}" ]; then
    exec python cli/train_grpo.py "$@"
fi

: "${NODES:?number of nodes}" "${NODE_RANK:?rank of this node, from 0}" "${HEAD_ADDR:?address of node 0}"
port=${HEAD_PORT:-6379}
head=$HEAD_ADDR:$port
patience=${PATIENCE:-600}

case ${DEVICE:=npu} in
    npu) resources=(--resources "{\"NPU\": ${NUM_DEVICES:-8}}") ;;
    cuda) resources=(${NUM_DEVICES:+--num-gpus "$NUM_DEVICES"}) ;;
    cpu) resources=() ;;
    *) echo "DEVICE = $DEVICE: must be npu, cuda or cpu" >&2 && exit 2 ;;
esac

# Where a token exists, `ray start --head` demands it of everyone; workers and clients send it only in this mode.
if [ -z "${RAY_AUTH_MODE:-}" ] &&
    { [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || [ -f "$HOME/.ray/auth_token" ]; }; then
    export RAY_AUTH_MODE=token
fi

pids=() # what this script started, in order

stop_started() {
    local i
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do # the training before the Ray node under it
        kill -TERM "${pids[i]}" 2>/dev/null || true
        wait "${pids[i]}" 2>/dev/null || true
    done
    # Ray leaves its note of the cluster behind, and programs on this machine would try to join what is gone
    local note=${RAY_TMPDIR:-/tmp}/ray/ray_current_cluster
    if [ ${#pids[@]} -gt 0 ] && [[ $(cat "$note" 2>/dev/null) == *":$port" ]]; then
        rm -f "$note"
    fi
}
trap stop_started EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ray_node ARGUMENT...: start Ray here; --block keeps its processes below one process, which ends them with itself
ray_node() {
    ray start --block "$@" "${resources[@]}" &
    pids+=($!)
}

await_head() {
    local deadline=$((SECONDS + patience))
    until (exec 3<>"/dev/tcp/$HEAD_ADDR/$port") 2>/dev/null; do
        if [ ${#pids[@]} -gt 0 ] && ! kill -0 "${pids[0]}" 2>/dev/null; then
            echo "node $NODE_RANK: Ray did not start; see its message above" >&2
            return 1
        fi
        if [ "$SECONDS" -ge "$deadline" ]; then
            echo "node $NODE_RANK: waited $patience s for the head at $head" >&2
            return 1
        fi
        sleep 1
    done
}

await_nodes() {
    python - "$head" "$NODES" "$patience" <<'PYTHON'
import sys
import time

import ray

address, wanted, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
deadline = time.monotonic() + patience
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
while (alive := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"node 0: {alive} of {wanted} nodes joined within {patience:g} s")
    time.sleep(1)
PYTHON
}

if [ "$NODE_RANK" -eq 0 ]; then
    ray_node --head --node-ip-address="$HEAD_ADDR" --port="$port" --include-dashboard=false
    await_head
    await_nodes
    RAY_ADDRESS=$head python cli/train_grpo.py "$@" &
    pids+=($!)
    wait "${pids[-1]}" # in the background, so that a signal reaches this script at once; its exit code is ours
else
    await_head
    ray_node --address="$head"
    wait "${pids[-1]}" || true # Ray ends here when the head leaves, after the training
fi
