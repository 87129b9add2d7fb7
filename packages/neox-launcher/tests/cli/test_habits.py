"""What users of DeepSpeed and GPT-NeoX type works, or is answered with the command to type instead."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from neox_launcher.cli import launch as cli
from neox_launcher.cli.config import main as neox_config
from neox_launcher.cli.habits import _ADVICE_ON_WORDS, _settings_in
from neox_launcher.cli.launch import main
from neox_launcher.plan.planning import Request, plan_launch

PROGRAMS = {"neox-launch": main, "neox-config": neox_config}


@pytest.fixture
def requests(monkeypatch, tmp_path):
    """Record the requests instead of launching them, in a folder with configuration files."""
    found = []
    monkeypatch.setattr(
        cli, "_launch", lambda request, dry_run, wanted=None: found.append((request, dry_run))
    )
    monkeypatch.chdir(tmp_path)
    for name in (
        "small.yml",
        "a.yml",
        "configs/big.yml",
        "configs/c.yml",
        "imported/model.yml",
        "script.sh",
        "train.yml",
        "llama/model.safetensors",
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    Path("llama/config.json").write_text('{"model_type": "llama"}')
    return found


def run(*arguments):
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "paths", "directory"),
    [
        ("a.yml b.yml", ("a.yml", "b.yml"), None),
        ("--config a.yml b.yaml c.json", ("a.yml", "b.yaml", "c.json"), None),
        ("small a", ("small", "a"), None),
        ("-d configs big", ("big",), "configs"),
        ("big -d configs", ("big",), "configs"),
        ("-dconfigs big", ("big",), "configs"),
        ("--directory=configs big other.yml", ("big", "other.yml"), "configs"),
        ("train.yml", ("train.yml",), None),
        ("a.yml --set x=y b.yml --output all c.yml", ("a.yml", "b.yml", "c.yml"), None),
        ("--set x=y -- a.yml -b.yml", ("a.yml", "-b.yml"), None),
    ],
)
@pytest.mark.parametrize("command", ["", "generate", "doctor"])
def test_files_are_configuration_files(requests, words, paths, directory, command):
    expected = (command or "train", paths, directory)
    for line in (f"{command} {words}", f"{words} {command}"):
        result = run(*line.split())
        assert result.exit_code == 0, result.output
        request, _ = requests.pop()
        assert (request.program, request.paths, request.directory) == expected


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ("-i p.txt", {"sample_input_file": "p.txt", "text_gen_type": "input-file"}),
        (
            "-i p.txt -o out.jsonl --set text-gen-type=interactive",
            {"text-gen-type": "interactive", "sample_input_file": "p.txt", "sample_output_file": "out.jsonl"},
        ),
        ("--sample_output_file=out.jsonl", {"sample_output_file": "out.jsonl"}),
    ],
)
def test_generate_takes_the_files_as_gpt_neox_does(requests, words, overrides):
    result = run("generate", "a.yml", *words.split())
    assert result.exit_code == 0, result.output
    ((request, _),) = requests
    found = dict(each.split("=", 1) for each in request.overrides)
    assert {name: yaml.safe_load(value) for name, value in found.items()} == overrides


def test_a_prompt_and_a_file_of_prompts_exclude_each_other(requests):
    result = run("generate", "a.yml", "-i", "p.txt", "--prompt", "Once")
    assert (result.exit_code, "--prompt and -i exclude each other" in result.output) == (2, True)


def test_a_dry_run_before_a_file_keeps_the_file(requests):
    assert run("--dry-run", "a.yml").exit_code == 0
    (request, dry_run) = requests.pop()
    assert (request.paths, dry_run) == (("a.yml",), "text")


def test_a_dry_run_that_is_a_value_of_another_option_stays_as_it_is(requests):
    assert run("a.yml", "--hostfile", "--dry-run", "--dry-run").exit_code == 0
    (request, dry_run) = requests.pop()
    assert (request.overrides, dry_run) == (("hostfile=--dry-run",), "text")


def test_a_command_after_two_dashes_has_options(requests):
    result = run("--", "generate", "--prompt", "Once", "--", "a.yml")
    assert result.exit_code == 0, result.output
    (request, _) = requests.pop()
    assert (request.program, request.paths) == ("generate", ("a.yml",))
    assert request.overrides == ('prompt="Once"',)


@pytest.mark.parametrize("spelling", ["{0}_{1}", "{0}-{1}"])
def test_parameters_of_the_launcher_are_options(requests, spelling):
    words = []
    for name, value in (("num nodes", "2"), ("num gpus", "4"), ("master addr", "::1"), ("master port", "5")):
        words += [f"--{spelling.format(*name.split())}", value]
    words += ["--hostfile", "my 'hosts'", "--include", "[fd00::7]:0,1", "--exclude=n1", "--launcher", "ssh"]
    words += ["--hf-export-at-end", "out"]
    assert run("--set", "seed=1", "doctor", "a.yml", *words).exit_code == 0
    (request, _) = requests.pop()
    assert request.overrides == (
        *("seed=1", "hostfile=my 'hosts'", "include='[fd00::7]:0,1'", "exclude=n1"),
        *("num_nodes=2", "num_gpus=4", "master_addr=::1", "master_port=5", "launcher=ssh"),
        "hf_export=out",
    )


def test_an_option_has_the_effect_of_the_parameter(minimal, tmp_path):
    hosts = tmp_path / "it's hosts"
    hosts.write_text("n1 slots=4\nfd00::7 slots=4\n")
    options = {"hostfile": str(hosts), "include": "[fd00::7]:0,1", "launcher": "ssh", "master_port": "7000"}
    given = dict.fromkeys(("exclude", "num_nodes", "num_gpus", "master_addr", "hf_export")) | options
    settings = cli.take_overrides({"overrides": ("include=n1",), **given})["overrides"]
    request = Request(program="train", paths=(str(minimal),), overrides=settings[1:])
    planned = plan_launch(request, gpus=0, environment={})
    assert [(host.name, host.slots) for host in planned.world.hosts] == [("fd00::7", (0, 1))]
    assert (planned.launcher, planned.master_port) == ("ssh", 7000)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("train --config a.yml", "neox-launch trains without a command"),
        ("deepy.py train.py -d configs big", "neox-launch trains without a command"),
        ("train.py -d configs big", "neox-launch trains without a command: neox-launch -d configs big"),
        ("deepy.py train.py a.yml b.yml", "trains without a command: neox-launch a.yml b.yml"),
        ("eval.py a.yml", "use the command evaluate"),
        ("generate.py a.yml", "use the command generate"),
        ("check a.yml", "check is a command of neox-config"),
        ("explain rope", "explain is a command of neox-config: neox-config explain WORD"),
        (
            "train.py -d configs big.yml other.yml",
            "neox-launch trains without a command: neox-launch -d configs big.yml other.yml",
        ),
        (
            "./deepy.py train.py -d configs big",
            "neox-launch trains without a command: neox-launch -d configs big",
        ),
        ("deepy.py generate.py -d configs big.yml", "generate: neox-launch generate -d configs big.yml"),
        ("deepy.py", "neox-launch trains without a command: neox-launch --config FILE"),
        # Everything else that was typed is kept, under our names.
        (
            "./deepy.py train.py --conf_dir configs big other.yml -H hosts --num_nodes 2",
            "neox-launch -d configs big other.yml --hostfile hosts --num_nodes 2",
        ),
        ("deepy.py train.py --hostfile hosts", "neox-launch --config FILE --hostfile hosts"),
        ("-d configs train.py big --dry-run", "neox-launch -d configs big --dry-run"),
        (
            "generate.py --conf_dir configs big -i prompts.txt -o 'my texts'",
            "neox-launch generate -d configs big -i prompts.txt -o",
        ),
        (
            "eval.py -d configs big --iteration 100 --eval_tasks piqa arc_easy --limit 5",
            "neox-launch evaluate -d configs big --set load=CHECKPOINTS/global_step100 --tasks piqa,arc_easy "
            "--limit 5",
        ),
        (
            "eval.py --conf_dir=configs big --iteration=100 --eval_tasks=piqa",
            "neox-launch evaluate -d configs big --set load=CHECKPOINTS/global_step100 --tasks piqa",
        ),
        ("resume a.yml", "the same command continues a training from load: neox-launch a.yml"),
        ("help", "use neox-launch --help"),
        ("tools/ckpts/merge20b.py", "neox-convert from-neox reads those of GPT-NeoX"),
        ("a.yml --force_multi", "leave it out: it starts a launch backend for a single host"),
        ("a.yml --save_iters 5", "--set 'extra-save-iters=[5]'"),
        (
            "neox/evaluate.py a.yml",
            "neox/evaluate.py is not a command of neox-launch; use the command evaluate",
        ),
        (
            "deepy.py evaluate.py a.yml --eval_tasks piqa arc_easy",
            "use the command evaluate: neox-launch evaluate a.yml --tasks piqa,arc_easy",
        ),
        ("evaluate a.yml --eval_tasks piqa arc_easy", "separated by commas: --tasks piqa,arc_easy"),
        ("evaluate --tasks piqa arc_easy sciq a.yml", "separated by commas: --tasks piqa,arc_easy,sciq"),
        ("a.yml -i prompts.txt", "use neox-launch generate -i FILE"),
        ("a.yml -o out.txt", "use neox-launch generate -o FILE"),
        (
            "init --data my texts --output r2",
            "init takes no argument 'texts'; if it belongs to --data, quote the whole value: "
            "--data 'my texts'",
        ),
        ("init texts", "init takes no argument 'texts'"),
        (
            "generate a.yml --prompt Once upon some time",
            "No such configuration file: upon; if it belongs to --prompt, quote the whole value: "
            "--prompt 'Once upon some time'",
        ),
        (
            "generate --prompt=Once upon a.yml",
            "No such configuration file: upon; if it belongs to --prompt, quote the whole value: "
            "--prompt 'Once upon'",
        ),
        ("evaluate a.yml --limit 5 more", "No such configuration file: more"),
        ("a.yml -H hosts", "use --hostfile FILE"),
        ("a.yml --dry-run json", "--dry-run=json"),
        ("script.sh", "script.sh is a file, but not a configuration file"),
        ("-d config a", "folder config does not exist; did you mean configs?"),
        ("config/a", "folder config does not exist; did you mean configs?"),
        ("-d other a", "folder other does not exist; check the path."),
        ("imported", "imported is a directory, not a file; did you mean imported/model.yml?"),
        (
            "configs",
            "configs is a directory, not a file; give the configuration files in it: -d configs FILE",
        ),
        (
            "llama",
            "llama is a model of transformers, not a configuration of a training; run neox-convert from-hf",
        ),
        ("generate llama", "run neox-convert from-hf llama --output NEW"),
        (
            "llama/model.safetensors",
            "but not a configuration file (.yml); run neox-convert from-hf llama --output NEW",
        ),
        ("genrate a.yml", "did you mean generate?"),
        ("a.yml -- --dry-run", "No such command or file: --dry-run"),
        ("lambada", "the commands are doctor, evaluate, find-blocks, generate, index-blocks, init, serve,"),
        ("a.yml --eval_tasks lambada", "use neox-launch evaluate --tasks NAME,..., or --set eval-tasks"),
        ("--conf_dir configs big", "use -d DIR"),
        ("--train_iters 5 a.yml", "parameters are set with --set: --set train-iters=5"),
        ("generate a.yml --top_p", "--set top-p=VALUE"),
        ("generate --top_p a.yml", "--set top-p=VALUE"),
        (
            "generate a.yml --max-tokens 50",
            "No such option: --max-tokens; parameters are set with --set: --set maximum-tokens=50",
        ),
        ("generate a.yml --temperature=0.7 --top_k 5", "--set temperature=0.7"),
        ("generate a.yml --num_return_sequences 5", "--set num-samples=5"),
        ("serve a.yml --port 80", "--set serve.port=80"),
        ("evaluate a.yml --batch_size 8", "--set train-micro-batch-size-per-gpu=8"),
        ("evaluate a.yml --eval-tasks piqa arc_easy", "separated by commas: --tasks piqa,arc_easy"),
        (
            "-q a.yml",
            "what a training shows is set by --set log-interval=N, --set terminal=plain and --output",
        ),
        ("generate a.yml --verbose", "is set by --set log-interval=N"),
        (
            "tools/datasets/preprocess_data.py --input a.jsonl",
            "not a command of neox-launch; preprocess_data is a separate program: preprocess_data --input",
        ),
        ("preprocess_data", "preprocess_data is a separate program"),
        ("prepare_data.py enwik8", "nothing is downloaded; for your own texts use neox-launch init"),
        ("tools/ckpts/convert_neox_to_hf.py", "use neox-convert to-hf, after neox-convert from-neox"),
        ("generate --num-samples=3 a.yml", "parameters are set with --set: --set num-samples=3"),
        ("generate --max_new_tokens 5 a.yml", "parameters are set with --set: --set maximum-tokens=5"),
        ("a.yml --autotuning run", "autotuning is a block of parameters: use --set autotuning.enabled=true"),
        ("a.yml --optimizer Adam", "set them one by one, such as --set optimizer.type=VALUE"),
        ("a.yml --deepspeed_slurm", "use --launcher slurm"),
        ("-c a.yml", "No such option: -c; give the name of the file alone"),
        ("a.yml --no_python", "leave it out"),
        ("a.yml --push_to_hub", "; remove it: nothing is uploaded; neox-convert to-hf writes a folder"),
        ("a.yml --nproc_per_node 2", "use --num_gpus N for the processes of each host"),
        ("a.yml --num_processes=2", "use --num_gpus N for the processes of each host"),
        ("a.yml --resume", "leave it out: the same command continues a training if load is its save folder"),
        ("generate a.yml --max_length 4", "use maximum-tokens for the tokens to generate, or seq-length for"),
        ("a.yml --beta 0.1", "; remove it: training on preferences (DPO) is not supported"),
        ("a.yml --config_file b.yml", "use --config FILE"),
        (
            "a.yml --deepspeed ds.json",
            "leave it out: --set engine=deepspeed chooses DeepSpeed, which is used",
        ),
        (
            "a.yml --deepspeed_config ds.json",
            "give its file as a further configuration file: --config ds.json",
        ),
        ("a.yml -i node-0", "use --include HOSTS"),
        ("a.yml -e node-0", "use --exclude HOSTS"),
        ("-d configs/big.yml a", "configs/big.yml is a file, not a folder; give it without -d."),
        ("a.yml train_iters=10", "parameters are set with --set: --set train_iters=10"),
        ("generate a.yml temperature=0", "parameters are set with --set: --set temperature=0"),
        (
            "chat --config a.yml",
            "for conversations, use neox-launch serve --config a.yml, and its page in a browser; generate",
        ),
        (
            "--check a.yml",
            "No such option: --check; use neox-config check --files FILE, or neox-launch --dry-run",
        ),
        ("--hostfil hosts a.yml", "Did you mean '--hostfile'?"),
        ("a.yml --resume_from_checkpoint continued", "--set load=continued --set finetune=false"),
        ("a.yml --bf16 true", "parameters are set with --set: --set precision=bf16"),
        ("a.yml --fp16", "--set precision=fp16"),
        ("a.yml --bf16 False", "--set precision=fp32"),
        ("--lora_target_modules q_proj v_proj down_proj a.yml", "--set 'lora-target-modules=[qkv,down]'"),
        ("a.yml --lora_target_modules q_proj,o_proj,up_proj", "'lora-target-modules=[qkv,dense,up]'"),
        ("a.yml --model_name_or_path gpt2", "import the model with neox-convert from-hf DIR --output OUT"),
        ("serve a.yml --model x", "load); neox-convert from-hf DIR --output OUT imports a model"),
        ("evaluate a.yml --model hf", "OUT/model.yml is its configuration"),
        ("a.yml --dataset_name wikitext", "write the texts as a dataset with preprocess_data"),
        ("a.yml --train_file t.txt", "preprocess_data; data-path names its prefix"),
        ("a.yml --output_dir o", "--set save=o"),
        ("a.yml --overwrite_output_dir", "remove it: a training starts anew with another save"),
        ("a.yml --attn_implementation sdpa", "; remove it; attention is computed by the fastest"),
        ("a.yml --load_in_4bit", "; remove it: training on quantized weights (QLoRA) is not supported"),
        ("a.yml --tokenizer_name x", "in the configuration file, set tokenizer-type: HFTokenizer"),
        ("a.yml --trust_remote_code", "; remove it: no code of a model is run"),
        ("a.yml --do_train", "leave it out: it is computed (whether there is training data)"),
        ("a.yml --do_eval", "evaluated every eval-interval iterations"),
        ("a.yml --adam_beta2 0.95", "--set 'optimizer.params.betas=[0.9,0.95]'"),
        ("a.yml --pos_emb=", "--set pos-emb=VALUE"),
        ("a.yml --pos_emb rope", "--set pos-emb=rotary"),
        ("a.yml --lora_target_modules=", "--set lora-target-modules=VALUE"),
        ("a.yml --train_iters=", "--set train-iters=VALUE"),
        ("a.yml --eval_strategy steps", "--set eval-interval=VALUE"),
        ("a.yml --eval_strategy 50", "--set eval-interval=50"),
        ("a.yml --lr_scheduler_type constant_with_warmup", "--set lr-decay-style=VALUE"),
        ("a.yml --lr_scheduler_type cosine", "--set lr-decay-style=cosine"),
        ("a.yml --hidden_act gelu_new", "--set activation=VALUE"),
        ("a.yml --use_comet", "--set comet.enabled=true"),
        ("a.yml --use_comet 0", "--set comet.enabled=false"),
        ("a.yml --gradient_checkpointing 1", "--set checkpoint-activations=true"),
        ("a.yml --cpu_optimizer", "--set cpu-optimizer=true"),
        ("generate a.yml --top_k -1", "--set top-k=0"),
        ("a.yml --eval_interval -5", "--set eval-interval=VALUE"),
        ("a.yml --optimizer.params.lr -bf16", "--set optimizer.params.lr=VALUE"),
        *(
            (f"a.yml --{name} {word}", "--set precision=fp32")
            for name in ("fp16", "bf16", "bfloat16")
            for word in ("0", "no", "off", "False")
        ),
        ("a.yml --bfloat16", "parameters are set with --set: --set precision=bf16"),
        ("a.yml --packing", "; remove it: by default, documents are joined"),
        ("a.yml --packing false", "in the configuration file, use pack-impl: unpacked"),
        ("a.yml --report_to wandb", "in the configuration file, use use-wandb: true"),
        ("a.yml --use_peft", "in the configuration file, set lora-rank"),
        ("a.yml --lr 1", "--set optimizer.params.lr=1"),
        ("generate a.yml --do_sample", "set temperature above 0, which samples"),
        ("a.yml --mode x", "No such option '--mode'."),
    ],
)
def test_other_words_are_answered_with_what_to_type(requests, words, answer):
    result = run(*words.split())
    assert result.exit_code == 2
    assert answer in " ".join(result.stderr.split())
    # A full stop after a command would be copied with it.
    assert "--set" not in answer or not result.stderr.endswith(".\n")
    assert requests == []


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--set lr=1 seed=2", "--set takes one NAME=VALUE without spaces; write --set lr=1 --set seed=2"),
        ("--set lr 1", "--set takes one NAME=VALUE without spaces; write --set lr=1"),
        ("--set lr 1 seed=2 a.yml", "write --set lr=1 --set seed=2"),
        ("--set=lr=1 a.yml zero_optimization.stage=2", "write --set lr=1 --set zero_optimization.stage=2"),
        ("--set lr 1 x -d configs", "write --set 'lr=1 x'"),
        (
            "--set prompt=Once upon some time a.yml",
            "if it belongs to --set, quote the whole value: --set 'prompt=Once upon some time'",
        ),
        ("--set=prompt=Once upon", "quote the whole value: --set 'prompt=Once upon'"),
        ("--iteration 100", "name the folder of that checkpoint: --set load=CHECKPOINTS/global_step1000"),
        (
            "--train_iters 10",
            "No such option: --train_iters; parameters are set with --set: --set train-iters=",
        ),
        ("--learning_rate 10", "--set optimizer.params.lr=10"),
        ("--autotuning run", "use --set autotuning.enabled=true"),
        ("train_iters=10", "parameters are set with --set: --set train_iters=10"),
        ("--conf_dir configs", "use -d DIR"),
        ("--conf_file a.yml", "give the name of the file alone"),
    ],
)
@pytest.mark.parametrize(
    "command", ["neox-launch", "neox-launch generate", "neox-config check", "neox-config estimate"]
)
def test_settings_and_options_have_the_same_advice_in_both_programs(requests, command, words, answer):
    program, *subcommand = command.split()
    result = CliRunner().invoke(PROGRAMS[program], [*subcommand, "small.yml", *words.split()])
    assert result.exit_code == 2
    assert answer in " ".join(result.stderr.split())
    assert requests == []


def test_a_value_with_spaces_is_quoted_in_the_advice(requests):
    for option, answer in (
        ("--resume_from_checkpoint", "--set 'load=my dir' --set finetune=false"),
        ("--output_dir", "--set 'save=my dir'"),
    ):
        assert answer in run("a.yml", option, "my dir").stderr


def test_an_option_with_an_equals_sign_is_no_setting_without_set(minimal):
    for command, option in (("check", "--set=seed=2"), ("estimate", "--devices=8")):
        for words in ([option, str(minimal)], [str(minimal), option]):
            result = CliRunner().invoke(neox_config, [command, *words])
            assert (result.exit_code, result.stderr) == (0, ""), words


def test_words_after_a_setting_that_are_files_or_commands_are_no_settings(requests):
    for line in (
        "--set lr=1 small a.yml generate",
        "generate --set lr=1 small a.yml",
        "--set lr a.yml small generate",
    ):
        assert run(*line.split()).exit_code == 0, line
        assert requests.pop()[0].program == "generate"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            "-d configs big -d imported model",
            "-d is given with two folders, configs and imported; leave it out",
        ),
        (
            "-d configs --directory=imported model",
            "give each file with its folder: configs/FILE imported/FILE",
        ),
        ("-d configs -dimported model", "-d is given with two folders"),
        ("-d configs", "no configuration file given: configs is a directory, not a file; give the config"),
        (
            "-d imported",
            "no configuration file given: imported is a directory, not a file; "
            "did you mean imported/model.yml",
        ),
        ("-d llama", "no configuration file given: llama is a model of transformers"),
        ("-d configs/big.yml", "configs/big.yml is a file, not a folder; give it without -d"),
        ("-d nowhere", "no configuration file given, and nowhere is not a folder"),
    ],
)
@pytest.mark.parametrize(
    "command", ["neox-launch", "neox-launch generate", "neox-config check", "neox-config migrate"]
)
def test_folders_of_configurations_that_are_not_enough(
    requests, monkeypatch, tmp_path, command, words, answer
):
    monkeypatch.undo()  # The request reaches the launcher.
    monkeypatch.chdir(tmp_path)
    program, *subcommand = command.split()
    result = CliRunner().invoke(PROGRAMS[program], [*subcommand, *words.split()])
    assert result.exit_code == 2
    assert answer in " ".join(result.stderr.split())


def test_one_folder_may_be_given_twice(requests):
    assert run("-d", "configs", "generate", "--directory", "configs", "big").exit_code == 0
    assert requests[0][0].directory == "configs"


def test_a_value_that_begins_with_d_is_no_folder(requests):
    words = ("generate", "-d", "configs", "big", "--prompt", "-dark")
    assert run(*words).exit_code == 0
    request = requests[0][0]
    assert (request.directory, request.paths) == ("configs", ("big",))
    assert request.overrides == ('prompt="-dark"',)


def test_files_after_a_setting_are_no_rest_of_its_value(minimal, monkeypatch):
    monkeypatch.chdir(minimal.parent)
    (minimal.parent / "more.yml").write_text("log-interval: 5")
    for words in (["--set", "seed=2", minimal.name], [minimal.name, "--set", "seed=2", "more"]):
        result = CliRunner().invoke(neox_config, ["check", *words])
        assert (result.exit_code, result.stderr) == (0, "")


def test_a_text_in_place_of_a_file_is_answered_with_the_option_for_prompts(requests):
    result = run("generate", "--config", "a.yml", "def main(")
    assert result.exit_code == 2
    assert "a prompt is given with --prompt: --prompt 'def main('" in result.stderr
    assert "quote the whole value" not in result.stderr


def test_the_option_for_files_is_not_needed_in_neox_config(requests):
    result = CliRunner().invoke(neox_config, ["check", "--config", "a.yml"])
    assert result.exit_code == 2
    assert "No such option: --config; give the name of the file alone" in result.stderr


@pytest.mark.parametrize("command", ["diff small.yml a.yml", "explain lr", "models"])
def test_a_command_without_settings_does_not_recommend_them(command, requests):
    result = CliRunner().invoke(neox_config, [*command.split(), "--train_iters", "10"])
    assert result.exit_code == 2
    assert "--set" not in result.stderr


def test_the_commands_of_neox_config_that_are_named_exist():
    named = {word for word, advice in _ADVICE_ON_WORDS.items() if "neox-config" in advice}
    assert named <= set(neox_config.commands)


def test_the_plan_of_a_file_is_that_of_config(minimal):
    one = run(str(minimal), "--dry-run=json")
    other = run("--config", str(minimal), "--dry-run=json")
    assert json.loads(one.stdout) == json.loads(other.stdout)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Once",
        'it\'s: "a" #b',
        "two\nlines\\n\t",
        "no",
        "1.0",
        "é 中 😀",
        "\x85\u2028\x7f\ufeff",
        "-x {y}",
    ],
)
def test_the_prompt_of_generate_is_taken_literally(requests, text):
    run("generate", "a.yml", "--set", "seed=1", "--prompt", text)
    first, setting = requests[0][0].overrides
    assert first == "seed=1"
    name, _, value = setting.partition("=")
    assert (name, yaml.safe_load(value)) == ("prompt", text)


def test_the_options_of_evaluate_are_parameters(requests):
    options = ["--tasks", "piqa, a:b", "--data", "x: y.jsonl", "--num-fewshot", "0", "--limit", "7"]
    run("evaluate", "a.yml", "--set", "seed=1", *options, "--include-path", "C")
    ((request, _),) = requests
    found = dict(one.split("=", 1) for one in request.overrides)
    assert {name: yaml.safe_load(value) for name, value in found.items()} == {
        "seed": 1,
        "eval_tasks": ["piqa", "a:b"],
        "eval_data": "x: y.jsonl",
        "eval_include_path": "C",
        "eval_num_fewshot": 0,
        "eval_limit": 7,
    }


def test_tasks_without_a_name_are_refused(requests):
    done = run("evaluate", "a.yml", "--tasks", " , ")
    assert done.exit_code == 2
    assert "--tasks names no task" in done.output
    assert requests == []


def test_spaces_around_the_equals_sign_are_left_out_of_the_suggestion():
    message = _settings_in(["train-iters", "=", "40", "lr=", "0.1", "prompt=Once", "upon"])
    assert message == ["train-iters=40", "lr=0.1", "prompt=Once upon"]
