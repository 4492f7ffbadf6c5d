"""Commands that read a run: import, info, report, replay, whatif, diagnose, diff, dashboard and export."""
