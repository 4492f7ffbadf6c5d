"""Starting a job under the recorder.

start               the job as the process that was asked for, and a sidecar beside it
belonging           whether several launchers are of one job
recording           what a run holds while it is recorded
pretended           the job as one process after another, each a rank of a larger job
portable            a copy of what runs inside the job, for containers that dpro is not in
ownership           what of a run may be changed: this user's own folders only
processes           whether processes that are no children of this one live, and how they ended
absence             why nothing is recorded, as far as can be seen from outside
inspector           turns NCCL's Inspector on, if asked for
"""
