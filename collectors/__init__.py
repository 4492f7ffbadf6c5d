"""What runs beside or inside the recorded job. It meets the analysis only at the schema.

`launch` starts the job as the process that was asked for, and forks a sidecar that watches it. What runs
inside the job is `inside/`, loaded at the end of `import torch`; `telemetry/` samples the node.

    launch                              start a job as the process that was asked for; know whether a
                                        recording is over
    portable                            a copy of what runs inside the job, for containers that dpro is not in
    ownership, inside/own               what of a run may be changed, and what a process of the job may read:
                                        this user's own
    applied                             the same from outside: what was changed on which rank, and what could
                                        not be
    sidecar, processes                  the process beside the job; watching processes that are nobody's
                                        children
    host_facts, meshes, agreement       running totals into counters of steps, timing events into their times;
                                        axes of device meshes into coordinates; whether ranks count alike
    cut, lost                           a recording that is longer than its window, cut to the window's steps;
                                        GPU work that it lacks
    convert, calls, stall, merge, finish
                                        the recorder's files into tables, each collective call once, windows
                                        joined with calls, the manifest
    absence                             why nothing is recorded, as far as can be seen from outside
    attach, dynolog, cost               talking to a job that runs, recorded or not; what deep windows cost
    readiness                           what dpro doctor looks at
    endings, attempts                   how a process ended, from everybody who saw it; which processes
                                        trained together
    inspector, inspector_logs           NCCL's Inspector: turned on if asked for, and its logs taken in
"""
