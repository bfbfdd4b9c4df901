"""Information in the name of a kernel: its class, its use of tensor cores, its collective.

This is the only module that interprets names of device kernels. A table holds patterns in the order in which they
are tried, and the first match counts; the patterns follow the naming conventions of vendors and libraries, given
beside each. A name without a match has the class `other`, and null for the use of tensor cores: nothing is
guessed. The patterns are RE2 expressions and ignore case; `CLASS`, `TENSOR_CORES`, `PRECISION` and `COLLECTIVE`
are SQL expressions made of them, which read a column `name`.

A step launches hundreds of thousands of kernels under some hundred names, so queries should use the distinct
names: see `NAMES`.
"""

from __future__ import annotations

from xsp.schema import Kind, Level

COMMUNICATION = "communication"
MATRIX = ("gemm", "convolution", "attention")
"""Classes whose arithmetic tensor cores can do."""

WITHOUT_PRODUCTS = (COMMUNICATION, "normalisation", "elementwise", "reduction", "copy", "triton")
"""Classes without matrix products: `triton` is Inductor's fusions, since its product templates are classed as such."""

CLASSES = (COMMUNICATION, *MATRIX, "normalisation", "elementwise", "reduction", "copy", "triton", "other")

Rules = tuple[tuple[str, str], ...]

