"""Kernels by name."""

from __future__ import annotations

import pytest

from dpro.classify import KernelClass, classify, is_communication, operation


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*)", "broadcast"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", ""),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*)", "dispatch"),
        ("void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*, void*)", "combine"),
    ],
)
def test_communication_kernels_are_known_with_their_operation(name, op):
    assert classify(name) == KernelClass("communication", op)
    assert is_communication(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("volta_sgemm_128x32_nn", "gemm"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>", "attention"),
        ("void cudnn::cnn::wgrad_alg0_engine<float, 128, 6>(int)", "convolution"),
        ("triton_poi_fused__flash_attn_backward__unsafe_view_mul_10", "fused"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>>",
            "optimizer",
        ),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
            "normalisation",
        ),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("void cub::DeviceRadixSortOnesweepKernel<cub::Policy800, false>", "sort"),
        ("void split_embedding_codegen_forward_unweighted_kernel<float>", "embedding"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 2, 64, 64>", "memory"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>", "elementwise"),
        ("my_own_kernel", "other"),
    ],
)
def test_compute_kernels_have_one_class(name, kind):
    assert classify(name) == KernelClass(kind)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("nccl:_all_gather_base", "all_gather"),
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("gloo:send 0->1", "send"),
        ("nccl:recv 1<-0", "recv"),
        ("c10d::recv_any_source_", "recv"),
        ("all_to_allv", "all_to_all"),
        ("nccl:all_reduce_barrier", "barrier"),
        ("c10d::reduce_", "reduce"),
        ("nccl:coalesced", ""),
        ("wait", ""),
    ],
)
def test_operators_are_known_however_they_are_spelt(name, op):
    assert operation(name) == op
