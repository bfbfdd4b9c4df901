"""Information in the name of a kernel: its class, its use of tensor cores, its collective, its readable form.

This is the only module that interprets names of device kernels. A table holds patterns in the order in which they
are tried, and the first match counts; the patterns follow the naming conventions of vendors and libraries, given
beside each. A name without a match has the class `other`, and null for the use of tensor cores: nothing is
guessed. The patterns are RE2 expressions and ignore case; `CLASS`, `TENSOR_CORES`, `PRECISION` and `COLLECTIVE`
are SQL expressions made of them, which read a column `name`.

A step launches hundreds of thousands of kernels under some hundred names, so queries should use the distinct
names: see `NAMES`.

`readable` shortens a name for people. Only charts and text use it: tables of data contain full names.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Union

from xsp.schema import Kind, Level

COMMUNICATION = "communication"
MATRIX = ("gemm", "convolution", "attention")
"""Classes whose arithmetic tensor cores can do."""

WITHOUT_PRODUCTS = (COMMUNICATION, "normalisation", "elementwise", "reduction", "copy", "triton")
"""Classes without matrix products: `triton` is Inductor's fusions, since its product templates are classed as such."""

TO_HOST = r"(?i)dtoh|device\s*(to|->)\s*(host|pageable|pinned)"
TO_DEVICE = r"(?i)htod|(host|pageable|pinned)\s*(to|->)\s*device"
"""Patterns for the names of copies from a device to the host and back, as profilers of NVIDIA and AMD write them."""

DOUBLE = r"(?i)dgemm|dgemv|f64|fp64|double|dmma"
"""Pattern for the names of kernels that compute in double precision."""

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
    (r"attention|attn|(^|_|:)mha_|^sage_fwd|_mla_|Batch(Prefill|Decode)With", "attention"),
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
    branches = " ".join(f"WHEN regexp_matches(name, '{pattern}', 'i') THEN '{value}'" for pattern, value in rules)
    return f"CASE {branches} ELSE {otherwise} END"


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

# --- readable names ----------------------------------------------------------------------------------------------
# A demangled name repeats the functor of a template in its parameters, and has namespaces and lambdas inside: hundreds
# of characters that most kernels of PyTorch share.

_MAX_LETTERS, _MAX_DEPTH = 20_000, 40
"""Longer names, and deeper nested templates, are only truncated: no compiler writes such names."""

_TYPE = re.compile(r"[*&<]|::|\b(?:bool|char|short|int|long|unsigned|float|double|half|__half|Params)\b")
_HEAD = re.compile(r"(?:\(anonymous namespace\)::)?[\w:$~]+(?=[<(])")
_TOKEN = re.compile(r"operator ?(?:\(\)|\[\]|->|<<|>>|[<>]=?)|->|::|[<>(){}\[\],]|[^<>(){}\[\],:-]+|[:-]")
_BRACKETS = {"<": ">", "(": ")", "{": "}", "[": "]"}
_NUMBER = re.compile(r"#(\d+)|instance (\d+)")
_LITERAL = re.compile(r"(-?\d+)[uUlL]*")
_PLAIN = re.compile(
    r"-?\d+|(?:(?:true|false|void|unsigned|signed|bool|char|short|int|long|float|double|const|__half|__nv_bfloat16|"
    r"BFloat16|Half|half)\b ?)+[*&]*|complex<\w+>"
)
"""An argument that is a number or a type of elements."""

_LAYOUT_ARGUMENT = re.compile(
    r"[Aa]rray<char ?\*, \d+>|\w*OffsetCalculator<.*>|(?:Load|Store)With\w+(?:<.*>)?|TensorList\w*Metadata<.*>"
)
"""An argument of PyTorch's kernels that describes the layout of operands, not the operation."""

_GENERIC = re.compile(r"\w*elementwise\w*_kernel\w*|(?:reduce|multi_tensor_apply)_kernel")
"""PyTorch kernels whose operation is that of their functor."""

_WRAPPERS = {"gpu_kernel_impl": 0, "gpu_kernel_impl_nocast": 0, "ReduceOp": 1, "func_wrapper_t": 1}
"""PyTorch templates that wrap a functor → index of the functor in their arguments."""

_CUTLASS_WRAPPER, _ENABLE = re.compile(r"Kernel2?|device_kernel"), re.compile(r"enable_\w+")
"""CUTLASS templates that wrap the kernel whose name describes the operation."""

_TRITON = re.compile(r"triton_\w+(_\d+)")
_MIN_LETTERS = 8
"""Minimum number of letters to show both the beginning of a name and where it differs."""

_WORD = re.compile(r".*[_<, (]", re.DOTALL)


class _Group(NamedTuple):
    """The content of a pair of brackets."""

    bracket: str
    items: list[_Item]


_Item = Union[str, _Group]  # noqa: UP007 - evaluated at run time, where Python 3.10 knows no forward reference with |


