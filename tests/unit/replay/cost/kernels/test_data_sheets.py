"""Peaks of GPUs, by the names that drivers give them."""

import itertools

import pytest

from dpro.errors import Unanswerable
from dpro.replay.cost.kernels.roofline import GPUS, gpu_named, model_named

NAMES = {
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-PCIE-32GB": "V100-PCIE",
    "Tesla T4": "T4",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "NVIDIA A800-SXM4-80GB": "A800-SXM4-80GB",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA H20": "H20",
    "NVIDIA H20-3e": "H20-3e",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H800": "H800",
    "NVIDIA GH200 480GB": "GH200 480GB",
    "NVIDIA GH200 144G HBM3e": "GH200 144G HBM3e",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB300": "GB300",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada Generation",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 Blackwell Workstation Edition",
    "NVIDIA GeForce RTX 3090": "GeForce RTX 3090",
    "NVIDIA GeForce RTX 3090 Ti": "GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 3060": "GeForce RTX 3060",
    "NVIDIA GeForce RTX 4070 Ti": "GeForce RTX 4070 Ti",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "GeForce RTX 4070 Ti SUPER",
    "NVIDIA GeForce RTX 4080 SUPER": "GeForce RTX 4080 SUPER",
    "NVIDIA GeForce RTX 5080": "GeForce RTX 5080",
    "NVIDIA GeForce RTX 4090": "GeForce RTX 4090",
    "NVIDIA GeForce RTX 5090": "GeForce RTX 5090",
    "AMD Instinct MI210": "MI210",
    "AMD Instinct MI250X": "MI250X",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI350X": "MI350X",
    "AMD Instinct MI355X": "MI355X",
}
OTHERS = [
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3080 Ti Laptop GPU",
    "NVIDIA GeForce RTX 3080 SUPER",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA A1000",
    "NVIDIA A100X",
    "Quadro RTX 6000",
    "AMD Radeon Graphics",
    "",
]


@pytest.mark.parametrize(("name", "model"), NAMES.items())
def test_a_device_name_is_that_of_its_model(name, model):
    assert model_named(name) == model


@pytest.mark.parametrize("name", OTHERS)
def test_names_of_other_products_and_of_slices_are_not_known(name):
    assert model_named(name) == ""


@pytest.mark.parametrize("key", GPUS)
def test_every_key_is_the_name_of_itself_only(key):
    for before, after in itertools.product(("", "NVIDIA ", "AMD Instinct "), ("", " HBM9")):
        assert model_named(f"{before}{key}{after}") == key
    for name in (f"X{key}", f"{key}X1"):  # no part of a longer word
        assert model_named(name) in (set(GPUS) - {key}) | {""}


@pytest.mark.parametrize("key", GPUS)
def test_peaks_are_in_the_order_of_element_sizes_and_have_a_source(key):
    gpu = GPUS[key]
    tflops = gpu.tflops
    assert tflops["fp32"] <= tflops["tf32"] < tflops["fp16"] < tflops.get("fp8", 1e9)
    assert tflops["fp16"] == tflops.get("bf16", tflops["fp16"])
    if "fp8" in tflops:  # twice the operations at half the bits: a figure with sparsity would be four times
        assert tflops["fp8"] == pytest.approx(2 * tflops["fp16"], rel=0.02)
    assert 100 < gpu.gbps < 10_000
    assert ("NVIDIA" in gpu.source) != ("AMD" in gpu.source)


def test_a_run_of_several_models_cannot_be_answered():
    assert gpu_named(["NVIDIA H20", "NVIDIA H20"]).tflops["bf16"] == 148
    with pytest.raises(Unanswerable, match="NVIDIA H20, NVIDIA H200"):
        gpu_named(["NVIDIA H20", "NVIDIA H200"])
    with pytest.raises(Unanswerable, match="the run names none; `dpro record` records it"):
        gpu_named([])
