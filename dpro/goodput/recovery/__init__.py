"""What a job would get done if it saved, failed and restarted in another way.

stages      how long each stage of the job took, and how often it failed
rates       how often a job fails: by its own failures, a log, or published rates
simulate    what a job gets done if it fails and recovers
designs     changes to how a job saves and recovers
degraded    how long a step takes while a host is missing, by a replay
predict     what changes would give
outlook     the predictions, as a part of the answer of `dpro goodput`
"""
