# Kubernetes: cordon a node, and have its pod replaced; or stop or restart the Job.
#
#   dpro watch RUN --on-finding "$(dpro recipe kubernetes)"
#
# NAMESPACE  of the pods  [that of the context]
# JOB        the Job that is stopped (suspended) or restarted (its pods are replaced)
#
# A host is the pod's name, unless the pod uses the host's network: then it is the node's. What made the pods
# (a Job, PyTorchJob, JobSet) has to make a new one, and the job to continue from its checkpoint. The account needs
# to patch nodes, and to get and delete pods.
set -eu
in=${NAMESPACE:+--namespace=$NAMESPACE}
case "${DPRO_ACTION:-replace}" in
stop) exec kubectl patch job $in "${JOB:?}" --type=merge --patch='{"spec":{"suspend":true}}' ;;
restart) exec kubectl delete pod $in --selector="job-name=${JOB:?}" --wait=false ;;
reroute) echo "reroute: dpro recipe nccl"; exit 2 ;;
esac
if node=$(kubectl get pod $in "$DPRO_HOST" -o 'jsonpath={.spec.nodeName}' 2>/dev/null) && [ "$node" ]; then
    kubectl cordon "$node"
    kubectl delete pod $in "$DPRO_HOST" --wait=false
else
    kubectl cordon "$DPRO_HOST"
fi
