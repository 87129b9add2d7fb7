import subprocess

from neox_model.train import run_info


def git(folder, *arguments):
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *author, *arguments], check=True, capture_output=True)


def test_the_commit_is_that_of_a_repository_which_tracks_the_package(tmp_path, monkeypatch):
    package = tmp_path / "venv" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "own.py").write_text("")
    git(tmp_path, "init")
    git(tmp_path, "add", "own.py")
    git(tmp_path, "commit", "-m", "own")
    monkeypatch.setattr(run_info, "_folder_of", lambda name: package)
    assert run_info.code_version()["commit"] is None
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "all")
    assert len(run_info.code_version()["commit"]) == 12


def test_parameters_that_are_not_trained_are_told_apart():
    whole = [((1_000, 64), False), ((64, 8), True), ((8,), True)]
    assert run_info.describe_size(whole) == "64,520 parameters (520 of them are trained)"
    assert run_info.describe_size(whole[1:]) == "520 parameters"
