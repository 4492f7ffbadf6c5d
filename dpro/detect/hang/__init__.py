"""What a job that stands still waits for: from what each rank called last to the ranks at fault.

It needs calls alone, no graph and no clocks.

    records      the run's tables as the search needs them
    operations   unfinished operations: which ranks came, finished, did not come, or left no record
    waits        the graph of ranks and operations that wait for each other; where waiting ends
    mismatch     calls that do not fit each other
    deaths       processes that ended, and which of them first
    failed       calls that count as finished because they failed when the job was ended
    case         all that is known before anything is blamed
    watched      what a watcher of the job saw while it hung
    ras          what a report of NCCL's RAS confirms or settles
    find         findings
    evidence     ranks, calls and chains of waiting in words
"""
