"""GPUs that are not present: their properties, and a CUDA device in name.

torch.compile asks a device for its properties, and generates code from the answers. Autograd asks it for
streams, which it does not have without a GPU: `load_stand_in` loads a library that answers.
"""

import ctypes
import importlib
import importlib.util
import subprocess
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_gate.cache import digest

__all__ = ["GPUS", "Gpu", "load_stand_in", "standing_in"]

_SOURCE = Path(__file__).with_name("cuda.cpp")


@dataclass(frozen=True)
class Gpu:
    """A GPU's properties that torch.compile uses.

    Args:
        name: as the driver reports it.
        capability: major and minor number of its architecture.
        multiprocessors: their number.
        memory_gib: of the GPU.
        shared_per_block: bytes of shared memory that one thread block can have.
        cache_mib: of the last level.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_gib: int
    shared_per_block: int
    cache_mib: int

    @property
    def number(self) -> int:
        """The architecture as a number, such as 90."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def properties(self) -> types.SimpleNamespace:
        """In the form of torch.cuda.get_device_properties."""
        major, minor = self.capability
        return types.SimpleNamespace(
            name=self.name,
            type="cuda",
            index=0,
            major=major,
            minor=minor,
            multi_processor_count=self.multiprocessors,
            total_memory=self.memory_gib << 30,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.shared_per_block,
            # One KiB of each block belongs to the driver.
            shared_memory_per_multiprocessor=self.shared_per_block + 1024,
            L2_cache_size=self.cache_mib << 20,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            warp_size=32,
            gcnArchName="",
        )


# Source: NVIDIA, CUDA C++ Programming Guide, technical specifications per compute capability; data sheets.
GPUS = {
    "sm_80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80, 166912, 40),
    "sm_90": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 80, 232448, 50),
    "sm_100": Gpu("NVIDIA B200", (10, 0), 148, 180, 232448, 126),
}


def load_stand_in(folder: Path) -> None:
    """Compile and load the device in name, and import torch, which must not be imported before.

    Args:
        folder: for the compiled library.

    Raises:
        RuntimeError: it does not compile.
    """
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch = Path(found.origin).parent
    version = (torch / "version.py").read_bytes()
    library = folder / f"stand-in-{digest(_SOURCE.read_bytes(), version)}.so"
    if not library.exists():
        _compile(library, torch)
    # PyTorch looks for CUDA once, while it is imported.
    ctypes.CDLL(str(torch / "lib/libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    device = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    importlib.import_module("torch")
    device.register_guard()


def _compile(library: Path, torch: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    aside = library.with_suffix(".new")
    links = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}", str(_SOURCE), *links]
    done = subprocess.run([*command, "-o", str(aside)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{_SOURCE.name} does not compile:\n{done.stderr.strip()[-4000:]}")
    aside.replace(library)


@contextmanager
def standing_in(gpu: Gpu) -> Iterator[None]:
    """Let PyTorch and Triton take this GPU for present. Once per process, because torch keeps facts."""
    import torch.cuda
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    # Inductor traces its patterns with small real tensors, here on the CPU; the patterns fit any device.
    joint_graph.lazy_init(torch.device("cpu"))
    post_grad.lazy_init(torch.device("cpu"))
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, device=None: None),
        (torch.cuda, "_exchange_device", lambda device: 0),
        (torch.cuda, "_maybe_exchange_device", lambda device: 0),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "get_device_name", lambda device=None: gpu.name),
        (torch.cuda, "get_device_capability", lambda device=None: gpu.capability),
        (torch.cuda, "get_device_properties", lambda device=None: gpu.properties),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: gpu.number)),
        (CudaInterface, "get_device_properties", staticmethod(lambda device=None: gpu.properties)),
        (CudaInterface, "raise_if_triton_unavailable", staticmethod(lambda device=None: None)),
        (CudaInterface, "synchronize", staticmethod(lambda device=None: None)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: gpu.properties)),
        (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (joint_graph, "lazy_init", lambda device=None: None),
        (post_grad, "lazy_init", lambda device=None: None),
    ]
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", gpu.number, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_active_torch_device=lambda: torch.device("cuda:0"),
            is_active=lambda: True,
        )
    )
    with ExitStack() as stack:
        stack.enter_context(_constants_on_the_host())
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        yield


@contextmanager
def _constants_on_the_host() -> Iterator[None]:
    """Let the few real tensors that Inductor makes on its device, to fold constants, be on the CPU."""
    import torch

    def empty(size: Any, *, dtype: Any = None, **options: Any) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="cpu")

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("empty.memory_format", empty, "CUDA")
        library.impl("empty_strided", empty_strided, "CUDA")
        yield
