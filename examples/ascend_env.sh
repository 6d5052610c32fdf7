# shellcheck shell=bash
# Environment of a process that uses NPUs; does nothing on hosts without CANN. Source it.

ascend_toolkit=${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit}
if [ -f "$ascend_toolkit/set_env.sh" ]; then
    set +u # CANN's script reads variables that may be unset
    # shellcheck source=/dev/null
    . "$ascend_toolkit/set_env.sh"
    set -u
    # seconds that ranks wait for each other: the first to load a large model must not give up on the last
    export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"
fi
