"""Describes the fabric that a job runs on, attaches it to a run, draws it and predicts changes to it.

The core reads the description, routes traffic over it and computes its cost (`dpro/topology`,
`dpro/replay/cost/fabric`), since detectors name links and ports by it.
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
