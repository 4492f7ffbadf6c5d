# Kubernetes: keep pods off the node, and have the pod of the rank made anew elsewhere.
#
#   dpro watch RUN --on-finding "$(dpro recipe kubernetes)"
#
# NAMESPACE  of the pods  [that of the context]
#
# A host is the pod's name, unless the pod uses the host's network: then it is the node's. What made the pods
# (a Job, PyTorchJob, JobSet) has to make one anew, and the job to go on from its checkpoint. The account needs
# to patch nodes, and to get and delete pods.
set -eu
in=${NAMESPACE:+--namespace=$NAMESPACE}
if node=$(kubectl get pod $in "$DPRO_HOST" -o 'jsonpath={.spec.nodeName}' 2>/dev/null) && [ "$node" ]; then
    kubectl cordon "$node"
    kubectl delete pod $in "$DPRO_HOST" --wait=false
else
    kubectl cordon "$DPRO_HOST"
fi
