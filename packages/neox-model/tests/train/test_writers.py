"""Which writers a configuration opens, and where their numbers go."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from neox_config.errors import NeoXError
from neox_model.errors import ModelError
from neox_model.metrics.writers.jsonl import read_metrics
from neox_model.optional import MissingPackageError
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.train.data.position import START, Position
from neox_model.train.open_run import train_in
from neox_model.train.writers import check_services
from support.refusals import refused
from support.settings import resolved_from
from support.writers import writers_of


def check_services_of(settings):
    config = resolved_from(settings).config
    check_services(config.logging, config.monitors)


def write_one(settings, *, position=START):
    for writer in writers_of(resolved_from(settings, devices=2), position):
        writer.write({"loss/train": 2.5, "optimizer/learning_rate": 0.1}, position.iteration + 1)
        writer.close()


def monitor(folder):
    return {"enabled": True, "output_path": str(folder), "job_name": "job"}


def test_monitors_count_samples_where_the_loop_counts_iterations(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_one(
        {
            "log_dir": str(tmp_path / "log"),
            "csv_monitor": monitor(tmp_path / "csv"),
            "tensorboard": monitor(tmp_path / "tensorboard"),
        },
        position=Position(iteration=4, samples=12),
    )
    (record,) = read_metrics(tmp_path / "log/metrics.jsonl")
    assert record["iteration"] == 5
    # 12 before it was resumed, and an iteration of micro-batch 2 x accumulation 2 x 2 devices
    assert (tmp_path / "csv/job/Train_Samples_lr.csv").read_text() == "step,lr\n20,0.1\n"
    events = EventAccumulator(str(tmp_path / "tensorboard/job"))
    events.Reload()
    (event,) = events.Scalars("Train/Samples/train_loss")
    assert (event.step, event.value) == (20, 2.5)


def test_no_monitor_is_enabled_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_one({"csv_monitor": {"job_name": "job"}, "wandb": {"project": "p"}, "comet": {"mode": "get"}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("block", "package"), [("wandb", "wandb"), ("comet", "comet_ml")])
def test_a_monitor_whose_package_is_missing_is_refused(monkeypatch, block, package):
    monkeypatch.setitem(sys.modules, package, None)
    with refused(MissingPackageError, package):
        write_one({block: {"enabled": True}})


def test_folder_that_cannot_be_created_is_reported_before_training(tmp_path):
    (tmp_path / "taken").write_text("")
    with refused(NeoXError, "cannot write metrics"):
        write_one({"csv_monitor": monitor(tmp_path / "taken")})


def write_losses(settings, iterations, *, position=START):
    for writer in writers_of(resolved_from(settings), position):
        for iteration in iterations:
            writer.write({"loss/train": float(iteration)}, iteration)
        writer.close()


def test_resuming_with_a_smaller_batch_keeps_the_records_of_finished_iterations(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = {"csv_monitor": monitor(tmp_path / "csv"), "tensorboard": monitor(tmp_path / "tensorboard")}
    write_losses({**files, "gradient_accumulation_steps": 8}, range(1, 7))
    # Interrupted after 6 iterations of 16 samples, resumed from the checkpoint of iteration 4 with 4 samples.
    write_losses(
        {**files, "gradient_accumulation_steps": 2}, range(5, 8), position=Position(iteration=4, samples=64)
    )
    expected = [(16, 1.0), (32, 2.0), (48, 3.0), (64, 4.0), (68, 5.0), (72, 6.0), (76, 7.0)]
    rows = (tmp_path / "csv/job/Train_Samples_train_loss.csv").read_text().splitlines()[1:]
    assert [(int(step), float(loss)) for step, loss in (row.split(",") for row in rows)] == expected
    events = EventAccumulator(str(tmp_path / "tensorboard/job"))
    events.Reload()
    scalars = events.Scalars("Train/Samples/train_loss")
    assert [(event.step, event.value) for event in scalars] == expected


class FakeServices:
    """Packages `wandb` and `comet_ml` that remember every run and its steps."""

    def __init__(self, monkeypatch):
        self.runs, self.calls = {}, []
        wandb, comet = ModuleType("wandb"), ModuleType("comet_ml")
        wandb.init, comet.start = self.init, self.start
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        monkeypatch.setitem(sys.modules, "comet_ml", comet)
        monkeypatch.delenv("WANDB_RUN_ID", raising=False)

    def init(self, *, id=None, resume=None, **settings):
        return self._open("wandb", id, resume)

    def start(self, *, experiment_key=None, mode=None, **settings):
        return self._open("comet", experiment_key, mode)

    def _open(self, service, key, mode):
        self.calls.append((service, key, mode))
        key = key or f"{service}-{len(self.runs)}"
        return FakeRun(key, self.runs.setdefault(key, []))


class FakeRun:
    def __init__(self, key, steps):
        self.id = key
        self.steps, self.starting_step = steps, max(steps, default=-1) + 1

    def get_key(self):
        return self.id

    def log(self, metrics, step):
        self.steps.append(step)

    def log_metrics(self, metrics, step):
        self.steps.append(step)

    def finish(self):
        pass

    end = finish


@pytest.mark.parametrize("setting", ["use_wandb", "wandb", "comet"])
def test_resumed_training_continues_its_run_of_a_service(tmp_path, monkeypatch, setting):
    services, save = FakeServices(monkeypatch), str(tmp_path / "save")
    enabled = True if setting == "use_wandb" else {"enabled": True}
    settings = {setting: enabled, "save": save, "load": save, "save_interval": 1}
    if setting == "comet":
        settings["comet"] = {"enabled": True, "samples_log_interval": 1}
    write_losses(settings, range(1, 4))
    (name,) = services.runs
    write_losses(settings, range(3, 6), position=Position(iteration=2, samples=8))
    sizes = 1 if setting == "use_wandb" else 4
    # Comet keeps the last value of a step; wandb refuses steps that it already has.
    expected = [1, 2, 3, 4, 5] if setting != "comet" else [1, 2, 3, 3, 4, 5]
    assert services.runs == {name: [step * sizes for step in expected]}
    # A run that branches off from the checkpoints of another, and one from the start, are new runs.
    branch = settings | {"save": str(tmp_path / "branch")}
    write_losses(branch, range(3, 5), position=Position(iteration=2, samples=8))
    write_losses(settings, range(1, 2))
    assert [len(steps) for steps in services.runs.values()] == [len(expected), 2, 1]


def test_the_users_own_keys_have_precedence(tmp_path, monkeypatch):
    services, save = FakeServices(monkeypatch), str(tmp_path / "save")
    both = {"use_wandb": True, "save": save, "load": save, "save_interval": 1}
    key = "k" * 32
    write_losses(both | {"comet": {"enabled": True, "mode": "create"}}, range(1, 2))
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    services.calls.clear()
    position = Position(iteration=1, samples=4)
    write_losses(both | {"comet": {"enabled": True, "mode": "create"}}, [2], position=position)
    write_losses(both | {"comet": {"enabled": True, "experiment_key": key}}, [2], position=position)
    assert services.calls == [
        ("wandb", None, None),
        ("comet", None, "create"),
        ("wandb", None, None),
        ("comet", key, "get_or_create"),
    ]


def test_damaged_record_of_the_runs_starts_new_ones(tmp_path, monkeypatch, caplog):
    services, save = FakeServices(monkeypatch), tmp_path / "save"
    save.mkdir()
    (save / "monitor-runs.json").write_text('{"use_wandb": 3}')
    settings = {"use_wandb": True, "save": str(save), "load": str(save), "save_interval": 1}
    write_losses(settings, [2], position=Position(iteration=1, samples=4))
    assert services.calls == [("wandb", None, None)]
    assert "monitor-runs.json is damaged" in caplog.text
    assert (save / "monitor-runs.json").read_text() == '{"use_wandb": "wandb-0"}\n'


@pytest.mark.parametrize(
    ("settings", "package", "function", "message"),
    [
        ({"use_wandb": True}, "wandb", "init", ("no key", "use-wandb")),
        ({"comet": {"enabled": True}}, "comet_ml", "start", ("Comet", "no key")),
    ],
)
def test_a_service_that_refuses_the_run_is_reported(monkeypatch, settings, package, function, message):
    def refuse(**settings):
        raise RuntimeError("no key")

    FakeServices(monkeypatch)
    monkeypatch.setattr(sys.modules[package], function, refuse)
    with refused(ModelError, *message):
        write_losses(settings, [1])


def test_a_run_that_cannot_be_continued_names_the_record_of_the_runs(tmp_path, monkeypatch):
    def refuse(**settings):
        raise RuntimeError("the run was deleted")

    FakeServices(monkeypatch)
    save = str(tmp_path / "save")
    settings = {"use_wandb": True, "save": save, "load": save, "save_interval": 1}
    write_losses(settings, [1])
    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with refused(ModelError, "run was deleted", "monitor-runs.json"):
        write_losses(settings, [2], position=Position(iteration=1, samples=4))


def packages_with_keys(monkeypatch, keys, *, mode="online"):
    """Install packages that find the given keys; they fail if they would ask for one."""
    FakeServices(monkeypatch)

    def login(host=None, prompt=True, verify=True):
        # With a host, the package writes it to the user's settings file.
        assert (host, prompt, verify) == (None, False, False)
        return settings.settings.base_url in keys

    settings = SimpleNamespace(settings=SimpleNamespace(mode=mode, base_url="https://own"))
    monkeypatch.setattr(sys.modules["wandb"], "setup", lambda: settings, raising=False)
    monkeypatch.setattr(sys.modules["wandb"], "login", login, raising=False)
    monkeypatch.setattr(sys.modules["comet_ml"], "get_config", keys.get, raising=False)


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"use_wandb": True, "wandb_host": "https://w"}, "https://w", ("API key", "wandb login")),
        ({"wandb": {"enabled": True}}, "https://own", ("API key", "wandb login")),
        ({"comet": {"enabled": True}}, "comet.api_key", ("Comet", "API key", "COMET_API_KEY")),
    ],
)
def test_a_service_without_a_key_is_refused_before_the_model_is_built(monkeypatch, settings, key, message):
    packages_with_keys(monkeypatch, {})
    with refused(ModelError, *message):
        check_services_of(settings)
    packages_with_keys(monkeypatch, {key: "secret"})
    check_services_of(settings)
    assert sys.modules["wandb"].setup().settings.base_url == "https://own"
    monkeypatch.setattr(
        "neox_model.train.open_run.prepare_engine", lambda resolved: pytest.fail("the run started")
    )
    packages_with_keys(monkeypatch, {})
    with refused(ModelError, *message):
        train_in(SINGLE_PROCESS, resolved_from(settings))


def test_a_key_that_is_not_valid_is_refused_before_the_model_is_built(monkeypatch):
    def login(prompt, verify):
        raise ValueError("API key is too short")

    packages_with_keys(monkeypatch, {})
    monkeypatch.setattr(sys.modules["wandb"], "login", login)
    with refused(ModelError, "API key is too", "API key"):
        check_services_of({"use_wandb": True})


def test_metrics_that_stay_on_this_host_require_no_key(monkeypatch):
    packages_with_keys(monkeypatch, {}, mode="offline")
    check_services_of({"use_wandb": True, "comet": {"enabled": True, "online": False}})
    check_services_of({})
