"""The interface for programs: docs/python.md runs, and a run in parts is that of neox-launch."""

import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import neox_model
from neox_config.facts.checkpoints import MANIFEST
from neox_data.indexed import IndexedDatasetWriter
from neox_model.checkpoint.contents import Layout, Manifest
from neox_model.parallel.logical import named_logical_parameters
from support.corpus import write_corpus
from support.launches import launch, write_job
from support.refusals import refused, shows
from support.settings import SMALL_TRAINING
from support.sources import ROOT

SETTINGS: dict[str, Any] = SMALL_TRAINING | {
    "train_iters": 6,
    "save_interval": 100,
    "log_interval": 1,
    "split": "80,10,10",
    "eval_interval": 3,
    "eval_iters": 1,
}
PRECISIONS = ("fp32", "bfloat16")


def blocks_of(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def data(tmp_path):
    return write_corpus(tmp_path)


def config_of(data: str, **changes: Any) -> Any:
    return neox_model.load_config(SETTINGS, {"data_path": data}, overrides=changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor of the latest checkpoint: weights, the optimizer's states, random generators."""
    from safetensors.torch import load_file

    latest = folder / (folder / "latest").read_text().strip()
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(latest.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 20
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# The document


@pytest.mark.slow
def test_the_document_runs_as_it_is_shown(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    from support.hf_models import ENTRIES, write_model, write_tokenizer

    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "quickstart/data"):
        Path(folder).mkdir(parents=True)
    shutil.copy(ROOT / "configs/quickstart.yml", "configs")
    shutil.copy(write_tokenizer(tmp_path), "quickstart/tokenizer.json")
    generator = np.random.default_rng(0)
    for prefix in ("quickstart/data/stdlib_text_document", "pythia-data"):
        with IndexedDatasetWriter(Path(prefix), dtype=np.uint16) as writer:
            for length in generator.integers(200, 600, size=300):
                writer.append(generator.integers(0, ENTRIES, size=length).astype(np.uint16))
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": ENTRIES}
    write_model(tmp_path / "pythia", "gpt_neox", sizes | {"intermediate_size": 64})
    names: dict[str, Any] = {}
    for block in blocks_of(ROOT / "docs/python.md"):
        exec(compile(block, "docs/python.md", "exec"), names)
    assert names["trainer"].iteration == 8
    assert len(names["losses"]) == 20
    assert names["losses"][-1] < names["losses"][0]
    assert names["logits_SV"].shape[1] == ENTRIES
    assert [len(reply.tokens) <= 20 for reply in names["replies"]] == [True] * 3
    assert Path("tuned/global_step5").is_dir()
    assert shows(capsys.readouterr().out, "you mean hidden")


def test_importing_the_package_loads_nothing_heavy():
    program = "import sys, neox_model; neox_model.load_config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert set(neox_model.__all__) <= set(dir(neox_model))
    assert [name for name in neox_model.__all__ if getattr(neox_model, name).__name__ != name] == []


# The same run


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_training_in_parts_is_that_of_neox_launch(tmp_path, data, precision):
    config = {"precision": precision, "data_path": data}
    job = write_job(tmp_path, SETTINGS | config | {"save": str(tmp_path / "launched"), "num_gpus": 1})
    done = launch(tmp_path, "--config", str(job), seconds=200)
    assert done.returncode == 0, done.stderr
    seen: list[int] = []

    def draw(step: neox_model.Step) -> None:
        seen.append(step.iteration)
        torch.rand(3), random.random(), np.random.rand()

    torch.manual_seed(5)
    with neox_model.Trainer(config_of(data, precision=precision), callback=draw) as trainer:
        trainer.train(2)
        torch.rand(7)
        trainer.model().generate("abc", maximum_tokens=2, temperature=1.0)
        trainer.save(tmp_path / "half")
        trainer.train(1)
        trainer.train()
        trainer.save(tmp_path / "ours")
    assert seen == [1, 2, 3, 4, 5, 6]
    assert_same(tmp_path / "launched", tmp_path / "ours")

    # neox-launch continues what was saved in the middle.
    resumed = {"load": str(tmp_path / "half"), "save": str(tmp_path / "rest"), "num_gpus": 1}
    done = launch(tmp_path, "--config", str(write_job(tmp_path, SETTINGS | config | resumed)), seconds=200)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "launched", tmp_path / "rest")


# What a program keeps


def test_nothing_of_a_training_is_left_in_the_process(data, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1), random.seed(2), np.random.seed(3)
        expected = torch.rand(3), random.random(), np.random.rand()
        torch.manual_seed(1), random.seed(2), np.random.seed(3)
        with torch.no_grad(), neox_model.Trainer(config_of(data)) as trainer:
            trainer.train(2)
            assert {number: signal.getsignal(number) for number in handlers} == handlers
            assert gc.isenabled()
            model = trainer.model()
            assert model.generate("ab", maximum_tokens=3).tokens
            assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}
        assert torch.get_default_dtype() == torch.float64
        drawn = torch.rand(3), random.random(), np.random.rand()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(drawn[0], expected[0])
    assert drawn[1:] == expected[1:]
    assert not torch.distributed.is_initialized()
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == ("0", None)


@pytest.mark.slow
def test_two_trainings_in_turns_are_two_trainings_one_after_another(data):
    def train(turns: list[tuple[int, int]]) -> list[torch.Tensor]:
        seeds = (1, 2)
        trainers = [neox_model.Trainer(config_of(data, seed=seed)) for seed in seeds]
        for which, iterations in turns:
            trainers[which].train(iterations)
        found = [trainer.model().logits("abcdef") for trainer in trainers]
        for trainer in trainers:
            trainer.close()
        return found

    in_turns = train([(0, 1), (1, 2), (0, 1), (1, 1), (0, 1)])
    in_order = train([(0, 3), (1, 3)])
    assert torch.equal(in_turns[0], in_order[0])
    assert torch.equal(in_turns[1], in_order[1])
    assert not torch.equal(in_turns[0], in_turns[1])
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_model_of_a_training_is_a_copy(data):
    with neox_model.Trainer(config_of(data)) as trainer:
        before = trainer.model()
        logits = before.logits("abc")
        trainer.train(1)
        assert torch.equal(before.logits("abc"), logits)
        assert not torch.equal(trainer.model().logits("abc"), logits)


# Errors


@pytest.mark.slow
def test_a_callback_that_fails_ends_the_training_and_its_error_is_raised(data):
    def fail(step: neox_model.Step) -> None:
        raise KeyError(step.iteration)

    handler = signal.getsignal(signal.SIGINT)
    with neox_model.Trainer(config_of(data), callback=fail) as trainer:
        with refused(KeyError, "1"):
            trainer.train()
        assert signal.getsignal(signal.SIGINT) is handler
        assert gc.isenabled()
        for action in (trainer.train, trainer.save, trainer.model):
            with refused(neox_model.NeoXError, "run has failed"):
                action()
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_an_interrupted_training_is_saved_and_says_why_it_ended(tmp_path, data):
    def interrupt(step: neox_model.Step) -> None:
        if step.iteration == 2:
            signal.raise_signal(signal.SIGINT)

    config = config_of(data, save=str(tmp_path / "saved"))
    with neox_model.Trainer(config, callback=interrupt) as trainer:
        trainer.train()
        assert trainer.stop_reason == "Ctrl-C received"
        with refused(neox_model.NeoXError, "Ctrl-C"):
            trainer.train()
    assert (tmp_path / "saved" / "latest").read_text() == f"global_step{trainer.iteration}\n"
    assert trainer.iteration < 6


@pytest.mark.slow
def test_a_training_of_which_no_iteration_is_left_says_so_and_can_be_saved(tmp_path, data, caplog):
    saved = str(tmp_path / "saved")
    with neox_model.Trainer(config_of(data, save=saved)) as trainer:
        trainer.train()
        assert caplog.messages == []
        trainer.train(2)
    warning = (
        "no iteration is left to train: the model was trained for 6, and train-iters is 6; to train further"
    )
    assert [each.split(", open")[0] for each in caplog.messages] == [warning]
    caplog.clear()
    # A notebook whose cells run again.
    with neox_model.Trainer(config_of(data, save=saved, load=saved)) as trainer:
        trainer.train(2)
        trainer.train()
        assert len([each for each in caplog.messages if each.startswith(warning)]) == 2
        assert trainer.save().name == "global_step6"


_EXPERTS = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_expert_bias": True,
    "moe_expert_bias_rate": 1.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, _EXPERTS], ids=["dense", "experts"])