CLASS_RULES: Rules = (
    # Inductor: triton_<heuristic>_fused_<operators>; a template (tem) is a whole matrix product or attention
    (r"^triton_tem_\w*(attention|sdpa)", "attention"),
    (r"^triton_tem_\w*conv", "convolution"),
    (r"^triton_(tem_|mm|bmm)", "gemm"),
    (r"^triton_", "triton"),
    # NCCL to 2.18 ncclKernel_, from 2.19 ncclDevKernel_, symmetric kernels ncclSymk; RCCL has NCCL's names
    (r"(^|[^a-z])(nccl|rccl|oneccl|msccl)", COMMUNICATION),
    # NVSHMEM and libraries built on it; DeepEP, PPLX, PyTorch's symmetric memory, Transformer Engine's userbuffers
    (r"nvshmem|rocshmem|deep_ep|pplx|symmetric_memory|userbuffers", COMMUNICATION),
    # all-reduces of vLLM, SGLang, AITER, TensorRT-LLM, FlashInfer, MSCCL++, quick-reduce
    (r"cross_device_reduce|quick_?reduce|multimem|lamport|mscclpp", COMMUNICATION),
    (r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", COMMUNICATION),
    (r"reshape_and_cache|kv_?cache_?(copy|store)", "copy"),
    # FlashAttention, cuDNN's and xFormers' fused attention, FlashInfer, CK and AOTriton
    (r"flash_?(attn|attention|fwd|bwd|mla|infer|fprop|bprop|decod)|flash::|fmha|sdpa", "attention"),
    (r"attention|attn|(^|_|:)mha_|_mla_|Batch(Prefill|Decode)With", "attention"),
    # cuDNN (scudnn, hcudnn, s884cudnn …), its xmma and CUTLASS kernels, MIOpen and CK
    (r"fprop|dgrad|wgrad|winograd|[a-z0-9]_?[shi](16816|1688|884)?cudnn|implicit_gemm|ImplicitGemm", "convolution"),
    (r"conv(\d|_|olution|olve|fwd|bwd|wrw|direct|kernel|asm|$)", "convolution"),
    (r"im2col|col2im|Im2d2Col|fft2d|igemm_(fwd|bwd|wrw)|bwd_weight|bwd_data|cask_cudnn", "convolution"),
    # cuBLAS (gemm, gemv, nvjet, xmma, split-K), CUTLASS, Tensile's Cijk_Ailk_Bjlk, DeepGEMM, quantised products
    # (fbgemm is the namespace of embeddings and quantisation, and no product)
    (r"(^|[^b])gemm|(^|[^f])bgemm|gemv|matmul|nvjet|xmma|cijk_|cublas|splitk|(^|_|:)(b|add)?mm_", "gemm"),
    (r"marlin|machete|gptq|fused_moe_kernel|wvSplitK|LLGemm|tinygemm|(^|_|:)fmoe|moe_?stage|MoeFlatmm", "gemm"),
    (r"topk_?gating|moe_align|moe_sum|moe_sort|permute", "other"),
    (r"(Lp|Two|One)Norm|NormTwoOps|NormOneOps|NormOps", "reduction"),
    (r"batch_?norm|layer_?norm|group_?norm|instance_?norm|rms_?norm|weight_?norm|l2_?norm", "normalisation"),
    (r"norm_(fwd|bwd|kernel|forward|backward)|GammaBeta|RowwiseMoments|softmax|(^|_|:)bn_(fw|bw)", "normalisation"),
    # the drivers' copies, cuDNN's and MIOpen's changes of layout, PyTorch's copies and concatenations
    (r"memcpy|memset|(copy|fill)Buffer|CatArray|copy_device_to_device|copy_kernel", "copy"),
    (r"nchwToNhwc|nhwcToNchw|NCHW2|CNHW2|transpose", "copy"),
    (r"scatter|gather|index(Select|Put|Add|Func|_)|_index_|embedding|radix|sort", "other"),
    (r"reduce|reduction|DeviceScan|scan_kernel|cumsum|argmax|argmin", "reduction"),
    (r"elementwise|pointwise|multi_tensor_apply|_tensor_apply|TensorOp|Op\dTensor", "elementwise"),
    (r"gelu|silu|swiglu|relu|sigmoid|dropout|act_and_mul|rotary|rope_|adam|sgd", "elementwise"),
)
"""Pattern → class, in the order in which they are tried."""

TENSOR_CORE_RULES: Rules = (
    # helper kernels before and after a product
    (
        r"(fwd|kv)_?combine|dot_do_o|convert_dq|bwd_?(pre|post)process|splitkreduce|reducesplitk|^(void )?epilogue::",
        "no",
    ),
    # NVIDIA writes the shape of the instruction: 16x8x16 as s16816, with the type of the sum before it
    (r"[shidc](884|1688|8816|8832|16816|16832|16864|161616|32816)", "yes"),
    (r"tensor\d+x\d+x\d+|warpgroup|m16n\d+k\d+|SM\d+_\d+x\d+x\d+_", "yes"),
    # names of the instructions: HMMA, IMMA, DMMA, QMMA, GMMA (Hopper), UMMA (Blackwell); MFMA and WMMA of AMD
    (r"[hidqg]mma|sm10\d\w*umma|umma_|tcgen05|mfma|wmma|tensorop", "yes"),
    # cuBLAS on Hopper and later; products of 8 and 4 bit floats, which only tensor cores compute; Marlin
    (r"nvjet|(fp8|fp4|mxfp\d|e4m3|e5m2)\w*gemm|gemm\w*(fp8|fp4|mxfp\d|e4m3|e5m2)|marlin", "yes"),
    # FlashAttention 2 and 3 and its derivatives; xFormers' kernels for half precision; FlashInfer's prefill
    (r"flash_?(fwd|bwd|attn_fwd|attn_bwd|fprop|bprop)|flash::|Flash(Attn)?(Fwd|Bwd)", "yes"),
    (r"fmha_cutlass[fb]_(f16|bf16)|BatchPrefillWith", "yes"),
    # Tensile: MI16x16x16x1 is a matrix instruction, TT4_4 a tile of a thread without one
    (r"cijk_\w*_MI\d+x\d+", "yes"),
    (r"cijk_\w*_TT\d+_\d+", "no"),
    # CK and MIOpen: xdlops, gtcx are matrix instructions, dlops and gtc are not
    (r"xdl|igemm_\w+_gtcx", "yes"),
    (r"dlops|_dl_|igemm_\w+_gtc_", "no"),
    # FMA on the ordinary cores: cuBLAS's sgemm, cuDNN's scudnn, CUTLASS's simt; products with a vector
    (r"ffma|hfma|dfma|simt|gemv|dot_kernel|fft2d", "no"),
    (r"(^|[^a-z0-9]|_|gc|g)[shdczi]gemm|(^|_)[sh]cudnn|gcgemm|convolve_[shd]gemm", "no"),
)
"""Pattern → whether a kernel of one of the classes `MATRIX` uses tensor cores (matrix cores on AMD)."""

COLLECTIVE_RULES: Rules = (
    (r"all_?reduce|cross_device_reduce|quick_?reduce", "all_reduce"),
    (r"reduce_?scatter", "reduce_scatter"),
    (r"all_?gather", "all_gather"),
    (r"all_?to_?all|deep_ep.*(dispatch|combine)|pplx", "all_to_all"),
    (r"broadcast", "broadcast"),
    (r"send_?recv", "send_recv"),
    (r"kernel_reduce|nccl.*_reduce_", "reduce"),
)
"""Pattern → the collective, if the name of a communication kernel shows it."""


PRECISION_RULES: Rules = (
    # names of CUTLASS and cuDNN have the types in the order left, right, sum; Tensile's have a letter for each
    (r"(mx|nv)?fp4|e2m1", "fp4"),
    (r"fp8|e4m3|e5m2|(^|_)f8|cijk_\w*_F8", "fp8"),
    (r"tf32|s1688gemm|s1688fprop|s1688[dw]grad|s1688cudnn|cijk_\w*_(S|XF32)_?MX|f32xf32", "tf32"),
    (r"bf16|bfloat16|cijk_\w*_(BBS|BSS|B_)|nvjet_tst|nvjet_\w*bb[bs]_", "bf16"),
    (r"(^|_|[^a-z0-9])h(gemm|cudnn)|[hs](884|16816)|f16|__half|half_t|cijk_\w*_(HHS|HSS|HH|H)_|nvjet_hsh|fp16", "fp16"),
    (r"i8(i8)?|int8|imma|i(8816|16832)", "int8"),
    (r"dgemm|(^|_)d(884|gemm)|f64|double|cijk_\w*_(DB|D)_", "fp64"),
    (r"(^|_|[^a-z])s(gemm|cudnn)|gemmk1|sgemm|ffma|f32f32|cijk_\w*_(SB|S)_|<float, ", "fp32"),
)
"""Pattern → element type of the factors, if the name of a kernel of one of the classes `MATRIX` shows it."""


def _case(rules: Rules, otherwise: str) -> str:
    found = " ".join(f"WHEN regexp_matches(name, '{pattern}', 'i') THEN '{answer}'" for pattern, answer in rules)
    return f"CASE {found} ELSE {otherwise} END"


CLASS = _case(CLASS_RULES, "'other'")
TENSOR_CORES = _case(TENSOR_CORE_RULES, "NULL")
PRECISION = _case(PRECISION_RULES, "NULL")
COLLECTIVE = _case(COLLECTIVE_RULES, "NULL")

NAMES = f"""
    names AS MATERIALIZED (
        SELECT *, CASE WHEN class IN {MATRIX} THEN {TENSOR_CORES} END AS tensor_cores,
               CASE WHEN class IN {MATRIX} THEN {PRECISION} END AS precision,
               CASE WHEN class = '{COMMUNICATION}' THEN {COLLECTIVE} END AS collective
        FROM (
            SELECT name, {CLASS} AS class
            FROM (SELECT DISTINCT name FROM spans WHERE level = {int(Level.KERNEL)} AND kind = '{Kind.KERNEL}')
        )
    )
"""
"""SQL for a WITH clause: each kernel name with its class, tensor cores ('yes', 'no' or null), precision, and
collective."""
