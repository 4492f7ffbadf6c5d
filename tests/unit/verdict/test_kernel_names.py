"""Kernels by names that a person can read."""

from __future__ import annotations

import pytest

from dpro.verdict.facts import LONGEST, short_kernel
from dpro.verdict.sources.kernels import without_tensor_cores


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("volta_sgemm_128x64_tn", "volta_sgemm_128x64_tn"),
        (
            "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)128>>(flash::Params)",
            "flash_fwd_kernel",
        ),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)", "ncclDevKernel_SendRecv"),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 4>(float*)",
            "CatArrayBatchedCopy",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
            "CUDAFunctor_add",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::BinaryFunctor<float, float, float, "
            "at::native::binary_internal::MulFunctor<float> > >(int)",
            "MulFunctor",
        ),
        (
            "void cutlass::device_kernel<moe::fp8_grouped::GemmKernel>(moe::fp8_grouped::GemmKernel::Params)",
            "fp8_grouped::GemmKernel",
        ),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FwdSm90<flash::C<2> > > >(P)", "FwdSm90"),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __half, false, 7, false, "
            "cublasGemvParamsEx<int, __half> >(cublasGemvParamsEx<int, __half>)",
            "gemvx::kernel",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_nn>(cutlass_80_simt_sgemm_nn::Params)",
            "cutlass_80_simt_sgemm_nn",
        ),
        ("ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel>", "FmhaFwdKernel"),
        ("void kernel<int, 4>(int)", "kernel"),
    ],
)
def test_a_kernel_is_named_without_types_and_namespaces(name, short):
    assert short_kernel(name) == short
    assert len(short) <= LONGEST


@pytest.mark.parametrize(
    ("name", "is_fp32"),
    [
        ("volta_sgemm_128x64_tn", True),
        ("cudnn_volta_scudnn_128x64_relu_xregs_large_nn_v1", True),
        ("void cudnn::cnn::wgrad_alg1_engine<float, float, 512, 6, 5, 3>(int, float const*)", True),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(P)", True),
        ("void explicit_convolve_sgemm<float, int, 128, 5, 5, 3>(int)", True),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<__half, __half>(P)", False),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw", False),
        ("turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_medium", False),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", False),
    ],
)
def test_matmuls_and_convolutions_in_fp32_are_known_by_their_names(name, is_fp32):
    assert without_tensor_cores(name) == is_fp32
