"""benchmarks/kernel_times.py: kernels of a profile by class, with made-up kernels."""

import gzip
import importlib
import json

import pytest

from support.sources import ROOT

# Names as profiles of H100s have them, shortened.
NAMES = {
    "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT": "products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>(Params)": "products",
    "void cublasLt::splitKreduce_kernel<32, 16, int>(...)": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true>(...)": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(...)": "attention",
    "triton_tem_fused_flex_attention_3": "attention",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_view_3": "compiled",
    "triton_red_fused_add_native_layer_norm_backward_12": "compiled",
    "triton_tem_fused_mm_0": "products",
    "void neox::cross_entropy_kernel<c10::BFloat16, 8, true>(...)": "loss",
    "void neox::(anonymous namespace)::bias_gelu_backward_kernel<c10::BFloat16, 8>(...)": "fused operators",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<...>>": "update",
    "Memcpy DtoD (Device -> Device)": "copies",
    "Memset (Device)": "copies",
    "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add<float>>": "other",
}


@pytest.fixture
def kernel_times(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("kernel_times")


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_a_kernel_has_the_class_of_its_name(kernel_times, name, expected):
    found = kernel_times.by_class([(name, 10.0, 2510.0)])
    assert found == dict.fromkeys(found, 0.0) | {expected: 2.5}
    assert list(found) == [*kernel_times.CLASSES, "other", "idle"]


def test_idle_time_is_that_without_any_kernel(kernel_times):
    # In any order: 0 to 1 ms, one inside another from 3 to 7 ms, one that overlaps it until 8, one from 8.5.
    found = kernel_times.by_class(
        [
            ("nvjet", 6000.0, 8000.0),
            ("flash_fwd", 0.0, 1000.0),
            ("Memcpy", 4000.0, 5000.0),
            ("nvjet", 3000.0, 7000.0),
            ("something", 8500.0, 9000.0),
        ]
    )
    expected = {"attention": 1.0, "products": 6.0, "copies": 1.0, "other": 0.5, "idle": 2.0 + 0.5}
    assert found == dict.fromkeys(found, 0.0) | expected


def test_only_what_ran_on_the_gpu_is_read_from_a_trace(kernel_times, tmp_path, monkeypatch):
    events = [
        {"name": "nvjet", "cat": "kernel", "ts": 5.0, "dur": 2000.0},
        {"name": "Memset (Device)", "cat": "gpu_memset", "ts": 2005.0, "dur": 1000.0},
        {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 0.0, "dur": 7000.0},
        {"name": "process_name", "ph": "M", "ts": 0.0},
    ]

    class Profile:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def export_chrome_trace(self, path):
            with gzip.open(path, "wt") as file:
                json.dump({"traceEvents": events}, file)

    monkeypatch.setattr(kernel_times.torch.profiler, "profile", lambda **options: Profile())
    found = kernel_times.profiled(lambda: None, tmp_path / "new" / "trace.json.gz")
    assert found == dict.fromkeys(found, 0.0) | {"products": 2.0, "copies": 1.0}
