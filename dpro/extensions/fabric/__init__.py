"""The fabric that a job runs on: described, attached to a run, drawn, and changed on paper.

What a description says, where traffic goes on it and what that costs is the core's (`dpro/topology`,
`dpro/replay/cost/fabric`): detectors name links and ports by it.
"""

from dpro.plugins import Command, Extension

_EDITS = "dpro.extensions.fabric.edits"
EXTENSION = Extension(
    commands={
        "topology": Command(
            "dpro.extensions.fabric.command:topology",
            "Describe the fabric: hosts, ports, switches, cables.",
            "Operate",
            paged=True,
        ),
    },
    options={"record": "dpro.extensions.fabric.recorded:OPTIONS"},
    edits={
        "Fabric": {
            "paths": f"{_EDITS}:PlannedPaths",
            "spray": f"{_EDITS}:SprayedPaths",
            "place": f"{_EDITS}:PlacedRanks",
            "ecmp": f"{_EDITS}:HashedPaths",
            "fail": f"{_EDITS}:FailedCable",
            "oversubscription": f"{_EDITS}:Oversubscription",
            "beside": f"{_EDITS}:OtherJobs",
        },
    },
    views={"fabric": "dpro.extensions.fabric.view:VIEW"},
    hooks={"record": "dpro.extensions.fabric.recorded:keep_topology"},
)
