"""How right replays and predictions are.

whatif      predictions beside real changes: records, predicts, changes, measures
twins       two recordings that differ in one thing: each predicted from the other
schedules   real pipelines in one schedule, predicted in another
orders      those that no library runs: what each rank does
edges       how much each kind of edge in the graph is worth
"""
