"""Bytes and values of source files: within limits, and never an exception that is not one line.

files, streams          files and members of archives, decompressed, in chunks
plain_pickle, opcodes   pickles that cannot run code
values, dtypes, peers   numbers, element types, senders and receivers as the tables want them
"""
