"""Settings of DeepSpeed's engine."""

from typing import Literal

from neox_config.schema.parameter import Section, block, param
from neox_config.schema.paths import PathText

__all__ = ["Aio", "CommsLogger", "DataTypes", "Eigenvalue", "EngineSection", "FlopsProfiler"]


class FlopsProfiler(Section):
    """Floating-point operations (FLOPs) profiler, for every engine and layout.

    It counts the operations of one iteration on every rank, measures the modules' forward passes, and
    compares the total with the formula behind TFLOP/s (see profiling.md).
    """

    enabled: bool = param(False, origin="DSC", doc="Profile one iteration.")
    profile_step: int = param(
        1,
        origin="DSC",
        gt=0,
        doc="Iteration to profile; the next one if it is left out. A run that resumes after it profiles "
        "none.",
    )
    module_depth: int = param(
        -1, origin="DSC", ge=-1, doc="Maximum module depth to report; the model has 0, -1 reports all."
    )
    top_modules: int = param(
        1, origin="DSC", gt=0, doc="Number of largest classes of modules to report at each depth."
    )
    detailed: bool = param(True, origin="DSC", doc="Report every module.")
    output_file: PathText | None = param(
        None, origin="DSC", none_means="the log of rank 0", doc="File for the report on all pipeline stages."
    )


