"""Fabricated reports in the form of Nsight Compute, and a run with their kernels."""

from __future__ import annotations

from pathlib import Path

from xsp import rundir
from xsp.device import metrics
from xsp.store.write import StepWriter
from xsp.testing import spans

RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
FIXED = ("ID", "Process ID", "Process Name", "Host Name", RANGES, "Kernel Name", "Context", "Stream")
PLACEMENT = ("Block Size", "Grid Size", "Device", "CC")
ZEROS = {name: "0" for name in metrics.requested() if "fadd2" not in name}
FFMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
BF16 = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
READ, WRITE, OCCUPANCY = "dram__bytes_read.sum", "dram__bytes_write.sum", metrics.OCCUPANCY[0]


def raw(*kernels: dict[str, str], units: dict[str, str] | None = None, header: str = "") -> str:
    """Write the page `raw`: each kernel with its name, ranges, grid, block, CC and metrics."""
    metric_names = list(dict.fromkeys(name for kernel in kernels for name in kernel if "__" in name))
    lines = [
        [*FIXED, *PLACEMENT, *metric_names],
        [*("" for _ in (*FIXED, *PLACEMENT)), *((units or {}).get(n, "") for n in metric_names)],
    ]
    for number, kernel in enumerate(kernels):
        marks = "  ".join(
            f'"<default domain>:{name}:none:none:none:none:none:none"' for name in kernel.get("in", "").split()
        )
        place = [kernel.get("block", "(128, 1, 1)"), kernel.get("grid", "(8, 1, 1)"), "0", kernel.get("CC", "9.0")]
        fixed = [str(number), "7", "python3.12", "127.0.0.1", f"1  {marks} " if marks else "", kernel["name"], "1", "7"]
        lines.append([*fixed, *place, *(kernel.get(name, "n/a") for name in metric_names)])
    text = "\n".join(",".join('"' + field.replace('"', '""') + '"' for field in line) for line in lines)
    return f"==PROF== Connected to process 7\n{header}{text}\n==PROF== Disconnected from process 7\n"


def report(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "report.csv"
    path.write_text(text, encoding=encoding)
    return path


STEP = """
step train 0-1000 span_id=5
  forward Net 10-500 phase=forward
    module conv 20-200 type=Conv2d phase=forward depth=1
      op aten::conv2d 30-190 {op}
        launch cudaLaunchKernel 40-50 correlation_id=1
        launch cudaLaunchKernel 60-70 correlation_id=2
    module fc 210-400 type=Linear phase=forward depth=1
      op aten::addmm 220-390 {op}
        launch cudaLaunchKernel 230-240 correlation_id=3
kernel prepare 100-150 correlation_id=1 attributes={{"grid":[8,1,1],"block":[128,1,1]}}
kernel gemm<4>() 150-550 correlation_id=2 attributes={{"grid":[8,1,1],"block":[128,1,1]}}
kernel gemm<4>() 550-850 correlation_id=3 attributes={{"grid":[8,1,1],"block":[128,1,1]}}
"""


def run_of_kernels(directory: Path) -> Path:
    """Return a run of two timed steps and one that describes, with analytic figures of the operators."""
    directory = rundir.create(directory)
    store = StepWriter(directory)
    for number in range(3):
        columns = {"step": number, "trace_id": f"{number:032x}", "rung": 70, "timed": number > 0}
        op = "flops=100 flops_source=shapes dtype=float" if number == 0 else ""
        rows = [span._replace(span_id=None) for span in spans(STEP.format(op=op), **columns)]
        store.add(number, list(zip(*rows, strict=True)))
    store.finish({"name": "net", "finished": True, "notes": [], "absent": {"counters": "not asked for"}})
    return directory


def kernel_counters(name: str, layer: str, **values: str) -> dict[str, str]:
    return {"name": name, "in": f"xsp.step xsp.layer#0#{layer}", **ZEROS, **values}


FULL_REPORT = raw(
    kernel_counters("prepare", "conv", **{READ: "10", WRITE: "20", OCCUPANCY: "12.5"}),
    kernel_counters("void gemm<(int)4>(T1)", "conv", **{FFMA: "3,000", READ: "1000", WRITE: "500", OCCUPANCY: "50"}),
    kernel_counters("void gemm<(int)4>(T1)", "fc", **{FFMA: "500", READ: "2000", WRITE: "100", OCCUPANCY: "75"}),
)
