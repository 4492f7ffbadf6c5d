"""Sources of advice: functions of the facts of a job and its limit, which yield what to do about it."""
