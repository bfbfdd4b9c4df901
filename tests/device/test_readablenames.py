"""Names of kernels as people write them. The long names are those of an H200 with PyTorch, cuDNN and cuBLAS."""

from __future__ import annotations

import doctest
import io
import time

import duckdb
import pytest
from rich.console import Console

from xsp.device import kernelnames
from xsp.device.kernelnames import is_cpp, readable, readable_each
from xsp.report import text
from xsp.report.fitting import kernel_names

# ruff: noqa: E501 - a name is one line
# fmt: off
REAL = [
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)",
        "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>",
        "…CUDAFunctor_add<float>",
    ),
    (
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}>(at::TensorIteratorBase&, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1} const&)::{lambda(int)#1}>(int, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}>(at::TensorIteratorBase&, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1} const&)::{lambda(int)#1})",
        "elementwise_kernel<128, 2, direct_copy_kernel_cuda(float)>",
        "…direct_copy_kernel_cuda",
    ),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar, c10::Scalar, at::native::detail::ClampLimits)::{lambda()#1}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul> >(int, at::native::(anonymous namespace)::launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar, c10::Scalar, at::native::detail::ClampLimits)::{lambda()#1}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul>)",
        "vectorized_elementwise_kernel<4, launch_clamp_scalar(float)>",
        "…launch_clamp_scalar",
    ),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::pow_tensor_scalar_kernel_impl<float, float>(at::TensorIteratorBase&, float)::{lambda(float)#2}, std::array<char*, 2ul> >(int, at::native::(anonymous namespace)::pow_tensor_scalar_kernel_impl<float, float>(at::TensorIteratorBase&, float)::{lambda(float)#2}, std::array<char*, 2ul>)",
        "vectorized_elementwise_kernel<4, pow_tensor_scalar_kernel_impl<float, float>#2>",
        "…pow_tensor_scalar_kerne…",
    ),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int, at::native::AUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul>)",
        "vectorized_elementwise_kernel<4, AUnaryFunctor<float, float, float, MulFunctor<float>>>",
        "…AUnaryFunctor<MulFuncto…",
    ),
    (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4, 4>)",
        "reduce_kernel<512, 1, sum_functor<float, float, float>>",
        "…sum_functor",
    ),
    (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<2>, at::native::(anonymous namespace)::TernaryOpScalarFunctor<c10::BFloat16, 2, 2, 0>, at::native::LerpFunctor<float>, float>(at::native::(anonymous namespace)::TensorListMetadata<2>, at::native::(anonymous namespace)::TernaryOpScalarFunctor<c10::BFloat16, 2, 2, 0>, at::native::LerpFunctor<float>, float)",
        "multi_tensor_apply_kernel<TernaryOpScalarFunctor<BFloat16, 2, 2, 0>, LerpFunctor<float>, float>",
        "…TernaryOpScalarFunctor,…",
    ),
    (
        "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(float, float, cudnnTensorStruct, float const*, cudnnTensorStruct, float*, cudnnTensorStruct, float const*, float const*, float const*, float const*, float)",
        "bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>",
        "bn_fw_inf_1C11_kernel_NC…",
    ),
    (
        "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(cudnn::engines_precompiled::nchw2nhwc_params_t<float>, float const*, float*)",
        "nchwToNhwcKernel<float, float, float, false, true, 2>",
        "nchwToNhwcKernel<float, …",
    ),
    (
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_nt_align1>(cutlass_80_simt_sgemm_64x64_8x5_nt_align1::Params)",
        "cutlass_80_simt_sgemm_64x64_8x5_nt_align1",
        "cutlass_80_simt_sgemm_64…",
    ),
    (
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80, true, 64, 64, 64, true, true>::Params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80",
        "fmha_cutlassF_f32_aligne…",
    ),
    (
        "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scalar const&, c10::Scalar const&, c10::Scalar const&, at::Tensor&)::{lambda()#1}::operator()() const::{lambda()#4}::operator()() const::{lambda(long)#1}>(int, at::native::arange_cuda_out(c10::Scalar const&, c10::Scalar const&, c10::Scalar const&, at::Tensor&)::{lambda()#1}::operator()() const::{lambda()#4}::operator()() const::{lambda(long)#1}, function_traits<at::native::arange_cuda_out(c10::Scalar const&, c10::Scalar const&, c10::Scalar const&, at::Tensor&)::{lambda()#1}::operator()() const::{lambda()#4}::operator()() const::{lambda(long)#1}>::result_type*)",
        "elementwise_kernel_with_index<int, arange_cuda_out(long)>",
        "…arange_cuda_out(long)",
    ),
    (
        "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortHistogramKernel<at_cuda_detail::cub::detail::radix::policy_hub<long, at::cuda::cub::detail::OpaqueType<8>, unsigned long long>::Policy1000, (at_cuda_detail::cub::SortOrder)0, long, unsigned long long, at_cuda_detail::cub::detail::identity_decomposer_t>(unsigned long long*, long const*, unsigned long long, int, int, at_cuda_detail::cub::detail::identity_decomposer_t)",
        "DeviceRadixSortHistogramKernel<Policy1000, 0, long, unsigned long long, identity_decomposer_t>",
        "DeviceRadixSortHistogram…",
    ),
]
SPLIT = "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, false, float, float, float, true, false, false, false>(cublasLt::cublasSplitKParams<float>, float const*, float const*, float*, float*, float const*, float const*, float const*, float const*, float*, void*, long, float*, int*, float*, float*, float const*, float const*, float const*, float const*, float const*)"
# fmt: on

