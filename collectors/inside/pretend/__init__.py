"""One process as a rank of a larger job: its collectives return at once, with answers of its own.

In: `pretend` of the configuration, and `RANK` of the environment. Out: what any rank records, and
`pretendedNNNN.json`, the collective calls of a deep window. Loaded only where `--pretend-ranks` asks for it.
Here the job is changed on purpose; what cannot be answered ends the process with one line that names the
call.

    groups      process groups whose other members are not there
    answers     what each collective call brings, and the work that its caller waits for
    calls       each call: of which group, how much, when, and when its result was asked for
    objects     collectives of objects
    mailbox     what one pretended rank leaves for another; whose turn it is
    received    numbers that came from other ranks: a script must not decide by them
    refusal     the end of a process that cannot be pretended
"""
