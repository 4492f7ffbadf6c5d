"""Accuracy of replays and predictions.

whatif      predictions beside real changes: records, predicts, changes, measures
twins       two recordings that differ in one thing: each predicted from the other
schedules   real pipelines in one schedule, predicted in another
orders      orders that no library runs, as the pieces of work of each rank
edges       what each kind of edge in the graph contributes
"""
