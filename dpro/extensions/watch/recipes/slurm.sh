# Slurm: drain a host, and begin the batch job again without it; or stop or restart it.
#
#   dpro watch RUN --on-finding "$(dpro recipe slurm)"
#
# JOB  id of the job  [$SLURM_JOB_ID]
#
# Run the watcher outside of the job, on a login node that sees RUN: requeueing ends all that is in the job.
# The job has to be one that may be requeued (sbatch --requeue), and to go on from its checkpoint.
# Draining needs the rights of an operator; without them the job is still moved away from the host. Where the
# job asks for nodes by name (--nodelist) and the host is one of them, it may run on any others afterwards.
set -eu
job=${JOB:-${SLURM_JOB_ID:?JOB: the id of the job}}
case "${DPRO_ACTION:-replace}" in
stop) exec scancel "$job" ;;
restart) exec scontrol requeue "$job" ;;
reroute) echo "reroute: dpro recipe nccl"; exit 2 ;;
esac
node=${DPRO_HOST%%.*}
shown=$(scontrol show job "$job")
excluded=$(echo "$shown" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p')
required=$(echo "$shown" | sed -n 's/.*ReqNodeList=\([^ ]*\).*/\1/p')
case "$required" in '' | '(null)') ;; *)
    scontrol show hostnames "$required" | grep -qxF "$node" && any=ReqNodeList= ;;
esac
case "$excluded" in '' | '(null)') excluded=$node ;; *) excluded="$excluded,$node" ;; esac
scontrol update NodeName="$node" State=DRAIN Reason="dpro: $DPRO_CLASS" || echo "$node is not drained"
scontrol requeuehold "$job"
# What sbatch --exclude sets; the job has left its hosts when it is pending.
for attempt in 1 2 3 4 5 6 7 8 9 10 11 12; do
    scontrol update JobId="$job" ExcNodeList="$excluded" ${any:-} && break
    [ "$attempt" != 12 ] || exit 1
    sleep "${PAUSE:-5}"
done
scontrol release "$job"
echo "job $job starts again without $excluded"
