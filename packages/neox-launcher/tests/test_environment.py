"""Which variables travel, and which are never shown."""

import pytest

from neox_launcher.environment import is_secret, read_environment_file, shown_value, travelling_variables
from neox_launcher.errors import LaunchError


@pytest.fixture
def folders(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    return home, folder


def test_what_decides_how_libraries_work_travels_and_nothing_else(folders):
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
        "SLURM_PROCID": "0",
        "MASTER_ADDR": "10.0.0.1",
        "RANK": "0",
    }
    travelling = travelling_variables(environment, home=home, folder=folder)
    assert set(travelling) == {
        *("NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "UCX_TLS", "PYTHONHASHSEED", "TORCHINDUCTOR_CACHE_DIR"),
        *("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"),
    }


def test_files_add_variables_and_the_nearest_wins(folders):
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


def test_a_file_that_is_named_counts_alone(folders):
    home, folder = folders
    (folder / ".deepspeed_env").write_text("A=1")
    (folder / "mine").write_text("B=2")
    named = {"DS_ENV_FILE": str(folder / "mine")}
    assert travelling_variables(named, home=home, folder=folder) == {"B": "2"}
    with pytest.raises(LaunchError, match="nowhere cannot be read"):
        travelling_variables({"DS_ENV_FILE": str(folder / "nowhere")}, home=home, folder=folder)


@pytest.mark.parametrize("line", ["A", "=1", "export A=1", "A B=1", "1A=1", "A=\0"])
def test_a_wrong_line_is_told_with_its_number(tmp_path, line):
    path = tmp_path / "env"
    path.write_text(f"GOOD=1\n{line}\n")
    with pytest.raises(LaunchError, match="env line 2: write NAME=VALUE"):
        read_environment_file(path)


def test_secrets_are_known_by_their_names():
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