class DataTypes(Section):
    """Data types used by the engine."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = param(
        None,
        origin="DSC",
        resume="training",
        none_means="fp32 when training is in bf16, else the model's data type",
        doc="Data type in which gradients are accumulated. Under ZeRO stages 2 and 3, data-parallel ranks of "
        "the torch engine use fp32.",
    )


class CommsLogger(Section):
    """Communication logger: counts and times collective operations, ours and DeepSpeed's.

    It waits for each of them, which slows training. Rank 0 logs a table of its operations at the end: calls,
    bytes, time and bandwidth by operation and group (see profiling.md).
    """

    enabled: bool = param(False, origin="DSC", doc="Count and time collective operations.")
    verbose: bool = param(
        False, origin="DSC", doc="Log each operation when it finishes, and the table every log-interval."
    )
    prof_all: bool = param(True, origin="DSC", doc="Time all operations, not only those in prof_ops.")
    debug: bool = param(
        False, origin="DSC", doc="Name the calling function of each operation; one row for each."
    )
    prof_ops: tuple[str, ...] = param(
        (),
        origin="DSC",
        used_when="prof_all is false",
        doc="Names of the operations to time, as in torch.distributed, such as all_reduce.",
    )


class Aio(Section):
    """Asynchronous I/O (libaio) for offloading to NVMe."""

    block_size: int = param(1048576, origin="DSC", gt=0, doc="Size of one I/O request in bytes.")
    queue_depth: int = param(8, origin="DSC", gt=0, doc="Maximum number of outstanding requests.")
    thread_count: int = param(1, origin="DSC", gt=0, doc="Threads that submit the requests of one tensor.")
    single_submit: bool = param(
        False, origin="DSC", doc="Submit requests one at a time instead of in a batch."
    )
    overlap_events: bool = param(
        True, origin="DSC", doc="Submit requests without waiting for earlier ones to finish."
    )


class Eigenvalue(Section):
    """Largest Hessian eigenvalue of each layer, by power iteration.

    With weight_quantization, whenever the number of bits of a matrix falls, its quantization_period is
    multiplied by 1 + floor(4 e), where e is the eigenvalue of its layer divided by the largest one (see
    compression.md).
    """

    enabled: bool = param(
        False, origin="DSC", doc="Compute eigenvalues and report them as Train/Eigenvalues/ModelBlockParam_N."
    )
    verbose: bool = param(False, origin="DSC", doc="Log each power iteration.")
    max_iter: int = param(100, origin="DSC", gt=0, doc="Maximum number of power iterations.")
    tol: float = param(0.01, origin="DSC", gt=0, doc="Relative change at which the power iteration stops.")
    stability: float = param(1e-6, origin="DSC", ge=0, doc="Constant added to norms before dividing by them.")
    gas_boundary_resolution: int = param(1, origin="DSC", gt=0, doc="Iterations between computations.")
    layer_name: str = param(
        "bert.encoder.layer",
        origin="DSC",
        min_length=1,
        doc="Name of the module that holds the layers; must be layers.",
    )
    layer_num: int = param(
        0, origin="DSC", ge=0, doc="Number of layers, from the first, whose eigenvalues are computed."
    )


class EngineSection(Section, resume="free"):
    """The engine, which runs forward and backward passes and updates weights, and its settings."""

    engine: Literal["auto", "torch", "deepspeed"] = param(
        "auto",
        origin="ours",
        doc="Engine that trains. torch: PyTorch's own parts (fully_shard for ZeRO); deepspeed: DeepSpeed's "
        "engine; auto: deepspeed if a setting requires it, such as offloading, else torch. A log line states "
        "the choice and the reason. Both train the same model and read each other's checkpoints.",
    )
    deepspeed: bool = param(
        True, origin="DSC", doc="false is the same as engine: torch; true does not choose the engine."
    )
    expandable_segments: bool = param(
        False,
        origin="ours",
        doc="Let PyTorch's allocator of GPU memory grow its segments instead of adding others, so that less "
        "memory is lost to fragmentation where the sizes of tensors vary. PYTORCH_ALLOC_CONF and "
        "PYTORCH_CUDA_ALLOC_CONF in the environment take precedence. No effect on CPUs.",
    )
    prescale_gradients: bool = param(
        False,
        origin="DSC",
        resume="training",
        doc="Divide gradients by the data-parallel size before the all-reduce instead of after it. ZeRO "
        "stage 3, and reduce_scatter, always divide before.",
    )
    gradient_predivide_factor: float = param(
        1.0,
        origin="DSC",
        resume="training",
        gt=0,
        used_when="prescale_gradients is false",
        doc="Divide gradients by this factor before the all-reduce, and by data-parallel size / factor after "
        "it.",
    )
    sparse_gradients: bool = param(
        False, origin="DSC", doc="Communicate embedding gradients as sparse tensors."
    )
    communication_data_type: Literal["fp16", "bf16", "fp32"] | None = param(
        None,
        origin="DSC",
        resume="training",
        none_means="under ZeRO the data type of training, else that in which gradients are accumulated",
        doc="Data type in which gradients are summed over data-parallel ranks.",
    )
    steps_per_print: int | None = param(
        None,
        origin="DSC",
        gt=0,
        none_means="log_interval",
        doc="Iterations between progress reports, with loss, learning rate and skipped updates: the value of "
        "log_interval where that is not given, else not used. DeepSpeed prints no reports of its own.",
    )
    wall_clock_breakdown: bool = param(
        False,
        origin="DSC",
        doc="Measure the phases of iterations on rank 0: time/forward, time/backward (time/backward_inner "
        "and time/backward_allreduce), time/step, time/data, time/pipeline and time/other, in seconds per "
        "iteration, and in milliseconds in the monitors (Train/Samples/elapsed_time_ms_forward, ...). Every "
        "phase waits for the device, so training is slower. flops_profiler.enabled also measures them.",
    )
    dump_state: bool = param(False, origin="DSC", doc="Not used: neox-config show prints all settings.")
    flops_profiler: FlopsProfiler = block(
        FlopsProfiler, origin="DSC", doc="Floating-point operations (FLOPs) profiler."
    )
    data_types: DataTypes = block(DataTypes, origin="DSC", doc="Data types used by the engine.")
    comms_logger: CommsLogger = block(
        CommsLogger, origin="DSC", doc="Counts and times collective operations."
    )
    aio: Aio = block(Aio, origin="DSC", doc="Asynchronous I/O for offloading to NVMe.")
    eigenvalue: Eigenvalue = block(Eigenvalue, origin="DSC", doc="Largest Hessian eigenvalue of each layer.")
