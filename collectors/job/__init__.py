"""A whole recording, from all its processes.

finish              the tables of all processes, and then the manifest
attempts            which processes trained together: a restarted job is several trainings
agreement           whether the ranks count steps equally
applied             what was changed on which rank, and what could not be
"""
