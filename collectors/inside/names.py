"""Names of files that both the job and who looks at it from outside know."""

WANTED = "wanted.json"  # beside the folders of the launches: changes when somebody wants the latest calls
SHOWN = "calls-"  # what names of dumps for them begin with
