"""The loop: a change is predicted, made to the real job, measured, and remembered.

changes            one table of all changes that can be made: their text, who makes them, which edit
                   predicts them
probes             what has to be measured of the job first, and what is chosen by it
job                run the job recorded, changed or not; a change that was not made is an error
measure            two sides of recordings into a ratio, an interval and a verdict
ledger, calibrate  what was tried so far, and how that widens intervals
"""
