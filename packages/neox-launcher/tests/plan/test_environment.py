"""The variables that are passed to the workers, and those that are hidden."""

import pytest

from neox_config.errors import LaunchError
from neox_launcher.agent.worker_environment import worker_environment
from neox_launcher.plan.environment import is_secret, read_environment_file, shown_value, travelling_variables
from support.refusals import refused


@pytest.fixture
def folders(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    return home, folder


def test_only_variables_with_listed_prefixes_are_passed(folders):
    home, folder = folders
    environment = {
        "NCCL_DEBUG": "INFO",
        "TORCHINDUCTOR_CACHE_DIR": "/scratch",
        "CUDA_LAUNCH_BLOCKING": "1",
        "UCX_TLS": "rc",
        "PYTHONHASHSEED": "5",
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "eth1",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "PATH": "/bin",
        "WANDB_API_KEY": "x",
        "WANDB_SERVICE": "2-123-tcp-localhost-4711",
        "HF_HOME": "/scratch/hf",
        "TRITON_CACHE_DIR": "/scratch/triton",
        "https_proxy": "http://proxy:3128",
        "NO_PROXY": "localhost",
        "COMET_API_KEY": "x",
        "SLURM_PROCID": "0",
        "MASTER_ADDR": "10.0.0.1",
        "RANK": "0",
    }
    travelling = travelling_variables(environment, home=home, folder=folder)
    assert set(travelling) == {
        *("NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "UCX_TLS", "PYTHONHASHSEED", "TORCHINDUCTOR_CACHE_DIR"),
        *("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"),
        *("WANDB_API_KEY", "HF_HOME", "TRITON_CACHE_DIR", "https_proxy", "NO_PROXY"),
    }


def test_settings_of_pytorch_cublas_and_cudnn_reach_the_workers(folders, make_orders):
    home, folder = folders
    settings = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDNN_LOGLEVEL_DBG": "2",
    }
    travelling = travelling_variables({**settings, "PATH": "/bin"}, home=home, folder=folder)
    found = worker_environment(make_orders(environment=travelling), (0,), own={"PATH": "/usr/bin"}, cores=4)
    assert found == {**settings, "PATH": "/usr/bin", "OMP_NUM_THREADS": "4"}


def test_files_add_variables_and_the_working_directory_takes_precedence(folders):
    home, folder = folders
    (home / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\nHTTPS_PROXY=http://proxy:3128\nA=home\n")
    (folder / ".deepspeed_env").write_text("# for this project\n\nA=work = 'here\x0b' \nB=\n")
    travelling = travelling_variables({"NCCL_DEBUG": "INFO"}, home=home, folder=folder)
    assert travelling == {
        "NCCL_DEBUG": "WARN",
        "HTTPS_PROXY": "http://proxy:3128",
        "A": "work = 'here\x0b' ",
        "B": "",
    }


def test_a_file_of_windows_is_read(tmp_path):
    (tmp_path / "env").write_bytes(b"\xef\xbb\xbfA=1\r\nB=2\r\n")
    assert read_environment_file(tmp_path / "env") == {"A": "1", "B": "2"}


def test_ds_env_file_replaces_the_other_files(folders):
    home, folder = folders
    (folder / ".deepspeed_env").write_text("A=1")
    (folder / "mine").write_text("B=2")
    named = {"DS_ENV_FILE": str(folder / "mine")}
    assert travelling_variables(named, home=home, folder=folder) == {"B": "2"}
    with refused(LaunchError, code="not-readable"):
        travelling_variables({"DS_ENV_FILE": str(folder / "nowhere")}, home=home, folder=folder)


@pytest.mark.parametrize("line", ["A", "=1", "export A=1", "A B=1", "1A=1", "A=\0"])
def test_an_invalid_line_is_reported_with_its_number(tmp_path, line):
    path = tmp_path / "env"
    path.write_text(f"GOOD=1\n{line}\n")
    with refused(LaunchError, "line 2", "NAME=VALUE", code="invalid-line"):
        read_environment_file(path)


def test_secrets_are_recognized_by_their_names():
    secret = [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "my_passwd",
        "X_CREDENTIALS",
    ]
    assert all(is_secret(name) for name in secret)
    assert not any(is_secret(name) for name in ("NCCL_DEBUG", "PATH", "HTTPS_PROXY", "OMP_NUM_THREADS"))
    assert shown_value("HF_TOKEN", "abc") == "(hidden)"
    assert shown_value("NCCL_DEBUG", "INFO") == "INFO"


def test_a_password_in_an_address_is_hidden():
    shown = shown_value("https_proxy", "http://user:pass@proxy:3128")
    assert shown == "http://(hidden)@proxy:3128"
    assert shown_value("no_proxy", "a.org,b@c") == "a.org,b@c"
