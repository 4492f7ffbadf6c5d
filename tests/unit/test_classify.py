"""Kernels by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro import classify as classify_module
from dpro.classify import KernelClass, classify, is_communication, operation, table_version
from dpro.errors import InputError
from dpro.plugins import installed


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


@settings(max_examples=20, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(
    ("needed", "pattern"), [entry[:2] for entry in classify_module.COMMUNICATION_PATTERNS]
)
def test_every_name_that_a_pattern_finds_holds_what_is_looked_for_first(needed, pattern, data):
    name = data.draw(st.from_regex(pattern, alphabet=st.characters(codec="ascii")))
    assert needed in name.lower()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("volta_sgemm_128x32_nn", "gemm"),
        ("void fbgemm_gpu::_offsets_range_cuda_kernel<int>(long, long, int const*, int*)", "embedding"),
        (
            "void at::native::vectorized_elementwise_kernel<4, fbgemm_gpu::_hfp8_to_float_gpu(long, long)>",
            "elementwise",
        ),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>", "attention"),
        ("void cudnn::cnn::wgrad_alg0_engine<float, 128, 6>(int)", "convolution"),
        ("void cudnn::cnn::kern_precompute_indices<false>(int*, int, int, int, int, int)", "convolution"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*)", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)", "attention"),
        ("void at::native::(anonymous namespace)::sum_and_scatter<float, long>(long const*)", "embedding"),
        ("triton_poi_fused__flash_attn_backward__unsafe_view_mul_10", "fused"),
        ("triton_tem_fused_addmm_gelu_7", "gemm"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_tem_fused_convolution_3", "convolution"),
        ("void thrust::get_property_kernel<float>(float*)", "other"),
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
        ("void mul_mat_q<(ggml_type)12, 128, false>(char const*, int const*, int const*)", "gemm"),
        ("void mul_mat_vec_q6_K<32, 1>(void const*, float const*, float*, int)", "gemm"),
        ("void gated_delta_net_cuda<128, false, false>(float const*, float const*)", "attention"),
        ("void ssm_scan_f32<128, 16>(float const*, float const*)", "attention"),
        ("void l2_norm_f32<1024>(float const*, float*, int)", "normalisation"),
        ("void k_get_rows_float<float, float>(float const*, int const*, float*)", "embedding"),
        ("void concat_cont<0>(float const*, float const*, float*)", "memory"),
        ("void cpy_scalar<&cpy_1_scalar<float, float>>(char const*, char*)", "memory"),
        ("void k_bin_bcast<&op_add, float, float, float>(float const*, float const*)", "elementwise"),
        ("void unary_gated_op_kernel<&op_silu, float>(float const*, float*)", "elementwise"),
        ("scale_f32(float const*, float*, float, float, long)", "elementwise"),
        ("void cask__5x_cudnn::computeOffsetsKernel<false, false>(int)", "convolution"),
        ("void Eigen::internal::EigenMetaKernel<Eigen::TensorEvaluator<int>>", "elementwise"),
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


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclAllReduceRingLLKernel_sum_f32(ncclWorkElem)", "all_reduce"),
        ("ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)", "all_reduce"),
        ("ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs4K)", "all_gather"),
        ("ncclSymkDevKernel_ReduceScatter_LL_sum_f32(ncclSymkDevWorkArgs4K)", "reduce_scatter"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", ""),
        ("ncclDevKernelDebug_Generic_4(ncclDevKernelArgsStorage<4096ul>)", ""),
        ("mscclKernel_Sum_half_LL_false(ncclDevComm*, mscclAlgo*, mscclWork*)", ""),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8>(AllReduceParams)", "all_reduce"),
        ("void tensorrt_llm::kernels::twoShotAllReduceKernel<float, 4>(AllReduceParams)", "all_reduce"),
        ("void allreduce_fusion_kernel_oneshot_lamport<3, __nv_bfloat16, 8, true>", "all_reduce"),
        ("void sglang::cross_device_reduce_1stage<half, 2>(sglang::RankData*)", "all_reduce"),
        ("void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<half>>", "all_reduce"),
        (
            "void c10d::symmetric_memory::multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>",
            "all_reduce",
        ),
        ("void deep_ep::intranode::notify_dispatch<8>(int const*)", "dispatch"),
        ("void deep_ep::intranode::cached_notify_combine<8>(void**)", "combine"),
        ("void deep_ep::internode::combine<true, 8, __nv_bfloat16>", "combine"),
        ("void deep_ep::intranode::barrier<8>(int**, int)", "barrier"),
        ("void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, float*)", "dispatch"),
        ("void dpsk::ep::internode::notify_dispatch<false, 8>(int const*, long*)", "dispatch"),
        ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8>(int4*, float*)", "combine"),
        ("void dpsk::ep::internode::cached_notify<false>(int, int, int)", "barrier"),
        ("rcclGenericKernel_4", ""),
        ("EpDispatchIntraNodeKernel_bf16", "dispatch"),
        ("moeA2ACombineKernel", "combine"),
        ("void alltoall_on_stream_kernel<float>(int, float*, float const*)", "all_to_all"),
        ("void nvshmemi_rdxn_on_stream_kernel<float, (rdxn_ops)0>", "all_reduce"),
        ("void fcollect_on_stream_kernel<int>(int, int*, int const*)", "all_gather"),
        ("barrier_all_on_stream_kernel()", "barrier"),
        ("c10d::nvshmem_extension::allToAllV(void*, void*, long*, unsigned long)", "all_to_all"),
        ("Memcpy PtoP (Device -> Device)", "send_recv"),
        ("gloo:all_reduce", "all_reduce"),
        ("MPI_Allreduce", "all_reduce"),
        ("MPI_Ibcast", "broadcast"),
        ("MPI_Isend", "send"),
    ],
)
def test_libraries_of_every_sort_communicate(name, op):
    assert classify(name) == KernelClass("communication", op)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy DtoD (Device -> Device)", "memory"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "gemm"),
        ("void vllm::moe::moe_align_block_size_kernel<int>", "other"),
    ],
)
def test_what_looks_like_communication_but_is_none_stays_compute(name, kind):
    assert classify(name) == KernelClass(kind)


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Classifies with a table of the user's own."""

    def use(text: str) -> Path:
        path = tmp_path / "classes.toml"
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv("DPRO_CLASSES", str(path))
        _forget()
        return path

    yield use
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    for cached in (classify, classify_module.own_classes, installed):
        cached.cache_clear()


