"""Analyses: pure functions from a trace to a small table, numbered A1 … A15 as in XSP's Table I.

>>> import xsp                                                   # doctest: +SKIP
>>> trace = xsp.load("runs/demo")                                # doctest: +SKIP
>>> xsp.analyses.A2(trace).show()                                # doctest: +SKIP
>>> xsp.analyses.layer_information is xsp.analyses.A2            # doctest: +SKIP

Each states which levels it needs and refuses, with the reason, where the trace does not hold them. Tables
are DuckDB relations: `.df()` for pandas, `.pl()` for Polars, `.fetchall()` for tuples. Units stand in the
names of the columns; what was not measured is null.
"""

from __future__ import annotations

from xsp.analyses.activity import DEVICE_ACTIVITY, KERNEL_CLASSES, STEPS, TENSOR_CORES
from xsp.analyses.communication import COMMUNICATION
from xsp.analyses.contract import Analysis
from xsp.analyses.counted import COUNTERS, OP_COUNTERS
from xsp.analyses.critical import CRITICAL_PATH, CRITICAL_PATH_SUMMARY
from xsp.analyses.doubts import HEALTH
from xsp.analyses.fusing import ATTENTION, FUSIBLE_KERNELS
from xsp.analyses.idle import IDLE_CAUSES, IDLE_GAPS
from xsp.analyses.kernel import A8, A10, A11, A12, A13
from xsp.analyses.launches import LAUNCH_BOUND, LAUNCHES
from xsp.analyses.layer import A2, A3, A4, A5, A6, A7, LAYERS_BY_NAME, STAGES
from xsp.analyses.ledger import LEDGER, LEDGER_BY_KIND, LEDGER_BY_LAYER
from xsp.analyses.loop import LOOP
from xsp.analyses.memory import MEMORY_STEPS, MEMORY_TIMELINE
from xsp.analyses.model import A1, Optimum, model_roofline, model_sweep, optimal_batch
from xsp.analyses.modules import MODULE_CLASSES, MODULES
from xsp.analyses.ops import OPS
from xsp.analyses.phases import PHASES, PHASES_OVER_TIME
from xsp.analyses.ranks import COLLECTIVE_SKEW, STRAGGLERS
from xsp.analyses.roofline import A9, A14, A15
from xsp.analyses.samples import SAMPLES, SAMPLES_TIMELINE, THROTTLING
from xsp.analyses.streams import KERNEL_SEQUENCES, QUEUES
from xsp.analyses.utilisation import MFU

ANALYSES: dict[str, Analysis] = {
    each.id: each
    for each in (
        PHASES, PHASES_OVER_TIME, LOOP, LAYERS_BY_NAME, OPS, MODULES, MODULE_CLASSES,
        A1, A2, A3, A4, A5, A6, A7, A8, A9, A10, A11, A12, A13, A14, A15, MFU, STAGES,
        LEDGER, LEDGER_BY_LAYER, LEDGER_BY_KIND, HEALTH,
        DEVICE_ACTIVITY, STEPS, KERNEL_CLASSES, IDLE_CAUSES, IDLE_GAPS, LAUNCHES, LAUNCH_BOUND,
        QUEUES, KERNEL_SEQUENCES,
        ATTENTION, FUSIBLE_KERNELS, TENSOR_CORES, COUNTERS, OP_COUNTERS, COMMUNICATION, COLLECTIVE_SKEW, STRAGGLERS,
        CRITICAL_PATH, CRITICAL_PATH_SUMMARY, MEMORY_TIMELINE, MEMORY_STEPS,
        SAMPLES, SAMPLES_TIMELINE, THROTTLING,
    )
}  # fmt: skip
"""All analyses by what the command line calls them."""

model_information = A1
layer_information = A2
layer_latency = A3
layer_memory = A4
layer_types = A5
layer_latency_by_type = A6
layer_memory_by_type = A7
kernel_information = A8
kernel_roofline = A9
kernels_by_name = A10
kernels_by_layer = A11
layer_metrics = A12
kernel_share = A13
layer_roofline = A14
kernels_by_model = A15
phases = PHASES
phases_over_time = PHASES_OVER_TIME
layers = LAYERS_BY_NAME
operators = OPS
modules_by_path = MODULES
modules_by_class = MODULE_CLASSES
model_flops_utilisation = MFU
stages = STAGES
program_loop = LOOP
health_findings = HEALTH
ledger = LEDGER
ledger_by_layer = LEDGER_BY_LAYER
ledger_by_kind = LEDGER_BY_KIND
device_activity = DEVICE_ACTIVITY
device_steps = STEPS
kernel_classes = KERNEL_CLASSES
idle_causes = IDLE_CAUSES
idle_gaps = IDLE_GAPS
launch_costs = LAUNCHES
launch_bound = LAUNCH_BOUND
stream_queues = QUEUES
kernel_sequences = KERNEL_SEQUENCES
attention_by_form = ATTENTION
fusible_kernels = FUSIBLE_KERNELS
tensor_cores = TENSOR_CORES
counters_by_kernel = COUNTERS
counters_by_operator = OP_COUNTERS
collectives_by_kind = COMMUNICATION
collective_skew = COLLECTIVE_SKEW
collective_waiting = STRAGGLERS
critical_path = CRITICAL_PATH
critical_path_summary = CRITICAL_PATH_SUMMARY
memory_timeline = MEMORY_TIMELINE
memory_steps = MEMORY_STEPS
samples_summary = SAMPLES
samples_timeline = SAMPLES_TIMELINE
throttling_reasons = THROTTLING

__all__ = [
    "A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "A9", "A10", "A11", "A12", "A13", "A14", "A15",
    "ANALYSES", "Analysis", "Optimum",
    "attention_by_form", "collective_skew", "collective_waiting", "collectives_by_kind", "critical_path",
    "critical_path_summary", "device_activity", "device_steps", "fusible_kernels", "health_findings", "idle_causes",
    "idle_gaps", "kernel_classes",
    "kernel_information", "kernel_roofline", "kernel_sequences", "kernel_share", "kernels_by_layer", "kernels_by_model",
    "kernels_by_name", "launch_bound", "launch_costs", "layer_information", "layer_latency", "layer_latency_by_type",
    "layer_memory", "layer_memory_by_type", "layer_metrics", "layer_roofline", "layer_types", "layers", "ledger",
    "ledger_by_kind", "ledger_by_layer", "memory_steps", "memory_timeline", "model_flops_utilisation",
    "model_information", "model_roofline", "model_sweep",
    "operators", "optimal_batch", "phases", "phases_over_time", "program_loop", "samples_summary", "samples_timeline",
    "stages", "stream_queues", "tensor_cores", "throttling_reasons",
]  # fmt: skip
