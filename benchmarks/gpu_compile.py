"""The gate's kernels for NVIDIA GPUs, on a machine without one: generated, compiled for each target, interpreted.

Inductor and Triton need no GPU to generate and compile code for a stated one, only to run it. So this program answers
the questions of a driver itself and lets `kernels.compiled` do what it would do there. What it makes for sm_80 and
sm_90 is compiled to machine code, which is not run; the same Triton source is run by Triton's interpreter on the CPU
and compared with `algorithm.run`. `make gpu-compile` runs it in an environment with a CUDA build of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from cplus.cli import gpu
from cplus.core import kernels

TARGETS = {80: (108, 2048), 90: (132, 2048)}  # A100 and H100: processors, threads per processor
INSTRUCTIONS = {"fused": "fma.rn.f32", "divisions": "div.rn.f32", "approximate": "div.full.f32", "flushed": ".ftz"}


@contextmanager
def pretended(capability: int, found: list[Any]) -> Iterator[None]:
    """A CUDA device that answers questions and launches nothing; kernels that Inductor makes are put into `found`."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.async_compile import AsyncCompile
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    processors, threads = TARGETS[capability]
    major, minor = divmod(capability, 10)
    about = SimpleNamespace(
        name=f"sm_{capability}",
        major=major,
        minor=minor,
        multi_processor_count=processors,
        max_threads_per_multi_processor=threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        warp_size=32,
        total_memory=80 << 30,
    )

    def taken(self: Any, name: str, source: str, **_: Any) -> Any:
        found.append(made := SimpleNamespace(name=name, source=source, launches=[]))
        return SimpleNamespace(run=lambda *args, stream: made.launches.append(args))

    answers = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.set_device": lambda device: None,
        "torch.cuda.get_device_properties": lambda device=None: about,
        "torch.cuda.get_device_capability": lambda device=None: (major, minor),
        "torch.cuda.get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "torch.cuda.set_rng_state": lambda state, device=None: None,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.synchronize": lambda device=None: None,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda._exchange_device": lambda device: 0,
        "torch.cuda._maybe_exchange_device": lambda device: 0,
        "torch.cuda._DeviceGuard": lambda device: nullcontext(),
        "torch.accelerator.is_available": lambda: False,
        "torch._C._cuda_getCurrentRawStream": lambda device: 0,
        # patterns of attention and matrix products, which are tried on the device; the kernels have neither
        "torch._inductor.fx_passes.joint_graph.lazy_init": lambda device=None: None,
        "torch._inductor.fx_passes.post_grad.lazy_init": lambda device=None: None,
    }
    torch._C._ensureCUDADeviceGuardSet()  # a guard that does nothing, as fake tensors use
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda"),
        )
    )
    static = {
        "get_device_properties": lambda device=None: about,
        "get_compute_capability": lambda device=None: capability,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(name, answer))
        for name, answer in static.items():
            stack.enter_context(patch.object(CudaInterface, name, staticmethod(answer)))
        stack.enter_context(
            patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda d=None: about))
        )
        stack.enter_context(patch.object(AsyncCompile, "triton", taken))
        yield


