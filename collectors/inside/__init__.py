"""All that runs inside the job: the standard library and torch only, any Python that PyTorch runs with.

Nothing here may change the job or raise. `recorder` is the core: it says which processes record and what a
step is, and calls the probes when a step, a window, a second or the job ends. Trouble in a probe silences
that probe.

    hooks, patching                     where the recorder hangs on torch
    recorder                            the core: which processes record, what a step is, whom to tell
    stepping                            from optimizer updates to steps that are numbered alike on all ranks
    environment, masking                which variables and words are recorded: settings, and no secrets
    names                               names of files that both sides know
    records                             fixed-size records in a mapped file: what is written survives kill -9
    windows, opened, plan, agreement, kineto, modules
                                        probe: deep windows; one that is open; which steps they are, by their
                                        cost; how ranks agree; one recording of Kineto
    tail, foreign, ranges               how far a GPU has got with a window's work; the user's own profilers,
                                        to which windows give way; ranges that outlive a recording
    captures                            when CUDA graphs are captured: nothing of ours calls CUDA then
    coverage                            probe: turns PyTorch's flight recorder on where it is off; which calls
                                        it does not have
    flight, stalls, buckets, clocks     probes: every collective call that a group knows, messages of gloo and
                                        what a process is stuck in, buckets of DDP and FSDP2, clocks
    gpu_steps                           probe: how long steps take on the device, by timing events
    rings                               PyTorch's rings of calls: how far they are, without asking a GPU;
                                        dumps, only while that harms nothing
    control, stacks                     probes: requests from outside, where the threads are
    store                               questions to the job's own store: answered at once or not at all
    peers, pingpong                     probe: clocks of other hosts, compared by timed messages
    exits, preemption                   probes: how processes end; a last flush before a deadly signal
    host, data, mesh                    probes: garbage collection and CPU time, waiting for data, device
                                        meshes
    aside                               probe: what a training loop does beside training: saving, work without
                                        gradients, compilation
    gpu                                 which GPU a process computes on
    batches                             how much work a batch is, by the sizes of its tensors
    naming, inference                   probes: steps that the user names, model calls of jobs that never step
    apply/                              changes to the job that dpro try makes, one file per family; loaded
                                        only then. report.py: what became of them
"""