class _Name(NamedTuple):
    """The parts of a C++ name: namespaces, last word, template arguments, and suffix."""

    spaces: list[list[_Item]]
    word: str
    arguments: list[list[_Item]]
    suffix: str


def is_cpp(name: str) -> bool:
    """Return whether a name looks like one of a C++ compiler; `call(x)` and `Memcpy DtoD (Device -> Device)` do not."""
    if name.startswith("void "):
        return True
    if (head := _HEAD.match(name)) is None:
        return False
    template = name[head.end()] == "<"
    return name.endswith((">", ")")) if template else name.endswith(")") and _TYPE.search(name, head.end()) is not None


@lru_cache(maxsize=4096)
def readable(name: str, letters: int = _MAX_LETTERS) -> str:
    """Return a kernel's name as people write it, in at most `letters` characters.

    In a C++ name, the result type, parameters, namespaces, and arguments that describe the layout of operands are left
    out. A lambda is replaced by the enclosing function, with the types of its parameters. If the result is too long,
    the functor of a generic PyTorch kernel loses its types, then is shown alone after an ellipsis. A result that is
    still too long is truncated; a Triton name keeps its number, which distinguishes fusions of the same operators.
    Other names, and names with unbalanced brackets, are only truncated. Different names can have the same result.

    >>> add = "at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>"
    >>> add = f"void at::native::vectorized_elementwise_kernel<4, {add} >(int, {add})"
    >>> readable(add)
    'vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>'
    >>> readable(add, 30)
    '…CUDAFunctor_add<float>'
    >>> readable("triton_per_fused_native_layer_norm_backward_0", 24)
    'triton_per_fused_nati…_0'
    """
    forms = _all_forms(name)
    for text in forms:
        if len(text) <= letters:
            return text
    triton = _TRITON.fullmatch(name)
    end = triton[1] if triton and 2 * len(triton[1]) < letters else ""
    return f"{forms[-1][: max(0, letters - 1 - len(end))]}…{end}"[: max(0, letters)]


