"""What runs beside or inside the recorded job. It meets the analysis only at the schema.

launch/             starts the job as the process that was asked for
inject/, inside/    gets the recorder into the job's processes; what runs in them, loaded at the end of
                    `import torch`
sidecar             the process beside the job: waits for its end, and has the files turned into tables
telemetry/          samples the node
convert/            what one process recorded into tables
job/                the whole recording: all processes, and the manifest
attach, dynolog     requests to a job that runs, recorded or not
readiness           what dpro doctor looks at
"""
