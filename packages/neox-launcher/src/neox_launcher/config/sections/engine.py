"""What only DeepSpeed's engine reads."""

from typing import Literal

from neox_launcher.config.parameter import Section, block, param

__all__ = ["Aio", "CommsLogger", "DataTypes", "Eigenvalue", "EngineSection", "FlopsProfiler"]


class FlopsProfiler(Section):
    """Counts the operations of one iteration."""

    enabled: bool = param(False, origin="DSC", doc="Profile one iteration.")
    profile_step: int = param(1, origin="DSC", gt=0, doc="The iteration to profile.")
    module_depth: int = param(-1, origin="DSC", ge=-1, doc="Depth of modules to report; -1 reports all.")
    top_modules: int = param(1, origin="DSC", gt=0, doc="Modules to report at each depth.")
    detailed: bool = param(True, origin="DSC", doc="Report every module.")
    output_file: str | None = param(None, origin="DSC", none_means="stdout", doc="File for the report.")


class DataTypes(Section):
    """Number formats inside the engine."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = param(
        None,
        origin="DSC",
        resume="training",
        none_means="fp32 when training is in bf16, else the model's",
        doc="Format in which gradients are accumulated.",
    )


class CommsLogger(Section):
    """Times every collective operation; each then waits for its end, which slows training down."""

    enabled: bool = param(False, origin="DSC", doc="Time collective operations.")
    verbose: bool = param(False, origin="DSC", doc="Report each operation when it ends.")
    prof_all: bool = param(True, origin="DSC", doc="Time all operations, not only those of prof_ops.")
    debug: bool = param(False, origin="DSC", doc="Tell the calling function of each operation.")
    prof_ops: tuple[str, ...] = param(
        (), origin="DSC", used_when="prof_all is false", doc="Names of the operations to time."
    )


class Aio(Section):
    """How files are read and written when offloading to NVMe, through libaio."""

    block_size: int = param(1048576, origin="DSC", gt=0, doc="Bytes of one request.")
    queue_depth: int = param(8, origin="DSC", gt=0, doc="Requests under way at once.")
    thread_count: int = param(1, origin="DSC", gt=0, doc="Threads that share one tensor's requests.")
    single_submit: bool = param(False, origin="DSC", doc="Hand requests over one by one, not together.")
    overlap_events: bool = param(
        True, origin="DSC", doc="Hand over requests without waiting for earlier ones."
    )


class Eigenvalue(Section):
    """Largest eigenvalue of each layer's second derivatives, by power iteration."""

    enabled: bool = param(
        False, origin="DSC", doc="Compute the eigenvalues, reported as Train/Eigenvalues/ModelBlockParam_N."
    )
    verbose: bool = param(False, origin="DSC", doc="Report each power iteration.")
    max_iter: int = param(100, origin="DSC", gt=0, doc="Most power iterations.")
    tol: float = param(0.01, origin="DSC", gt=0, doc="Relative change that ends the power iteration.")
    stability: float = param(1e-6, origin="DSC", ge=0, doc="Added to norms before dividing by them.")
    gas_boundary_resolution: int = param(1, origin="DSC", gt=0, doc="Iterations between computations.")
    layer_name: str = param(
        "bert.encoder.layer", origin="DSC", min_length=1, doc="Name of the list of layers."
    )
    layer_num: int = param(0, origin="DSC", ge=0, doc="Layers in that list.")


class EngineSection(Section, resume="free"):
    """What is passed on to DeepSpeed as it is."""

    deepspeed: bool = param(True, origin="DSC", doc="Train with DeepSpeed; there is no other engine.")
    prescale_gradients: bool = param(
        False,
        origin="DSC",
        resume="training",
        doc="Divide gradients by the data-parallel size before they are summed, not after.",
    )
    gradient_predivide_factor: float = param(
        1.0,
        origin="DSC",
        resume="training",
        gt=0,
        used_when="prescale_gradients is false",
        doc="Divide gradients by this before they are summed, and by data-parallel size / this after.",
    )
    sparse_gradients: bool = param(False, origin="DSC", doc="Send embedding gradients in sparse form.")
    communication_data_type: Literal["fp16", "bf16", "fp32"] | None = param(
        None,
        origin="DSC",
        resume="training",
        none_means="the training's own format",
        doc="Format in which gradients travel.",
    )
    steps_per_print: int = param(
        10, origin="DSC", gt=0, doc="Iterations between DeepSpeed's own reports; quiet unless it is given."
    )
    wall_clock_breakdown: bool = param(
        False, origin="DSC", doc="Time the forward pass, backward pass and update, in DeepSpeed's reports."
    )
    dump_state: bool = param(False, origin="DSC", doc="Print DeepSpeed's state when it starts.")
    flops_profiler: FlopsProfiler = block(
        FlopsProfiler, origin="DSC", doc="Counts the operations of one iteration."
    )
    data_types: DataTypes = block(DataTypes, origin="DSC", doc="Number formats inside the engine.")
    comms_logger: CommsLogger = block(CommsLogger, origin="DSC", doc="Times every collective operation.")
    aio: Aio = block(Aio, origin="DSC", doc="Reading and writing when offloading to NVMe.")
    eigenvalue: Eigenvalue = block(Eigenvalue, origin="DSC", doc="Eigenvalues of the second derivatives.")
