"""Probes of clocks.

wall                the wall clock against one that is never stepped or slewed
peers, pingpong     the clocks of other hosts, compared by timed messages
"""
