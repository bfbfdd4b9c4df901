"""Names of device kernels, as the vendors' libraries write them: class, tensor cores, collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xsp import table
from xsp.device import kernelnames

AT = "void at::native::"

# name; class; tensor cores
NAMES = f"""
volta_sgemm_128x64_nn                                                                    | gemm | no
volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn                                             | gemm | yes
turing_h1688gemm_128x128_ldg8_nn                                                         | gemm | yes
maxwell_hgemm_256x128_tn                                                                 | gemm | no
ampere_gcgemm_64x64_nt                                                                   | gemm | no
ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_nn                               | gemm | yes
ampere_d884gemm_64x64_nt                                                                 | gemm | yes
sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_stage3_warpsize1x4x1_ffma_aligna4 | gemm | no
sm80_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x32_stage4_tensor16x8x16_kernel  | gemm | yes
sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute   | gemm | yes
nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN                                           | gemm | yes
void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)                | gemm | no
void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_nt_align4>(Params)        | gemm | yes
void cutlass::device_kernel<cutlass::gemm::MainloopSm90TmaGmma<4>, cutlass::epilogue::X> | gemm | yes
void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u>(float*)                               | gemm | yes
void gemv2T_kernel_val<int, int, float, float, float, 128>(cublasGemvParamsEx<int>)      | gemm | no
void splitKreduce_kernel<float, float>(cublasSplitKParams<float>, float const*)          | gemm | no
Cijk_Ailk_Bljk_BBS_BH_MT32x32x64_MI16x16x16x1_SN_1LDSB0_APM1_ABV0                        | gemm | yes
Cijk_Ailk_Bljk_SB_MT64x64x8_SE_K1_GRVW4_TT4_4_USFGRO0_VAW1_WG16_16_1                     | gemm | no
Cijk_Alik_Bljk_SB                                                                        | gemm |
triton_tem_fused_addmm_relu_3                                                            | gemm |
fused_moe_kernel                                                                         | gemm |
volta_scudnn_128x64_relu_interior_nn_v1                                                  | convolution | no
turing_h1688cudnn_256x64_ldg8_relu_exp_small_nhwc_tn_v1                                  | convolution | yes
void implicit_convolve_sgemm<float, float, 128, 6, 7, 3, 3, 5, 1>(int, int, int)         | convolution | no
void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128>(P)  | convolution | yes
sm80_xmma_dgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_g1_tensor16x8x8_execute       | convolution | yes
void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(Params)              | convolution |
igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1_wr2x2                     | convolution | yes
igemm_fwd_gtc_nchw_fp32_bt64x128x8                                                       | convolution | no
_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm | convolution | yes
miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1                                          | convolution |
void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Params)   | attention | yes
void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128>>(Params)       | attention | no
void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<X>>>(P)  | attention | yes
fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)                | attention | yes
void flashinfer::BatchDecodeWithPagedKVCacheKernel<1, 2>(Params)                         | attention |
cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x64x64              | attention | yes
attn_fwd                                                                                 | attention |
triton_tem_fused_flex_attention_1                                                        | attention |
{AT}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)            | elementwise |
{AT}(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdam>   | elementwise |
void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>(Params)                 | elementwise |
{AT}vectorized_elementwise_kernel<4, fbgemm_gpu::_float_to_hfp8_gpu(at::Tensor const&)>  | elementwise |
{AT}(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)        | normalisation |
void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(Params)                  | normalisation |
void (anonymous namespace)::softmax_warp_forward<float, float, float, 6, false>(float*)  | normalisation |
MIOpenBatchNormFwdTrainSpatial                                                           | normalisation |
{AT}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>    | reduction |
void cub::DeviceReduceKernel<cub::DeviceReducePolicy<float>>(float*)                     | reduction |
{AT}elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(X)>(int)              | copy |
{AT}(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(float*)   | copy |
__amd_rocclr_copyBuffer                                                                  | copy |
void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(Params)              | copy |
triton_poi_fused_convolution_relu_0                                                      | triton |
triton_red_fused_add_all_reduce_mean_rsqrt_1                                             | triton |
void split_embedding_codegen_forward_unweighted_kernel<fbgemm_gpu::X>(Params)            | other |
{AT}(anonymous namespace)::indexSelectLargeIndex<float, long>(TensorInfo<float>)         | other |
my_kernel(float*)                                                                        | other |
"""

# name; collective
COMMUNICATION = """
ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)              | all_reduce
ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>) | all_reduce
ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevComm*)         | reduce_scatter
ncclKernel_Reduce_RING_LL_Sum_float(ncclDevComm*)                 | reduce
ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>) | all_gather
ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)          | send_recv
ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, ncclWork*)  | broadcast
ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)           |
void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*) | all_reduce
void multimem_one_shot_all_reduce_kernel<c10::BFloat16, 8>(X)     | all_reduce
void deep_ep::internode::dispatch<false, 8>(int4*, float*)        | all_to_all
nvshmemi_transfer_quiet                                           |
"""


def rows(text: str) -> list[tuple[str, ...]]:
    return [tuple(part.strip() for part in line.split(" |")) for line in text.strip().splitlines()]


def read(names: list[str]) -> dict[str, tuple[Any, ...]]:
    con = table.connect()
    con.execute("CREATE TABLE spans AS SELECT unnest(?::VARCHAR[]) AS name, 70 AS level, 'kernel' AS kind", [names])
    result = con.execute(f"WITH {kernelnames.NAMES} SELECT name, class, tensor_cores, collective FROM names").fetchall()
    return {name: rest for name, *rest in result}  # type: ignore[misc]


def test_class_and_tensor_cores() -> None:
    expected = rows(NAMES)
    result = read([name for name, *_ in expected])
    wrong = [
        (name, *result[name]) for name, of_class, cores in expected if result[name][:2] != [of_class, cores or None]
    ]
    assert wrong == []


def test_communication_and_its_collective() -> None:
    expected = rows(COMMUNICATION)
    result = read([name for name, _ in expected])
    assert {name: result[name] for name, _ in expected} == {
        name: ["communication", None, collective or None] for name, collective in expected
    }


@pytest.mark.parametrize("rules", ["CLASS_RULES", "TENSOR_CORE_RULES", "COLLECTIVE_RULES"])
def test_every_answer_of_the_table_is_a_word_that_readers_know(rules: str) -> None:
    answers = {answer for _, answer in getattr(kernelnames, rules)}
    known = {
        "CLASS_RULES": set(kernelnames.CLASSES),
        "TENSOR_CORE_RULES": {"yes", "no"},
        "COLLECTIVE_RULES": {answer for _, answer in rows(COMMUNICATION) if answer},
    }
    assert answers <= known[rules]


def test_no_other_module_reads_names_of_kernels() -> None:
    root = Path(__file__).resolve().parents[2] / "xsp"
    named = [path.name for path in root.rglob("*.py") if "ncclDevKernel" in path.read_text(encoding="utf-8")]
    assert named == ["kernelnames.py"]
