"""Tensor plans: how each gradient is reduced; searched, predicted and stored in a file."""

from dpro.plugins import Extension

EXTENSION = Extension(
    options={"whatif": "dpro.extensions.tensors.command:OPTIONS"},
    edits={"Gradients": {"tensors": "dpro.extensions.tensors.edits:Tensors"}},
    hooks={"whatif": "dpro.extensions.tensors.command:ask_for_plan"},
)
