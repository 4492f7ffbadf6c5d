"""Spans of a run, and the nodes that they are.

nesting             which spans lie in which, what they launch, and which nodes they are
scope               work within a range, a module or a function
"""
