"""What a job that stands still waits for: from what each rank called last to the ranks at fault.

It needs calls only, no graph and no clocks.

    records      the run's tables as the search needs them
    operations   unfinished operations: which ranks came, finished, did not come, or left no record
    waits        the wait-for graph of ranks and operations, and where its chains end
    mismatch     calls that differ between the ranks of a group
    deaths       processes that ended, and which of them first
    failed       calls that count as finished because they failed when the job was ended
    case         everything that is known before a cause is named
    watched      what a watcher of the job saw while it hung
    ras          what a report of NCCL's RAS adds
    find         findings
    evidence     ranks, calls and chains of waiting in words
"""
