# Ray: stop the job, and submit it again, without a host where the finding names one.
#
#   JOB=raysubmit_… START='dpro record --ray -o RUN -- python driver.py' \
#     dpro watch RUN --on-finding "$(dpro recipe ray)" --policy policy.toml
#
# JOB      id of the job, as `ray job submit` printed it
# START    what is submitted
# LAUNCH   what runs a command on a host  [ssh -o BatchMode=yes]
#
# RAY_ADDRESS says which cluster, as it does for `ray job`. A host is taken out by ending Ray on it: a cluster
# with an autoscaler starts another one.
set -eu
: "${JOB:?}" "${START:?}"
action=${DPRO_ACTION:-replace}
[ "$action" != reroute ] || { echo "reroute: dpro recipe nccl"; exit 2; }
ray job stop "$JOB" || echo "job $JOB does not run"
if [ "$action" = replace ]; then
    ${LAUNCH:-ssh -o BatchMode=yes} "$DPRO_HOST" "ray stop" </dev/null
fi
[ "$action" = stop ] || ray job submit --no-wait -- sh -c "$START"
