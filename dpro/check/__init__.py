"""Checking hosts outside of a job: what each computes, copies and exchanges, against its peers.

schedule   which hosts exchange with which, in rounds: each pair once
search     the rounds, what failed in them tried again with others; which host or link is at fault
peers      a figure against the same figure of the others: median and deviation
worker     the program that runs on each host: sent there, standard library and torch alone
workers    starts the workers through a launcher, asks them, and gives none more time than it has
run        the whole check: answers, figures, exchanges, and what they say of each host
answer     the documents
expected   what a run says its communication takes

"""