def generated(capability: int, block: str, average: str) -> dict[str, Any]:
    """The Triton source that `kernels.compiled` gets for this target, and the order of its arguments."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: list[Any] = []
    dtype = gpu.AVERAGES[average]
    with pretended(capability, found), FakeTensorMode():
        kernels.compiled.cache_clear()
        kernel = kernels.compiled(gpu.BLOCKS[block], dtype, torch.device("cuda"))
        assert len(found) == 1, f"expected one kernel, got {[one.name for one in found]}"
        # A launch of another size shows which argument is which, and must not compile anything.
        tensors = {name: torch.zeros(gpu.COUNT, device="cuda") for name in gpu.ARGUMENTS[block]}
        tensors |= {"packed": torch.zeros(-(-gpu.COUNT // 4), dtype=torch.uint8, device="cuda")}
        tensors |= {"numbers": torch.zeros(3 if block == "gate" else 10, device="cuda")}
        tensors |= {"ema": None if dtype is None else torch.zeros(gpu.COUNT, dtype=dtype, device="cuda")}
        kernel(*tensors.values())
    [made] = found
    order = [next((name for name, held in tensors.items() if held is given), given) for given in made.launches[-1]]
    return {"name": made.name, "source": made.source, "order": order}


def machine_code(capability: int, made: dict[str, Any]) -> dict[str, Any]:
    """The kernel compiled as Inductor would; of its launch configurations the one with the most registers."""
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers
    from triton import knobs

    with (
        pretended(capability, []),
        patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        config.patch(use_static_cuda_launcher=False),
    ):
        tuner = load(made)
        tuner.precompile(warm_cache_only=True)
    rows = []
    for built in tuner.compile_results:
        assembly, machine = built.kernel.asm["ptx"], built.kernel.asm["cubin"]
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{capability}", "-o", os.devnull, "/dev/stdin"]
        told = subprocess.run(command, input=assembly, capture_output=True, text=True, check=True).stderr
        numbers = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
        row = {name: int(re.search(text, told)[1]) for name, text in numbers.items()}  # type: ignore[index]
        rows.append(row | {"bytes": len(machine)} | {name: assembly.count(text) for name, text in INSTRUCTIONS.items()})
    return {"configurations": len(rows), **max(rows, key=lambda row: row["registers"])}


def load(made: dict[str, Any]) -> Any:
    """The kernel of a generated source, from a file, where Triton reads its text."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(made["source"])
    space: dict[str, Any] = {"__file__": file.name, "__name__": "generated"}
    exec(compile(made["source"], file.name, "exec"), space)
    return space[made["name"]]


def interpreted(made: dict[str, Any]) -> float:
    """Run a generated source in Triton's interpreter: its largest distance from the algorithm after a step.

    In units of last place of the parameter, or of the size of a step where that is larger.
    """
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.runtime import interpreter

    with (
        patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        patch.object(triton_heuristics, "pointwise", lambda **_: lambda function: function),
    ):
        kernel = load(made)
    # The interpreter cuts float32 off to bfloat16, where a GPU rounds to the nearest; it has no nearbyint at all.
    convert = interpreter._convert_float

    def rounded(values: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if wanted.name != "bf16":
            return convert(values, given, wanted, mode)
        return torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")

    interpreter._convert_float = rounded
    kernel.fn.__globals__["libdevice"] = SimpleNamespace(nearbyint=lambda x: x + 2.0**23 - 2.0**23)  # for x >= 0

    def launch(block: str, average: str, held: Mapping[str, Any]) -> None:
        kernel[(-(-gpu.COUNT // 256),)](*(held.get(name, name) for name in made["order"]), XBLOCK=256)

    return gpu.distance(made["block"], made["average"], torch.device("cpu"), launch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu-compile.json"))
    parser.add_argument("--interpret", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.interpret is not None:
        kinds = json.loads(given.interpret.read_text())
        print(json.dumps([interpreted(made) for made in kinds]))
        return
    made = [
        {"block": block, "average": average, "target": target, **generated(target, block, average)}
        for target in TARGETS
        for block in gpu.BLOCKS
        for average in gpu.AVERAGES
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(made))
        file.flush()
        command = [sys.executable, __file__, "--interpret", file.name]
        run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, check=True)
    distances = json.loads(run.stdout)
    rows = []
    for one, distance in zip(made, distances, strict=True):
        about = {name: one[name] for name in ("block", "average", "target")}
        rows.append({**about, **machine_code(one["target"], one), "ulp": round(distance, 3)})
        print(rows[-1])
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    report = {
        "ran_on_a_gpu": False,
        "versions": versions,
        "coordinates": gpu.COUNT,
        "steps": gpu.STEPS,
        "kernels": rows,
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    if max(distances) > 1:
        sys.exit("a kernel is more than one unit of last place away from the algorithm")


if __name__ == "__main__":
    main()
