"""Files that were read become one run.

staging     one file read, and kept on disk until all are
merge       several files of one rank as that rank's tables
assemble    ranks numbered, parts and manifest written, the run moved to its place
"""