OWN = """
[[class]]
pattern = "my_ring_\\\\w+"
kind = "communication"
op = "send_recv"

[[class]]
pattern = "volta_sgemm"
kind = "attention"
"""


def test_a_users_own_patterns_come_before_the_table(own):
    plain = table_version()
    own(OWN)
    assert classify("void My_Ring_exchange<4>()") == KernelClass("communication", "send_recv")
    assert classify("volta_sgemm_128x32_nn") == KernelClass("attention")
    assert classify("nvjet_tst_256x128") == KernelClass("gemm")
    assert table_version().startswith(f"{plain}+")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("class = 3", "only [[class]] tables are allowed"),
        ("[[clas]]\npattern = 'a'", "clas: only [[class]] tables are allowed"),
        ("[[class]", "not TOML"),
        ("[[class]]\npattern = 'a'\nkind = 'gemm'\n[[class]]\npattern = '('\nkind = 'gemm'", "class 2 ('(')"),
        ("[[class]]\nkind = 'gemm'", "class 1 (''): pattern, kind and op must be strings"),
        ("[[class]]\npattern = 'a'\nkind = 'gem'", "class 1 ('a'): kind 'gem' is none of communication"),
        ("[[class]]\npattern = 'a'\nkind = 'gemm'\nop = 'send'", "op goes with kind 'communication' only"),
        ("[[class]]\npattern = 'a'\nkind = 'gemm'\ncolour = 1", "unknown key colour"),
        ("[[class]]\npattern = 3\nkind = 'gemm'", "must be strings"),
    ],
)
def test_a_wrong_entry_is_one_line_that_names_it(own, text, what):
    path = own(text)
    with pytest.raises(InputError) as caught:
        classify("anything")
    assert str(path) in str(caught.value)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_that_does_not_exist_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("DPRO_CLASSES", str(tmp_path / "nowhere.toml"))
    _forget()
    with pytest.raises(InputError, match="DPRO_CLASSES"):
        table_version()
    monkeypatch.undo()
    _forget()


def test_a_distribution_can_bring_classes(monkeypatch, tmp_path):
    (tmp_path / "my_classes.py").write_text(
        "from dpro.plugins import Extension\nTABLE = [{'pattern': 'zap', 'kind': 'fused'}]\n"
        "EXTENSION = Extension(classes={'mine': 'my_classes:TABLE'})\n"
    )
    info = tmp_path / "my_classes-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-classes\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[dpro.extensions]\nmine = my_classes:EXTENSION\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    _forget()
    assert classify("zap_kernel") == KernelClass("fused")
    monkeypatch.undo()
    _forget()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*, int*)", "other"),
        ("void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128>>", "attention"),
        ("_chunk_scan_fwd_kernel", "attention"),
        ("kernel_mha_gqa", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "attention"),
        ("DeviceScanKernel", "sort"),
        ("void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>(int, int)", "gemm"),
        ("void marlin::Marlin<128, 4>(int4 const*)", "gemm"),
        ("void cuComputeGradInput<float, float, float, false>(float const*)", "normalisation"),
        ("void cudnn::engines_precompiled::convertTensor_kernel<float, float>", "memory"),
        ("void cuda::swiglu_forward_backward_with_weight_impl<__nv_bfloat16>", "elementwise"),
    ],
)
def test_kernels_of_newer_models_and_frameworks_have_a_kind(name, kind):
    assert classify(name).kind == kind
