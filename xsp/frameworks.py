"""The framework of a recorded program, and advice in its words.

xsp records programs in PyTorch, and its advice names what PyTorch has. A trace of another profiler may be of a program
in another framework (field `framework` of `run.json`; None if it is PyTorch or not stated), whose user can type none of
that. `in_words_of` is the one place that says what such a user can do instead: it translates a text, or says that
there is no translation, and then the text is not shown.
"""

from __future__ import annotations

import re

JAX, TORCH_XLA, TENSORFLOW = "jax", "torch_xla", "tensorflow"
"""Frameworks other than plain PyTorch whose programs are recognised in traces."""

COMPILED = (JAX, TORCH_XLA, TENSORFLOW)
"""Frameworks whose recorded operators are those of XLA's compiler."""

TITLES = {JAX: "JAX", TORCH_XLA: "PyTorch/XLA", TENSORFLOW: "TensorFlow"}

_OF_PYTORCH = re.compile(
    r"torch|\bnn\.|\bF\.|data ?loader|num_workers|persistent_workers|pin_memory|non_blocking|memory_format|"
    r"channels[ _]last|_?foreach|\bfused=|autocast|inference_mode|no_grad|requires_grad|gradient_checkpointing|sdpa|"
    r"graph breaks|\.(item|cpu|to|clone|contiguous|detach|double|half|float|bfloat16|eval|tolist)\(|CUDA graphs|"
    r"set_detect_anomaly|logits_to_keep|SparseAdam|Embedding\(",
    re.IGNORECASE,
)
"""Pattern for what only programs in PyTorch have."""

_IN_JAX = (
    ("fewer launches (", "one jax.jit around the whole step, or fewer launches ("),
    ("(CUDA graphs, ", "(XLA's command buffers, "),
    ("torch.compile, ", ""),
    (" (torch.compile)", ""),
    ("fuse them; torch.compile", "fuse them: one jax.jit around all of them"),
    (" (graph breaks)", " (calls outside jax.jit)"),
    ("in workers of the data loader, in another thread or process", "in another thread, with jax.device_put"),
    ("num_workers and prefetching load in the background", "a thread, Grain or tf.data can prefetch batches"),
    ("(.item(), .cpu(), prints), and pin the copied memory", "(float(x), np.asarray(x), prints)"),
    ("(.item(), boolean masks, synchronize())", "(float(x), np.asarray(x), block_until_ready())"),
    ('torch.set_float32_matmul_precision("high") allows TF32; or torch.autocast in bfloat16',
     'jax.config.update("jax_default_matmul_precision", "tensorfloat32"); or arrays in bfloat16'),
    ("torch.backends.cudnn.allow_tf32 = True allows TF32; or torch.autocast in bfloat16",
     'jax.config.update("jax_default_matmul_precision", "tensorfloat32"); or arrays in bfloat16'),
    ("pin_memory=True and non_blocking=True: the host does not wait, the copy is faster",
     "jax.device_put of the next batch before this step: the copy runs beside it"),
    ("torch.profiler records modules with with_stack and with_modules, shapes with record_shapes",
     "XLA's profiler records HLO operators, but no modules and shapes"),
    ("record shapes (torch.profiler's record_shapes), or counters", "XLA's profiler records neither"),
    ("import a trace of torch.profiler with profile_memory=True", "xsp does not read those of XLA's profiler"),
    ("record with xsp and --levels M/L/G, or with torch.profiler and profile_memory=True",
     "xsp does not read those of XLA's profiler"),
    ("record with `xsp run --counters`, join a report with `xsp counters`, or give torch.profiler profiler_metrics",
     "join a report with `xsp counters`"),
    (" (torch.profiler: with_modules, with_stack)", ""),
)  # fmt: skip
"""Words of PyTorch in the texts of xsp, and what to do in JAX instead."""


def in_words_of(framework: str | None, text: str) -> str | None:
    """Return a text in words of a framework; None if it is about something that only PyTorch has.

    Args:
        framework: field `framework` of a run; of PyTorch, also under XLA, a text stays as it is.
        text: a sentence, or what to type.
    """
    if framework is None or framework not in (JAX, TENSORFLOW):
        return text
    if framework == JAX:
        for ours, theirs in _IN_JAX:
            text = text.replace(ours, theirs)
    return None if _OF_PYTORCH.search(text) else text
