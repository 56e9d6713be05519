"""Compiles both kernels for GPUs that are not here, and prints the bytes of shared memory each takes."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from regard.attention import kernels, triton_source


class Absent:
    """A driver for a GPU of this capability, good for compiling only."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Compiled:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def compile_it(*args: Any, **options: Any) -> None:
            sys.stdout.write(f"{self.kernel.warmup(*args, grid=grid, **options).metadata.shared}\n")

        return compile_it


def main() -> None:
    """Both kernels plainly and with everything on; lengths and offset 1 too, which Triton makes constants."""
    source = SimpleNamespace(
        row_kernel=Compiled(triton_source.row_kernel), column_kernel=Compiled(triton_source.column_kernel)
    )
    kernels._source = lambda query: source
    for capability, dtype, width, length, everything in (
        (80, torch.bfloat16, 64, 1, False),
        (80, torch.float32, 80, 70, True),
        (90, torch.bfloat16, 80, 70, True),
        (90, torch.float32, 64, 1024, False),
    ):
        driver.set_active(Absent(capability))
        query, key = (torch.zeros(2, length, heads, width, dtype=dtype).transpose(1, 2) for heads in (4, 2))
        real = torch.ones(2, length, dtype=torch.bool) if everything else None
        shared: dict[str, Any] = {"scale": 0.1, "causal": not everything, "offset": int(length == 1)}
        if everything:
            keep = torch.ones(2, 1, length, length, dtype=torch.bool)
            shared |= {"key_mask": real, "softcap": 5.0, "window": 30, "keep": keep}
        rows = kernels.row_statistics(
            query, key, sink=torch.zeros(4) if everything else None, distance=everything, **shared
        )
        kernels.column_statistics(query, key, rows.lse, query_mask=real, square=everything, **shared)


if __name__ == "__main__":
    main()
