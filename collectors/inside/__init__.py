"""All that runs inside the job: the standard library and torch only, any Python that PyTorch runs with.

Nothing here may change the job or raise. `recorder` is the core: it says which processes record and what a
step is, and calls the probes when a step, a window, a second or the job ends. An error in a probe ends that
probe alone.

    hooks, patching     where the recorder is called from torch; code of ours around a function of torch's
    torch_internals     every private attribute of torch that is used, and what is done without it
    recorder            the core
    records             fixed-size records in a mapped file: what is written survives kill -9
    names, own, files   names of files that both sides know; whether a folder is this user's own; files that
                        are there whole or not at all
    imports             what to do once the job has imported a module
    main_thread         functions that the job's main thread runs between two of its bytecodes
    captures            when CUDA graphs are captured: nothing of ours calls CUDA then
    store               questions to the job's own store: answered at once or not at all
    steps/              where steps end, and what the process did in them
    windows/            deep windows
    calls/              collective calls, messages, gradient buckets, device meshes
    serving/            iterations and requests of servers
    pipelines/          forward and backward of each micro-batch, of jobs that pipeline
    clocks/             the clocks of this host and of the others
    process/            settings, GPU, threads, requests, ends
    pretend/            the process as a rank of a larger job that is not there; loaded only then
    apply/              changes to the job that dpro try makes, one file per family; loaded only then
"""