COPY = [REAL[1][0], REAL[1][0].replace("(float)#1", "(long)#1")]


@pytest.mark.parametrize(("name", "whole", "narrow"), REAL)
def test_a_name_of_cpp_is_what_tells_a_kernel_apart(name, whole, narrow):
    assert readable(name) == whole
    assert readable(name, 25) == narrow
    assert readable(whole.partition("<")[0], 80) == whole.partition("<")[0]


def test_namespaces_parameters_and_the_result_go_and_the_first_arguments_stay():
    assert readable(SPLIT, 36) == "splitKreduce_kernel<32, 16, int, fl…"
    assert readable("void (anonymous namespace)::own::add<(bool)1, 2ul>(float const*, int)") == "add<1, 2>"
    assert readable("own::add(float const*, int)") == "add"
    assert readable("void own::Sum<float>::run(float*)") == "Sum<float>::run"
    of_nsight = "void at::elementwise_kernel<(int)128, at::copy(at::Base &)::[lambda() (instance 3)]::operator ()() const::[lambda(float) (instance 2)]>(int)"
    assert readable(of_nsight) == "elementwise_kernel<128, copy(float)#2>"


def test_other_names_are_cut_at_their_end_and_fusions_keep_their_number():
    xmma = "sm90_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x64x32"
    assert readable(xmma, 38) == "sm90_xmma_fprop_implicit_gemm_tf32f32…"
    nvjet = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
    assert readable(nvjet) == readable(nvjet, 46) == nvjet
    assert readable("triton_per_fused_add_addmm_native_layer_norm_view_10", 26) == "triton_per_fused_add_a…_10"


@pytest.mark.parametrize(
    "name", ["aten::mm", "Memcpy DtoD (Device -> Device)", "Memset (Device)", "call(x)", "a.b", "", "<module>"]
)
def test_what_no_compiler_made_is_no_name_of_cpp(name):
    assert not is_cpp(name)
    assert readable(name) == name


def test_different_kernels_have_different_names_where_the_width_allows_it():
    assert readable_each(COPY, 56) == ["…direct_copy_kernel_cuda(float)", "…direct_copy_kernel_cuda(long)"]
    other = SPLIT.replace("true, false, false, false>", "true, true, false, false>")
    shown = readable_each([SPLIT, other, SPLIT], 40)
    assert [entry.partition("…")[2][:5] for entry in shown] == ["false", "true,", "false"]
    whole = readable_each([name for name, _, _ in REAL], 10_000)
    assert len(set(whole)) == len(REAL)


HOSTILE = [
    "",
    "void ",
    "void <",
    "void ::",
    "void ()",
    "f<(>)",
    "void f<,>()",
    "void {lambda()#1}",
    "void f<{}, []::x>(int)",
    "<" * 10_000,
    "void " + "a<" * 5000,
    "void " + "a<" * 5000 + ">" * 5000,
    "void f(" + "*" * 10_000,
    "_" * 10_000,
    "void " + "::" * 5000,
    "void f<" + "a, " * 3300 + "b>(int)",
    "a<" + "unsigned " * 1100 + "x>(int)",
    "void " + "f<" * 38 + "int" + ">" * 38,
    "triton" + "_1" * 5000,
    "void elementwise_kernel<f<g<" * 400,
    "名前" * 50,
]


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_any_name_has_a_short_form_soon(name):
    began = time.process_time()
    for letters in (0, 1, 2, 9, 26):
        entry = [readable(name, letters), *readable_each([name, name + "x", name + "y"], letters)]
        assert max(map(len, entry)) <= letters
        assert letters < 2 or readable(name, letters) or not name
    assert time.process_time() - began < 10  # tenths of a second; a quadratic search takes minutes


def test_a_table_shows_readable_names_only_in_its_column_of_kernels():
    name = REAL[0][0]
    relation = duckdb.from_query(f"SELECT '{name}' AS name, 2 AS calls, '{name}' AS layer")
    shown = Console(width=130, record=True, file=io.StringIO())
    shown.print(text.table(relation, "kernels", kernels=["name"]))
    message = shown.export_text()
    assert "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>" in message
    assert "void at::native" in message
    assert relation.fetchall()[0][0] == name
    assert text.KERNEL_COLUMNS["A10"] == ("name",)


def test_without_a_device_the_names_are_those_of_operators():
    names = ["aten::_scaled_dot_product_attention", REAL[2][0], "Memset (Device)"]
    assert kernel_names(names, 15) == ["aten::_…tention", "…launch_clamp_…", "Memset (Device)"]
    assert kernel_names([], 10) == []


def test_the_examples_in_the_documentation_hold():
    assert doctest.testmod(kernelnames).failed == 0