def test_a_configuration_is_loaded_in_another_precision(tmp_path, data, more):
    saved = str(tmp_path / "saved")
    with neox_model.Trainer(config_of(data, save=saved, **more)) as trainer:
        trainer.train(1)
        trainer.save()
        copied = trainer.model().logits("abc")
    config = config_of(data, save=saved, load=saved, **more)
    model = neox_model.load_model(config, precision="bf16")
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
    whole = neox_model.load_model(saved, precision="bf16")
    assert torch.equal(model.logits("abc"), whole.logits("abc"))
    assert torch.equal(copied, neox_model.load_model(saved).logits("abc"))


@pytest.mark.slow
def test_what_is_not_saved_is_named(data, caplog):
    with neox_model.Trainer(config_of(data)) as trainer:
        trainer.train(2)
    assert shows(caplog.text, "iterations 1", "to 2")
    with refused(neox_model.NeoXError, "Trainer is closed"):
        trainer.train()


def ends(folder: Path) -> list[tuple[str, str | None]]:
    """Reasons and messages of the ends in the record of a run."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(one["reason"], one.get("message")) for one in records if one.get("event") == "end"]


@pytest.mark.slow
def test_a_closed_trainer_keeps_its_results_but_not_the_memory_of_the_training(data):
    with neox_model.Trainer(config_of(data)) as trainer:
        trainer.train(3)
        parameters = [weakref.ref(parameter) for parameter in trainer._run.model.parameters()]
        masters = [weakref.ref(master) for master in trainer._run.engine.update.mixed.masters]
    gc.collect()
    assert [reference for reference in (*parameters, *masters) if reference() is not None] == []
    assert (trainer.iteration, trainer.stop_reason, trainer.config.training.train_iters) == (3, "closed", 6)
    assert set(trainer.losses) == {"valid"}


@pytest.mark.slow
def test_a_trainer_that_is_forgotten_is_released(data):
    trainer = neox_model.Trainer(config_of(data), callback=lambda step: None)
    trainer.train(1)
    forgotten = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert forgotten() is None
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_a_number_of_iterations_that_is_none_is_refused(data, count):
    with neox_model.Trainer(config_of(data)) as trainer:
        with refused(neox_model.NeoXError, "cannot be trained"):
            trainer.train(count)
        assert trainer.iteration == 0


@pytest.mark.slow
def test_the_record_and_the_warning_are_true_for_every_end(tmp_path, data, caplog):
    def train(name: str, iterations: int | None, callback: Any = None) -> str:
        caplog.clear()
        config = config_of(data, log_dir=str(tmp_path / name))
        with neox_model.Trainer(config, callback=callback) as trainer:
            trainer.train(iterations)
        return caplog.text

    # No checkpoint is saved: `save` is not set.
    assert shows(train("all", None), "iterations 1", "to 6")
    assert ends(tmp_path / "all") == [("finished", None)]
    assert shows(train("part", 2), "iterations 1", "to 2")
    assert ends(tmp_path / "part") == [("stopped", "closed")]
    with pytest.raises(ZeroDivisionError):
        train("failed", None, lambda step: 1 / 0)
    assert ends(tmp_path / "failed") == [("error", "ZeroDivisionError: division by zero")]


@pytest.mark.slow
def test_a_trainer_that_is_never_closed_ends_with_the_program(tmp_path, data):
    program = (
        "import sys, neox_model\n"
        f"config = neox_model.load_config({str(write_job(tmp_path, SETTINGS | {'data_path': data}))!r})\n"
        "trainer = neox_model.Trainer(config, callback=lambda step: print(step.iteration))\n"
        "trainer.train(1)\n"
        "print(neox_model.Trainer(config).iteration)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    # DeepSpeed logs to standard output.
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (0, ["1", "0"])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "llama", "mistral", "qwen2"])
def test_a_model_of_transformers_has_its_logits(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    from support.hf_models import random_settings, write_model

    folder = write_model(tmp_path / "model", family, random_settings(family, 3))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model = neox_model.load_model(folder)
    tokens = model.tokenizer.encode("a text of some tokens")[: model.config.model.seq_length]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0, :, : model.tokenizer.vocab_size]
    assert torch.allclose(model.logits(tokens), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    with refused(neox_model.NeoXError, "start_from"):
        model.copy_to(torch.nn.Module())


LONGER = {"max_position_embeddings": 128}
TEMPLATE = """\
{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}{% endfor -%}
{% if add_generation_prompt %}[assistant]{% endif %}"""


def test_an_answer_of_a_chat_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from support.hf_models import random_settings, write_model

    folder = write_model(tmp_path / "model", "llama", random_settings("llama", 3) | LONGER)
    with pytest.raises(
        neox_model.NeoXError, match=rf"no chat template next to the tokenizer {folder}/.*; pass template=PATH"
    ):
        neox_model.load_model(folder).chat([{"role": "user", "content": "a"}])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    reader = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = reader.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    expected = theirs.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :].tolist()
    model = neox_model.load_model(folder)
    reply = model.chat(messages, maximum_tokens=5)
    assert list(reply.tokens) == expected
    assert reply.finish_reason == "maximum-tokens"
    # The answer ends before the text of the token that ends answers, which here is a character of the answer.
    text = model.chat(messages, maximum_tokens=40).text
    place = next(
        place for place, one in enumerate(text) if place and one.isascii() and one not in text[:place]
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "chat_template.jinja").write_text(
        TEMPLATE.replace("{{ eos_token }}", "<|endoftext|>")
    )
    end = {"eos_token": text[place]}
    (tmp_path / "other" / "tokenizer_config.json").write_text(json.dumps(end))
    ended = model.chat(messages, template=tmp_path / "other", maximum_tokens=40)
    assert (ended.text, ended.finish_reason) == (text[:place], "stop-string")
    for wrong, message in (
        ([], "messages is empty; pass"),
        ("ab", "messages is text, but not JSON (Expecting value at column 1); pass"),
        (["ab"], "message 1 of messages is text, but not JSON (Expecting value at column 1); pass"),
        ([{"role": "user", "content": "ab"}] * 99, "use a shorter prompt"),
    ):
        with pytest.raises(neox_model.NeoXError, match=re.escape(message)):
            model.chat(wrong)
    # An error of the template names its file.
    strict = tmp_path / "strict.jinja"
    strict.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(neox_model.NeoXError, match=r"alternate; pass .*, as .*strict.jinja accepts them"):
        model.chat(messages, template=strict)
    # Also one that is too long for a path.
    for given in (TEMPLATE, TEMPLATE * 100):
        with pytest.raises(neox_model.NeoXError, match="contains no chat template; name a folder"):
            model.chat(messages, template=given)
    # Stop strings of the call end the answer, too.
    stopped = model.chat(messages, maximum_tokens=40, stop_strings=[text[place]])
    assert stopped.text == text[:place]


def test_a_chat_begins_as_its_template_does_and_is_found_with_a_moved_model(tmp_path):
    pytest.importorskip("transformers")
    from neox_model.convert.from_hf import from_hf
    from support.hf_models import random_settings, write_model

    folder = write_model(tmp_path / "model", "llama", random_settings("llama", 3) | LONGER)
    # This tokenizer begins each text with a token, which the template does not write.
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    file.write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    from_hf(folder, tmp_path / "imported")
    (tmp_path / "imported").rename(tmp_path / "moved")
    model = neox_model.load_model(tmp_path / "moved")
    assert model.tokenizer.encode("a")[0] == 0
    messages = [{"role": "user", "content": "ab"}]
    seen: list[Any] = []
    updates = type(model)._updates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(model),
            "_updates",
            lambda self, job, tokens: seen.append(tokens) or updates(self, job, tokens),
        )
        model.chat(messages, maximum_tokens=1)
    (tokens,) = seen
    assert tokens[0] != 0
    assert model.tokenizer.decode(tokens) == "[user] ab<|endoftext|>[assistant]"
    assert model.settings["vocab_file"] == str(tmp_path / "moved" / "tokenizer.json")


@pytest.mark.slow
def test_the_record_names_the_model_that_a_training_starts_from(tmp_path, data):
    with neox_model.Trainer(config_of(data)) as trainer:
        trainer.save(tmp_path / "saved")
    model = neox_model.load_model(tmp_path / "saved")
    for start, source in ((None, None), (model, str(tmp_path / "saved" / "global_step0"))):
        log = tmp_path / f"log-{source is None}"
        with neox_model.Trainer(config_of(data, log_dir=str(log)), start_from=start) as trainer:
            trainer.train(1)
        events = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
        assert [event["checkpoint"] for event in events if event.get("event") == "start"] == [source]


@pytest.mark.slow
def test_a_callback_may_save_but_not_train_or_close(tmp_path, data):
    found: list[Any] = []

    def act(step: neox_model.Step) -> None:
        found.append(trainer.save(tmp_path / "saved"))
        for action in (trainer.train, trainer.close):
            with refused(neox_model.NeoXError, "a callback cannot"):
                action()

    with neox_model.Trainer(config_of(data), callback=act) as trainer:
        trainer.train(1)
    assert found == [tmp_path / "saved" / "global_step1"]
    assert neox_model.load_model(found[0]).logits("abc").shape == (3, 512)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "fp16"])
def test_a_training_in_16_bit_starts_from_all_bits_of_the_weights(data, precision):
    with neox_model.Trainer(config_of(data)) as trainer:
        trainer.train(1)
        model = trainer.model()
    with neox_model.Trainer(config_of(data, precision=precision), start_from=model) as trainer:
        run = trainer._run
        masters = {id(held.param): held.holder for held in run.engine.update.param_shards()}
        started = dict(named_logical_parameters(run.model))
        for name, weight in named_logical_parameters(model.module):
            assert torch.equal(masters[id(started[name])], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_training_starts_from_the_weights_of_another_model(tmp_path, data, stage):
    with neox_model.Trainer(config_of(data)) as trainer:
        trainer.train(2)
        model = trainer.model()
    zero = {"zero_optimization": {"stage": stage}, "seed": 5}
    with neox_model.Trainer(config_of(data, **zero), start_from=model) as trainer:
        assert torch.equal(trainer.model().logits("abc"), model.logits("abc"))
    adapters = {"lora_rank": 2, "lora_base": str(tmp_path)}
    with refused(neox_model.ConfigError, "start_from", "lora-rank", "lora-base"):
        neox_model.Trainer(config_of(data, **adapters), start_from=model)
    for finetune in (False, True):
        config = config_of(data, load=str(tmp_path), finetune=finetune)
        with refused(neox_model.ConfigError, "start_from", "load"):
            neox_model.Trainer(config, start_from=model)


def test_a_tokenizer_that_was_moved_is_given_by_argument(tmp_path, data, caplog):
    from support.hf_models import write_tokenizer

    first, moved = write_tokenizer(tmp_path), tmp_path / "moved.json"
    settings = {"tokenizer_type": "HFTokenizer", "vocab_file": str(first), "seq_length": 16}
    with neox_model.Trainer(config_of(data, **settings)) as trainer:
        trainer.save(tmp_path / "saved")
        logits = trainer.model().logits([5, 6, 7])
    first.rename(moved)
    with pytest.raises(neox_model.NeoXError, match=r"pass vocab_file=\.\.\. \(and merge_file=\.\.\.\)$"):
        neox_model.load_model(tmp_path / "saved")
    found = neox_model.load_model(tmp_path / "saved", vocab_file=moved)
    assert torch.equal(found.logits([5, 6, 7]), logits)
    # A file of its name with the checkpoints is used if it is the same tokenizer.
    beside = tmp_path / "saved" / first.name
    beside.write_text(moved.read_text().replace("<|endoftext|>", "<|end|>"))
    with pytest.raises(neox_model.NeoXError, match=rf"{beside} .*(is not the tokenizer|endoftext)"):
        neox_model.load_model(tmp_path / "saved")
    shutil.copyfile(moved, beside)
    caplog.clear()
    found = neox_model.load_model(tmp_path / "saved")
    assert torch.equal(found.logits([5, 6, 7]), logits)
    assert caplog.messages == [
        f"the tokenizer that the checkpoint records, {first}, is not there; using the same tokenizer in "
        f"{beside}"
    ]
    (tmp_path / "config.json").write_text("{}")
    for source in (tmp_path, config_of(data, load=str(tmp_path / "saved"))):
        with pytest.raises(neox_model.NeoXError, match="vocab_file cannot be used: "):
            neox_model.load_model(source, vocab_file=moved)


@pytest.mark.slow
def test_a_folder_of_checkpoints_ends_texts_at_its_stop_tokens(tmp_path, data):
    with neox_model.Trainer(config_of(data)) as trainer:
        trainer.train(1)
        first = trainer.model().generate("abc", maximum_tokens=4).tokens[0]
    stops = {"stop_tokens": [first]}
    with neox_model.Trainer(config_of(data, **stops)) as trainer:
        trainer.train(1)
        trainer.save(tmp_path / "saved")
    model = neox_model.load_model(tmp_path / "saved")
    assert model.generate("abc", maximum_tokens=4).finish_reason == "end-of-document"
    assert model.settings.items() >= stops.items()
    with neox_model.Trainer(config_of(data, **model.settings), start_from=model) as trainer:
        trainer.save(tmp_path / "continued")
    continued = neox_model.load_model(tmp_path / "continued").generate("abc", maximum_tokens=4)
    assert (continued.text, continued.finish_reason) == ("", "end-of-document")


@pytest.mark.slow
def test_lists_of_datasets_may_lack_the_parts_that_are_not_evaluated(data):
    losses: dict[str, list[float]] = {"alone": [], "evaluated": []}
    lists = {"data_path": None, "train_data_paths": [data]}
    evaluated = {"valid_data_paths": [data], "eval_iters": 1, "eval_interval": 1}
    for name, changes in (("alone", {"eval_iters": 0}), ("evaluated", evaluated)):
        seen = losses[name].append
        config = config_of(data, **lists, **changes)
        with neox_model.Trainer(config, callback=lambda step, seen=seen: seen(step.loss)) as trainer:
            trainer.train()
            parts = set(trainer.losses)
        assert parts == ({"valid"} if name == "evaluated" else set())
    assert losses["alone"] == losses["evaluated"]
    assert losses["alone"]


@pytest.mark.slow
def test_the_length_of_a_training_may_be_given_in_passes(tmp_path, data):
    passes = {"train_iters": None, "train_epochs": 1}
    config = config_of(data, **passes, curriculum_learning=CUSTOM)
    with neox_model.Trainer(config, curriculum=lambda iteration: 8) as trainer:
        trainer.train(1)
        trainer.save(tmp_path / "saved")
        logits = trainer.model().logits("abc")
    # A model needs no data.
    load = {"load": str(tmp_path / "saved")}
    config = config_of(str(tmp_path / "absent"), **passes, **load)
    assert torch.equal(neox_model.load_model(config).logits("abc"), logits)
    file = write_job(tmp_path, SETTINGS | {"data_path": "absent"} | load)
    assert torch.equal(neox_model.load_model(str(file)).logits("abc"), logits)


def test_one_process_of_several_is_refused(data, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused(neox_model.NeoXError, "one of several"):
        neox_model.Trainer(config_of(data))


@pytest.mark.parametrize(
    ("sources", "arguments", "message"),
    [
        ((), {}, ("no configuration",)),
        ((3,), {}, ("of type int",)),
        (({"num-layers": object()},), {}, ("YAML",)),
        (({"num-layers": torch.ones(2)},), {}, ("YAML",)),
        (({"nun-layers": 2},), {}, ("nun-layers", "num-layers")),
        ((), {"text": "num-layers: 2\nnum-layers: 3"}, ("line 2", "num-layers")),
        (("missing.yml",), {}, ("file not found",)),
    ],
)
def test_a_configuration_that_is_wrong_is_one_exception(sources, arguments, message):
    with refused(neox_model.ConfigError, *message):
        neox_model.load_config(*sources, **arguments)


def test_a_configuration_is_the_same_from_a_file_a_text_and_a_dictionary(tmp_path, data):
    settings = SETTINGS | {"data_path": data}
    path = write_job(tmp_path, settings)
    ours = neox_model.load_config(settings)
    assert ours == neox_model.load_config(path)
    assert ours == neox_model.load_config(text=json.dumps(settings))
    assert ours == neox_model.load_config(path, overrides={"train_iters": np.int64(6)})
    assert neox_model.load_config(path, overrides={"train-iters": 9}).training.train_iters == 9


def test_a_file_in_place_of_a_folder_or_a_configuration_is_named(tmp_path):
    file = tmp_path / "latest"
    file.touch()
    with refused(neox_model.NeoXError, "folder given by"):
        neox_model.load_model(file)
    with refused(neox_model.ConfigError, "file not found"):
        neox_model.load_model(tmp_path / "config.yml")
    for value in ("config.yml", {"seed": 1}, 5):
        with refused(neox_model.NeoXError, "not a configuration"):
            neox_model.Trainer(value)


def test_two_values_in_python_are_replaced_by_overrides(tmp_path, data):
    path = write_job(tmp_path, SETTINGS | {"data_path": data, "seed": 3})
    with refused(neox_model.ConfigError, "different value in"):
        neox_model.load_config(path, {"seed": 4})
    assert neox_model.load_config(path, overrides={"seed": 4}).training.seed == 4


def test_adapters_alone_are_answered_with_the_configuration_to_pass(tmp_path):
    saved = tmp_path / "lora" / "global_step4"
    saved.mkdir(parents=True)
    layout = Layout(data=1, model=1, pipe=1)
    manifest = Manifest(iteration=4, layout=layout, config={"lora_rank": 2}, tensors={})
    (saved / MANIFEST).write_text(manifest.to_json())
    (tmp_path / "lora" / "latest").write_text("global_step4\n")
    for folder in (tmp_path / "lora", saved):
        with refused(neox_model.NeoXError, "load_config", "base.yml", "adapters.yml"):
            neox_model.load_model(folder)


def test_folders_of_other_programs_are_named_with_what_to_do(tmp_path):
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text("{}")
    with refused(neox_model.NeoXError, "PEFT", "neox-convert", "from-peft"):
        neox_model.load_model(tmp_path / "peft")
    with refused(neox_model.NeoXError, "Llama-3.2-1B"):
        neox_model.load_model("meta-llama/Llama-3.2-1B")
    (tmp_path / "bert").mkdir()
    path = tmp_path / "bert" / "config.json"
    path.write_text('{"model_type": "bert", "architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(neox_model.NeoXError) as refusal:
        neox_model.load_model(tmp_path / "bert")
    assert str(refusal.value).startswith(f"{path} has model_type 'bert'")
    assert "docs/add-an-architecture.md" in str(refusal.value)


def test_a_model_describes_itself_and_refuses_what_is_no_text(tmp_path, data):
    with neox_model.Trainer(config_of(data)) as trainer:
        trainer.save(tmp_path / "saved")
        copied = repr(trainer.model())
    model = neox_model.load_model(tmp_path / "saved")
    count = sum(each.numel() for each in model.module.parameters())
    size = f"{model.config.model.num_layers} layers, hidden size {model.config.model.hidden_size}"
    described = f"{size}, {count:,} parameters in float32 on {model.device}>"
    assert repr(model) == f"<Model of {tmp_path / 'saved' / 'global_step0'}: {described}"
    assert copied == f"<Model of a run: {described}"
    for prompts in ([1, 2], [[1, 2]], ["a", None], b"ab", [{"role": "user", "content": "a"}]):
        with refused(neox_model.NeoXError, "is a text"):
            model.generate(prompts)
    with refused(neox_model.NeoXError, "is a text"):
        list(model.stream([1, 2]))
    one, other = model.generate(iter(["a", "b"]), maximum_tokens=1)
    assert [one.tokens, other.tokens] == [model.generate(text, maximum_tokens=1).tokens for text in "ab"]
    with refused(TypeError, "keyword argument 'other'"):
        neox_model.load_model(tmp_path / "saved", other=1)


def test_settings_of_generation_are_checked(data):
    with neox_model.Trainer(config_of(data)) as trainer:
        model = trainer.model()
    with pytest.raises(neox_model.ConfigError, match=r"temperatur\n +is not a setting of a call"):
        model.generate("a", temperatur=1.0)
    with pytest.raises(neox_model.ConfigError, match=r"use maximum_tokens$"):
        model.generate("a", max_new_tokens=4)
    with pytest.raises(neox_model.ConfigError, match=r"num_samples\n +is not a setting of a call"):
        model.generate("a", num_samples=3)
    with pytest.raises(neox_model.ConfigError, match="contains an empty string"):
        model.generate("a", stop_strings=["b", ""])
    with pytest.raises(neox_model.ConfigError, match=r"top_p: 3\n +must be at most 1"):
        list(model.stream("a", top_p=3))
    # Half of a character of two code units.
    for use in (model.logits, model.generate, lambda text: list(model.stream(text))):
        with pytest.raises(neox_model.NeoXError, match="cannot be encoded"):
            use("\ud800")
    for text, message in (
        ("", "empty text"),
        ("a" * 17, "longest sequence has 16"),
        ([512], "outside the voc"),
    ):
        with pytest.raises(neox_model.NeoXError, match=message):
            model.logits(text)


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        (None, ("no function",)),
        (lambda iteration: 20, ("returns 20", "iteration 1", "of 8", "to 16")),
        (
            lambda iteration: 16 - iteration,
            ("returns 14", "iteration 2", "of 15", "to 16"),
        ),
        (lambda iteration: 8.5, ("a whole number",)),
        ({"seqlen": lambda iteration: 8}, ("schedule_type: custom", "no function")),
    ],
)
def test_a_curriculum_that_is_wrong_is_refused(data, curriculum, message):
    with refused(neox_model.ConfigError, *message):
        neox_model.Trainer(config_of(data, curriculum_learning=CUSTOM), curriculum=curriculum)


CUSTOM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 16,
    "schedule_type": "custom",
}


@pytest.mark.slow
def test_a_curriculum_of_a_function_is_the_configured_one_with_the_same_lengths(data):
    steps = {"difficulty": [8, 12, 16], "max_step": [2, 4]}
    discrete = CUSTOM | {"schedule_type": "fixed_discrete", "schedule_config": steps}

    def grow(iteration: int) -> int:
        return 8 if iteration <= 2 else 12 if iteration <= 4 else 16

    def train(block: dict[str, Any], function: Any) -> tuple[list[int], torch.Tensor]:
        tokens: list[int] = []
        config = config_of(data, curriculum_learning=block)
        with neox_model.Trainer(
            config, curriculum=function, callback=lambda step: tokens.append(step.tokens)
        ) as trainer:
            trainer.train()
            return tokens, trainer.model().logits("abcdef")

    ours, theirs = train(CUSTOM, grow), train(discrete, None)
    assert ours[0] == theirs[0] == [16, 32, 56, 80, 112, 144]
    assert torch.equal(ours[1], theirs[1])
    with refused(neox_model.ConfigError, "function for curriculum"):
        train(discrete, grow)
