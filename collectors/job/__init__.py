"""A whole recording, from all its processes.

finish              the tables of all processes, and then the manifest
liveness            whether the job still runs, and waiting until its tables are whole
attempts            which processes trained together: a restarted job is several trainings
agreement           whether the ranks count steps equally
applied             what was changed on which rank, and what could not be
"""
