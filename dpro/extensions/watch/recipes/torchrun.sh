# torchrun: stop a job on a list of hosts, restart it, or start it without one that is slow.
#
#   HOSTFILE=hosts NNODES=8 STOP='pkill -f [t]rain.py' START='torchrun … train.py' \
#     dpro watch RUN --on-finding "$(dpro recipe torchrun)"
#
# HOSTFILE  the hosts, one a line, spares last; the one that is taken out moves to HOSTFILE.out
# NNODES    how many of them the job takes; fewer where fewer are left, but not below MIN_NODES [NNODES]
# STOP      what ends the job on a host
# START     what starts it; it runs with HOST_RANK, NNODES and MASTER in its environment
# LAUNCH    what runs a command on a host                        [ssh -o BatchMode=yes]
# CHECK     what confirms; not 3 as its exit code, and all hosts stay [dpro check --finding - --only network]
# LOGS      where what the job says goes                         [.]
set -eu
: "${HOSTFILE:?}" "${NNODES:?}" "${STOP:?}" "${START:?}"
LAUNCH=${LAUNCH:-ssh -o BatchMode=yes}
finding=$(cat)
action=${DPRO_ACTION:-replace}
[ "$action" != reroute ] || { echo "reroute: dpro recipe nccl"; exit 2; }
if [ "$action" = replace ]; then
    grep -qxF "$DPRO_HOST" "$HOSTFILE" || { echo "$DPRO_HOST is not in $HOSTFILE"; exit 1; }
    [ "$(grep -cvxF "$DPRO_HOST" "$HOSTFILE")" -ge "${MIN_NODES:-$NNODES}" ] || { echo "too few hosts are left"; exit 1; }
fi

for host in $(head -n "$NNODES" "$HOSTFILE"); do
    $LAUNCH "$host" "$STOP" </dev/null || echo "$host: nothing to stop"
done
[ "$action" != stop ] || exit 0
code=0
[ "$action" = restart ] || printf '%s' "$finding" | ${CHECK:-dpro check --finding - --only network} || code=$?
if [ "$code" = 3 ]; then
    echo "$DPRO_HOST" >>"$HOSTFILE.out"
    grep -vxF "$DPRO_HOST" "$HOSTFILE" >"$HOSTFILE.new"
    mv "$HOSTFILE.new" "$HOSTFILE"
fi

hosts=$(head -n "$NNODES" "$HOSTFILE")
set -- $hosts
master=$1 number=$# rank=0
for host; do
    command="HOST_RANK=$rank NNODES=$number MASTER=$master; export HOST_RANK NNODES MASTER; $START"
    nohup $LAUNCH "$host" "$command" </dev/null >>"${LOGS:-.}/$host.log" 2>&1 &
    rank=$((rank + 1))
done
echo "the job starts on" $hosts