def readable_each(names: Sequence[str], letters: int) -> list[str]:
    """Return `readable` of each name; names that would become equal show the first place where they differ.

    Such a name consists of its beginning, an ellipsis, and the text from the first word that differs. Names remain
    equal if this does not distinguish them either.

    >>> gemm = "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x{}x32_warpgroupsize1x1x1"
    >>> readable_each([gemm.format(128), gemm.format(64)], 30)
    ['sm90_xmma_gemm…tilesize128x12…', 'sm90_xmma_gemm…tilesize128x64…']
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        groups[readable(name, letters)].append(name)
    by_name: dict[str, str] = {}
    for text, group in groups.items():
        texts = _distinguish(group, letters) if len(group) > 1 and letters >= _MIN_LETTERS else [text]
        by_name.update(zip(group, texts if len(set(texts)) > 1 else [text] * len(group), strict=True))
    return [by_name[name] for name in names]


def _distinguish(names: Sequence[str], letters: int) -> list[str]:
    """Return the beginnings of names with the first place where their shortest different forms differ."""
    levels = list(zip(*map(_all_forms, names), strict=False))
    for level in levels:
        if len(set(level)) == len(names) and max(map(len, level)) <= letters:
            return list(level)
    texts = next((level for level in reversed(levels) if len(set(level)) == len(names)), levels[0])
    letter_pairs = zip(min(texts), max(texts), strict=False)  # all texts between these two share their beginning
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], letter_pairs))
    if shared < letters // 2:  # they begin with kernels that do not fit, and have the same functor
        return [readable(names[0], letters)] * len(names)
    word_match = _WORD.match(texts[0], 0, shared)
    word = max(word_match.end() if word_match else 0, shared - 2 * letters // 5)
    suffix_length = letters // 2
    suffixes = [
        text[word:] if len(text) - word <= suffix_length else f"{text[word : word + suffix_length - 1]}…"
        for text in texts
    ]
    return [f"{text[: letters - 1 - len(end)]}…{end}" for text, end in zip(texts, suffixes, strict=True)]


def _all_forms(name: str) -> list[str]:
    return [form for form in _forms(name) if form] or [name]


def _forms(name: str) -> Iterator[str]:
    """Yield forms of a name of C++, from the longest to the shortest; none if it cannot be read."""
    tree = _tree(name.removeprefix("void ")) if is_cpp(name) else None
    if tree is None:
        return
    spaces, word, arguments, suffix = _parsed_name(tree)
    if arguments and spaces and _text(spaces[0]) == "cutlass" and _CUTLASS_WRAPPER.fullmatch(word):
        yield _short_text(arguments[0])
        return
    if spaces and any(isinstance(part, _Group) and part.bracket == "<" for part in spaces[-1]):
        word = f"{_short_text(spaces[-1])}::{word}"  # the class is more specific than its method
    yield _with_arguments(word, map(_short_text, arguments)) + suffix
    arguments = [argument for argument in arguments if not _LAYOUT_ARGUMENT.fullmatch(_short_text(argument))]
    functors = [argument for argument in arguments if not _PLAIN.fullmatch(_short_text(argument))]
    if functors and _GENERIC.fullmatch(word):
        yield _with_arguments(word, (_short_text(argument, brief=True) for argument in arguments))
        yield "…" + ", ".join(map(_short_text, functors))
        yield "…" + ", ".join(_short_text(argument, brief=True) for argument in functors)


def _tree(name: str) -> list[_Item] | None:
    """Return the words of a name and its groups in brackets; None if brackets do not match or are too many."""
    if len(name) > _MAX_LETTERS:
        return None
    levels: list[_Group] = [_Group("", [])]
    for token in _TOKEN.findall(name):
        if token in _BRACKETS:
            levels.append(_Group(token, []))
            levels[-2].items.append(levels[-1])
            if len(levels) > _MAX_DEPTH:
                return None
        elif token in _BRACKETS.values():
            if _BRACKETS.get(levels.pop().bracket) != token:
                return None
        else:
            levels[-1].items.append(token)
    return levels[0].items if len(levels) == 1 else None


def _parts(tree: Sequence[_Item], separator: str) -> list[list[_Item]]:
    """Return the parts of a name between separators outside brackets."""
    parts: list[list[_Item]] = [[]]
    for entry in tree:
        if entry == separator:
            parts.append([])
        elif parts[-1] or not isinstance(entry, str) or entry.strip():  # a space after a comma is no part of a name
            parts[-1].append(entry)
    return parts


def _text(tree: Sequence[_Item]) -> str:
    texts = (
        entry if isinstance(entry, str) else f"{entry.bracket}{_text(entry.items)}{_BRACKETS[entry.bracket]}"
        for entry in tree
    )
    return "".join(texts).strip()


def _parsed_name(tree: Sequence[_Item]) -> _Name:
    """Return the parts of a name; of a lambda, those of the function that it is in, with its types and number."""
    path = _parts(tree, "::")
    lambda_suffix, index = "", len(path) - 1
    while index > 0 and (not path[index] or _is_lambda_part(path[index])):
        lambda_suffix = lambda_suffix or _lambda(path[index])
        index -= 1
    parts = path[index]
    if len(parts) > 1 and isinstance(parts[0], _Group) and parts[0].bracket == "(":  # a number with its type: (bool)1
        parts = parts[1:]
    word, remainder = _text(parts[:1]), parts[1:]
    arguments: list[list[_Item]] = []
    if remainder and isinstance(remainder[0], _Group) and remainder[0].bracket == "<":
        arguments, remainder = _parts(remainder[0].items, ","), remainder[1:]
    suffix = (
        _text(remainder) if remainder and isinstance(remainder[0], str) else ""
    )  # a group here is the parameter list
    if arguments and lambda_suffix.startswith("("):
        lambda_suffix = lambda_suffix[lambda_suffix.rindex(")") + 1 :]  # a template's arguments usually are these types
    return _Name(path[:index], word, arguments, suffix.replace("const", " const") + lambda_suffix)


def _is_lambda_part(part: Sequence[_Item]) -> bool:
    """Return whether a part of a name is a lambda, or an operator of a class or of a lambda."""
    head = part[0]
    return head.bracket in "{[" if isinstance(head, _Group) else head.startswith(("operator", "'lambda"))


def _lambda(part: Sequence[_Item]) -> str:
    """Return the types of a lambda's parameters in brackets, and its number if it is not the first one."""
    words = part[0].items if part and isinstance(part[0], _Group) else part
    if not words or isinstance(words[0], _Group) or "lambda" not in words[0]:
        return ""
    types = next((word.items for word in words if isinstance(word, _Group) and word.bracket == "("), [])
    number = _NUMBER.search(_text(part))
    ordinal = f"#{digits}" if number and (digits := number[1] or number[2]) != "1" else ""
    return f"({', '.join(map(_short_text, _parts(types, ',')))}){ordinal}" if types else ordinal


def _short_text(tree: Sequence[_Item], brief: bool = False) -> str:
    """Return a type, a number or a functor without namespaces; in brief, only with the functors of its arguments."""
    _, word, arguments, suffix = _parsed_name(tree)
    if (index := _WRAPPERS.get(word, 0 if _ENABLE.fullmatch(word) else None)) is not None and index < len(arguments):
        return _short_text(arguments[index], brief)
    if number := _LITERAL.fullmatch(word + suffix):
        return number[1]
    texts = [_short_text(argument, brief) for argument in arguments]
    if not brief:
        return _with_arguments(word, texts) + suffix
    return _with_arguments(word, [text for text in texts if not _PLAIN.fullmatch(text)]) + re.sub(
        r"^\(.*\)", "", suffix
    )


def _with_arguments(word: str, arguments: Iterable[str]) -> str:
    visible = [argument for argument in arguments if not _LAYOUT_ARGUMENT.fullmatch(argument)]
    return f"{word}<{', '.join(visible)}>" if visible else word
