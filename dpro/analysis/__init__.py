"""All that is asked of one run, computed when it is first asked for and kept: for commands, views, notebooks.

end               how the job ended, which every answer begins with where it failed, hung or was ended
analysis, cached  what can be asked; properties that are computed once, however many threads ask
selected          the same of some steps and ranks
graphs            built graphs and condensed ranks, kept in the user's cache
unanswered        what a run cannot answer, and why
summary           a run in a few facts and short tables
step_time         how long a step takes, in the names and numbers that all commands use
after_window      whether steps became slower with the first deep window, for good
report, markdown  what a report says, whatever it is written in; the same as Markdown
"""
